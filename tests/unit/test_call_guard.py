"""What a call guard and a cancellation do when other ranks are gone, shown with a board that answers as told."""

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiny_models import call_arguments, pipeline
from xpar import CommTimeoutError, EngineConfig, Parallel, PeerFailedError, XparError
from xpar.core.distributed import call_guard
from xpar.core.distributed.call_agreement import CallHeader
from xpar.core.distributed.call_guard import CallGuard
from xpar.core.distributed.cancellation import Cancellation
from xpar.core.distributed.progress import Progress


class Board:
    """A failure board of two ranks, of which the other one waits for a call and leaves nothing."""

    rank, ranks = 0, (0, 1)

    def first(self) -> None:
        return None

    def has(self, key: str) -> bool:
        return False

    def is_awaited(self, call: int, seconds: float) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def test_an_object_is_refused_in_a_process_that_was_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    with Parallel(pipeline("flux"), EngineConfig()) as parallel:
        made_in = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: made_in + 1)
        with pytest.raises(XparError, match=f"process id changed from {made_in} to {made_in + 1}.*spawn"):
            parallel(**call_arguments("flux"))
        monkeypatch.undo()


def test_a_rank_that_refuses_a_call_and_finds_the_others_gone_says_both(monkeypatch: pytest.MonkeyPatch) -> None:
    broken_off: list[bool] = []
    grid: Any = SimpleNamespace(
        rank=0,
        timeout=timedelta(seconds=5),
        control=None,
        failure_board=Board(),
        break_off=lambda: broken_off.append(True),
    )

    def lost(*_: Any) -> None:
        raise PeerFailedError("the agreement on a call: connection lost")

    monkeypatch.setattr(call_guard, "agree_on_call", lost)
    monkeypatch.setattr(call_guard, "explain", lambda error, *_: error)
    guard = CallGuard(grid)
    with pytest.raises(PeerFailedError, match="connection lost") as caught, guard.call() as progress:
        progress.header = CallHeader(progress.call, {}, {})
        raise TypeError("no such argument")
    assert isinstance(caught.value.__cause__, TypeError)
    assert broken_off and guard.cause is not None
    guard.close()


def test_a_cancelled_call_does_not_wait_for_ever_for_a_rank_that_gives_no_promise() -> None:
    board: Any = Board()
    board.has = lambda key: key.endswith("asked")
    cancellation = Cancellation(board, Progress(call=1), timeout=0.05)
    cancellation.look()
    with pytest.raises(CommTimeoutError, match=r"not all of the ranks \[0, 1\] answered that the call is to end"):
        cancellation.pass_step()
