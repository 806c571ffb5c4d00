"""One `encode` or `decode` with the rows, the columns, or both, of the picture split over ranks."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xpar.core.halo import Levels, Split, Splits
from xpar.core.partition import shares
from xpar.errors import UnsupportedError
from xpar.wrappers.models.plan import map_tensors
from xpar.wrappers.vae.adapters import adapted
from xpar.wrappers.vae.gather import cut_out, gather
from xpar.wrappers.vae.ops import SplitOps
from xpar.wrappers.vae.outputs import map_output

__all__ = ["Cut", "choose_cut", "choose_grid", "run_split"]

# Shares are counted in rows of latents, of which the finest resolution has about eight; there a halo costs one row.
_HALOS_IN_A_ROW = 8


@dataclass(frozen=True)
class Cut:
    """How one input is cut."""

    base: Splits
    """Splits of the latents."""
    whole: Splits
    """Splits of the input."""

    @classmethod
    def by(cls, grid: tuple[int, int], shape: Sequence[int], shrink: int, rank: int) -> "Cut":
        """Cut an input over a grid of ranks, which run along a row of the grid before they go on to the next.

        Args:
            grid: number of rows and columns of tiles.
            shape: of the input, (..., height, width).
            shrink: rows of the input for one row of latents: 1 for latents.
            rank: this one.
        """
        above, beside = grid
        row, column = divmod(rank, beside)
        lines = {-2: range(column, above * beside, beside), -1: range(row * beside, (row + 1) * beside)}
        places = {-2: row, -1: column}
        base = {
            dim: Split.deal(shape[dim] // shrink, len(line), places[dim], line)
            for dim, line in lines.items()
            if len(line) > 1
        }
        return cls(base, {dim: split.scaled(shrink, shape[dim]) for dim, split in base.items()})


def choose_grid(shape: Sequence[int], shrink: int, ranks: int) -> tuple[int, int] | None:
    """The grid of ranks that leaves least for the one that gets most, halos counted; None if nothing can be shared.

    Args:
        shape: of the input, (..., height, width).
        shrink: rows of the input for one row of latents: 1 for latents.
        ranks: number of ranks, all of which the grid has.
    """

    def load(rows: int, parts: int) -> int:
        lengths = [length for length in shares(max(1, rows), parts) if length]
        seams = [(place > 0) + (place < len(lengths) - 1) for place in range(len(lengths))]
        return max(length * _HALOS_IN_A_ROW + halos for length, halos in zip(lengths, seams, strict=True))

    def cost(grid: tuple[int, int]) -> tuple[int, bool]:
        return load(height, grid[0]) * load(width, grid[1]), min(grid) > 1  # if equal: one dim, and rows

    height, width = (shape[dim] // shrink for dim in (-2, -1))
    grids = [(above, ranks // above) for above in range(ranks, 0, -1) if ranks % above == 0]
    grids = [(a, b) for a, b in grids if ranks > 1 and (a == 1 or height > 1) and (b == 1 or width > 1)]
    return min(grids, key=cost, default=None)


def choose_cut(shape: Sequence[int], shrink: int, ranks: int, rank: int) -> Cut | None:
    """The cut by the best grid of ranks; None if there is nothing to share. See `choose_grid` and `Cut.by`."""
    grid = choose_grid(shape, shrink, ranks)
    return None if grid is None else Cut.by(grid, shape, shrink, rank)


def run_split(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cut: Cut,
    *,
    group: ProcessGroup | None,
    attention: str,
    adapters: Sequence[nn.Module],
    to_all: bool,
) -> Any:
    """Call `encode` or `decode` on this rank's part and gather what it returns.

    Args:
        function: the method of the autoencoder, for one process.
        args: its arguments; pictures among them (masks, conditions) are cut at their own resolution.
        kwargs: likewise.
        cut: see `choose_cut`.
        group: the ranks.
        attention: see `VaePlan.attention`.
        adapters: modules that need an adapter.
        to_all: whether every rank gets the whole, or the first one only and the others zeros.

    Raises:
        UnsupportedError: an argument is a picture of a size that is no multiple of the input's, or the model calls
            something that is not known to be right over a split picture.
    """
    levels = Levels(cut.base)
    for dim, split in cut.whole.items():
        levels.add(dim, split)
    held = functools.partial(_held, whole=cut.whole)
    args, kwargs = map_tensors(held, args), map_tensors(held, kwargs)
    ops = SplitOps(levels, group, attention)
    with adapted(adapters, ops), ops:
        output = function(*args, **kwargs)
    return map_output(lambda x: gather(x, levels.of(x.shape), group, to_all=to_all), output)


def _held(x: Tensor, whole: Splits) -> Tensor:
    """What this rank holds of an argument, at the argument's own resolution."""
    if x.ndim < 4:
        return x
    splits = {}
    for dim, split in whole.items():
        factor, rest = divmod(x.shape[dim], split.total)
        if rest or not factor:
            raise UnsupportedError(
                f"an input of shape {tuple(x.shape)} cannot be cut like one of {split.total} "
                f"{'rows' if dim == -2 else 'columns'}; its size must be a multiple"
            )
        splits[dim] = split.scaled(factor)
    return cut_out(x, splits).contiguous()
