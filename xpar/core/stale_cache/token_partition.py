"""Which tokens of each stream belong to which patch and which shard.

A *stream* (image, text, ...) of S tokens is first shared over M patches (PipeFusion), then each patch over the
ring x ulysses shards. A view of one patch, or of the whole sequence (`patch=None`), therefore holds, per stream, one
run of tokens or M runs. Sizes differ by at most one and follow from the full lengths alone, so no rank ever has to ask
another one.

A shard may get no token of a short stream. Models cannot be relied on to run on empty tensors (Qwen-Image's rotary
embedding cannot), so such a shard *holds* a stand-in, the stream's first token, which takes no part in attention and is
dropped in the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from xpar.core.partition import share

Run = tuple[int, int]


@dataclass(frozen=True)
class TokenPartition:
    """Lengths of the streams and the number of parts they are cut into.

    Args:
        lengths: (stream name, number of tokens of the whole stream) pairs.
        patches: number of patches M.
        shards: number of ring x ulysses coordinates; shard = ring index * ulysses size + ulysses index.
    """

    lengths: tuple[tuple[str, int], ...]
    patches: int = 1
    shards: int = 1

    @classmethod
    def of(cls, lengths: Mapping[str, int], patches: int = 1, shards: int = 1) -> "TokenPartition":
        """Build a partition from a mapping of stream name to its whole length in tokens."""
        return cls(tuple(lengths.items()), patches, shards)

    def length(self, stream: str) -> int:
        """Number of tokens of the whole stream."""
        return dict(self.lengths)[stream]

    def runs(self, stream: str, patch: int | None, shard: int) -> list[Run]:
        """(start, stop) runs of the whole stream that a shard holds of a patch, or of all patches in order."""
        total = self.length(stream)
        runs = []
        for index in range(self.patches) if patch is None else (patch,):
            start, stop = share(total, self.patches, index)
            low, high = share(stop - start, self.shards, shard)
            runs.append((start + low, start + high))
        return runs

    def count(self, streams: Sequence[str], patch: int | None, shard: int) -> int:
        """Number of tokens of the joined `streams` in a shard of a view, stand-ins not counted."""
        return sum(stop - start for name in streams for start, stop in self.runs(name, patch, shard))

    def has_stand_in(self, stream: str, patch: int | None, shard: int) -> bool:
        """Whether a shard of a view has no token of a stream, so that it holds a stand-in for it."""
        return self.length(stream) > 0 and self.count((stream,), patch, shard) == 0

    def own_rows(self, streams: Sequence[str], patch: int | None, shard: int) -> list[int] | None:
        """Which of the rows that a shard holds of the joined `streams` are no stand-ins; None: all of them."""
        if not any(self.has_stand_in(name, patch, shard) for name in streams):
            return None
        rows: list[int] = []
        offset = 0
        for name in streams:
            count = self.count((name,), patch, shard)
            rows += range(offset, offset + count)
            offset += max(count, int(self.has_stand_in(name, patch, shard)))
        return rows

    def positions(self, streams: Sequence[str], patch: int | None, shards: Sequence[int]) -> torch.Tensor:
        """Indices into the joined whole sequence, in the order in which the shards hold the tokens. Shape [S_view]."""
        parts = []
        for shard in shards:
            offset = 0
            for name in streams:
                parts += [torch.arange(offset + a, offset + b) for a, b in self.runs(name, patch, shard)]
                offset += self.length(name)
        return torch.cat(parts)

    def cut(self, x: torch.Tensor, dim: int, streams: Sequence[str], patch: int | None, shard: int) -> torch.Tensor:
        """What one shard holds of a view, taken from a tensor whose `dim` covers the joined whole `streams`."""
        runs, offset = [], 0
        for name in streams:
            held = [(0, 1)] if self.has_stand_in(name, patch, shard) else self.runs(name, patch, shard)
            runs += [(offset + a, offset + b) for a, b in held]
            offset += self.length(name)
        joined = _join_runs(runs)
        if joined == [(0, offset)]:
            return x
        pieces = [x.narrow(dim, a, b - a) for a, b in joined]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _join_runs(runs: list[Run]) -> list[Run]:
    """Merge runs that touch, and drop empty ones, so that a cut makes as few pieces as it can."""
    joined: list[Run] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif stop > start or not joined:
            joined.append((start, stop))
    return [run for run in joined if run[1] > run[0]] or joined[:1]


@lru_cache(maxsize=256)
def patch_major_order(partition: TokenPartition, streams: tuple[str, ...]) -> torch.Tensor:
    """Where each row of the patch-major cache stands in a gathered whole view. Shape [S], CPU.

    The cache keeps patches one after another, each in shard order; a whole view gathers shard after shard.
    """
    shards = range(partition.shards)
    gathered = partition.positions(streams, None, shards)
    where = torch.empty_like(gathered)
    where[gathered] = torch.arange(gathered.numel())
    return where[cache_positions(partition, streams)]


@lru_cache(maxsize=256)
def cache_positions(partition: TokenPartition, streams: tuple[str, ...]) -> torch.Tensor:
    """Index into the joined whole sequence of each row of the patch-major cache. Shape [S], CPU."""
    shards = range(partition.shards)
    return torch.cat([partition.positions(streams, patch, shards) for patch in range(partition.patches)])
