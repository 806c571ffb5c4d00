"""A try to build a grid, as other ranks see it before they share a group: so that nobody waits for one that gave up."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from xpar.core.distributed.operations import named
from xpar.core.distributed.patient_store import PatientStore
from xpar.errors import PeerFailedError

__all__ = ["Attempt"]

_STORE_PATIENCE = 1.5  # seconds that a use of the store may take
_PATIENCE = 1.0  # seconds in which a rank that gave up may come with another try
_POLL = 0.1  # seconds between two looks at the store


class Attempt:
    """This rank's part in building a grid over some ranks.

    Each rank counts its tries in the job's store. Ranks that have always tried together count alike, so that what a
    former try has left there is not taken for this one's.

    Args:
        ranks: global ranks of the grid, in any order.

    Raises:
        PeerFailedError: the job's store has gone.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._others = [rank for rank in sorted(ranks) if rank != dist.get_rank()]
        store = c10d._world.pg_map[c10d._get_default_group()][1].clone()  # type: ignore[attr-defined]
        span = "-".join(map(str, sorted(ranks)))
        self._store = PatientStore(PrefixStore(f"xpar/attempts/{span}", store), _STORE_PATIENCE)
        with named("the beginning of a rank grid"):
            self._number = self._store.use(lambda store: store.add(str(dist.get_rank()), 1))

    def give_up(self, error: BaseException) -> None:
        """Leave the reason why this rank does not take part."""
        text = json.dumps([dist.get_rank(), f"{type(error).__name__}: {error}"])
        with named("the end of a rank grid"):
            self._store.use(lambda store: store.set(f"{self._number}/given up", text))

    def wait(self, work: dist.Work, seconds: float) -> bool:
        """Wait for a first communication of all ranks; returns whether it has ended.

        Raises:
            PeerFailedError: a rank has given up and does not try again.
        """
        start, seen = time.monotonic(), None
        looked = start
        while not work.is_completed():
            now = time.monotonic()
            if now - start > seconds:
                return False
            if now - looked > _POLL:
                looked, cause = now, self._cause()
                seen = (seen or now) if cause else None
                if seen and now - seen > _PATIENCE:
                    raise PeerFailedError(
                        f"{cause}; this rank waits for it in a communication that cannot be taken back, so initialise "
                        "torch.distributed anew before the pipeline is wrapped again"
                    )
            time.sleep(0.001)
        return True

    def _cause(self) -> str | None:
        """What made another rank give up, unless it has begun another try."""
        try:
            return str(text) if (text := self._store.use(self._find_cause)) else None
        except RuntimeError:  # the communication itself will fail, or end in time
            return None

    def _find_cause(self, store: Any) -> str | None:
        key = f"{self._number}/given up"
        if not store.check([key]):
            return None
        rank, text = json.loads(store.get(key))
        if rank not in self._others or store.add(str(rank), 0) != self._number:
            return None
        return f"rank {rank} has not wrapped its pipeline: {text}"

    def close(self) -> None:
        """End the thread that talks to the store."""
        self._store.close()
