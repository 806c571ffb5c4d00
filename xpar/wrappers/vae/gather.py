"""The rows of all ranks put together, on every rank or on the first one."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xpar.core.distributed.collectives import all_gather_uneven, group_rank, group_size
from xpar.core.halo import Split

__all__ = ["gather"]


def gather(x: Tensor, dim: int, split: Split, group: ProcessGroup | None, *, to_all: bool) -> Tensor:
    """The whole of a tensor of which each rank holds some rows.

    Args:
        x: the rows that this rank owns.
        dim: the split dim, counted from the end.
        split: rows of all ranks.
        group: the ranks.
        to_all: whether every rank gets the whole, or the first one only and the others zeros that take no memory.
    """
    if to_all:
        return all_gather_uneven(x, x.ndim + dim, split.lengths, group).contiguous()
    lengths, shape = split.lengths, list(x.shape)
    shape[dim] = max(lengths)
    padded = x.new_zeros(shape)
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    parts = [torch.empty_like(padded) for _ in range(group_size(group))] if group_rank(group) == 0 else None
    dist.gather(padded, parts, group=group, group_dst=0)
    if parts is not None:
        return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, lengths, strict=True)], dim=dim)
    shape[dim] = split.total
    return x.new_zeros(()).expand(shape)
