"""Rows of the neighbours: which ones a rank needs, and the exchange that brings them.

One `batch_isend_irecv` per exchange with every neighbour at once. All sizes follow from the split, so none is sent. A
halo taller than a neighbour's share comes from several ranks.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from xpar.core.halo.split import Split

__all__ = ["Halo", "HaloPlan", "start_halo_exchange"]


@dataclass(frozen=True)
class HaloPlan:
    """Messages of one rank in one exchange. Rows are counted over the whole picture, peers are group ranks."""

    sends: tuple[tuple[int, int, int], ...]
    """(peer, start, stop) of own rows that a peer needs."""
    above: tuple[tuple[int, int], ...]
    """(peer, number of rows) that come from above, top first."""
    below: tuple[tuple[int, int], ...]
    """(peer, number of rows) that come from below, top first."""

    @classmethod
    def of(cls, split: Split, above: int, below: int) -> "HaloPlan":
        """The plan for `above` rows over and `below` rows under each rank's own, as far as the picture goes."""
        start, stop = split.own
        if start == stop:
            return cls((), (), ())
        sends: list[tuple[int, int, int]] = []
        tops: list[tuple[int, int]] = []
        bottoms: list[tuple[int, int]] = []
        for place, (low, high) in enumerate(itertools.pairwise(split.bounds)):
            if place == split.place or low == high:
                continue
            peer = split.line[place]
            if place < split.place:
                needed = _overlap((start, stop), (high, high + below))
                received = _overlap((low, high), (start - above, start))
            else:
                needed = _overlap((start, stop), (low - above, low))
                received = _overlap((low, high), (stop, stop + below))
            if needed[1] > needed[0]:
                sends.append((peer, *needed))
            if received[1] > received[0]:
                (tops if place < split.place else bottoms).append((peer, received[1] - received[0]))
        return cls(tuple(sends), tuple(tops), tuple(bottoms))


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return max(a[0], b[0]), min(a[1], b[1])


@dataclass(kw_only=True)
class Halo:
    """An exchange under way; it holds every buffer and handle until `wait`, as gloo and NCCL need."""

    dim: int
    _above: list[Tensor]
    _below: list[Tensor]
    _sent: list[Tensor] = field(default_factory=list)
    _works: Sequence[Work] = ()

    def wait(self) -> tuple[Tensor | None, Tensor | None]:
        """Rows from above and from below, None for none (on NCCL the stream waits for them, not the host)."""
        for work in self._works:
            work.wait()
        self._works = ()
        self._sent.clear()
        return self._joined(self._above), self._joined(self._below)

    def _joined(self, parts: list[Tensor]) -> Tensor | None:
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)


def start_halo_exchange(x: Tensor, dim: int, split: Split, above: int, below: int, group: ProcessGroup | None) -> Halo:
    """Ask for `above` rows over and `below` rows under this rank's; at the picture's border there are fewer or none.

    Every rank with rows must call it with the same `above` and `below`; a rank with a stand-in gets nothing. Only the
    ranks of one line of the group may be concerned, which NCCL allows once the group has had a collective.

    Args:
        x: this rank's rows, `split.held` along `dim`.
        dim: -2 or -1.
        split: rows of all ranks of the line.
        above: rows wanted over the first own row.
        below: rows wanted under the last own row.
        group: the ranks, of which the line may be a part; None for one rank.
    """
    plan = HaloPlan.of(split, above, below)
    start = split.own[0]
    shape = list(x.shape)

    def buffer(rows: int) -> Tensor:
        shape[dim] = rows
        return x.new_empty(shape)

    tops, bottoms = ([buffer(rows) for _, rows in wanted] for wanted in (plan.above, plan.below))
    sent = [x.narrow(dim, low - start, high - low).contiguous() for _, low, high in plan.sends]
    ops = [
        dist.P2POp(dist.isend, piece, group=group, group_peer=peer)
        for piece, (peer, _, _) in zip(sent, plan.sends, strict=True)
    ]
    ops += [
        dist.P2POp(dist.irecv, piece, group=group, group_peer=peer)
        for piece, (peer, _) in zip(tops + bottoms, plan.above + plan.below, strict=True)
    ]
    works = dist.batch_isend_irecv(ops) if ops else ()
    return Halo(dim=dim, _above=tops, _below=bottoms, _sent=sent, _works=works)
