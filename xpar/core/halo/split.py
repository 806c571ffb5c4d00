"""Which rows and columns of a picture each rank holds, at each of its resolutions."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from xpar.core.partition import shares
from xpar.errors import ConfigError, UnsupportedError

__all__ = ["Levels", "Split", "Splits", "areas"]


@dataclass(frozen=True)
class Split:
    """Contiguous rows by place in a line of ranks.

    The line is the whole group, or one row or column of a grid of ranks. A rank beyond the number of rows owns none and
    holds a *stand-in*: some row, so that its layers run on tensors of legal shapes. It takes part in the collectives
    with weight zero, in no halo exchange along this line, and its results are dropped.
    """

    bounds: tuple[int, ...]
    """First row of each place, then the number of rows."""
    place: int
    """This rank's place in the line."""
    line: tuple[int, ...]
    """Group rank of each place."""
    stand_in: int = 1
    """Rows held by a rank that owns none."""

    @classmethod
    def deal(cls, total: int, ranks: int, place: int, line: Sequence[int] | None = None) -> "Split":
        """Rows that differ by at most one from place to place.

        Args:
            total: number of rows.
            ranks: number of ranks in the line.
            place: this rank's.
            line: group rank of each place; None: the line is the group.

        Raises:
            ConfigError: there is no row, no such place, or the line is of another length.
        """
        line = tuple(range(ranks) if line is None else line)
        if total < 1 or not 0 <= place < ranks or len(line) != ranks:
            raise ConfigError(
                f"cannot deal total={total} rows over ranks={ranks} as place={place} of line={line}; there must be a "
                "row, and a group rank for each place"
            )
        return cls((0, *itertools.accumulate(shares(total, ranks))), place, line)

    @property
    def total(self) -> int:
        """Rows on all ranks together."""
        return self.bounds[-1]

    @property
    def lengths(self) -> list[int]:
        """Rows by place."""
        return [stop - start for start, stop in itertools.pairwise(self.bounds)]

    @property
    def own(self) -> tuple[int, int]:
        """Start and stop of this rank's rows."""
        return self.bounds[self.place], self.bounds[self.place + 1]

    @property
    def is_idle(self) -> bool:
        """Whether this rank owns no row and holds a stand-in."""
        start, stop = self.own
        return start == stop

    @property
    def held(self) -> int:
        """Rows of this rank's tensors."""
        start, stop = self.own
        return stop - start or self.stand_in

    @property
    def held_slice(self) -> slice:
        """Rows to cut out of the whole; the last ones for a stand-in."""
        start, stop = self.own
        return slice(start, stop) if stop > start else slice(self.total - self.stand_in, self.total)

    def scaled(self, factor: int, total: int | None = None) -> "Split":
        """The same split at a higher resolution; rows beyond `factor * self.total` go to the last rank with rows."""
        return self._mapped([bound * factor for bound in self.bounds], self.stand_in * factor, total)

    def reduced(self, stride: int, total: int) -> "Split":
        """The split after a strided layer that leaves `total` rows, which go where their windows begin.

        Raises:
            UnsupportedError: a rank's rows begin inside a window.
        """
        inner = [bound for bound in self.bounds if bound < self.total]
        if any(bound % stride for bound in inner):
            raise UnsupportedError(f"rows that begin at {inner} cannot be reduced by a stride of {stride}")
        return self._mapped([bound // stride for bound in self.bounds], max(1, self.stand_in // stride), total)

    def _mapped(self, bounds: list[int], stand_in: int, total: int | None) -> "Split":
        if total is not None:
            last = self.total
            bounds = [total if before == last else bound for before, bound in zip(self.bounds, bounds, strict=True)]
        return replace(self, bounds=tuple(bounds), stand_in=stand_in)


Splits: TypeAlias = Mapping[int, Split]
"""The split of each split dim (-2 rows, -1 columns), rows first.

With two dims the group is a grid of tiles: its ranks run along a row of the grid before they go on to the next.
"""


def areas(splits: Splits) -> list[int]:
    """Positions (pixels, where both dims are split; else rows or columns) by group rank."""
    return [math.prod(lengths) for lengths in itertools.product(*(split.lengths for split in splits.values()))]


class Levels:
    """The splits of the resolutions that one run goes through, found by the number of rows that this rank holds.

    Every resolution is a multiple of the coarsest one on every rank, so the rows held tell which it is. Only a strided
    layer over rows that it does not divide (the encoder of a picture of odd height) leaves the multiples; such splits
    are made known with `add`.

    Args:
        base: split of the coarsest resolution in each split dim.
    """

    def __init__(self, base: Splits) -> None:
        self.base = dict(base)
        self._known = {dim: {split.held: split} for dim, split in base.items()}

    @property
    def is_idle(self) -> bool:
        """Whether this rank owns no position."""
        return any(split.is_idle for split in self.base.values())

    def add(self, dim: int, split: Split) -> None:
        """Make a split known; one of the coarsest resolution takes the place of the base (it may have a row more)."""
        self._known[dim][split.held] = split
        if split.total < 2 * self.base[dim].total:
            self.base[dim] = split

    def at(self, dim: int, held: int) -> Split:
        """The split of a tensor that has `held` rows here.

        Raises:
            UnsupportedError: there is no such resolution.
        """
        known, base = self._known[dim], self.base[dim]
        if held not in known:
            factor, rest = divmod(held, base.held)
            if rest or not factor:
                raise UnsupportedError(
                    f"a tensor of {held} {_NAMES[dim]} belongs to no resolution of a split of {base.total} "
                    f"{_NAMES[dim]} of which place {base.place} holds {base.held}; use vae_parallel='tile' or 'off'"
                )
            known[held] = base.scaled(factor)
        return known[held]

    def of(self, shape: Sequence[int]) -> dict[int, Split]:
        """The splits of a tensor that has this shape here.

        Raises:
            UnsupportedError: see `at`.
        """
        return {dim: self.at(dim, shape[dim]) for dim in self.base}

    def tokens(self, held: int) -> list[int]:
        """Tokens by group rank of a flattened picture of which this rank holds `held` tokens.

        Raises:
            UnsupportedError: they do not fill the positions held.
        """
        positions = math.prod(split.held for split in self.base.values())
        depth, rest = divmod(held, positions)
        if rest:
            raise UnsupportedError(f"{held} tokens are no multiple of the {positions} positions held here")
        return [area * depth for area in areas(self.base)]


_NAMES = {-2: "rows", -1: "columns"}
