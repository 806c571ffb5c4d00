"""The way of the tokens through one forward of a transformer: cut, pass the blocks, gather."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from xpar.core.distributed.collectives import all_gather_uneven
from xpar.core.partition import share
from xpar.core.shard_groups import ShardGroups
from xpar.core.stale_cache.kv_cache import LayerCache
from xpar.core.stale_cache.token_partition import TokenPartition
from xpar.errors import UnsupportedError
from xpar.wrappers.models.plan import ModelPlan, PerToken, Tokens, map_tensors


@dataclass(frozen=True)
class View:
    """What a forward is to compute.

    Args:
        patch: the patch to run; None: the whole sequence.
        caches: keys and values by attention module, refreshed by this forward; None: nothing is kept.
        probe: run no block at all and hand NaN to the head in the tokens of this patch, to see what it writes.
    """

    patch: int | None = None
    caches: dict[str, LayerCache] | None = None
    probe: int | None = None


@dataclass
class TokenFlow:
    """State of one forward. The tokens are cut when the first block is reached, and gathered after the last.

    Args:
        plan: what is known about the transformer.
        groups: the ring and ulysses groups that share the tokens.
        patches: number of patches M.
        view: what this forward computes.
        has_result: whether this rank's stage runs the last block; elsewhere the head runs on zeros.
        observe: is shown what a stage has "received" and what is to be "sent".
    """

    plan: ModelPlan
    groups: ShardGroups
    patches: int
    view: View
    has_result: bool = True
    observe: Callable[[str, Sequence[torch.Tensor | None]], None] = lambda what, tensors: None
    received: bool = False
    sent: bool = False
    left: bool = False
    key_masks: dict[str, torch.Tensor] = field(default_factory=dict)
    _partition: TokenPartition | None = None
    _kept: dict[Any, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def entered(self) -> bool:
        """Whether a block has been reached."""
        return self._partition is not None

    @property
    def partition(self) -> TokenPartition:
        """How the streams of this forward are shared; known once the first block is reached."""
        if self._partition is None:
            raise UnsupportedError("the tokens are not cut yet: no block of the plan has been reached")
        return self._partition

    def once(self, kind: Any, source: Any, make: Callable[[], Any]) -> Any:
        """`make()`, computed once per forward for one source object (blocks share rotary tables and masks)."""
        key = (kind, id(source))
        if key not in self._kept:
            self._kept[key] = (source, make())  # holding the source keeps its id from being used again
        return self._kept[key][1]

    def enter(self, arguments: dict[str, Any]) -> None:
        """Cut the streams in `arguments` (of the first block reached) to this rank's tokens of the view.

        Raises:
            UnsupportedError: a stream is not a [B, S, C] tensor, or there are fewer tokens than patches.
        """
        lengths = {}
        for name in self.plan.streams:
            x = arguments.get(name)
            if not torch.is_tensor(x) or x.ndim != 3:
                found = tuple(x.shape) if torch.is_tensor(x) else type(x).__name__
                raise UnsupportedError(f"stream {name} must be a [B, S, C] tensor where the blocks begin, got {found}")
            lengths[name] = x.shape[1]
        main = self.plan.streams[0]
        if lengths[main] < self.patches:
            raise UnsupportedError(
                f"num_patches({self.patches}) is more than the {lengths[main]} tokens of {main}; use num_patches <= "
                f"{lengths[main]}"
            )
        self._partition = TokenPartition.of(lengths, self.patches, self.groups.count)
        if self.view.probe is not None:
            return
        for name, stream in self.plan.masks.items():
            if arguments.get(name) is not None:
                self.key_masks[stream] = arguments[name]
        for name in self.plan.streams:
            arguments[name] = self.cut(arguments[name], Tokens(dim=1, streams=(name,)), name)

    def cut(self, x: torch.Tensor, tokens: Tokens, what: str) -> torch.Tensor:
        """This rank's tokens of a tensor that covers whole streams.

        Raises:
            UnsupportedError: the tensor has not the length of its streams.
        """
        expected = sum(self.partition.length(name) for name in tokens.streams)
        if x.ndim <= tokens.dim or x.shape[tokens.dim] != expected:
            raise UnsupportedError(
                f"{what} of shape {tuple(x.shape)} should have the {expected} tokens of {tokens.streams} in dim "
                f"{tokens.dim}"
            )
        return self.partition.cut(x, tokens.dim, tokens.streams, self.view.patch, self.groups.index)

    def cut_per_token(self, arguments: dict[str, Any]) -> None:
        """Cut a block's other per-token arguments, in place."""
        for name, tokens in self.plan.per_token.items():
            value = arguments.get(name)
            if value is not None:
                arguments[name] = self.once(name, value, functools.partial(self._cut_tree, value, tokens, name))

    def _cut_tree(self, value: Any, tokens: PerToken, name: str) -> Any:
        if isinstance(tokens, tuple):
            if not isinstance(value, (tuple, list)) or len(value) != len(tokens):
                raise UnsupportedError(f"{name} should be a tuple of {len(tokens)}, got {type(value).__name__}")
            return type(value)(self._cut_tree(v, t, name) for v, t in zip(value, tokens, strict=True))
        if torch.is_tensor(value) and tokens.ndim is not None and value.ndim != tokens.ndim:
            return value
        return map_tensors(lambda x: self.cut(x, tokens, name), value)

    def leave(self, x_BSC: torch.Tensor, stream: str) -> torch.Tensor:
        """The whole stream again, from this rank's tokens: what the head sees.

        On the stage with the last block the tokens of the view are gathered over the shards and put in their place;
        other places, and other stages, get zeros, whose predictions nobody reads.
        """
        total = self.partition.length(stream)
        batch, _, width = x_BSC.shape
        if self.view.probe is not None:
            start, stop = share(total, self.patches, self.view.probe)
            marked = torch.zeros_like(x_BSC)
            marked[:, start:stop] = torch.nan
            return marked
        if not self.has_result:
            return x_BSC.new_zeros(batch, total, width)
        if self.partition.has_stand_in(stream, self.view.patch, self.groups.index):
            x_BSC = x_BSC[:, :0]
        gathered = self._gather(x_BSC, stream)
        if self.view.patch is None:
            return gathered
        start, stop = share(total, self.patches, self.view.patch)
        whole = gathered.new_zeros(batch, total, width)
        whole[:, start:stop] = gathered
        return whole

    def _gather(self, x_BSC: torch.Tensor, stream: str) -> torch.Tensor:
        groups, patch = self.groups, self.view.patch
        if groups.count == 1:
            return x_BSC
        count = [self.partition.count((stream,), patch, shard) for shard in range(groups.count)]
        peers = groups.ring_peers(groups.ring_index)
        x_BSC = all_gather_uneven(x_BSC, 1, [count[shard] for shard in peers], groups.ulysses)
        per_ring = [sum(count[shard] for shard in groups.ring_peers(i)) for i in range(groups.ring_size)]
        x_BSC = all_gather_uneven(x_BSC, 1, per_ring, groups.ring)
        if patch is not None or self.patches == 1:
            return x_BSC
        held = self.partition.positions((stream,), None, range(groups.count))
        return x_BSC.index_select(1, torch.argsort(held).to(x_BSC.device))
