"""Ulysses: trade a split over tokens for a split over heads, and back (DeepSpeed Ulysses, arXiv 2309.14509).

Names: B batch, H heads, S tokens, D head dim. Between `scatter_heads` and `gather_heads` a rank holds *all* tokens of
its group, in group-rank order, and some of the heads, so any local attention is right. One packed all-to-all each way
instead of four. Tokens and heads need not divide by the group: a rank may even have no head at all.

A rank's own piece never enters the collective: it goes straight to its place between those that arrive. That spares
a pass over it (on gloo with two ranks 6 of the 89 ms of an attention over 2432 tokens), and the kernel gets contiguous
tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xpar.core.distributed.collectives import exchange_splits, group_rank, group_size
from xpar.core.partition import share, shares
from xpar.errors import ConfigError

__all__ = ["HeadShare", "gather_heads", "head_share", "scatter_heads"]


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads that one rank computes: query heads [start, stop) and the key/value heads which those need."""

    start: int
    stop: int
    kv_start: int
    kv_stop: int
    kv_map: tuple[int, ...] | None
    """For each query head its key/value head, counted from `kv_start`, where equal runs would be wrong; else None."""

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """First head and the one after the last of the queries, the keys and the values."""
        return (self.start, self.stop), (self.kv_start, self.kv_stop), (self.kv_start, self.kv_stop)


def head_share(heads: int, kv_heads: int, parts: int, index: int) -> HeadShare:
    """Heads of part `index`. A key/value head goes to every part that needs it.

    Raises:
        ConfigError: `kv_heads` does not divide `heads`.
    """
    if kv_heads < 1 or heads % kv_heads:
        raise ConfigError(f"{heads} query heads cannot share {kv_heads} key/value heads; the counts must divide")
    run = heads // kv_heads
    start, stop = share(heads, parts, index)
    if start == stop:
        return HeadShare(start, stop, 0, 0, None)
    kv_start, kv_stop = start // run, (stop - 1) // run + 1
    whole_runs = start % run == 0 and stop % run == 0
    equal_runs = whole_runs or kv_stop - kv_start == 1
    kv_map = None if equal_runs else tuple(head // run - kv_start for head in range(start, stop))
    return HeadShare(start, stop, kv_start, kv_stop, kv_map)


def scatter_heads(
    q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, lengths: Sequence[int], group: ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """From this rank's tokens with all heads to all tokens of the group with this rank's heads.

    Args:
        q_BHSD: (B, H, S of this rank, D).
        k_BHSD: (B, Hk, S of this rank, D), where Hk divides H.
        v_BHSD: (B, Hk, S of this rank, Dv).
        lengths: tokens that each rank of the group holds, in group-rank order.
        group: the ulysses group, or None to get the inputs back.

    Returns:
        q, k and v with sum(lengths) tokens in group-rank order. q has the heads of
        `head_share(H, Hk, ...)`. k and v have heads that local attention can group evenly over those of q: where the
        split cuts through a group of query heads, they are expanded to one for each query head.

    Raises:
        ConfigError: `lengths` does not fit the group or the tensors, or the head counts do not divide.
    """
    if group is None:
        return q_BHSD, k_BHSD, v_BHSD
    rank, parts = group_rank(group), group_size(group)
    _check(q_BHSD.shape[2], lengths, rank, parts)
    tensors = q_BHSD, k_BHSD, v_BHSD
    B, H, S = q_BHSD.shape[:3]
    head_shares = [head_share(H, k_BHSD.shape[1], parts, index) for index in range(parts)]
    mine, others, start = head_shares[rank], sum(lengths) - S, sum(lengths[:rank])
    send, send_sizes = _pack(tensors, head_shares, rank)
    own = [x[:, first:last] for x, (first, last) in zip(tensors, mine.ranges, strict=True)]
    widths = [x.shape[1] * x.shape[3] for x in own]
    received = exchange_splits(send, send_sizes, _but_own([n * B * sum(widths) for n in lengths], rank), group)
    rows_SBW = received.view(others, B, sum(widths)).split(widths, dim=-1)
    q, k, v = (_between(x, rows, start) for x, rows in zip(own, rows_SBW, strict=True))
    if (kv_map := mine.kv_map) is not None:
        # By views: an index would have to be sent to the device, for which the host waits.
        k, v = (torch.stack([x[:, head] for head in kv_map], dim=1) for x in (k, v))
    return q, k, v


def gather_heads(out_BHSD: Tensor, lengths: Sequence[int], heads: int, group: ProcessGroup | None) -> Tensor:
    """The way back: from all tokens with this rank's heads to this rank's tokens with all heads.

    Args:
        out_BHSD: (B, heads of this rank, sum(lengths), D).
        lengths: as given to `scatter_heads`.
        heads: number of query heads in all.
        group: the ulysses group, or None to get the input back.

    Returns:
        (B, heads, S of this rank, D), as a strided view.

    Raises:
        ConfigError: `lengths` or `heads` does not fit the group or the tensor.
    """
    if group is None:
        return out_BHSD
    rank, parts = group_rank(group), group_size(group)
    head_counts = shares(heads, parts)
    B, h, S, D = out_BHSD.shape
    if len(lengths) != parts or sum(lengths) != S or h != head_counts[rank]:
        raise ConfigError(
            f"attention output with {h} heads and {S} tokens does not fit lengths={list(lengths)} and "
            f"{heads} heads over {parts} ranks"
        )
    own, start = lengths[rank], sum(lengths[:rank])
    out_SBHD = out_BHSD.permute(2, 0, 1, 3)
    send = torch.cat([out_SBHD[:start], out_SBHD[start + own :]]).reshape(-1)
    send_sizes = _but_own([n * B * h * D for n in lengths], rank)
    sizes = _but_own([own * B * n * D for n in head_counts], rank)
    received = exchange_splits(send, send_sizes, sizes, group)
    pieces = [
        out_SBHD[start : start + own] if r == rank else x.view(own, B, n, D)
        for r, (n, x) in enumerate(zip(head_counts, received.split(sizes), strict=True))
    ]
    return torch.cat([x.transpose(0, 1) for x in pieces], dim=2).transpose(1, 2)


def _pack(tensors: Sequence[Tensor], head_shares: Sequence[HeadShare], rank: int) -> tuple[Tensor, list[int]]:
    """For each other rank this rank's tokens with that rank's heads, (S, B, width) and all of them flat; the sizes."""
    B, S, parts = tensors[0].shape[0], tensors[0].shape[2], len(head_shares)
    widths = [
        sum((last - first) * x.shape[-1] for x, (first, last) in zip(tensors, heads.ranges, strict=True))
        for heads in head_shares
    ]
    sizes = _but_own([S * B * width for width in widths], rank)
    send = tensors[0].new_empty(sum(sizes))
    is_even = all(x.shape[1] % parts == 0 for x in tensors)
    # Neighbours with equal shares are filled together, so that the number of copies does not grow with that of ranks.
    runs = (range(rank), range(rank + 1, parts)) if is_even else [range(r, r + 1) for r in range(parts) if r != rank]
    targets = send.split([sum(sizes[r] for r in run) for run in runs])
    for run, target in zip(runs, targets, strict=True):
        if run:
            _fill(target.view(len(run), S, B, widths[run[0]]), tensors, head_shares[run[0]])
    return send, sizes


def _fill(target_RSBW: Tensor, tensors: Sequence[Tensor], heads: HeadShare) -> None:
    """Copy to each of R neighbouring ranks its heads of q, k and v side by side; `heads` are those of the first."""
    parts, column = len(target_RSBW), 0
    for x, (first, last) in zip(tensors, heads.ranges, strict=True):
        size = last - first, x.shape[-1]
        block = target_RSBW[..., column : column + size[0] * size[1]].unflatten(-1, size)
        block.copy_(x[:, first : first + parts * size[0]].unflatten(1, (parts, size[0])).permute(1, 3, 0, 2, 4))
        column += size[0] * size[1]


def _between(own_BhSD: Tensor, rows_SBW: Tensor, start: int) -> Tensor:
    """This rank's tokens put in after `start` tokens of the others, (B, h, all tokens, D)."""
    others_BhSD = rows_SBW.unflatten(-1, (own_BhSD.shape[1], own_BhSD.shape[3])).permute(1, 2, 0, 3)
    return torch.cat([others_BhSD[:, :, :start], own_BhSD, others_BhSD[:, :, start:]], dim=2)


def _but_own(sizes: Sequence[int], rank: int) -> list[int]:
    return [0 if r == rank else size for r, size in enumerate(sizes)]


def _check(tokens: int, lengths: Sequence[int], rank: int, parts: int) -> None:
    if len(lengths) != parts or lengths[rank] != tokens:
        raise ConfigError(f"lengths={list(lengths)} do not fit: rank {rank} of {parts} holds {tokens} tokens")
