"""Which rows of a picture each rank holds, at each of its resolutions."""

from dataclasses import dataclass

from xpar.core.partition import shares
from xpar.errors import ConfigError, UnsupportedError

__all__ = ["Levels", "Split"]


@dataclass(frozen=True)
class Split:
    """Contiguous rows by rank, in rank order.

    A rank beyond the number of rows owns none and holds a *stand-in*: some row, so that its layers run on tensors of
    legal shapes. It takes part in the collectives with weight zero, in no halo exchange, and its results are dropped.
    """

    bounds: tuple[int, ...]
    """First row of each rank, then the number of rows."""
    rank: int
    """This rank's place in the group."""
    stand_in: int = 1
    """Rows held by a rank that owns none."""

    @classmethod
    def deal(cls, total: int, ranks: int, rank: int) -> "Split":
        """Rows that differ by at most one from rank to rank.

        Raises:
            ConfigError: there is no row, or no such rank.
        """
        if total < 1 or not 0 <= rank < ranks:
            raise ConfigError(f"cannot deal total={total} rows over ranks={ranks} as rank={rank}; there must be a row")
        bounds = [0]
        for length in shares(total, ranks):
            bounds.append(bounds[-1] + length)
        return cls(tuple(bounds), rank)

    @property
    def total(self) -> int:
        """Rows on all ranks together."""
        return self.bounds[-1]

    @property
    def lengths(self) -> list[int]:
        """Rows by rank."""
        return [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]

    @property
    def own(self) -> tuple[int, int]:
        """Start and stop of this rank's rows."""
        return self.bounds[self.rank], self.bounds[self.rank + 1]

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
        return Split(tuple(bounds), self.rank, stand_in)


class Levels:
    """The splits of the resolutions that one run goes through, found by the number of rows that this rank holds.

    Every resolution is a multiple of the coarsest one on every rank, so the rows held tell which it is. Only a strided
    layer over rows that it does not divide (the encoder of a picture of odd height) leaves the multiples; such splits
    are made known with `add`.

    Args:
        base: split of the coarsest resolution.
    """

    def __init__(self, base: Split) -> None:
        self.base = base
        self._known = {base.held: base}

    def add(self, split: Split) -> None:
        """Make a split known; one of the coarsest resolution takes the place of the base (it may have a row more)."""
        self._known[split.held] = split
        if split.total < 2 * self.base.total:
            self.base = split

    def at(self, held: int) -> Split:
        """The split of a tensor that has `held` rows here.

        Raises:
            UnsupportedError: there is no such resolution.
        """
        if held not in self._known:
            factor, rest = divmod(held, self.base.held)
            if rest or not factor:
                raise UnsupportedError(
                    f"a tensor of {held} rows belongs to no resolution of a split of {self.base.total} rows of which "
                    f"rank {self.base.rank} holds {self.base.held}; use vae_parallel='tile' or 'off'"
                )
            self._known[held] = self.base.scaled(factor)
        return self._known[held]

    def tokens(self, held: int) -> list[int]:
        """Tokens by rank of a flattened picture of which this rank holds `held` tokens.

        Raises:
            UnsupportedError: they are not whole rows.
        """
        width, rest = divmod(held, self.base.held)
        if rest:
            raise UnsupportedError(f"{held} tokens are not whole rows of the {self.base.held} rows held here")
        return [length * width for length in self.base.lengths]
