"""Attention masks: one normal form, and the part of a mask that a rank needs.

Normal form: four dims, (B or 1, H or 1, Sq or 1, Sk), bool (True = attend) or floating (added to the scores). Every
rank holds the mask of the whole sequence; a rank takes the rows of its queries, the columns of its keys and the heads
it computes, by position in the whole sequence, whatever order the tokens have travelled in.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xpar.core.distributed.collectives import group_rank, group_size
from xpar.core.partition import share
from xpar.errors import ConfigError

__all__ = [
    "causal_mask",
    "combine_masks",
    "heads_of",
    "is_trivial",
    "normalise_mask",
    "settle_hidden_rows",
    "slice_mask",
    "slice_whole",
    "to_additive",
]

# A row whose largest bias is below this has lost its scores to rounding in fp32: softmax over it is uniform.
_HIDDEN = -5e8


def normalise_mask(mask: Tensor, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """Bring a mask to four dims, as a view.

    `scaled_dot_product_attention` reads two dims as (Sq, Sk) and three as (H, Sq, Sk); so does this. Only where that
    reading does not fit, two dims are read as (B, Sk) and three as (B, Sq, Sk), as diffusers does.

    Args:
        mask: (Sk), (B, Sk), (Sq, Sk), (H, Sq, Sk), (B, Sq, Sk) or (B, H, Sq, Sk), where any dim may be 1.
        batch: B of the attention call; likewise `heads`, `queries` and `keys`.

    Returns:
        (B or 1, H or 1, Sq or 1, Sk), bool or floating.

    Raises:
        ConfigError: the dtype is neither bool nor floating, or the shape cannot be broadcast.
    """
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ConfigError(f"an attention mask is bool or floating, got {mask.dtype}; use mask.bool()")
    full = (batch, heads, queries, keys)
    readings: list[tuple[Any, ...]] = [(None,) * (4 - mask.dim()) + (...,)]
    if mask.dim() == 2:
        readings.append((slice(None), None, None))
    if mask.dim() == 3:
        readings.append((slice(None), None))
    for reading in readings:
        view = mask[reading] if mask.dim() <= 4 else mask
        if view.dim() == 4 and all(n in (1, m) for n, m in zip(view.shape, full, strict=True)):
            return view.expand(-1, -1, -1, keys)
    raise ConfigError(f"a mask of shape {tuple(mask.shape)} does not broadcast to (B, H, Sq, Sk) = {full}")


def slice_mask(
    mask: Tensor, q_positions: Tensor, k_positions: Tensor, head_range: tuple[int, int] | None = None
) -> Tensor:
    """Rows, columns and heads of a mask in normal form. A mask of one row or one head keeps it.

    Args:
        mask: (B or 1, H or 1, Sq or 1, Sk) over the whole sequence.
        q_positions: int64 (Sq of this rank), place of each local query in the whole sequence, on the mask's device.
        k_positions: int64 (Sk of this rank), likewise for the keys, in the order they have locally.
        head_range: start and stop of the query heads that are computed here; None for all.

    Returns:
        (B or 1, local H or 1, local Sq or 1, local Sk).
    """
    if head_range is not None and mask.shape[1] > 1:
        mask = mask[:, head_range[0] : head_range[1]]
    if mask.shape[2] > 1:
        mask = mask.index_select(2, q_positions)
    return mask.index_select(3, k_positions) if mask.shape[3] > 1 else mask.expand(-1, -1, -1, len(k_positions))


def slice_whole(mask: Tensor | None, is_causal: bool, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
    """The part of a mask and of causality that concerns these queries and keys; None when nothing is masked.

    Args:
        mask: of the whole sequence, with up to four dims as `scaled_dot_product_attention` reads them, or None.
        is_causal: hide keys that come later in the whole sequence.
        q_positions: as in `slice_mask`, and likewise `k_positions`.

    Returns:
        (B or 1, H or 1, Sq or 1, Sk), or None.
    """
    if mask is not None:
        mask = slice_mask(mask[(None,) * (4 - mask.dim())], q_positions, k_positions)
    return combine_masks([mask, causal_mask(q_positions, k_positions) if is_causal else None])


def heads_of(mask: Tensor, heads: int, group: ProcessGroup | None) -> Tensor:
    """The part of a per-head mask, (B or 1, H, Sq or 1, Sk), for the heads of this rank of a ulysses group."""
    start, stop = share(heads, group_size(group), group_rank(group))
    return mask[:, start:stop] if mask.shape[1] > 1 else mask


def causal_mask(q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """Bool (1, 1, Sq, Sk): a query attends to keys at its own position and before."""
    return (k_positions <= q_positions.unsqueeze(-1))[None, None]


def combine_masks(masks: Sequence[Tensor | None]) -> Tensor | None:
    """One mask that hides what any of `masks` hides and adds what any of them adds; None entries do nothing."""
    combined: Tensor | None = None
    for mask in masks:
        if combined is None or mask is None:
            combined = mask if combined is None else combined
        elif combined.dtype == torch.bool and mask.dtype == torch.bool:
            combined = combined & mask
        else:
            dtype = next(m.dtype for m in (combined, mask) if m.dtype != torch.bool)
            combined = to_additive(combined, dtype) + to_additive(mask, dtype)
    return combined


def to_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as a bias of `dtype`: bool becomes 0 and -inf, floating is cast."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask.logical_not(), -math.inf)


def settle_hidden_rows(q_BHSD: Tensor, masks: Sequence[Tensor | None]) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Make rows that a large negative bias hides completely safe for a merge over pieces of the keys.

    Pipelines often hide keys with -1e4 or the dtype's minimum instead of -inf. When that covers a whole row, one
    process computes softmax over what is left of the scores, uniform in the end; but the log-sum-exp of each piece is
    then the bias and nothing else in fp32, and pieces of different length would merge with equal weight. Softmax does
    not change when a row is shifted, so such a row is shifted to a largest bias of 0, and the queries of rows that
    have lost their scores are set to 0, which is the same uniform softmax.

    Args:
        q_BHSD: the queries of this rank.
        masks: for each piece of the keys, four dims broadcastable to (B, H, Sq, keys of the piece), or None.

    Returns:
        Queries and masks. Bool masks, and rows that are all -inf (they attend to nothing), stay as they are.
    """
    biases = [mask for mask in masks if mask is not None and mask.dtype != torch.bool]
    if len(biases) < len(masks):
        return q_BHSD, masks
    pieces = [bias.amax(dim=-1, keepdim=True) for bias in biases if bias.shape[-1]]
    if not pieces:
        return q_BHSD, masks
    largest = functools.reduce(torch.maximum, pieces).clamp(max=0.0)
    hidden = (largest < _HIDDEN) & (largest != -math.inf)
    shift = largest.masked_fill(largest == -math.inf, 0.0)
    return q_BHSD.masked_fill(hidden, 0.0), [bias - shift for bias in biases]


def is_trivial(mask: Tensor) -> bool:
    """Whether the mask changes nothing: all True, or all zero. The host waits for the device: ask once per call."""
    return bool(mask.all() if mask.dtype == torch.bool else (mask == 0).all())
