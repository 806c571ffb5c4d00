"""A try to build a grid, as other ranks see it before they share a group: so that nobody waits for one that gave up."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from xpar.core.distributed.operations import named
from xpar.core.distributed.patient_store import PatientStore, StoreTimeoutError, job_store
from xpar.errors import CommTimeoutError, PeerFailedError

__all__ = ["Attempt"]

_PATIENCE = 1.0  # seconds in which a rank that gave up may come with another try
_POLL = 0.1  # seconds between two looks at the store


class Attempt:
    """This rank's part in building a grid over some ranks.

    Each rank counts its tries since the ranks last agreed. So what a rank has left of a try that the others gave up
    too, or that came before an agreement, is not taken for the present one's.

    Args:
        ranks: global ranks of the grid, in any order.
        patience: seconds to wait for the job's store, but in looks that are repeated.

    Raises:
        PeerFailedError: the job's store has gone.
        CommTimeoutError: it does not answer.
    """

    def __init__(self, ranks: Sequence[int], patience: float) -> None:
        self._others = [str(rank) for rank in sorted(ranks) if rank != dist.get_rank()]
        self._own = str(dist.get_rank())
        store = job_store().clone()  # type: ignore[attr-defined]  # missing in the stubs
        self._patience = patience
        span = "-".join(map(str, sorted(ranks)))
        self._store = PatientStore(PrefixStore(f"xpar/attempts/{span}", store))
        self._number = self._use("the beginning of a rank grid", self._begin)

    def _begin(self, store: Store) -> int:
        number = int(json.loads(store.get(self._own))[0]) + 1 if store.check([self._own]) else 1
        store.set(self._own, json.dumps([number, None]))
        return number

    def give_up(self, error: BaseException) -> None:
        """Leave the reason why this rank does not take part."""
        text = json.dumps([self._number, f"{type(error).__name__}: {error}"])
        self._use("the end of a rank grid", lambda store: store.set(self._own, text))

    def settle(self) -> None:
        """All ranks have come: they count anew."""
        self._use("the beginning of a rank grid", lambda store: store.set(self._own, json.dumps([0, None])))

    def _use(self, what: str, function: Callable[[Store], Any]) -> Any:
        try:
            with named(what):
                return self._store.use(function, self._patience)
        except StoreTimeoutError as error:
            raise CommTimeoutError(f"{what}: the job's store gives {error}") from error

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
            cause: str | None = self._store.use(self._find_cause)
            return cause
        except RuntimeError:  # the communication itself will fail, or end in time
            return None

    def _find_cause(self, store: Store) -> str | None:
        for rank in self._others:
            number, text = json.loads(store.get(rank)) if store.check([rank]) else (0, None)
            if text is not None and number >= self._number:
                return f"rank {rank} has not wrapped its pipeline: {text}"
        return None

    def close(self) -> None:
        """End the thread that talks to the store."""
        self._store.close()
