"""One transformer whose tokens are spread over shards and whose blocks are spread over stages."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed import ProcessGroup

from xpar.core.shard_groups import ShardGroups
from xpar.core.stale_cache.token_partition import TokenPartition
from xpar.errors import UnsupportedError
from xpar.wrappers.layers.attention import ParallelAttnProcessor
from xpar.wrappers.layers.block import ShardedBlock
from xpar.wrappers.layers.stage import FreedBlock, Stage, check_freeable, exchange_weights
from xpar.wrappers.layers.token_flow import TokenFlow, View
from xpar.wrappers.models.plan import ModelPlan, forward_signature, getattr_path, map_tensors, tensors_of


class CallSchedule(Protocol):
    """Decides which views of a denoiser call this rank computes, and when (see wrappers/pipelines)."""

    def denoise(self, transformer: "ParallelTransformer", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the transformer would return for the whole input."""


class ParallelTransformer:
    """Puts xpar around a transformer and takes it off again; the module, its class and its state_dict keys stay.

    Args:
        name: the pipeline's name of it, for messages.
        module: the transformer.
        plan: what is known about its class.
        groups: the ring and ulysses groups.
        patches: number of patches M.
        stage: the blocks that this rank owns.
        backend: kernel for attention with a log-sum-exp.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        plan: ModelPlan,
        *,
        groups: ShardGroups,
        patches: int,
        stage: Stage,
        backend: str = "auto",
    ) -> None:
        self.name, self.module, self.plan = name, module, plan
        self.groups, self.patches, self.stage, self.backend = groups, patches, stage, backend
        self.schedule: CallSchedule | None = None
        self.observe: Callable[[str, Sequence[torch.Tensor | None]], None] | None = None
        """Is shown what the stage has "received" and what is to be "sent" (or is its result)."""
        self._flow: TokenFlow | None = None
        self._replaced: list[tuple[nn.Module, Any]] = []
        self._hooks: list[Any] = []
        self._freed: list[FreedBlock] = []
        self._install()

    def _install(self) -> None:
        if self._is_spread:
            self._install_in_blocks()
        self._replace_forward(self.module, self._root(self.module.forward))

    @property
    def _is_spread(self) -> bool:
        """Whether this rank runs anything but all blocks on all tokens."""
        return self.groups.count * self.patches > 1 or len(self.stage.bounds) > 2

    def _install_in_blocks(self) -> None:
        blocks = self.plan.block_modules(self.module)
        self._check_blocks(blocks)
        for index, (path, block) in enumerate(blocks):
            for inner, attention, streams in self.plan.attention_modules(block):
                shell = ParallelAttnProcessor(
                    attention.forward, f"{path}.{inner}", streams, self.current_flow, self.backend
                )
                self._replace_forward(attention, shell)
            last = index == len(blocks) - 1
            sharded = ShardedBlock(
                block.forward, block, index=index, last=last, plan=self.plan, stage=self.stage, flow=self.current_flow
            )
            self._replace_forward(block, sharded)
            if not self.stage.owns(index):
                self._freed.append(FreedBlock(block))
        if self.plan.head is not None:
            head = getattr_path(self.module, self.plan.head)
            self._hooks.append(head.register_forward_pre_hook(self._enter_head, with_kwargs=True))

    def _check_blocks(self, blocks: list[tuple[str, nn.Module]]) -> None:
        for index, (path, block) in enumerate(blocks):
            if not self.stage.owns(index):
                check_freeable(f"{self.name}.{path}", block)

    def _replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._replaced.append((module, module.__dict__.get("forward")))
        module.forward = forward

    def _root(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """The transformer's forward: one call of the whole, or as the schedule of a pipeline call decides."""

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.schedule is not None:
                return self.schedule.denoise(self, args, kwargs)
            return self.run(View(), args, kwargs)

        forward.xpar_owner = self  # type: ignore[attr-defined]
        self._inner = inner
        return forward

    def current_flow(self) -> TokenFlow | None:
        """State of the forward that is running."""
        return self._flow

    def run(self, view: View, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward on one view.

        Returns:
            What the forward returns. It is right in the view's tokens, on the stage with the last block.

        Raises:
            UnsupportedError: the first or last block was skipped, so tokens were not cut or not gathered.
        """
        if not self._is_spread:
            return self._inner(*args, **kwargs)
        flow = TokenFlow(self.plan, self.groups, self.patches, view, has_result=self.stage.is_last)
        if self.observe is not None:
            flow.observe = self.observe
        if view.probe is None:
            args, kwargs = self._cut_inputs(view, args, kwargs)
        self._flow = flow
        try:
            result = self._inner(*args, **kwargs)
        finally:
            self._flow = None
        if self.stage.is_last and view.probe is None:
            flow.observe("sent", tensors_of(result))
        if not (flow.entered and flow.left):
            raise UnsupportedError(
                f"{self.name}: forward did not run its {'last' if flow.entered else 'first'} block, so the tokens were "
                "not gathered; a pipeline that skips it cannot be split over tokens or stages"
            )
        return result

    def _enter_head(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flow = self._flow
        if flow is None:
            return None
        flow.left = True
        return (flow.leave(args[0], self.plan.streams[0]), *args[1:]), kwargs

    def _cut_inputs(self, view: View, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        """Cut root arguments that are added between blocks; their own length is that of their stream."""
        if not self.plan.inputs:
            return args, kwargs
        bound = forward_signature(self.module).bind_partial(*args, **kwargs)
        for name, tokens in self.plan.inputs.items():
            (stream,) = tokens.streams

            def cut(x: torch.Tensor, dim: int = tokens.dim, stream: str = stream) -> torch.Tensor:
                partition = TokenPartition.of({stream: x.shape[dim]}, self.patches, self.groups.count)
                return partition.cut(x, dim, (stream,), view.patch, self.groups.index)

            if bound.arguments.get(name) is not None:
                bound.arguments[name] = map_tensors(cut, bound.arguments[name])
        return bound.args, bound.kwargs

    def take_off(self, restore_from: ProcessGroup | None = None) -> int:
        """Give back the transformer as it was.

        Args:
            restore_from: the pipefusion group, whose stages then send each other their blocks; all its ranks must
                call. None: freed blocks stay on the meta device.

        Returns:
            Number of blocks whose weights are gone.
        """
        for freed in self._freed:
            if restore_from is None:
                freed.release()
            else:
                freed.allocate()
        if restore_from is not None:
            exchange_weights([block for _, block in self.plan.block_modules(self.module)], self.stage, restore_from)
        for hook in self._hooks:
            hook.remove()
        for module, forward in reversed(self._replaced):
            if forward is None:
                del module.forward
            else:
                module.forward = forward
        gone = 0 if restore_from is not None else len(self._freed)
        self._hooks, self._replaced, self._freed = [], [], []
        return gone
