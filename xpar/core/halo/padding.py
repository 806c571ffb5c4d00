"""Padding of a split picture: rows of the neighbours inside, the padding mode at the picture's border."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from xpar.core.halo.exchange import start_halo_exchange
from xpar.core.halo.split import Split, Splits
from xpar.errors import UnsupportedError

__all__ = ["pads_of", "split_pad"]


def pads_of(pads: Sequence[int], dim: int) -> tuple[int, int]:
    """Rows before and after dim `dim` (counted from the end) in pads as `F.pad` takes them: last dim first."""
    place = 2 * (-dim - 1)
    return (pads[place], pads[place + 1]) if len(pads) > place + 1 else (0, 0)


def split_pad(
    x: Tensor, pads: Sequence[int], mode: str, value: float | None, *, splits: Splits, group: ProcessGroup | None
) -> Tensor:
    """`torch.nn.functional.pad` of the whole picture, as far as this rank's rows need it.

    A convolution without padding of its own that follows then finds all rows that its windows reach.

    Args:
        x: this rank's rows.
        pads: as `F.pad` takes them, last dim first; none may be negative in a split dim.
        mode: "constant", "replicate" or "reflect".
        value: for "constant".
        splits: rows of all ranks, of each split dim that is padded; at least one.
        group: the ranks.

    Returns:
        (..., above + rows + below, ...): own rows with the neighbours' rows or padding around them.

    Raises:
        UnsupportedError: another mode, or a crop.
    """
    for dim in splits:
        above, below = pads_of(pads, dim)
        if mode not in ("constant", "replicate", "reflect") or min(above, below) < 0:
            raise UnsupportedError(f"padding mode {mode!r} with {above} and {below} rows cannot be split over ranks")
    if any(split.is_idle for split in splits.values()):  # a stand-in may be too small for its own reflection
        return F.pad(x, list(pads))
    first, *others = splits
    if all(_is_inside(pads, mode, dim, splits[dim]) for dim in others):  # padded at once: one copy of the picture
        padded = _pad_rows(x, pads, mode, value, first, splits[first], group)
        for dim in others:
            above, below = pads_of(pads, dim)
            own = padded.narrow(dim, above, x.shape[dim])
            _overwrite(padded, start_halo_exchange(own, dim, splits[dim], above, below, group).wait(), dim)
        return padded
    x = _pad_rows(x, _without(pads, others), mode, value, first, splits[first], group)
    for dim in others:
        only = _without(pads, [each for each in range(-len(pads) // 2, 0) if each != dim])
        x = _pad_rows(x, only, mode, value, dim, splits[dim], group)
    return x


def _without(pads: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Pads with those of some dims set to zero."""
    return [0 if -(place // 2) - 1 in dims else rows for place, rows in enumerate(pads)]


def _fetched(pads: Sequence[int], mode: str, dim: int, split: Split) -> tuple[int, int, int, int]:
    """Rows to ask for above and below, and how many of them there are: a reflection may need more than the padding."""
    above, below = pads_of(pads, dim)
    if mode == "reflect":
        above = below = max(above, below)
    start, stop = split.own
    return above, below, min(start, above), min(split.total - stop, below)


def _is_inside(pads: Sequence[int], mode: str, dim: int, split: Split) -> bool:
    """Whether neighbours' rows take the place of a whole side of the padding, or of nothing of it."""
    above, below, over, under = _fetched(pads, mode, dim, split)
    return mode != "reflect" and over in (0, above) and under in (0, below)


def _pad_rows(
    x: Tensor, pads: Sequence[int], mode: str, value: float | None, dim: int, split: Split, group: ProcessGroup | None
) -> Tensor:
    """Padding with the neighbours' rows in one split dim, and as in one process in the others."""
    reach_above, reach_below, over, under = _fetched(pads, mode, dim, split)
    halo = start_halo_exchange(x, dim, split, reach_above, reach_below, group)
    if _is_inside(pads, mode, dim, split):
        padded, others = F.pad(x, list(pads), mode, value), _without(pads, [dim])
        rows = (F.pad(part, others, mode, value) if part is not None and any(others) else part for part in halo.wait())
        return _overwrite(padded, tuple(rows), dim)
    top, bottom = halo.wait()
    whole = torch.cat([part for part in (top, x, bottom) if part is not None], dim=dim)
    above, below = pads_of(pads, dim)
    border, place = list(pads), 2 * (-dim - 1)
    border[place : place + 2] = max(0, above - over), max(0, below - under)
    padded = F.pad(whole, border, mode, value)
    return padded.narrow(dim, max(0, over - above), above + x.shape[dim] + below)  # without what the reflection needed


def _overwrite(padded: Tensor, rows: Sequence[Tensor | None], dim: int) -> Tensor:
    """Write the neighbours' rows over the padding: one copy of the picture, not two."""
    for at_end, part in enumerate(rows):
        if part is not None:
            begin = padded.shape[dim] - part.shape[dim] if at_end else 0
            padded.narrow(dim, begin, part.shape[dim]).copy_(part)
    return padded
