"""A thread that notices, while this rank is busy or blocked in a call, that another rank has failed."""

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from xpar.core.distributed.cancellation import Cancellation
from xpar.core.distributed.failure_board import Failure, FailureBoard, Sign
from xpar.core.distributed.patient_store import StoreTimeoutError
from xpar.core.distributed.progress import Progress

__all__ = ["Watcher", "report_dead"]

_PATIENCE = 1.0  # seconds in which a rank that has refused a call may still come to say so
_BEAT = 0.3  # seconds between two signs of life, and two looks at the others; each takes the core from the kernels
_BEAT_BEFORE = 0.05  # while the call is being agreed on and no kernel runs: a rank that refuses it does not wait long


class Watcher:
    """Looks at the failure board between `begin` and `end`, and breaks off all communication when a rank has failed.

    A daemon thread, started with the first call. It sends a sign of life at least thrice a second, so that a rank whose
    communication times out can say which rank it was waiting for.

    Args:
        board: the grid's failure board.
        progress: of this rank's calls.
        cancellation: is looked after as well.
        break_off: ends every communication of this rank's groups, which wakes the calling thread.
    """

    def __init__(
        self,
        board: FailureBoard,
        progress: Progress,
        cancellation: Cancellation,
        break_off: Callable[[], None],
    ) -> None:
        self._board, self._progress, self._break_off = board, progress, break_off
        self._cancellation = cancellation
        self._active, self._closed = threading.Event(), False
        self._thread: threading.Thread | None = None
        self._caller = 0
        self._beats = 0
        self._left_alone_in, self._left_alone_since = 0, 0.0

    def begin(self) -> None:
        """Watch for the thread that calls this."""
        self._caller = threading.get_ident()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="xpar-watcher", daemon=True)
            self._thread.start()
        self._active.set()

    def end(self) -> None:
        """Stop watching."""
        self._active.clear()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._active.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while True:
            self._active.wait()
            if self._closed:
                return
            try:
                self._beat()
                if self._someone_failed():
                    self._break_off()
                    self._active.clear()
                    continue
                self._cancellation.look()
            except StoreTimeoutError:  # it may answer later; a rank that waits for its host has a time-out
                continue
            except RuntimeError:  # the store is gone, and with it whoever held it
                self._break_off()
                self._active.clear()
                continue
            time.sleep(_BEAT_BEFORE if self._progress.phase in ("arguments", "agreement") else _BEAT)

    def _someone_failed(self) -> bool:
        if self._board.first() is not None or self._is_left_alone():
            return True
        self._board.learn_processes()
        return report_dead(self._board, self._progress) is not None

    def _is_left_alone(self) -> bool:
        """Whether this rank waits to make a call that another has refused, who has been told so and does not come."""
        call = self._progress.call
        if self._progress.phase != "agreement" or self._board.refusal(call) is None:
            return False
        if self._left_alone_in != call:
            self._left_alone_in, self._left_alone_since = call, time.monotonic()
            self._board.await_refused(call)
        return time.monotonic() - self._left_alone_since > _PATIENCE

    def _beat(self) -> None:
        self._beats += 1
        waits, at = _whereabouts(self._caller)
        self._board.beat(Sign(self._beats, self._progress.phase, self._progress.step, waits, at))


def report_dead(board: FailureBoard, progress: Progress) -> Failure | None:
    """Publish that a rank's process has ended, if one has; returns the first failure then."""
    dead = board.dead()
    if not dead:
        return None
    text = "connection lost: the process has ended without leaving an error (killed?)"
    failure = Failure(dead[0], "ProcessEnded", text, progress.phase, progress.step)
    try:
        return board.publish(failure)
    except RuntimeError:  # the store has gone with that process
        return failure


def _whereabouts(thread: int) -> tuple[bool, str]:
    """Whether a thread, or the patch loop that it waits for, is inside of torch.distributed, and its line of code."""
    frames = sys._current_frames()
    # With this function's own frame the dict would refer to itself and outlive it, and with it all that other threads
    # have in their local variables, activations among it, until the garbage collector comes.
    del frames[threading.get_ident()]
    loops = [t.ident for t in threading.enumerate() if t.name.startswith("xpar-patch")]
    at = ""
    for ident in (thread, *loops):
        frame = frames.get(ident or 0)
        if frame is None or any(name.endswith("turns.py") for name in _files(frame, 5)):
            continue  # waits for its turn: another thread has it
        at = at or f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno} in {frame.f_code.co_name}"
        if any("torch/distributed" in name or "xpar/core/distributed" in name for name in _files(frame, 3)):
            return True, at
    return False, at


def _files(frame: FrameType | None, count: int) -> list[str]:
    """Files of the innermost frames."""
    files: list[str] = []
    while frame is not None and len(files) < count:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return files
