"""A picture cut into the parts of all ranks, and put together from them, on every rank or on the first one."""

import itertools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xpar.core.distributed.collectives import all_gather_uneven, group_rank, group_size
from xpar.core.halo import Split, Splits

__all__ = ["cut_out", "gather"]


def cut_out(x: Tensor, splits: Splits) -> Tensor:
    """What this rank holds of a whole tensor; a view."""
    for dim, split in splits.items():
        rows = split.held_slice
        x = x.narrow(dim, rows.start, rows.stop - rows.start)
    return x


def gather(x: Tensor, splits: Splits, group: ProcessGroup | None, *, to_all: bool) -> Tensor:
    """The whole of a tensor of which each rank holds a part. One collective.

    Args:
        x: this rank's part; a stand-in is dropped.
        splits: rows of all ranks by split dim, counted from the end; the ranks of the group run through the last dim
            first.
        group: the ranks.
        to_all: whether every rank gets the whole, or the first one only and the others zeros that take no memory.
    """
    shape = list(x.shape)
    for dim, split in splits.items():
        start, stop = split.own
        x, shape[dim] = x.narrow(dim, 0, stop - start), split.total
    others = math.prod(size for dim, size in enumerate(shape, -len(shape)) if dim not in splits)
    parts = list(itertools.product(*map(_ranges, splits.values())))
    sizes = [others * math.prod(stop - start for start, stop in part) for part in parts]
    flat = x.flatten()
    if to_all:
        pieces: Sequence[Tensor] = all_gather_uneven(flat, 0, sizes, group).split(sizes)
    else:
        pieces = _gather_to_first(flat, sizes, group)
        if not pieces:
            return x.new_zeros(()).expand(shape)
    whole = x.new_empty(shape)
    for part, piece in zip(parts, pieces, strict=True):
        place = whole
        for dim, (start, stop) in zip(splits, part, strict=True):
            place = place.narrow(dim, start, stop - start)
        place.copy_(piece.view(place.shape))
    return whole


def _ranges(split: Split) -> list[tuple[int, int]]:
    return list(itertools.pairwise(split.bounds))


def _gather_to_first(flat: Tensor, sizes: Sequence[int], group: ProcessGroup | None) -> list[Tensor]:
    """The flat parts of all ranks on the first one, nothing on the others."""
    padded = flat.new_zeros(max(sizes))
    padded[: len(flat)] = flat
    parts = [torch.empty_like(padded) for _ in range(group_size(group))] if group_rank(group) == 0 else None
    dist.gather(padded, parts, group=group, group_dst=0)
    return [part[:size] for part, size in zip(parts or [], sizes, strict=False)]
