"""What a rank says of a communication that failed: in the words of the rank that is the cause, where it left some."""

import time
from collections.abc import Callable
from datetime import timedelta

from xpar.core.distributed.failure_board import Failure, FailureBoard
from xpar.core.distributed.progress import Progress
from xpar.core.distributed.watcher import report_dead
from xpar.errors import CommError, CommTimeoutError, PeerFailedError

__all__ = ["explain"]

_GRACE = 1.0  # seconds in which a broken connection is expected to be explained by its other end
_LOOK = 0.8  # seconds to tell ranks that live from frozen ones: more than two signs of life
_LOOKING = "looking"  # key: a rank whose time-out has passed is about to say which rank it waited for


def explain(error: CommError, board: FailureBoard, progress: Progress, timeout: timedelta) -> CommError:
    """The error to raise for one of this rank's communications, and the cause of a failed one left for the others.

    Args:
        error: what the communication raised.
        board: where the ranks leave their errors.
        progress: of this rank's call.
        timeout: of the grid's groups.
    """
    where = ", ".join(filter(None, [error.place, f"step {progress.step}"]))
    try:
        explained = _explained(error, board, progress, timeout, where)
    except RuntimeError as lost:
        explained = _without_store(error, board, progress, where, lost)
    explained.operation, explained.place = error.operation, error.place
    return explained


def _explained(error: CommError, board: FailureBoard, progress: Progress, timeout: timedelta, where: str) -> CommError:
    is_late = isinstance(error, CommTimeoutError)
    failure = _first_failure(board, progress, 0.0 if is_late else _GRACE)
    if failure is not None:
        text = f"{failure}; rank {board.rank} was in {error.operation} ({where})"
        # A rank that others have waited for in vain is not one that waits.
        is_late = failure.kind == CommTimeoutError.__name__ and board.rank not in failure.suspects
        return CommTimeoutError(text) if is_late else PeerFailedError(text)
    own: CommError
    suspects: list[int] = []
    if is_late:
        board.note(_LOOKING, "1")
        suspects, described = _suspects(board)
        own = CommTimeoutError(f"{error} within {timeout.total_seconds():g} s ({where}); {described}")
    else:
        own = PeerFailedError(f"{error} ({where}); no rank has left an error")
    place = error.place or error.operation
    board.publish(
        Failure(board.rank, type(own).__name__, str(own), progress.phase, progress.step, place, tuple(suspects))
    )
    return own


def _first_failure(board: FailureBoard, progress: Progress, wait: float) -> Failure | None:
    """What another rank has left, or that its process is gone; waits a little for it to be written."""
    start = time.monotonic()
    board.learn_processes()
    while True:
        failure = board.first() or _refusal(board, progress) or report_dead(board, progress)
        if failure is not None:
            return failure
        patience = wait + 2 * _LOOK if wait and board.has(_LOOKING) else wait
        if time.monotonic() - start >= patience:
            return None
        time.sleep(0.02)


def _refusal(board: FailureBoard, progress: Progress) -> Failure | None:
    """Why another rank does not make the call that this one waits to make; the grid has fallen apart by that."""
    refusal = board.refusal(progress.call) if progress.phase == "agreement" else None
    return None if refusal is None else board.publish(refusal)


def _suspects(board: FailureBoard) -> tuple[list[int], str]:
    """Which ranks are not waiting themselves, by their signs of life, and the same in words."""
    others = [rank for rank in board.ranks if rank != board.rank]
    before = {rank: board.sign(rank) for rank in others}
    time.sleep(_LOOK)
    silent, busy = {}, {}
    for rank in others:
        sign, old = board.sign(rank), before[rank]
        if sign is None or old is None or sign.count == old.count:
            silent[rank] = f"rank {rank}, which gives no sign of life (frozen or gone)"
        elif not sign.waits:
            busy[rank] = f"rank {rank}, which is in {sign.phase}, step {sign.step}, at {sign.at}"
    found = silent | busy
    described = " and ".join(found.values()) or f"one of the ranks {others}, which all wait themselves"
    return list(found), f"waiting for {described}"


def _without_store(
    error: CommError, board: FailureBoard, progress: Progress, where: str, lost: RuntimeError
) -> CommError:
    """What can be said once the store has gone, which some launchers have one of the ranks hold."""
    dead = report_dead(board, progress)
    cause = f"{dead}; rank {board.rank} was in {error.operation} ({where})" if dead else f"{error} ({where})"
    kind: Callable[[str], CommError] = CommTimeoutError if isinstance(error, CommTimeoutError) else PeerFailedError
    return kind(f"{cause}; the job's store, where ranks leave their errors, does not answer either ({lost})")
