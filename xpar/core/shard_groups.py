"""The two axes over which the tokens of a patch are shared, seen from one rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from xpar.core.distributed.collectives import group_rank, group_size


@dataclass(frozen=True)
class ShardGroups:
    """Ring and ulysses groups of this rank (None: the axis has size one). Shard = ring index * U + ulysses index."""

    ring: ProcessGroup | None = None
    ulysses: ProcessGroup | None = None

    @property
    def count(self) -> int:
        """Number of shards, ring size times ulysses size."""
        return group_size(self.ring) * group_size(self.ulysses)

    @property
    def index(self) -> int:
        """This rank's shard."""
        return group_rank(self.ring) * group_size(self.ulysses) + group_rank(self.ulysses)

    def ring_peers(self, ring_index: int) -> Sequence[int]:
        """The shards with one ring index, in ulysses order: those whose tokens ulysses brings together."""
        size = group_size(self.ulysses)
        return range(ring_index * size, (ring_index + 1) * size)

    @property
    def ring_size(self) -> int:
        """Number of ring coordinates."""
        return group_size(self.ring)

    @property
    def ring_index(self) -> int:
        """This rank's ring coordinate."""
        return group_rank(self.ring)
