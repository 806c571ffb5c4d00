"""A call that one rank cancels, or interrupts, ends on all ranks at the same step; the next one is right."""

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.pool import RankPool
from tests.faults.harness import LIMIT, SOON, record
from tests.faults.jobs import PIPEFUSION, ULYSSES, Answer, answer_of, config
from tests.tiny_models import call_arguments, pipeline, relative_error
from xpar import Parallel

pytestmark = pytest.mark.timeout(LIMIT + 80)

EXACT = {**PIPEFUSION, "warmup_steps": 9}  # one process's pictures, in a short call
BOTH = pytest.mark.parametrize("fields", [ULYSSES, EXACT, PIPEFUSION], ids=["ulysses", "warm-up", "patches"])


def cancel(fields: dict[str, int], finite: str) -> tuple[Answer, float, float]:
    """What a cancelled call says, the seconds from `cancel` to its end, and the next call's error."""
    pipe = pipeline("flux")
    expected = pipe(**call_arguments("flux"))[0]
    asked = 0.0
    with Parallel(pipe, config(**fields, check_finite=finite)) as parallel:

        def ask() -> None:
            nonlocal asked
            while parallel._guard.progress.step < 20:
                time.sleep(0.01)
            asked = time.monotonic()
            parallel.cancel()

        asking = threading.Thread(target=ask, daemon=True)
        if dist.get_rank() == 1:
            asking.start()
        answer = answer_of(lambda: parallel(**call_arguments("flux", steps=5000)))
        seconds = time.monotonic() - asked if asked else 0.0
        error = relative_error(parallel(**call_arguments("flux"))[0], expected)
    return answer, seconds, error


@BOTH
@pytest.mark.parametrize("finite", ["end", "step"])
def test_cancelling_on_one_rank(pool2: RankPool, fields: dict[str, int], finite: str) -> None:
    first, second = pool2.run(cancel, fields, finite, timeout=LIMIT)
    record(first[1], second[1])
    for answer, seconds, error in (first, second):
        assert answer.kind == "CallCancelledError", answer
        assert seconds < SOON
        assert error < (0.5 if fields == PIPEFUSION else 1e-5)
    assert first[0].text == second[0].text  # it has the step in it


def cancel_after_the_last_step(fields: dict[str, int]) -> tuple[Answer, float]:
    """Rank 1 cancels in the callback of the last step; then the next call's error."""
    pipe = pipeline("flux")
    expected = pipe(**call_arguments("flux"))[0]
    with Parallel(pipe, config(**fields)) as parallel:

        def cancel(*arguments: Any) -> dict[str, Any]:
            if dist.get_rank() == 1 and arguments[1] == 3:
                parallel.cancel()
            return {}

        call = call_arguments("flux", steps=4) | {"callback_on_step_end": cancel, "output_type": "pt"}
        answer = answer_of(lambda: parallel(**call))
        return answer, relative_error(parallel(**call_arguments("flux"))[0], expected)


@pytest.mark.parametrize("fields", [ULYSSES, EXACT], ids=["ulysses", "warm-up"])
def test_cancelling_after_the_last_step_saves_the_decoding(pool2: RankPool, fields: dict[str, int]) -> None:
    for answer, error in pool2.run(cancel_after_the_last_step, fields, timeout=LIMIT):
        assert answer.kind == "CallCancelledError" and "stopped before decoding" in answer.text, answer
        assert error < 1e-5


def interrupt(fields: dict[str, int]) -> tuple[int, float, float]:
    """Callbacks of a call in which rank 1 sets `_interrupt`, its error to one process, and the next call's."""
    pipe = pipeline("flux")
    steps = 0

    def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        nonlocal steps
        steps += 1
        if step == 1 and (not dist.is_initialized() or dist.get_rank() == 1 or is_alone):
            pipe._interrupt = True
        return tensors

    is_alone = True
    expected = pipe(**call_arguments("flux", callback_on_step_end=callback))[0]
    whole = pipe(**call_arguments("flux"))[0]
    is_alone, alone, steps = False, steps, 0
    with Parallel(pipe, config(**fields)) as parallel:
        interrupted = parallel(**call_arguments("flux", callback_on_step_end=callback))[0]
        together = steps
        error = relative_error(parallel(**call_arguments("flux"))[0], whole)
    assert together == alone, (together, alone)
    return together, relative_error(interrupted, expected), error


@BOTH
def test_an_interrupt_on_one_rank(pool2: RankPool, fields: dict[str, int]) -> None:
    first, second = pool2.run(interrupt, fields)
    assert first[0] == second[0]
    bound = 0.5 if fields == PIPEFUSION else 1e-5
    assert max(*first[1:], *second[1:]) < bound


def cancel_without_a_call() -> float:
    pipe = pipeline("flux")
    expected = pipe(**call_arguments("flux"))[0]
    with Parallel(pipe, config(**ULYSSES)) as parallel:
        parallel.cancel()
        parallel(**call_arguments("flux"))
        parallel.cancel()
        return relative_error(parallel(**call_arguments("flux"))[0], expected)


def test_cancelling_without_a_call_does_nothing(pool2: RankPool) -> None:
    assert max(pool2.run(cancel_without_a_call)) < 1e-5


def cancel_alone() -> Answer:
    with Parallel(pipeline("flux"), config()) as parallel:

        def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if step == 2:
                parallel.cancel()
            return tensors

        return answer_of(lambda: parallel(**call_arguments("flux", callback_on_step_end=callback)))


def test_cancelling_in_one_process() -> None:
    assert not torch.distributed.is_initialized()
    answer = cancel_alone()
    assert answer.kind == "CallCancelledError" and "after step 4" in answer.text, answer
