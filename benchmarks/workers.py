"""Processes that stay alive over a benchmark and answer calls; none can make the benchmark hang."""

import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_GRACE = 5.0
"""Seconds that the other processes get once one has failed, and that processes get to end by themselves."""


class WorkerError(RuntimeError):
    """A process raised, died or did not answer in time."""


class Workers:
    """Processes that run module-level functions: one alone, or the ranks of a gloo world.

    Args:
        size: number of processes. With more than one, `torch.distributed` is initialised in them.
        threads: the most threads that a process may use; a function sets how many it does use.
        limit: seconds until a call counts as hung. Every process is then killed.
    """

    def __init__(self, size: int, *, threads: int, limit: float) -> None:
        self.size, self.limit = size, limit
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="xpar_bench_")
        # read when the children import torch and when gloo starts
        os.environ.update({"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)})
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        context = multiprocessing.get_context("spawn")
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self._folder.name, limit, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(*args)` in every process; the results by rank.

        Raises:
            WorkerError: a process raised, died or did not answer in time; all are killed then.
        """
        try:
            return self._call(function, args)
        except BaseException:
            self._kill()
            raise

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        message = pickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        answers: dict[int, Any] = {}
        failures: list[str] = []
        deadline = time.monotonic() + self.limit
        while len(answers) < self.size:
            waiting = {p: r for r, p in enumerate(self._pipes) if r not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                names = ", ".join(str(rank) for rank in waiting.values())
                failures.append(f"process(es) {names} did not return from {function.__name__} in time")
                break
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                succeeded, answers[rank] = _receive(pipe, rank)  # type: ignore[arg-type]
                if not succeeded:
                    failures.append(answers[rank])
                    deadline = min(deadline, time.monotonic() + _GRACE)
        if failures:
            raise WorkerError("\n".join(failures))
        return [answers[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()  # a process leaves when its pipe ends
        for process in self._processes:
            process.join(_GRACE)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        self._processes = []
        self._folder.cleanup()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _receive(pipe: Connection, rank: int) -> tuple[bool, Any]:
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return False, f"process {rank} died"


def _serve(rank: int, size: int, folder: str, limit: float, pipe: Connection) -> None:
    """Body of a process: answer calls until the pipe ends."""
    import torch.distributed as dist

    if size > 1:
        store = dist.FileStore(str(Path(folder) / "store"), size)
        timeout = datetime.timedelta(seconds=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            break
        try:
            answer = True, function(*args)
        except BaseException:  # noqa: BLE001 - it is told to the parent, which ends everything
            answer = False, f"process {rank} raised:\n{traceback.format_exc()}"
        pipe.send_bytes(pickle.dumps(answer))
    # no clean-up of the group: the other ranks are leaving too, and `close` kills whoever stays
