"""What makes all ranks of a grid end a call together: well, or each with an error that names the cause."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from xpar.core.distributed.call_agreement import CallHeader, agree_on_call
from xpar.core.distributed.cancellation import Cancellation
from xpar.core.distributed.explanation import explain
from xpar.core.distributed.failure_board import Failure
from xpar.core.distributed.grid import RankGrid
from xpar.core.distributed.operations import named
from xpar.core.distributed.patient_store import StoreTimeoutError
from xpar.core.distributed.progress import Progress
from xpar.core.distributed.watcher import Watcher
from xpar.errors import AgreedError, CommError, XparError

__all__ = ["CallGuard"]

logger = logging.getLogger(__name__)

_REFUSAL_GRACE = 1.0  # seconds in which all ranks are expected to say what they were called with


class CallGuard:
    """Runs one call at a time and carries its errors over the ranks.

    A rank that raises leaves its error on the failure board and breaks off its connections, so that no rank that waits
    for it goes on waiting. The others then raise `PeerFailedError` with its words. After that the object is broken:
    ranks are no longer in step. Errors that all ranks raise together (`AgreedError`), or before anything is
    communicated, break nothing.

    Args:
        grid: the ranks.
    """

    def __init__(self, grid: RankGrid) -> None:
        self.grid, self.progress = grid, Progress()
        self.cause: str | None = None
        """Why no more calls are possible."""
        self._process = os.getpid()
        self._running = threading.Lock()
        self._board, self._watcher = grid.failure_board, None
        self.cancellation = Cancellation(self._board, self.progress, grid.timeout.total_seconds())
        if self._board is not None:
            self._watcher = Watcher(self._board, self.progress, self.cancellation, grid.break_off)

    @contextmanager
    def call(self) -> Iterator[Progress]:
        """Guard one call.

        Raises:
            XparError: a call is running, or an earlier one has failed, here or elsewhere.
            PeerFailedError, CommTimeoutError: another rank failed in this call.
        """
        self.check_process()
        if not self._running.acquire(blocking=False):
            raise XparError("this Parallel object is in a call on another thread; let that one end first")
        try:
            self.check_usable()
            self.progress.call += 1
            self.progress.phase, self.progress.step = "arguments", 0
            self.progress.header = None
            self.cancellation.begin()
            with self._watched():
                yield self.progress
        finally:
            self._running.release()

    def check_process(self) -> None:
        """Refuse a process that was forked from the one that made this: connections cannot be shared.

        Raises:
            XparError: it was.
        """
        if os.getpid() != self._process:
            raise XparError(
                f"process id changed from {self._process} to {os.getpid()}: this Parallel object was made before a "
                "fork; start processes with spawn and wrap the pipeline in each"
            )

    def check_usable(self) -> None:
        """Check that the ranks are in step.

        Raises:
            XparError: a former call has failed, here or elsewhere, or this process was forked.
        """
        self.check_process()
        self.cause = self.cause or self._cause_elsewhere()
        if self.cause is not None:
            self.grid.break_off()
            raise XparError(
                f"a former call has failed, so the ranks are no longer in step; close() this object and wrap the "
                f"pipeline again. The cause was: {self.cause}"
            )

    def _cause_elsewhere(self) -> str | None:
        """What another rank has left on the board since the last call."""
        if self._board is None:
            return None
        try:
            failure = self._board.first()
        except StoreTimeoutError:  # its host is slow, or frozen: the call itself will tell
            return None
        except RuntimeError as error:
            return f"the job's store has gone, with the process that held it ({error})"
        return None if failure is None else str(failure)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        if self._watcher is not None:
            self._watcher.begin()
        try:
            yield
        except AgreedError:
            raise
        except CommError as error:
            raise self._explain(error) from error
        except BaseException as error:
            if self.progress.phase == "arguments":
                self._refuse(error)
            else:
                self._publish(error)
            raise
        finally:
            if self._watcher is not None:
                self._watcher.end()

    def _refuse(self, error: BaseException) -> None:
        """Nothing has been communicated. Others may refuse too, and be done; or wait, and then be told.

        Raises:
            RankMismatchError: on all ranks, if others make the call.
        """
        progress, board = self.progress, self._board
        if board is None or progress.header is None:
            return
        progress.header.refuse(f"{type(error).__name__}: {error}")
        try:
            board.refuse(progress.call, self._failure(error))
            if not board.is_awaited(progress.call, _REFUSAL_GRACE):
                return
            self.agree(progress.header)
        except CommError as lost:
            raise self._explain(lost) from error
        except RuntimeError as lost:
            if isinstance(lost, AgreedError):
                raise
            logger.warning("rank %d could not tell the other ranks that it refuses a call: %s", self.grid.rank, lost)

    def agree(self, header: CallHeader) -> None:
        """Compare the call over the ranks, which then number it alike.

        Raises:
            RankMismatchError: on every rank, naming what differs.
            CommError: another rank failed, or does not come.
        """
        self.progress.phase = "agreement"
        try:
            agree_on_call(header, self.grid.control)
        finally:
            self.cancellation.renumber(header.number)

    def _publish(self, error: BaseException) -> None:
        """Leave this rank's own error for the others, and wake those that wait for it."""
        failure = self._failure(error)
        if self._board is None:
            return
        try:
            failure = self._board.publish(failure)
        except RuntimeError:  # the store has gone; what matters more is the error that is on its way to the caller
            logger.warning("rank %d could not leave its error for the other ranks", self.grid.rank, exc_info=True)
        self.cause = str(failure)
        self.grid.break_off()

    def _failure(self, error: BaseException) -> Failure:
        text = str(error) or "without a text"
        return Failure(self.grid.rank, type(error).__name__, text, self.progress.phase, self.progress.step)

    def _explain(self, error: CommError) -> CommError:
        """The error to raise for a communication that failed: with what the other ranks say of it."""
        if self._board is None:
            return error
        explained = explain(error, self._board, self.progress, self.grid.timeout)
        self.cause = self.cause or str(explained)
        self.grid.break_off()
        return explained

    def close(self) -> None:
        """End the watching thread."""
        if self._watcher is not None:
            self._watcher.close()
        if self._board is not None:
            self._board.close()


def start_agreement(values: Sequence[int], group: dist.ProcessGroup | None) -> Callable[[], list[list[int]]]:
    """Start to gather a few integers of every rank; what is returned waits and gives them by group rank."""
    own = torch.tensor(values, dtype=torch.int64)
    if group is None:
        return lambda: [own.tolist()]
    every = torch.empty(dist.get_world_size(group) * own.numel(), dtype=torch.int64)
    operation = "the ranks' agreement on a step"
    with named(operation, group):
        work = dist.all_gather_single(every, own, group=group, async_op=True)

    def wait() -> list[list[int]]:
        with named(operation, group):
            work.wait()
        return every.view(-1, own.numel()).tolist()

    return wait
