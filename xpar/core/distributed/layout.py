"""The rank grid as arithmetic: who sits where and who shares an axis. No processes, no torch.distributed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from xpar.config import EngineConfig


class Axis(StrEnum):
    """The axes of the rank grid, outermost first.

    ulysses is innermost: it moves the most bytes, and neighbouring ranks sit in one node. ring comes next;
    pipefusion moves the least of the three, so its groups may cross nodes.
    """

    DP = "dp"
    CFG = "cfg"
    PIPEFUSION = "pipefusion"
    RING = "ring"
    ULYSSES = "ulysses"


@dataclass(frozen=True, slots=True)
class GridLayout:
    """`arange(size).view(dp, cfg, pipefusion, ring, ulysses)`.

    An *index* is a position in that flat range: the rank, when the grid spans all ranks in their order.
    """

    sizes: tuple[int, int, int, int, int]

    @classmethod
    def of(cls, config: EngineConfig) -> GridLayout:
        """The layout that `config` asks for."""
        dp, cfg, pipefusion, ring, ulysses = (getattr(config, f"{axis}_degree") for axis in Axis)
        return cls((dp, cfg, pipefusion, ring, ulysses))

    @property
    def size(self) -> int:
        """Number of processes in the grid."""
        return math.prod(self.sizes)

    def axis_size(self, axis: Axis) -> int:
        """Number of coordinates along `axis`."""
        return self.sizes[list(Axis).index(axis)]

    def stride(self, axis: Axis) -> int:
        """Difference in index between two neighbours along `axis`."""
        return math.prod(self.sizes[list(Axis).index(axis) + 1 :])

    def coordinate(self, index: int, axis: Axis) -> int:
        """Coordinate of `index` along `axis`."""
        return index // self.stride(axis) % self.axis_size(axis)

    def members(self, index: int, axis: Axis) -> tuple[int, ...]:
        """Indices that differ from `index` in `axis` only, by coordinate (`index` itself included)."""
        stride = self.stride(axis)
        first = index - self.coordinate(index, axis) * stride
        return tuple(first + step * stride for step in range(self.axis_size(axis)))

    def slices(self, axis: Axis) -> list[tuple[int, ...]]:
        """All groups along `axis`, in the order of their first index; together they hold every index once."""
        return [self.members(index, axis) for index in range(self.size) if self.coordinate(index, axis) == 0]
