"""Runs a function on fresh ranks that may crash, hang, freeze or be killed, and says how each of them ended.

Ranks are forked from a server that has imported torch and diffusers (multiprocessing's "forkserver"), because importing
takes seconds and a rank that has died cannot be used again. They meet over a file, so that no port is needed, and end
as every Python process does, its teardown included: a hang there is a hang.
"""

import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

# Every constant of the fault tests. On a machine that is busy with something else, XPAR_TEST_SLACK=5 stretches them.
SLACK = float(os.environ.get("XPAR_TEST_SLACK", "1"))
GROUP_TIMEOUT = 5.0 * min(SLACK, 4.0)  # T: `EngineConfig.timeout` of the tests
SOON = 2.0 * SLACK  # bound for whatever is noticed by a broken connection or on the failure board
LATE = GROUP_TIMEOUT + SOON  # bound for whatever only a time-out can notice
LIMIT = 40.0 * SLACK  # seconds until a run counts as hung
LAUNCHER_GRACE = 1.0 * SLACK  # seconds from SIGTERM to SIGKILL, which a launcher sends once a rank has failed
_PRELOAD = ["torch.distributed", "diffusers", "tests.tiny_models", "xpar.parallel", "tests.faults.harness"]


@dataclass
class Outcome:
    """How a rank ended."""

    rank: int
    exit_code: int | None = None
    """As of a shell: negative for a signal."""
    value: Any = None
    """What the function returned."""
    error_class: str = ""
    """Class of the error that left the function."""
    error_text: str = ""
    seconds_to_error: float = 0.0
    """From the injection (or else the start) to when the function was left."""
    seconds: float = 0.0
    """From the injection (or else the start) to the end of the process."""
    stack_if_hung: str = ""
    log: str = ""
    """What the rank printed."""


@dataclass
class Rank:
    """What a function on a rank knows of where it runs."""

    rank: int
    world: int
    folder: Path
    port: int = 0
    """Of the store, which rank 0 hosts; 0 for a store in a file."""
    group_timeout: float = LIMIT
    """Seconds, of the default group."""

    def inject(self) -> None:
        """Note that the fault happens now; the bound counts from here."""
        (self.folder / "injected").write_text(str(time.monotonic()))


def ended_with(outcome: Outcome, error_class: str, *parts: str, bound: float = SOON) -> None:
    """Check that a rank ended by itself, with this error, whose text has these parts, within the bound."""
    assert not outcome.stack_if_hung, outcome.stack_if_hung
    assert outcome.error_class == error_class, (outcome, outcome.log)
    missing = [part for part in parts if part not in outcome.error_text]
    assert not missing, (missing, outcome.error_text)
    assert outcome.exit_code == 1, outcome
    assert outcome.seconds <= bound, (outcome.seconds, outcome.seconds_to_error, bound)


AfterFirst = Callable[[list[int]], None]
"""Called with the process ids by rank once a rank has ended."""


def run_ranks(
    fn: Callable[..., Any],
    world: int = 2,
    *,
    timeout: float = LIMIT,
    arguments: Sequence[Any] = (),
    after_first: AfterFirst | None = None,
    as_launcher: bool = False,
    port: int = 0,
    group_timeout: float = LIMIT,
) -> list[Outcome]:
    """Call `fn(rank, *arguments)` on fresh ranks and wait until all of them have ended.

    Args:
        fn: a function of a module; its first argument is a `Rank`.
        world: number of ranks.
        timeout: seconds until ranks count as hung: their stacks are kept, and they are killed.
        arguments: picklable.
        after_first: called once the first rank has ended.
        port: for a store that rank 0 hosts, instead of one in a file.
        as_launcher: end the others when a rank has ended, as torchrun does: SIGTERM, then SIGKILL.

        group_timeout: of the default group, which xpar's groups do not depend on.

    Returns:
        How each rank ended, by rank.

    Raises:
        AssertionError: a process of a rank is still alive.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="xpar_faults_") as name:
        folder = Path(name)
        pipes, processes = [], []
        started = time.monotonic()
        for rank in range(world):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_serve, args=(fn, Rank(rank, world, folder, port, group_timeout), there, tuple(arguments))
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        run = _Run(processes, [Outcome(rank) for rank in range(world)], folder, started + timeout)
        try:
            run.wait_for_all(after_first, as_launcher)
        finally:
            run.kill()
        return run.report(pipes, started)


class _Run:
    def __init__(self, processes: list[Any], outcomes: list[Outcome], folder: Path, deadline: float) -> None:
        self.processes, self.outcomes, self.folder, self.deadline = processes, outcomes, folder, deadline
        self.ended: dict[int, float] = {}

    def wait_for_all(self, after_first: AfterFirst | None, as_launcher: bool) -> None:
        self._wait(1, self.deadline)
        if self.ended and after_first is not None:
            after_first([process.pid for process in self.processes])
        if self.ended and as_launcher:
            for way in (signal.SIGTERM, signal.SIGKILL):
                self._wait(len(self.processes), time.monotonic() + LAUNCHER_GRACE)
                for process in self._alive():
                    os.kill(process.pid, way)
        self._wait(len(self.processes), self.deadline)
        for process in self._alive():
            self._dump(process)

    def _wait(self, count: int, deadline: float) -> None:
        while len(self.ended) < count and time.monotonic() < deadline:
            sentinels = {p.sentinel: r for r, p in enumerate(self.processes) if r not in self.ended}
            for sentinel in wait(list(sentinels), timeout=max(0.0, deadline - time.monotonic())):
                self.ended[sentinels[sentinel]] = time.monotonic()  # type: ignore[index]

    def _alive(self) -> list[Any]:
        return [process for rank, process in enumerate(self.processes) if rank not in self.ended]

    def _dump(self, process: Any) -> None:
        rank = self.processes.index(process)
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # for the dump to be written
        self.outcomes[rank].stack_if_hung = (self.folder / f"rank{rank}.log").read_text()[-8000:] or "no dump"

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()

    def report(self, pipes: Sequence[Connection], started: float) -> list[Outcome]:
        mark = self.folder / "injected"
        since = float(mark.read_text()) if mark.exists() else started
        for outcome, process, pipe in zip(self.outcomes, self.processes, pipes, strict=True):
            outcome.exit_code = process.exitcode
            outcome.seconds = self.ended.get(outcome.rank, time.monotonic()) - since
            log = self.folder / f"rank{outcome.rank}.log"
            outcome.log = log.read_text()[-8000:] if log.exists() else ""
            if pipe.poll():
                try:
                    outcome.value, outcome.error_class, outcome.error_text, left = pickle.loads(pipe.recv_bytes())
                    outcome.seconds_to_error = left - since
                except EOFError:  # it died without a word
                    pass
            pipe.close()
        assert_none_left([process.pid for process in self.processes])
        record(*(outcome.seconds for outcome in self.outcomes))
        return self.outcomes


def record(*seconds: float) -> None:
    """Add a test's times to the file XPAR_FAULT_TIMES, if there is one; docs/reliability.md was made of them."""
    if path := os.environ.get("XPAR_FAULT_TIMES"):
        test = os.environ.get("PYTEST_CURRENT_TEST", "").split("::")[-1].removesuffix(" (call)")
        with Path(path).open("a") as file:
            file.write(f"{test} {' '.join(f'{value:.2f}' for value in seconds)}\n")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def assert_none_left(groups: Sequence[int], seconds: float = 1.0) -> None:
    """Check that no process of these process groups is alive, given a little time; each rank leads one."""
    deadline = time.monotonic() + seconds
    while left := [process for process in psutil.process_iter() if _process_group(process.pid) in groups]:
        if time.monotonic() > deadline:
            shown = [f"{process.pid} {process.status()} {process.cmdline()}" for process in left]
            for process in left:
                process.kill()
            raise AssertionError(f"processes are left: {shown}")
        time.sleep(0.05)


def _process_group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def _serve(fn: Callable[..., Any], where: Rank, pipe: Connection, arguments: tuple[Any, ...]) -> None:
    """Body of a rank."""
    os.setpgid(0, 0)
    gc.freeze()  # what the server has imported: collecting it at the end would copy it
    # The fork server would leave by `os._exit`; a rank ends as Python does, for its teardown is tested too.
    os._exit = sys.exit  # type: ignore[assignment]
    log = (where.folder / f"rank{where.rank}.log").open("w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if where.world > 1:
        if where.port:
            store: dist.Store = dist.TCPStore("127.0.0.1", where.port, where.world, where.rank == 0)
        else:
            store = dist.FileStore(str(where.folder / "store"), where.world)
        dist.init_process_group(
            "gloo", store=store, rank=where.rank, world_size=where.world, timeout=timedelta(seconds=where.group_timeout)
        )
    try:
        answer = fn(where, *arguments), "", "", time.monotonic()
    except BaseException as error:
        pipe.send_bytes(pickle.dumps((None, type(error).__name__, str(error), time.monotonic())))
        traceback.print_exc(file=log)
        raise
    pipe.send_bytes(pickle.dumps(answer))
