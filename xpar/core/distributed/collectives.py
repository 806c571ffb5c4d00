"""The few collectives that xpar needs, over plain tensors and a process group.

`group=None` everywhere means an axis of size one: nothing is sent and the input comes back. Sizes are arguments,
because every rank can work out every other rank's share (`xpar.core.partition`); nothing here exchanges sizes and
nothing makes the host wait for a device, except that gloo's own calls block.

Gloo and NCCL both go wrong silently, or abort, when ranks disagree on a size, so each function checks the local
tensor against the size that the other ranks expect of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from xpar.core.distributed.operations import named
from xpar.errors import ConfigError

__all__ = ["RingExchange", "all_gather_uneven", "exchange_splits", "group_rank", "group_size", "start_ring_exchange"]


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks of `group`; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    """This rank's place in `group`; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def all_gather_uneven(x: Tensor, dim: int, lengths: Sequence[int], group: ProcessGroup | None) -> Tensor:
    """Concatenate every rank's `x` along `dim`, in group-rank order; shards may differ in length or be empty.

    One all-gather. Gloo has no all-gather of unequal shards, so unequal ones are padded to the longest and trimmed.

    Args:
        x: this rank's shard; all ranks agree on its dtype and on every dim but `dim`.
        dim: the tensor dim that is split over the group.
        lengths: `lengths[r]` is the size of `dim` on group rank r.
        group: the ranks that hold the shards, or None.

    Returns:
        The whole tensor, the same on every rank; its memory has `dim` outermost, so it may not be contiguous.

    Raises:
        ConfigError: `lengths` does not fit the group or `x`.
    """
    _check_lengths("dim", x.shape[dim], lengths, group)
    if group is None:
        return x
    rows = x.movedim(dim, 0)
    longest = max(lengths)
    if rows.shape[0] < longest:
        padded = rows.new_zeros(longest, *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        rows = padded
    gathered = rows.new_empty(len(lengths) * longest, *rows.shape[1:])
    if gathered.numel():
        _all_gather_single(gathered, rows.contiguous(), group)
    if min(lengths) != longest:
        starts = range(0, len(lengths) * longest, longest)
        gathered = torch.cat([gathered[start : start + n] for start, n in zip(starts, lengths, strict=True)])
    return gathered.movedim(0, dim)


def exchange_splits(
    send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], group: ProcessGroup | None
) -> Tensor:
    """One all-to-all of a flat buffer: piece r of `send` goes to group rank r.

    Args:
        send: contiguous 1-D tensor, the pieces in group-rank order.
        send_sizes: number of elements for each rank; sums to the length of `send`.
        receive_sizes: number of elements that each rank sends here.
        group: the ranks, or None.

    Returns:
        1-D tensor with the received pieces in group-rank order.

    Raises:
        ConfigError: the sizes do not fit the group or `send`.
    """
    if len(send_sizes) != group_size(group) or len(receive_sizes) != len(send_sizes) or sum(send_sizes) != len(send):
        raise ConfigError(
            f"send_sizes={list(send_sizes)} and receive_sizes={list(receive_sizes)} do not fit a group of "
            f"{group_size(group)} ranks and a buffer of {len(send)} elements"
        )
    if group is None:
        return send
    received = send.new_empty(sum(receive_sizes))
    with named("all_to_all", group):
        dist.all_to_all_single(received, send, list(receive_sizes), list(send_sizes), group=group)
    return received


@dataclass(kw_only=True)
class RingExchange:
    """An exchange with the two neighbours of a ring that is under way.

    It holds the sent tensor and every handle until `wait`: gloo hangs, and NCCL may reuse the memory, when one is
    dropped earlier.
    """

    sent: Tensor
    received: Tensor
    _works: list[Work] = field(default_factory=list)
    _group: ProcessGroup | None = None

    def wait(self) -> Tensor:
        """Wait for both directions (on NCCL: the current stream does, not the host) and return what came in."""
        with named("ring exchange", self._group):
            while self._works:
                self._works.pop().wait()
        return self.received


def start_ring_exchange(send: Tensor, receive_size: int, group: ProcessGroup | None) -> RingExchange:
    """Send `send` to the next rank of the ring and receive from the previous one, as one `batch_isend_irecv`.

    Every rank takes part every time, even with nothing to send: NCCL leaves a batch that only some ranks enter
    undefined when it is the first use of a group. So no buffer may be empty.

    Args:
        send: contiguous 1-D tensor of at least one element.
        receive_size: number of elements that the previous rank sends, at least one.
        group: the ring, in group-rank order, or None.

    Raises:
        ConfigError: a buffer is empty.
    """
    if len(send) < 1 or receive_size < 1:
        raise ConfigError(f"ring buffers must not be empty: sending {len(send)} and receiving {receive_size} elements")
    if group is None:
        return RingExchange(sent=send, received=send)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    received = send.new_empty(receive_size)
    with named("ring exchange", group):
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, send, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
            ]
        )
    return RingExchange(sent=send, received=received, _works=works, _group=group)


def _all_gather_single(output: Tensor, shard: Tensor, group: ProcessGroup) -> None:
    # torch 2.13 renamed all_gather_into_tensor and warns about the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with named("all_gather", group):
        gather(output, shard, group=group)


def _check_lengths(what: str, size: int, lengths: Sequence[int], group: ProcessGroup | None) -> None:
    if len(lengths) != group_size(group) or lengths[group_rank(group)] != size:
        raise ConfigError(
            f"lengths={list(lengths)} do not fit: rank {group_rank(group)} of {group_size(group)} holds "
            f"{what} of size {size}"
        )
