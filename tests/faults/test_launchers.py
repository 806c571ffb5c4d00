"""Ranks under torchrun, and ranks that cannot be started: signals, a launcher that is killed, a second attempt."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from tests.faults.harness import GROUP_TIMEOUT, LIMIT, SLACK, SOON, Rank, ended_with, free_port, record, run_ranks
from tests.faults.jobs import config
from tests.tiny_models import pipeline
from xpar import Parallel

pytestmark = [pytest.mark.timeout(LIMIT + 60), pytest.mark.slow]

ROOT = Path(__file__).parents[2]
LAUNCHER_BOUND = 5.0 * SLACK


@contextmanager
def launched(folder: Path, what: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun with two ranks of `launched.py`; nothing of it is left afterwards."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *options]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / "log").open("w") as log:
        launcher = subprocess.Popen(
            [*command, str(ROOT / "tests/faults/launched.py"), str(folder), what],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield launcher
    finally:
        for pid in [launcher.pid, *(facts["pid"] for facts in notes(folder, "running"))]:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
        launcher.wait()


def notes(folder: Path, name: str) -> list[dict[str, Any]]:
    """What the ranks have left under a name, by rank."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}[0-9]"))]


def workers(folder: Path, launcher: subprocess.Popen[bytes]) -> list[int]:
    """Process ids of the ranks, once both are in the middle of a call."""
    deadline = time.monotonic() + LIMIT
    while len(found := notes(folder, "running")) < 2:
        assert launcher.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-4000:]
        time.sleep(0.05)
    return [facts["pid"] for facts in found]


def seconds_to_end(pids: list[int], bound: float) -> float:
    """Seconds until all of these processes have ended; fails where that takes longer than the bound."""
    start = time.monotonic()
    while left := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]:
        assert time.monotonic() - start < bound, f"processes {left} are alive after {bound} s"
        time.sleep(0.02)
    return time.monotonic() - start


def test_an_interrupted_launcher(tmp_path: Path) -> None:
    """F21: Ctrl-C at torchrun leaves no process."""
    with launched(tmp_path, "long") as launcher:
        pids = workers(tmp_path, launcher)
        launcher.send_signal(signal.SIGINT)
        record(seconds_to_end([*pids, launcher.pid], GROUP_TIMEOUT + SOON))
        assert launcher.wait() in (1, 130, -signal.SIGINT)


def test_an_interrupted_rank(tmp_path: Path) -> None:
    """F21: Ctrl-C at one rank: it raises KeyboardInterrupt, and the other says so."""
    with launched(tmp_path, "long") as launcher:
        pids = workers(tmp_path, launcher)
        os.kill(pids[1], signal.SIGINT)
        record(seconds_to_end([*pids, launcher.pid], GROUP_TIMEOUT + SOON))
        assert launcher.wait() == 1
        by_kind = {facts["kind"]: facts for facts in notes(tmp_path, "ended")}
        assert "KeyboardInterrupt" in by_kind, by_kind
        # torchrun ends the other rank too, and may be faster
        if "PeerFailedError" in by_kind:
            assert "rank 1 raised KeyboardInterrupt" in by_kind["PeerFailedError"]["text"]


def test_a_killed_launcher(tmp_path: Path) -> None:
    """F22: its ranks end within five seconds."""
    with launched(tmp_path, "long") as launcher:
        pids = workers(tmp_path, launcher)
        launcher.kill()
        launcher.wait()
        record(seconds_to_end(pids, LAUNCHER_BOUND))


def test_a_terminated_rank(tmp_path: Path) -> None:
    """F23."""
    with launched(tmp_path, "long") as launcher:
        pids = workers(tmp_path, launcher)
        os.kill(pids[1], signal.SIGTERM)
        record(seconds_to_end([*pids, launcher.pid], LAUNCHER_BOUND))
        assert launcher.wait() == 1


def test_a_second_attempt(tmp_path: Path) -> None:
    """F35: a rank is killed in the first attempt; the second one is right."""
    with launched(tmp_path, "restart", "--max-restarts", "1") as launcher:
        assert launcher.wait(timeout=LIMIT + 30) == 0, (tmp_path / "log").read_text()[-4000:]
    done = notes(tmp_path, "done")
    assert [facts["attempt"] for facts in done] == ["1", "1"]
    assert all(facts["error"] < 1e-5 for facts in done)


def wrap_as_rank(where: Rank, port: int, world: int) -> None:
    """Wrap a pipeline as the first rank of a world that xpar itself has to join."""
    os.environ.update(RANK="0", WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    where.inject()
    Parallel(pipeline("flux"), config(ulysses_degree=world, timeout=2.0))


def test_a_busy_port() -> None:
    """F28."""
    taken = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    (outcome,) = run_ranks(wrap_as_rank, 1, arguments=(taken.port, 2))
    parts = f"MASTER_ADDR:MASTER_PORT=127.0.0.1:{taken.port}", "choose a free port", "torchrun --standalone"
    ended_with(outcome, "ConfigError", *parts)


def test_a_missing_rank() -> None:
    """F29."""
    (outcome,) = run_ranks(wrap_as_rank, 1, arguments=(free_port(), 2))
    ended_with(outcome, "CommTimeoutError", "not all of WORLD_SIZE=2 processes joined", "1/2", bound=2.0 + SOON)
