"""The default random generators that a pipeline draws from when it is given none."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from xpar.core.distributed.operations import named


@dataclass(frozen=True)
class RandomState:
    """State of the CPU's default generator and of one device's."""

    device: torch.device
    cpu: torch.Tensor
    accelerator: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> "RandomState":
        """The states as they are."""
        accelerator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), accelerator)

    def set(self) -> None:
        """Put the generators into these states."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.cuda.set_rng_state(self.accelerator, self.device)


def share_random_state(device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Give every rank of a group the default generator states of its first rank.

    What the pipeline draws without a generator is then what one process, the first rank's, would have drawn.
    """
    if group is None:
        return
    state = RandomState.now(device)
    for part in (state.cpu, state.accelerator):
        if part is not None:
            moved = part.to(device)
            with named("broadcast of the random state", group, 0):
                dist.broadcast(moved, group=group, group_src=0)
            part.copy_(moved)
    state.set()


def clone_generators(value: Any) -> Any:
    """A copy of a generator, or of each in a list, in the same state; anything else as it is."""
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, (list, tuple)):
        return type(value)(clone_generators(item) for item in value)
    return value


def copy_containers(value: Any) -> Any:
    """A copy of nested dicts and lists, which pipelines pop from and add to; their other contents are shared."""
    if isinstance(value, dict):
        return {key: copy_containers(item) for key, item in value.items()}
    if type(value) is list:
        return [copy_containers(item) for item in value]
    return copy.copy(value) if isinstance(value, set) else value
