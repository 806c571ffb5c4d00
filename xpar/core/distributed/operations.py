"""Communication that says what it was when it fails: gloo and NCCL only speak of sockets."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from xpar.errors import CommError, CommTimeoutError, PeerFailedError

__all__ = ["NamedWork", "named"]

_FAILURE_SIGNS = ("gloo", "nccl", "connection", "socket", "timed out", "timeout", "aborted")


@contextmanager
def named(operation: str, group: ProcessGroup | None = None, peer: int | None = None) -> Iterator[None]:
    """Turn what torch raises inside, when communication fails, into an error that names the operation.

    Args:
        operation: what is done, in words.
        group: the ranks that take part; None where there is no group yet.
        peer: group rank of the other side, where there is one.

    Raises:
        CommTimeoutError: the group's time-out passed.
        PeerFailedError: a connection broke, or the group was shut down because another rank has failed.
    """
    try:
        yield
    except RuntimeError as error:
        where = "" if group is None else f" in {_describe(group, peer)}"
        failure = _failure(operation + where, error)
        if failure is None:
            raise
        raise failure from error


def _failure(operation: str, error: RuntimeError) -> CommError | None:
    """The error to raise instead; None if this one says nothing of communication (a wrong argument, say)."""
    text = str(error).lower()
    is_of_torch = type(error) is RuntimeError or isinstance(error, dist.DistError)
    if not is_of_torch or not any(sign in text for sign in _FAILURE_SIGNS):
        return None
    if "timed out" in text or "timeout" in text:
        failure: CommError = CommTimeoutError(f"{operation} did not end in time")
    else:
        failure = PeerFailedError(f"{operation}: connection lost")
    failure.operation = operation
    return failure


def _describe(group: ProcessGroup, peer: int | None) -> str:
    ranks = dist.get_process_group_ranks(group)
    name = (group.group_desc or "").removeprefix("xpar ")
    text = f"group {name} of ranks {', '.join(map(str, ranks))}"
    return text if peer is None else f"{text}, with rank {ranks[peer]}"


@dataclass
class NamedWork:
    """A handle of something under way; its tensors stay alive with it."""

    work: Work
    operation: str
    group: ProcessGroup | None
    peer: int | None = None
    tensors: tuple[object, ...] = field(default=(), repr=False)

    def wait(self) -> None:
        """Wait for the end (on NCCL the current stream does, not the host).

        Raises:
            CommTimeoutError, PeerFailedError: see `named`.
        """
        with named(self.operation, self.group, self.peer):
            self.work.wait()
