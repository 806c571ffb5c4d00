"""Convolution of a split picture with zero padding of its own.

The rank's own rows are convolved while the neighbours' rows are under way, with zeros in their place; then the few rows
that reach over a seam are computed again from the true ones. So no tensor of the size of the picture is copied.

For a picture that is split in both dims it is nested: the convolution that the rows are put through is itself one over
split columns. All ranks beside each other hold the same rows, so they ask for the same columns in the same order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from xpar.core.halo.exchange import start_halo_exchange
from xpar.core.halo.split import Split, Splits
from xpar.errors import UnsupportedError

__all__ = ["Geometry", "split_convolution"]


@dataclass(frozen=True)
class Geometry:
    """A convolution along the split dim."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def reach(self) -> int:
        """Rows between the first and the last of a window."""
        return (self.kernel - 1) * self.dilation

    @property
    def below(self) -> int:
        """Rows that the last window of a rank reaches under its last row; over its first row it is the padding."""
        return max(0, self.reach - self.padding - self.stride + 1)

    def rows(self, rows: int) -> int:
        """Output rows for a whole picture of `rows`."""
        return (rows + 2 * self.padding - self.reach - 1) // self.stride + 1

    def check(self) -> None:
        """Refuse a convolution whose output rows do not lie where its input rows lie.

        Raises:
            UnsupportedError: the padding is not that of a "same" (or strided same) convolution.
        """
        if not self.reach + 1 - self.stride <= 2 * self.padding <= self.reach:
            raise UnsupportedError(f"{self} cannot be split: its windows do not stay with their rows")


def split_convolution(
    convolve: Callable[[Tensor, Mapping[int, int]], Tensor],
    x: Tensor,
    geometries: Mapping[int, Geometry],
    *,
    splits: Splits,
    group: ProcessGroup | None,
) -> Tensor:
    """This rank's part of a convolution of the whole picture.

    Args:
        convolve: the convolution of a tensor with the given zero padding along each dim of `splits`.
        x: this rank's part.
        geometries: the convolution along each dim of `splits`.
        splits: rows of all ranks, of each split dim that is padded; `Split.reduced` gives those of the output.
        group: the ranks.

    Returns:
        The output positions whose windows begin at this rank's positions.

    Raises:
        UnsupportedError: see `Geometry.check`.
    """
    if not splits:
        return convolve(x, {})
    for each in splits:
        geometries[each].check()
    dim, *others = splits
    inner = {other: splits[other] for other in others}

    def over_others(x: Tensor, padding: int) -> Tensor:
        def padded(x: Tensor, paddings: Mapping[int, int]) -> Tensor:
            return convolve(x, {dim: padding, **paddings})

        return split_convolution(padded, x, geometries, splits=inner, group=group)

    return _over_rows(over_others, x, geometries[dim], dim, splits[dim], group)


def _over_rows(
    convolve: Callable[[Tensor, int], Tensor],
    x: Tensor,
    geometry: Geometry,
    dim: int,
    split: Split,
    group: ProcessGroup | None,
) -> Tensor:
    """The same where one dim is split; `convolve` takes the zero padding along it."""
    padding, below = geometry.padding, geometry.below
    if split.is_idle or (padding == 0 and below == 0):
        return convolve(x, padding)
    halo = start_halo_exchange(x, dim, split, padding, below, group)
    rows = x.shape[dim]
    seam_top = -(-padding // geometry.stride)  # output rows that reach over the first row
    need_top = (seam_top - 1) * geometry.stride - padding + geometry.reach + 1
    first_low = (rows - 1 + padding - geometry.reach) // geometry.stride + 1  # first that reaches under the last row
    if need_top > rows or first_low * geometry.stride < padding:
        return _joined(convolve, x, geometry, dim, split, halo.wait())
    out = convolve(x, padding)
    top, bottom = halo.wait()
    if top is not None and seam_top:
        strip = torch.cat((_filled(top, padding, dim, at_end=False), x.narrow(dim, 0, need_top)), dim=dim)
        out.narrow(dim, 0, seam_top).copy_(convolve(strip, 0))
    if bottom is not None and first_low < out.shape[dim]:
        begin = first_low * geometry.stride - padding
        strip = torch.cat((x.narrow(dim, begin, rows - begin), _filled(bottom, below, dim, at_end=True)), dim=dim)
        out.narrow(dim, first_low, out.shape[dim] - first_low).copy_(convolve(strip, 0))
    return out


def _joined(
    convolve: Callable[[Tensor, int], Tensor],
    x: Tensor,
    geometry: Geometry,
    dim: int,
    split: Split,
    halo: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """The same for a rank with so few rows that one window may reach over both seams."""
    top, bottom = halo
    none = x.narrow(dim, 0, 0)
    is_last = split.own[1] == split.total
    above = _filled(none if top is None else top, geometry.padding, dim, at_end=False)
    under = _filled(
        none if bottom is None else bottom, geometry.padding if is_last else geometry.below, dim, at_end=True
    )
    return convolve(torch.cat((above, x, under), dim=dim), 0)


def _filled(rows: Tensor, count: int, dim: int, *, at_end: bool) -> Tensor:
    """Rows filled up to `count` with the picture's zero padding, on the far side."""
    missing = count - rows.shape[dim]
    if missing <= 0:
        return rows
    sides = (0, missing) if at_end else (missing, 0)
    return F.pad(rows, (0, 0) * (-dim - 1) + sides)
