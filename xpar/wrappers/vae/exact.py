"""One `encode` or `decode` with the rows or columns of the picture split over ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xpar.core.halo import Levels, Split
from xpar.errors import UnsupportedError
from xpar.wrappers.models.plan import map_tensors
from xpar.wrappers.vae.adapters import adapted
from xpar.wrappers.vae.gather import gather
from xpar.wrappers.vae.ops import SplitOps
from xpar.wrappers.vae.outputs import map_output

__all__ = ["Cut", "choose_cut", "run_split"]


@dataclass(frozen=True)
class Cut:
    """How one input is cut."""

    dim: int
    """-2 for rows, -1 for columns."""
    base: Split
    """Split of the latents."""
    whole: Split
    """Split of the input."""


def choose_cut(shape: Sequence[int], shrink: int, ranks: int, rank: int) -> Cut | None:
    """Rows or columns, whichever leaves less for the rank that gets most; None if there is nothing to share.

    Args:
        shape: of the input, (..., height, width).
        shrink: rows of the input for one row of latents: 1 for latents.
        ranks: number of ranks.
        rank: this one.
    """

    def cost(dim: int) -> tuple[int, int]:
        rows, across = shape[dim] // shrink, shape[-3 - dim]
        share = -(-rows // ranks)
        return (share + 2 * (share < rows)) * across * shrink, dim  # a halo on either side; rows if equal

    dims = [dim for dim in (-2, -1) if shape[dim] // shrink > 1]
    if ranks == 1 or not dims:
        return None
    dim = min(dims, key=cost)
    base = Split.deal(shape[dim] // shrink, ranks, rank)
    return Cut(dim, base, base.scaled(shrink, shape[dim]))


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
    """Call `encode` or `decode` on this rank's rows and gather what it returns.

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
    levels.add(cut.whole)
    ops = SplitOps(levels, cut.dim, group, attention)

    def held(x: Tensor) -> Tensor:
        if x.ndim < 4:
            return x
        factor, rest = divmod(x.shape[cut.dim], cut.whole.total)
        if rest or not factor:
            raise UnsupportedError(
                f"an input of shape {tuple(x.shape)} cannot be cut like one of {cut.whole.total} rows or columns; its "
                "size must be a multiple"
            )
        rows = cut.whole.scaled(factor).held_slice
        return x.narrow(cut.dim, rows.start, rows.stop - rows.start).contiguous()

    args, kwargs = map_tensors(held, args), map_tensors(held, kwargs)
    with adapted(adapters, ops), ops:
        output = function(*args, **kwargs)

    def whole(x: Tensor) -> Tensor:
        split = levels.at(x.shape[cut.dim])
        start, stop = split.own
        return gather(x.narrow(cut.dim, 0, stop - start), cut.dim, split, group, to_all=to_all)

    return map_output(whole, output)
