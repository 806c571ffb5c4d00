"""Counts what torch.distributed is asked to send."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from xpar.core.distributed.channel import Channel

# What xpar's attention and stages have no business calling.
_FORBIDDEN = ("all_reduce", "all_gather", "all_gather_object", "all_to_all", "broadcast_object_list")


class Recorder:
    """Calls and elements sent by this rank, by operation. What a rank sends to itself is not counted."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()

    def add(self, operation: str, elements: int) -> None:
        self.calls[operation] += 1
        self.elements[operation] += elements


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Record everything that is sent inside: all_to_all, ring, all_gather, broadcast, send, and the agreement of a call."""
    recorder = Recorder()
    all_to_all, batch, gather, broadcast = (
        dist.all_to_all_single,
        dist.batch_isend_irecv,
        dist.all_gather_single,
        dist.broadcast,
    )
    send = Channel.send

    def count_all_to_all(output: Any, x: Any, receive: Any, sizes: Any, group: Any) -> Any:
        recorder.add("all_to_all", sum(sizes) - sizes[dist.get_rank(group)])
        return all_to_all(output, x, receive, sizes, group=group)

    def count_batch(operations: list[dist.P2POp]) -> Any:
        recorder.add("ring", sum(op.tensor.numel() for op in operations if op.op is dist.isend))
        return batch(operations)

    def count_gather(output: Any, x: Any, group: Any, async_op: bool = False) -> Any:
        kind = "agreement" if x.dtype == torch.int64 else "all_gather"  # what ranks compare in a call, at no step
        recorder.add(kind, output.numel() - x.numel())
        return gather(output, x, group=group, async_op=async_op)

    def count_broadcast(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.add("broadcast", tensor.numel())
        return broadcast(tensor, *args, **kwargs)

    def count_send(self: Channel, x: Any, *args: Any) -> None:
        recorder.add("send", x.numel())
        send(self, x, *args)

    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, "all_to_all_single", count_all_to_all))
        stack.enter_context(patch.object(dist, "batch_isend_irecv", count_batch))
        stack.enter_context(patch.object(dist, "all_gather_single", count_gather))
        stack.enter_context(patch.object(dist, "broadcast", count_broadcast))
        stack.enter_context(patch.object(Channel, "send", count_send))
        for name in _FORBIDDEN:
            error = AssertionError(f"{name} must not be used")
            stack.enter_context(patch.object(dist, name, side_effect=error))
        yield recorder
