"""Persistent pools of gloo ranks for tests: `pool.run(fn, *args)` calls a module-level function on every rank.

Starting a rank means importing torch, which takes seconds, so ranks live for the whole session. A rank that raises
has its error raised again in the test, with its traceback; one that dies or hangs ends the test inside its time limit
with the stacks of all ranks, and the pool is built anew for the next test. Ranks meet over a file: no port is needed.
"""

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

# Seconds that a collective inside a rank may take, that the other ranks get once one has failed, that an idle rank
# needs to answer, and that starting all ranks may take.
_GROUP_TIMEOUT = 40
_GRACE = 5
_START_TIMEOUT = 100
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class PoolError(RuntimeError):
    """A rank died or did not answer in time; the text holds what it printed and the stacks."""


class RemoteError(RuntimeError):
    """Cause of an error that a rank raised: which rank, and its traceback there."""


class RankPool:
    """Ranks that wait for functions to run; they start at the first `run` and end with `close`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._imported: set[str] = set()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """Call `fn(*args)` on every rank and return the results by rank.

        Args:
            fn: a function of a module, found there by name; `torch.distributed` is initialised when it runs.
            args: picklable; every rank gets its own copy.
            timeout: seconds until the ranks count as hung.

        Raises:
            PoolError: a rank died or hung. The pool starts anew on its next use.
            Exception: what the first rank to fail raised, with a `RemoteError` as its cause.
        """
        if not self._processes:
            self._start()
        if fn.__module__ not in self._imported:  # takes seconds, many on a busy machine, and is not what is timed
            self._call(_import, (fn.__module__,), _START_TIMEOUT)
            self._imported.add(fn.__module__)
        answers, arrival = self._call(fn, args, timeout)
        failed = [rank for rank in arrival if not answers[rank][0]]
        if not failed:
            return [value for _, value in answers]
        if len(failed) < self.size or not self._is_healthy():
            self._kill()  # a rank that left a collective early may have left its peers with half a message
        raise _rebuilt(failed[0], answers[failed[0]][1])

    def close(self) -> None:
        """End all ranks and check that none is left."""
        pids = [process.pid for process in self._processes]
        for pipe in self._pipes:
            pipe.close()  # a rank leaves when its pipe ends
        for process in self._processes:
            process.join(_GRACE)
        self._kill()
        left = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).ppid() == os.getpid()]
        if left:
            raise PoolError(f"ranks are still alive after close: process ids {left}")

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="xpar_ranks_")
        context = multiprocessing.get_context("spawn")
        before = {name: os.environ.get(name) for name in _ENVIRONMENT}
        os.environ.update(_ENVIRONMENT)  # must be set before the children import torch
        try:
            for rank in range(self.size):
                here, there = context.Pipe()
                args = (rank, self.size, self._folder.name, there)
                process = context.Process(target=_serve, args=args, daemon=True, name=f"rank{rank}")
                process.start()
                there.close()
                self._processes.append(process)
                self._pipes.append(here)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        self._call(_sync, (), _START_TIMEOUT)

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> tuple[list[Any], list[int]]:
        """Answers by rank, each (succeeded, pickled value or error), and the ranks in order of arrival."""
        message = pickle.dumps((fn, args))
        deadline = time.monotonic() + timeout
        answers: list[Any] = [None] * self.size
        arrival: list[int] = []
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except OSError:
                self._fail(rank, "has died since the last call", answers)
        while len(arrival) < self.size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if answers[rank] is None}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(min(waiting.values()), f"did not return from {fn.__qualname__} in time", answers)
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    self._fail(rank, f"died in {fn.__qualname__}", answers)
                arrival.append(rank)
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return answers, arrival

    def _fail(self, rank: int, what: str, answers: list[Any]) -> None:
        """Show the stacks of all ranks, end them, and raise; an error that a rank raised before takes precedence."""
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.3)  # for the dumps to be written
        self._processes[rank].join(_GRACE if what.startswith("died") else 0)  # it needs a moment to have an exit code
        code = self._processes[rank].exitcode
        logs = [(Path(self._folder.name) / f"rank{r}.log") for r in range(self.size)] if self._folder else []
        text = "".join(f"\n--- rank {r} ---\n{log.read_text()[-6000:]}" for r, log in enumerate(logs) if log.exists())
        self._kill()
        raised = next((r for r, answer in enumerate(answers) if answer is not None and not answer[0]), None)
        error = PoolError(f"rank {rank} of {self.size} {what} (exit code {code}){text}")
        if raised is None:
            raise error
        failure = _rebuilt(raised, answers[raised][1])
        (failure.__cause__ or failure).__cause__ = error
        raise failure

    def _is_healthy(self) -> bool:
        try:
            answers, _ = self._call(_sync, (), _GRACE)
        except PoolError:
            return False
        return all(succeeded and value == self.size for succeeded, value in answers)

    def _kill(self) -> None:
        for process in self._processes:
            process.terminate()  # under coverage, a rank writes down what it ran
        for process in self._processes:
            process.join(_GRACE)
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None
        self._imported.clear()


def _rebuilt(rank: int, answer: tuple[BaseException | None, str]) -> BaseException:
    error, text = answer
    remote = RemoteError(f"rank {rank} raised:\n{text}")
    if error is None:  # it could not be pickled
        return remote
    error.__cause__ = remote
    return error


def _import(module: str) -> None:
    importlib.import_module(module)


def _sync() -> int:
    """Number of ranks that are there, by a collective."""
    import torch
    import torch.distributed as dist

    count = torch.ones(1)
    dist.all_reduce(count)
    return int(count)


def _serve(rank: int, size: int, folder: str, pipe: Connection) -> None:
    """Body of one rank: initialise gloo, then answer calls until the pipe ends."""
    log = (Path(folder) / f"rank{rank}.log").open("w", buffering=1)  # open until the process ends
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the pipe

    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    timeout = datetime.timedelta(seconds=_GROUP_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            break
        pipe.send_bytes(_answer(message))
    log.flush()
    os._exit(0)  # tearing down gloo and the interpreter takes seconds and nobody needs it


def _answer(message: bytes) -> bytes:
    # Plain pickle, not the connection's own: that one sends tensors by shared memory, which outlives its owner badly.
    try:
        fn, args = pickle.loads(message)
        return pickle.dumps((True, fn(*args)))
    except BaseException as error:  # the rank must live to answer, whatever the function did
        text = traceback.format_exc()
        try:
            return pickle.dumps((False, (pickle.loads(pickle.dumps(error)), text)))
        except Exception:  # any error may refuse to be pickled or rebuilt
            return pickle.dumps((False, (None, text)))
