"""Ulysses: trade a split over tokens for a split over heads, and back (DeepSpeed Ulysses, arXiv 2309.14509).

Names: B batch, H heads, S tokens, D head dim. Between `scatter_heads` and `gather_heads` a rank holds *all* tokens of
its group, in group-rank order, and some of the heads, so any local attention is right. One packed all-to-all each way
instead of four. Tokens and heads need not divide by the group: a rank may even have no head at all.

The wire formats are chosen so that what arrives needs no copy: tokens outermost on the way in and heads outermost on
the way back, whatever each rank sends. Only packing copies.
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
        q, k and v with sum(lengths) tokens in group-rank order, as strided views. q has the heads of
        `head_share(H, Hk, ...)`. k and v have heads that local attention can group evenly over those of q: where the
        split cuts through a group of query heads, they are expanded to one for each query head.

    Raises:
        ConfigError: `lengths` does not fit the group or the tensors, or the head counts do not divide.
    """
    if group is None:
        return q_BHSD, k_BHSD, v_BHSD
    rank, parts = group_rank(group), group_size(group)
    _check(q_BHSD.shape[2], lengths, rank, parts)
    B, H, S, D = q_BHSD.shape
    Hk, Dv = k_BHSD.shape[1], v_BHSD.shape[-1]
    head_shares = [head_share(H, Hk, parts, index) for index in range(parts)]
    widths = [(x.stop - x.start) * D + (x.kv_stop - x.kv_start) * (D + Dv) for x in head_shares]
    if H % parts == 0 and Hk % parts == 0:
        send = _pack_even((q_BHSD, k_BHSD, v_BHSD), parts)
    else:
        send = _pack_uneven((q_BHSD, k_BHSD, v_BHSD), head_shares)
    mine = head_shares[rank]
    received = exchange_splits(
        send, [S * B * width for width in widths], [n * B * widths[rank] for n in lengths], group
    )
    rows_SBW = received.view(sum(lengths), B, widths[rank])
    num_heads, num_kv_heads = mine.stop - mine.start, mine.kv_stop - mine.kv_start
    parts_SBW = rows_SBW.split((num_heads * D, num_kv_heads * D, num_kv_heads * Dv), dim=-1)
    sizes = ((num_heads, D), (num_kv_heads, D), (num_kv_heads, Dv))
    q, k, v = (x.unflatten(-1, size).permute(1, 2, 0, 3) for x, size in zip(parts_SBW, sizes, strict=True))
    if mine.kv_map is not None:
        index = torch.tensor(mine.kv_map, device=k.device)
        k, v = k.index_select(1, index), v.index_select(1, index)
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
    if min(lengths) == max(lengths):
        send = out_BHSD.new_empty(parts, h, S // parts, B, D)
        send.copy_(out_BHSD.unflatten(2, (parts, S // parts)).permute(2, 1, 3, 0, 4))
        send = send.view(-1)
    else:
        pieces = out_BHSD.permute(1, 2, 0, 3).split(list(lengths), dim=1)
        send = torch.cat([piece.reshape(-1) for piece in pieces])
    own = lengths[rank]
    received = exchange_splits(send, [h * n * B * D for n in lengths], [n * own * B * D for n in head_counts], group)
    return received.view(heads, own, B, D).permute(2, 0, 1, 3)


def _pack_even(tensors: Sequence[Tensor], parts: int) -> Tensor:
    """Flat (parts, S, B, width) buffer; one strided copy for each tensor, whatever the number of ranks."""
    B, S = tensors[0].shape[0], tensors[0].shape[2]
    sizes = [(x.shape[1] // parts, x.shape[-1]) for x in tensors]
    widths = [num_heads * head_dim for num_heads, head_dim in sizes]
    buffer = tensors[0].new_empty(parts, S, B, sum(widths))
    for x, size, target in zip(tensors, sizes, buffer.split(widths, dim=-1), strict=True):
        target.unflatten(-1, size).copy_(x.unflatten(1, (parts, size[0])).permute(1, 3, 0, 2, 4))
    return buffer.view(-1)


def _pack_uneven(tensors: Sequence[Tensor], head_shares: Sequence[HeadShare]) -> Tensor:
    """Flat buffer of one (S, B, width of that rank) block for each rank."""
    q_SBHD, k_SBHD, v_SBHD = (x.permute(2, 0, 1, 3) for x in tensors)
    blocks = []
    for heads in head_shares:
        kv = slice(heads.kv_start, heads.kv_stop)
        block = (q_SBHD[:, :, heads.start : heads.stop], k_SBHD[:, :, kv], v_SBHD[:, :, kv])
        blocks.append(torch.cat([x.flatten(2) for x in block], dim=-1).view(-1))
    return torch.cat(blocks)


def _check(tokens: int, lengths: Sequence[int], rank: int, parts: int) -> None:
    if len(lengths) != parts or lengths[rank] != tokens:
        raise ConfigError(f"lengths={list(lengths)} do not fit: rank {rank} of {parts} holds {tokens} tokens")
