"""One direction of point-to-point traffic between the stages of a pipeline."""

from collections import deque
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from xpar.core.distributed.operations import NamedWork, named


class Channel:
    """Sends and receives inside one process group that is used for nothing else.

    A send is kept, tensor and handle, until it has been waited for: dropping either hangs gloo and frees memory that
    NCCL still reads. Messages between two ranks arrive in the order in which they were sent. Use one channel per
    direction: on NCCL a send may last until its receive runs, and messages both ways in one communicator could wait for
    each other in a circle.

    Args:
        group: the stages, in stage order.
        keep: number of sends that may be under way before the oldest is waited for.
    """

    def __init__(self, group: ProcessGroup, keep: int = 16) -> None:
        self.group, self.keep = group, keep
        self._sends: deque[NamedWork] = deque()

    def send(self, x: torch.Tensor, stage: int, what: str = "a message") -> None:
        """Start to send a tensor to a stage of the group; it must not be written to afterwards.

        `what` names it, should it never leave.
        """
        x, operation = x.contiguous(), f"send of {what}"
        with named(operation, self.group, stage):
            work = cast(Work, dist.isend(x, group=self.group, group_dst=stage))  # None: this rank is not in the group
        self._sends.append(NamedWork(work, operation, self.group, stage, (x,)))
        while len(self._sends) > self.keep:
            self._sends.popleft().wait()

    def receive(self, buffer: torch.Tensor, stage: int, what: str = "a message") -> NamedWork:
        """Start to receive into a contiguous buffer from a stage; wait on the returned handle before reading it.

        `what` names it, should it never come.
        """
        operation = f"receive of {what}"
        with named(operation, self.group, stage):
            work = cast(Work, dist.irecv(buffer, group=self.group, group_src=stage))
        return NamedWork(work, operation, self.group, stage, (buffer,))

    def flush(self) -> None:
        """Wait for every send that is under way."""
        while self._sends:
            self._sends.popleft().wait()
