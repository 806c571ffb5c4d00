"""A rank that hangs or freezes ends the others when the time limit has passed, and is named."""

import os
import signal

import pytest

from tests.faults.harness import GROUP_TIMEOUT, LATE, LIMIT, SLACK, SOON, Outcome, ended_with, free_port, run_ranks
from tests.faults.jobs import FROM_FIRST_STAGE, PIPEFUSION, ULYSSES, ULYSSES3, call_after_time_out, faulty_call

pytestmark = pytest.mark.timeout(LIMIT + 20)


def was_ended_by_launcher(outcome: Outcome, code: int) -> None:
    """A rank that is stuck in Python code cannot end itself: whoever launched it does, here the harness."""
    assert outcome.exit_code == code, outcome


@pytest.mark.parametrize("fields", [ULYSSES, PIPEFUSION], ids=["ulysses", "pipefusion"])
def test_a_rank_that_sleeps_in_a_block(fields: dict[str, int]) -> None:
    """F7."""
    waiting, hung = run_ranks(faulty_call, arguments=(fields, "block", "sleep"), as_launcher=True)
    was_ended_by_launcher(hung, -signal.SIGTERM)
    operation = "all_to_all in group ulysses of ranks 0, 1" if fields == ULYSSES else "group pipefusion"
    parts = (
        operation,
        f"did not end in time within {GROUP_TIMEOUT:g} s",
        "step",
        "waiting for rank 1, which is in denoising",
        "jobs.py",
    )
    ended_with(waiting, "CommTimeoutError", *parts, bound=LATE)


@pytest.mark.parametrize(("fields", "failing"), [(ULYSSES3, 1), (FROM_FIRST_STAGE, 0)], ids=["ulysses", "pipefusion"])
def test_a_rank_that_sleeps_ends_two_others(fields: dict[str, int], failing: int) -> None:
    """F7 with three ranks: both name the same one."""
    arguments = fields, "block", "sleep", failing
    outcomes = run_ranks(faulty_call, 3, arguments=arguments, as_launcher=True)
    was_ended_by_launcher(outcomes.pop(failing), -signal.SIGTERM)
    for waiting in outcomes:
        parts = f"did not end in time within {GROUP_TIMEOUT:g} s", f"waiting for rank {failing}, which is in denoising"
        ended_with(waiting, "CommTimeoutError", *parts, bound=LATE)


def test_a_frozen_rank() -> None:
    """F8."""
    waiting, frozen = run_ranks(faulty_call, arguments=(ULYSSES, "block", "freeze"), as_launcher=True)
    was_ended_by_launcher(frozen, -signal.SIGKILL)
    parts = "all_to_all in group ulysses", "step 1", "waiting for rank 1, which gives no sign of life (frozen or gone)"
    ended_with(waiting, "CommTimeoutError", *parts, bound=LATE)


def test_a_frozen_rank_that_holds_the_store() -> None:
    """F8, where torch's client of the store would wait for ever."""
    arguments = ULYSSES, "block", "freeze", 0
    frozen, waiting = run_ranks(faulty_call, arguments=arguments, as_launcher=True, port=free_port())
    was_ended_by_launcher(frozen, -signal.SIGKILL)
    parts = "all_to_all in group ulysses", "did not end in time", "step 1", "store", "no answer within"
    ended_with(waiting, "CommTimeoutError", *parts, bound=LATE + SOON)


def thaw(pids: list[int]) -> None:
    os.kill(pids[1], signal.SIGCONT)


def test_a_frozen_rank_that_goes_on_too_late() -> None:
    """F8, with SIGCONT after the others have given up."""
    waiting, frozen = run_ranks(faulty_call, arguments=(ULYSSES, "block", "freeze"), after_first=thaw)
    ended_with(waiting, "CommTimeoutError", "waiting for rank 1", bound=LATE)
    ended_with(frozen, "PeerFailedError", "rank 0 raised CommTimeoutError", "waiting for rank 1", bound=LATE + 2)


def test_a_call_after_a_failed_one() -> None:
    """F27: refused at once, with the first cause; closing works."""
    waiting, hung = run_ranks(call_after_time_out, as_launcher=True)
    was_ended_by_launcher(hung, -signal.SIGTERM)
    first, second, seconds = waiting.value
    assert waiting.exit_code == 0, waiting
    assert "did not end in time" in first and "close() this object and wrap the pipeline again" in second
    assert first in second
    assert seconds < 0.1 * SLACK
