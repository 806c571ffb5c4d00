"""What ranks leave for each other in the job's key-value store: errors, refusals, signs of life.

The store outlives the connections between ranks, so that a rank that fails can still say why.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from xpar.core.distributed.patient_store import PatientStore

__all__ = ["Failure", "FailureBoard", "Sign"]

_TEXT = 2000  # characters of an error's text that are passed on


@dataclass(frozen=True)
class Failure:
    """Why a rank left a call."""

    rank: int
    kind: str
    """Class of the error."""
    text: str
    phase: str
    """What the call was doing."""
    step: int
    """Scheduler steps done."""
    place: str = ""
    """Operation or layer, where known."""
    suspects: tuple[int, ...] = ()
    """Ranks that were waited for in vain."""

    def __str__(self) -> str:
        where = f"in {self.phase}, step {self.step}" + (f", {self.place}" if self.place else "")
        return f"rank {self.rank} raised {self.kind} ({where}): {self.text}"


@dataclass(frozen=True)
class Sign:
    """A sign of life of a rank."""

    count: int
    """Grows with each sign."""
    phase: str
    step: int
    waits: bool
    """Whether its caller was inside of a communication."""
    at: str
    """The line that its caller was at."""


class FailureBoard:
    """One grid's part of the store. No method waits for another rank, unless it says so.

    All raise RuntimeError once the store has gone, and StoreTimeoutError, which is one, while its host is frozen.

    Args:
        store: the job's store; a connection of its own is made, so that nobody waits for a user's blocking `get`.
        token: tells grids apart; the same on all ranks of one.
        ranks: global ranks of the grid.
        rank: this one.
    """

    def __init__(self, store: Store, token: str, ranks: Sequence[int], rank: int) -> None:
        own = store.clone()  # type: ignore[attr-defined]  # missing in the stubs
        part = PrefixStore(f"xpar/{token}", own)
        part.set(f"process/{rank}", json.dumps(_process()))
        self._store = PatientStore(part)
        self.ranks, self.rank = tuple(ranks), rank
        self._peers: dict[int, dict[str, Any]] = {}

    def publish(self, failure: Failure) -> Failure:
        """Leave an error, unless another rank was first; returns the first one."""
        text = _encoded(failure)
        return Failure(**json.loads(self._store.use(lambda store: store.compare_set("failure", "", text))))

    def first(self) -> Failure | None:
        """The first error of any rank."""
        return self._read("failure")

    def close(self) -> None:
        """End the thread that talks to the store."""
        self._store.close()

    def refuse(self, call: int, failure: Failure) -> None:
        """Leave an error that was raised before anything of a call was communicated."""
        self.note(f"refused/{call}/{self.rank}", "1")
        self.note(f"refusal/{call}", _encoded(failure))

    def await_refused(self, call: int) -> None:
        """Say that this rank waits to make a call that another has refused."""
        self.note(f"waits/{call}", "1")

    def is_awaited(self, call: int, seconds: float) -> bool:
        """Whether a rank waits to make a call that this one has refused; known once all others have refused it too."""
        deadline = time.monotonic() + seconds
        while not self.has(f"waits/{call}"):
            if time.monotonic() > deadline or all(self.has(f"refused/{call}/{rank}") for rank in self.ranks):
                return False
            time.sleep(0.02)
        return True

    def refusal(self, call: int) -> Failure | None:
        """Why a rank refused a call."""
        return self._read(f"refusal/{call}")

    def _read(self, key: str) -> Failure | None:
        return Failure(**json.loads(self.read(key))) if self.has(key) else None

    def note(self, key: str, text: str) -> None:
        """Leave any text under a key."""
        self._store.use(lambda store: store.set(key, text))

    def has(self, key: str) -> bool:
        """Whether a rank has left something under a key."""
        return bool(self._store.use(lambda store: store.check([key])))

    def read(self, key: str) -> str:
        """What has been left under a key."""
        return str(self._store.use(lambda store: store.get(key)).decode())

    def beat(self, sign: Sign) -> None:
        """Leave a sign of life."""
        self.note(f"sign/{self.rank}", json.dumps(asdict(sign)))

    def sign(self, rank: int) -> Sign | None:
        """The last sign of life of a rank."""
        key = f"sign/{rank}"
        return Sign(**json.loads(self.read(key))) if self.has(key) else None

    def learn_processes(self) -> None:
        """Find out which processes the ranks are, for `dead`."""
        for rank in self.ranks:
            if rank not in self._peers and self.has(f"process/{rank}"):
                self._peers[rank] = json.loads(self.read(f"process/{rank}"))

    def dead(self) -> list[int]:
        """Ranks on this machine whose process has ended, of those that have been learned; needs no store."""
        machine = _process()["machine"]
        return [
            rank
            for rank, peer in self._peers.items()
            if peer["machine"] == machine and _started(peer["pid"]) != peer["started"]
        ]


def _encoded(failure: Failure) -> str:
    return json.dumps(asdict(failure) | {"text": failure.text[:_TEXT]})


def _process() -> dict[str, Any]:
    """This process, as others on the machine can find it."""
    machine = [_text("/proc/sys/kernel/random/boot_id"), _link("/proc/self/ns/pid")]
    return {"machine": machine, "pid": os.getpid(), "started": _started(os.getpid())}


def _started(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None once it has ended, also if nobody has collected it."""
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return None if not fields or fields[0] in "ZX" else fields[19]


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
