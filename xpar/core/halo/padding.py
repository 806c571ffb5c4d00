"""Padding of a split picture: rows of the neighbours inside, the padding mode at the picture's border."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from xpar.core.halo.exchange import start_halo_exchange
from xpar.core.halo.split import Split
from xpar.errors import UnsupportedError

__all__ = ["split_pad"]


def split_pad(
    x: Tensor,
    pads: Sequence[int],
    mode: str,
    value: float | None,
    *,
    dim: int,
    split: Split,
    group: ProcessGroup | None,
) -> Tensor:
    """`torch.nn.functional.pad` of the whole picture, as far as this rank's rows need it.

    A convolution without padding of its own that follows then finds all rows that its windows reach.

    Args:
        x: this rank's rows.
        pads: as `F.pad` takes them, last dim first; none may be negative in the split dim.
        mode: "constant", "replicate" or "reflect".
        value: for "constant".
        dim: the split dim, -2 or -1.
        split: rows of all ranks.
        group: the ranks.

    Returns:
        (..., above + rows + below, ...): own rows with the neighbours' rows or padding around them.

    Raises:
        UnsupportedError: another mode, or a crop.
    """
    place = 2 * (-dim - 1)
    above, below = pads[place], pads[place + 1]
    if mode not in ("constant", "replicate", "reflect") or min(above, below) < 0:
        raise UnsupportedError(f"padding mode {mode!r} with {above} and {below} rows cannot be split over ranks")
    if split.is_idle:  # a stand-in may be too small for its own reflection
        return F.pad(x, list(pads))
    reach = max(above, below) if mode == "reflect" else 0
    halo = start_halo_exchange(x, dim, split, max(above, reach), max(below, reach), group)
    start, stop = split.own
    over, under = min(start, max(above, reach)), min(split.total - stop, max(below, reach))
    inside = mode != "reflect" and over in (0, above) and under in (0, below)
    if inside:
        return _overwritten(F.pad(x, list(pads), mode, value), halo.wait(), pads, mode, value, dim)
    top, bottom = halo.wait()
    whole = torch.cat([part for part in (top, x, bottom) if part is not None], dim=dim)
    border = list(pads)
    border[place] = max(0, above - over)
    border[place + 1] = max(0, below - under)
    padded = F.pad(whole, border, mode, value)
    extra = max(0, over - above)  # rows that only the reflection needed
    return padded.narrow(dim, extra, above + x.shape[dim] + below)


def _overwritten(
    padded: Tensor,
    rows: tuple[Tensor | None, Tensor | None],
    pads: Sequence[int],
    mode: str,
    value: float | None,
    dim: int,
) -> Tensor:
    """The padded tensor with the neighbours' rows written over the padding: one copy of the picture, not two."""
    others = list(pads)
    others[2 * (-dim - 1)] = others[2 * (-dim - 1) + 1] = 0
    for at_end, part in enumerate(rows):
        if part is not None:
            part = F.pad(part, others, mode, value) if any(others) else part
            begin = padded.shape[dim] - part.shape[dim] if at_end else 0
            padded.narrow(dim, begin, part.shape[dim]).copy_(part)
    return padded
