"""The rows of a batch, shared over ranks: what is independent by row is computed by row."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from xpar.core.distributed.collectives import all_gather_uneven, group_rank, group_size
from xpar.core.partition import share, shares
from xpar.errors import UnsupportedError
from xpar.wrappers.models.plan import ModelPlan, map_tensors


class RowSplit:
    """Shares rows over the ranks of one or more groups, outermost first.

    Args:
        groups: process groups, of which None ones have one rank; a row goes to one rank of the innermost group of one
            rank of the next ..., and the results are gathered the other way round.
    """

    def __init__(self, groups: Sequence[ProcessGroup | None]) -> None:
        self.groups = [group for group in groups if group is not None]

    @property
    def parts(self) -> int:
        """Number of ranks that share the rows."""
        product = 1
        for group in self.groups:
            product *= group_size(group)
        return product

    def own(self, rows: int) -> tuple[int, int]:
        """(start, stop) of this rank's rows; empty when there are fewer rows than ranks."""
        start, stop = 0, rows
        for group in self.groups:
            low, high = share(stop - start, group_size(group), group_rank(group))
            start, stop = start + low, start + high
        return start, stop

    def held(self, rows: int) -> slice:
        """Rows to compute: this rank's own, or a stand-in that is dropped when it has none."""
        start, stop = self.own(rows)
        return slice(start, stop) if stop > start else slice(0, 1)

    def gather(self, outputs: Any, rows: int) -> Any:
        """All rows again, on every rank, of a tree of tensors computed on `held(rows)`."""
        start, stop = self.own(rows)
        computed = max(1, stop - start)

        def whole(x: torch.Tensor) -> torch.Tensor:
            if x.ndim == 0 or x.shape[0] != computed:
                raise UnsupportedError(
                    f"an output of shape {tuple(x.shape)} has not the {computed} rows of this rank's inputs, so its "
                    "rows cannot be gathered; use dp_degree=1 and cfg_degree=1"
                )
            return self._gather(x[: stop - start].contiguous(), rows)

        return map_tensors(whole, outputs)

    def _gather(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        sizes = [rows]  # rows held together before each group shares them
        for group in self.groups:
            low, high = share(sizes[-1], group_size(group), group_rank(group))
            sizes.append(high - low)
        for group, together in zip(reversed(self.groups), reversed(sizes[:-1]), strict=True):
            x = all_gather_uneven(x, 0, shares(together, group_size(group)), group)
        return x


def cut_batch(arguments: Mapping[str, Any], rows: int, held: slice, plan: ModelPlan, name: str) -> dict[str, Any]:
    """Arguments of a denoiser call with only some of the rows.

    Args:
        arguments: by name.
        rows: number of rows of the whole call.
        held: rows to keep.
        plan: names the arguments with a batch dim, and those that have none.
        name: the denoiser, for messages.

    Raises:
        UnsupportedError: an argument looks like a batch but the plan does not know it.
    """
    cut = {}
    for key, value in arguments.items():
        if key in plan.batch:
            cut[key] = _rows_of(value, rows, held)
        elif key not in plan.unbatched and _has_rows(value, rows):
            raise UnsupportedError(
                f"{name}: argument {key} has {rows} rows but is not named in the plan's batch (or unbatched); "
                "use dp_degree=1 and cfg_degree=1, or add it to the plan"
            )
        else:
            cut[key] = value
    return cut


def _rows_of(value: Any, rows: int, held: slice) -> Any:
    if torch.is_tensor(value):
        return value[held] if value.ndim > 0 and value.shape[0] == rows else value
    if isinstance(value, dict):
        return {key: _rows_of(item, rows, held) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if len(value) == rows and not any(torch.is_tensor(item) for item in value):
            return value[held]
        return type(value)(_rows_of(item, rows, held) for item in value)
    return value


def _has_rows(value: Any, rows: int) -> bool:
    if torch.is_tensor(value):
        return value.ndim > 0 and value.shape[0] == rows
    if isinstance(value, dict):
        return any(_has_rows(item, rows) for item in value.values())
    return isinstance(value, (list, tuple)) and any(_has_rows(item, rows) for item in value)
