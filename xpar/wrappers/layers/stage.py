"""A PipeFusion stage: which blocks a rank owns, what crosses its boundaries, and whose weights are freed."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from xpar.core.distributed.channel import Channel
from xpar.core.distributed.operations import named
from xpar.errors import ConfigError, UnsupportedError
from xpar.wrappers.models.plan import ModelPlan


@dataclass(frozen=True)
class Stage:
    """The contiguous run of blocks [start, stop) that this rank executes.

    Args:
        index: this rank's stage.
        bounds: first block of every stage, and the number of blocks.
        forward: channel stage -> next stage, None with one stage.
    """

    index: int
    bounds: tuple[int, ...]
    forward: Channel | None = None

    @property
    def start(self) -> int:
        """First block that this stage owns."""
        return self.bounds[self.index]

    @property
    def stop(self) -> int:
        """First block after those that this stage owns."""
        return self.bounds[self.index + 1]

    @property
    def is_last(self) -> bool:
        """Whether this stage runs the last block."""
        return self.index == len(self.bounds) - 2

    def owns(self, block: int) -> bool:
        """Whether this stage executes a block."""
        return self.start <= block < self.stop

    def owner(self, block: int) -> int:
        """The stage that executes a block."""
        return next(stage for stage, stop in enumerate(self.bounds[1:]) if block < stop)

    def send(self, streams: dict[str, torch.Tensor | None], what: str) -> None:
        """Send the streams to the next stage, packed into one message."""
        self._channel.send(torch.cat([x.reshape(-1) for x in streams.values() if x is not None]), self.index + 1, what)

    def receive(self, like: dict[str, torch.Tensor | None], what: str) -> dict[str, torch.Tensor | None]:
        """Receive the streams from the previous stage; `like` has their shapes, which every stage knows."""
        present = {name: x for name, x in like.items() if x is not None}
        sizes = [x.numel() for x in present.values()]
        first = next(iter(present.values()))
        message = first.new_empty(sum(sizes))
        self._channel.receive(message, self.index - 1, what).wait()
        parts = zip(present.items(), message.split(sizes), strict=True)
        return {**like, **{name: part.view(x.shape) for (name, x), part in parts}}

    @property
    def _channel(self) -> Channel:
        if self.forward is None:
            raise ConfigError("a single stage has no neighbour to exchange tokens with")
        return self.forward


def balance(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Bounds of contiguous runs with the smallest greatest cost, then the lightest last stage (it has the head too).

    Args:
        costs: cost per token of each block.
        stages: number of runs, at most the number of blocks.

    Raises:
        ConfigError: more stages than blocks.
    """
    blocks = len(costs)
    check_stages(blocks, stages)
    total = list(itertools.accumulate(costs, initial=0.0))
    best: dict[tuple[int, int], tuple[float, float, tuple[int, ...]]] = {(0, 0): (0.0, 0.0, (0,))}
    for stage in range(1, stages + 1):
        for stop in range(stage, blocks - (stages - stage) + 1):
            options = []
            for start in range(stage - 1, stop):
                if (stage - 1, start) in best:
                    worst, _, bounds = best[stage - 1, start]
                    cost = total[stop] - total[start]
                    options.append((max(worst, cost), cost, (*bounds, stop)))
            best[stage, stop] = min(options)
    return best[stages, blocks][2]


def check_stages(blocks: int, stages: int) -> None:
    """Refuse stages without a block.

    Raises:
        ConfigError: more stages than blocks.
    """
    if stages > blocks:
        raise ConfigError(
            f"pipefusion_degree({stages}) is more than the {blocks} blocks of the transformer; use at most {blocks}"
        )


def block_cost(block: nn.Module, plan: ModelPlan) -> float:
    """Multiplications per token of a block, up to attention itself, which costs the same in all blocks of a model.

    Weights that see one row per sample (modulation) are left out; a block with its own weights for each of two joint
    streams uses half of them on any token.
    """
    cost = 0
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear) and not any(fnmatch(name, pattern) for pattern in plan.modulation):
            cost += module.weight.numel()
    attention = [module for _, module, _ in plan.attention_modules(block)]
    separate = len(plan.streams) > 1 and any(getattr(m, "added_kv_proj_dim", None) is not None for m in attention)
    return cost / 2 if separate else float(cost)


def check_freeable(name: str, block: nn.Module) -> None:
    """Refuse weights that cannot be taken out and put back as plain tensors.

    Raises:
        UnsupportedError: a quantised or otherwise wrapped parameter.
    """
    for key, parameter in block.named_parameters():
        if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
            raise UnsupportedError(
                f"{name}.{key} is a {type(parameter).__name__}: pipefusion_degree > 1 frees the blocks of other "
                "stages, which is only known to be right for plain parameters; use ulysses_degree or ring_degree"
            )


class FreedBlock:
    """A block whose weights another stage holds: they are on the meta device until they are put back."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self._devices = {key: x.device for key, x in _tensors(block)}
        for module in block.modules():
            # `pipe.to(device)` must pass over tensors that have no data
            module._apply = functools.partial(_leave, module)  # type: ignore[method-assign]
        _replace(block, lambda key, x: torch.empty_like(x, device="meta"))

    def release(self) -> None:
        """Let the block's modules be moved again."""
        for module in self.block.modules():
            module.__dict__.pop("_apply", None)

    def allocate(self) -> None:
        """Give the block memory again, where it was; the values are to be received."""
        self.release()
        _replace(self.block, lambda key, x: torch.empty_like(x, device=self._devices[key]))


def exchange_weights(blocks: Sequence[nn.Module], stage: Stage, group: ProcessGroup) -> None:
    """Every stage sends the weights of its blocks to all others. All ranks of the group must call."""
    ranks = dist.get_process_group_ranks(group)
    for index, block in enumerate(blocks):
        for _, x in _tensors(block):
            with named(f"broadcast of the weights of block {index}", group):
                dist.broadcast(x.data, ranks[stage.owner(index)], group=group)


def _leave(module: nn.Module, *_: Any, **__: Any) -> nn.Module:
    return module


def _tensors(block: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*block.named_parameters(), *block.named_buffers()]


def _replace(block: nn.Module, make: Any) -> None:
    """Replace every parameter and buffer by another tensor, keeping names, flags and kinds."""
    for prefix, module in block.named_modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                data = make(f"{prefix}.{key}" if prefix else key, parameter.data)
                module._parameters[key] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        for key, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[key] = make(f"{prefix}.{key}" if prefix else key, buffer)
