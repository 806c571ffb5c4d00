"""The job's key-value store, used so that nobody waits for it for ever.

torch's client waits without a limit for the answer of a store's host. The host may be one of the ranks, and that one
may be frozen, which is just when the others have to leave and look up errors.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d

__all__ = ["PatientStore", "StoreTimeoutError", "job_store"]

_PATIENCE = 1.5  # seconds that a use of the store may take; it takes a fraction of a millisecond

_Use = tuple[Callable[[Store], Any], queue.SimpleQueue[Any]]


def job_store() -> Store:
    """The store of the default process group."""
    store: Store = c10d._world.pg_map[c10d._get_default_group()][1]
    return store


class StoreTimeoutError(RuntimeError):
    """The store has not answered in time; it may later."""


class PatientStore:
    """Uses a store on a thread of its own, which may stay behind.

    Args:
        store: a connection that nothing else uses.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._uses: queue.SimpleQueue[_Use | None] = queue.SimpleQueue()
        self._start = threading.Lock()
        self._thread: threading.Thread | None = None

    def use(self, function: Callable[[Store], Any], patience: float = _PATIENCE) -> Any:
        """What a function of the store returns, which may take `patience` seconds.

        Raises:
            StoreTimeoutError: it has not returned in time.
            RuntimeError: the store has gone.
        """
        with self._start:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="xpar-store", daemon=True)
                self._thread.start()
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._uses.put((function, answer))
        try:
            value, error = answer.get(timeout=patience)
        except queue.Empty:
            raise StoreTimeoutError(f"no answer within {patience:g} s") from None
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the thread, once it is idle; a later use begins another."""
        with self._start:
            if self._thread is not None:
                self._uses.put(None)
                self._thread = None

    def _run(self) -> None:
        while (use := self._uses.get()) is not None:
            function, answer = use
            try:
                answer.put((function(self._store), None))
            except RuntimeError as error:
                answer.put((None, error))
