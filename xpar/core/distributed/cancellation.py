"""Ends a call on all ranks at the same step, without a word between them in the calls that nobody cancels.

Ranks are not at the same step at the same moment, and one that stopped at once would leave the others waiting for it.
So the ranks' watchers, which never wait, each promise a step that their rank will not pass unasked; at its promised
step a rank looks at all promises, and all stop at the latest of them.
"""

import threading
import time

from xpar.core.distributed.failure_board import FailureBoard
from xpar.core.distributed.progress import Progress
from xpar.errors import CallCancelledError, CommTimeoutError

__all__ = ["Cancellation"]


class Cancellation:
    """Whether this rank's call is to end, and where.

    Args:
        board: where the ranks meet; None with one rank.
        progress: of this rank's calls.
        timeout: seconds until a rank that gives no promise counts as failed.
    """

    def __init__(self, board: FailureBoard | None, progress: Progress, timeout: float) -> None:
        self._board, self._progress, self._timeout = board, progress, timeout
        self._lock = threading.Lock()
        self._promised: int | None = None
        self.is_requested = False
        """Whether this rank, or as far as it knows another, wants the call to end."""

    def begin(self) -> None:
        """A new call begins."""
        with self._lock:
            self._promised, self.is_requested = None, False

    def renumber(self, call: int) -> None:
        """The ranks have agreed on another number for the call that has begun."""
        with self._lock:
            changed, self._progress.call = call != self._progress.call, call
        if changed and self.is_requested:
            self.request()

    def request(self) -> None:
        """Ask for the end of the call that is running; from any thread."""
        self.is_requested = True
        if self._board is not None:
            self._board.note(self._key("asked"), "1")

    def look(self) -> None:
        """What the watcher does now and then: once the end is asked for, promise the next step."""
        call = self._progress.call
        if self._board is None or self._promised is not None or not self._board.has(self._key("asked")):
            return
        with self._lock:
            if call != self._progress.call:  # it has ended meanwhile, and the next one is not to be cancelled
                return
            self.is_requested = True
            self._promised = self._progress.step + 1
            promise = self._key(f"promise/{self._board.rank}")
        self._board.note(promise, str(self._promised))

    def pass_step(self) -> None:
        """Count a step, and stop if it is the one.

        Raises:
            CallCancelledError: on all ranks after the same step.
            CommTimeoutError: a rank gave no promise.
        """
        with self._lock:
            self._progress.step += 1
            promised = self._promised
        step = self._progress.step
        if self._board is None:
            stop = step if self.is_requested else None
        else:
            stop = None if promised is None or step < promised else self._agreed(self._board)
        if stop is not None and step >= stop:
            raise CallCancelledError(f"the call was cancelled; all ranks stopped after step {step}")

    def _agreed(self, board: FailureBoard) -> int:
        """The latest promise of all ranks; waits for the watchers, not for the calls, of the others."""
        keys = [self._key(f"promise/{rank}") for rank in board.ranks]
        deadline = time.monotonic() + self._timeout
        while not all(map(board.has, keys)):
            if time.monotonic() > deadline or board.first() is not None:
                error = CommTimeoutError(f"not all of the ranks {list(board.ranks)} answered that the call is to end")
                error.operation = "the agreement on the end of the call"
                raise error
            time.sleep(0.01)
        return max(int(board.read(key)) for key in keys)

    def _key(self, name: str) -> str:
        return f"cancel/{self._progress.call}/{name}"
