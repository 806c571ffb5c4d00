"""Keys and values of a whole sequence, refreshed patch by patch.

PipeFusion (arXiv 2405.14430) and DistriFusion (arXiv 2402.19481): a patch attends to the newest keys and values of the
whole sequence; those of patches that come later in the step are one step old. One `LayerCache` belongs to one attention
layer, one denoiser and one guidance branch of one pipeline call, and dies with that call.
"""

from dataclasses import dataclass, field

import torch

from xpar.core.stale_cache.token_partition import TokenPartition, cache_positions, patch_major_order


@dataclass
class LayerCache:
    """Patch-major keys and values of one attention layer, shape [B, H, S, D] each."""

    partition: TokenPartition
    streams: tuple[str, ...]
    key_BHSD: torch.Tensor | None = None
    value_BHSD: torch.Tensor | None = None
    filled: int = 0
    _bounds: list[int] = field(init=False)

    def __post_init__(self) -> None:
        shards = range(self.partition.shards)
        sizes = [
            sum(self.partition.count(self.streams, patch, shard) for shard in shards)
            for patch in range(self.partition.patches)
        ]
        self._bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]

    def store_whole(self, key_BHSD: torch.Tensor, value_BHSD: torch.Tensor) -> None:
        """Fill the cache from a gathered whole view (shard after shard)."""
        order = patch_major_order(self.partition, self.streams).to(key_BHSD.device)
        self.key_BHSD = key_BHSD.index_select(2, order)
        self.value_BHSD = value_BHSD.index_select(2, order)
        self.filled = self._bounds[-1]

    def refresh(
        self, patch: int, key_BHSD: torch.Tensor, value_BHSD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replace one patch's rows; return the keys and values that this patch may attend to.

        Before every patch has been seen once (warm-up 0) that is what has been computed so far, nothing older.
        """
        start, stop = self._bounds[patch], self._bounds[patch + 1]
        if self.key_BHSD is None or self.value_BHSD is None:
            self.key_BHSD = _empty_rows(key_BHSD, self._bounds[-1])
            self.value_BHSD = _empty_rows(value_BHSD, self._bounds[-1])
        self.key_BHSD[:, :, start:stop].copy_(key_BHSD)
        self.value_BHSD[:, :, start:stop].copy_(value_BHSD)
        self.filled = max(self.filled, stop)
        return self.key_BHSD[:, :, : self.filled], self.value_BHSD[:, :, : self.filled]

    def positions(self) -> torch.Tensor:
        """Index into the joined whole sequence of each row that `refresh` returns. Shape [S_filled], CPU."""
        return cache_positions(self.partition, self.streams)[: self.filled]


def _empty_rows(like_BHSD: torch.Tensor, rows: int) -> torch.Tensor:
    batch, heads, _, width = like_BHSD.shape
    return like_BHSD.new_empty((batch, heads, rows, width))
