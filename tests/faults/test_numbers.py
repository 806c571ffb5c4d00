"""The same bytes on every rank and in every run, and an error where they are no numbers."""

import hashlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.pool import RankPool
from tests.faults.harness import GROUP_TIMEOUT, LIMIT
from tests.faults.jobs import PIPEFUSION, ULYSSES, Answer, answer_of, config
from tests.tiny_models import call_arguments, pipeline, relative_error
from xpar import Parallel

pytestmark = pytest.mark.timeout(LIMIT + 80)

BOTH = pytest.mark.parametrize("fields", [ULYSSES, PIPEFUSION], ids=["ulysses", "pipefusion"])


def sha256(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()


def call_with_a_straggler(fields: dict[str, int]) -> tuple[str, str, float]:
    """Hashes of two calls, and the seconds of the second, in which one rank sleeps for most of the time limit."""
    pipe = pipeline("flux")
    with Parallel(pipe, config(**fields)) as parallel:
        plain = sha256(parallel(**call_arguments("flux"))[0])
        slept = False

        def sleep(*_: Any) -> None:
            nonlocal slept
            if dist.get_rank() == 1 and not slept:
                slept = True
                time.sleep(0.8 * GROUP_TIMEOUT)

        handle = pipe.transformer.register_forward_pre_hook(sleep)
        start = time.monotonic()
        slow = sha256(parallel(**call_arguments("flux"))[0])
        handle.remove()
        return plain, slow, time.monotonic() - start


@BOTH
def test_a_straggler_below_the_limit(pool2: RankPool, fields: dict[str, int]) -> None:
    """F9."""
    for plain, slow, seconds in pool2.run(call_with_a_straggler, fields, timeout=LIMIT):
        assert plain == slow
        assert seconds > 0.8 * GROUP_TIMEOUT


def call_without_generator(fields: dict[str, int]) -> tuple[str, float]:
    """The hash of a picture whose noise nobody has seeded alike, and how far it is from the one of rank 0 alone."""
    pipe = pipeline("flux")
    torch.manual_seed(0)
    expected = pipe(**{**call_arguments("flux"), "generator": None})[0]
    torch.manual_seed(dist.get_rank())
    with Parallel(pipe, config(**fields)) as parallel:
        picture = parallel(**{**call_arguments("flux"), "generator": None})[0]
    return sha256(picture), relative_error(picture, expected)


@pytest.mark.parametrize("fields", [ULYSSES, {**PIPEFUSION, "warmup_steps": 9}], ids=["ulysses", "pipefusion"])
def test_no_generator(pool2: RankPool, fields: dict[str, int]) -> None:
    """F13."""
    (first, error), (second, _) = pool2.run(call_without_generator, fields)
    assert first == second
    assert error < 1e-5


def poison(fields: dict[str, Any], step: int) -> tuple[Answer, int, bool]:
    """What a call says in which a block of rank 1 yields NaN, how often it decoded, and whether the next call works."""
    pipe = pipeline("flux")
    decoded = calls = 0
    block = pipe.transformer.single_transformer_blocks[-1]

    def count(*_: Any) -> None:
        nonlocal decoded
        decoded += 1

    def spoil(_module: Any, _args: Any, result: Any) -> Any:
        nonlocal calls
        calls += 1
        return tuple(x * float("nan") for x in result) if calls > per_step * (step - 1) else result

    with Parallel(pipe, config(**fields)) as parallel:
        handles = [pipe.vae.decoder.register_forward_pre_hook(count)]
        if dist.get_rank() == 1:
            per_step = 2 * calls_per_branch(fields)
            handles.append(block.register_forward_hook(spoil))
        answer = answer_of(lambda: parallel(**call_arguments("flux", steps=5)))
        while handles:
            handles.pop().remove()
        works = parallel(**call_arguments("flux"))[0].isfinite().all()
    return answer, decoded, bool(works)


def calls_per_branch(fields: dict[str, Any]) -> int:
    """Runs of a block for one branch of a step; a warm-up step is one, and so is the probe of a head's regions."""
    return 1 if "ulysses_degree" in fields else int(fields["num_patches"])


def test_nan_is_named_with_step_and_rank(pool2: RankPool) -> None:
    """F19 with check_finite="step": the step and the rank where it began; then calls may follow."""
    for answer, decoded, works in pool2.run(poison, {**ULYSSES, "check_finite": "step"}, 3):
        assert answer.kind == "NonFiniteError", answer
        assert "in step 3" in answer.text and "rank" in answer.text, answer
        assert decoded == 0
        assert works


def test_nan_is_named_with_stage(pool2: RankPool) -> None:
    """F19 with check_finite="step" and stages: the stage whose block it was, not the one that received it."""
    for answer, decoded, works in pool2.run(poison, {**PIPEFUSION, "warmup_steps": 9, "check_finite": "step"}, 3):
        assert answer.kind == "NonFiniteError", answer
        assert "rank 1 (stage 1)" in answer.text and "rank 0" not in answer.text, answer
        assert decoded == 0
        assert works


@BOTH
def test_nan_is_found_before_decoding(pool2: RankPool, fields: dict[str, int]) -> None:
    """F19 with the default, check_finite="end"."""
    for answer, decoded, works in pool2.run(poison, fields, 2):
        assert answer.kind == "NonFiniteError", answer
        assert "after the last step (5)" in answer.text and "check_finite='step'" in answer.text
        assert decoded == 0
        assert works


def run_often(fields: dict[str, int]) -> tuple[dict[int, set[str]], float]:
    """Hashes of five calls by number of threads, and how far they are from one process."""
    pipe = pipeline("flux")
    expected = pipe(**call_arguments("flux", output_type="latent"))[0]
    hashes: dict[int, set[str]] = {}
    with Parallel(pipe, config(**fields)) as parallel:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results = [parallel(**call_arguments("flux", output_type="latent"))[0] for _ in range(5)]
            hashes[threads] = {sha256(x) for x in results}
    torch.set_num_threads(1)
    return hashes, relative_error(results[0], expected)


@BOTH
def test_the_same_bytes_over_runs_and_ranks(pool2: RankPool, fields: dict[str, int]) -> None:
    """F34."""
    (first, error), (second, _) = pool2.run(run_often, fields, timeout=LIMIT)
    for threads in (1, 2):
        assert len(first[threads] | second[threads]) == 1, (threads, first, second)
    assert error < (1e-5 if fields == ULYSSES else 0.5)


def call_small_after_large(fields: dict[str, int]) -> tuple[str, str]:
    """Hashes of one call on a used object and on a fresh one."""
    small = {**call_arguments("flux", text=5, seed=9), "height": 12, "width": 16}
    hashes = []
    for used in (True, False):
        with Parallel(pipeline("flux"), config(**fields)) as parallel:
            if used:
                parallel(**{**call_arguments("flux"), "height": 24, "width": 32})
            fresh = {**small, "generator": torch.Generator().manual_seed(3)}
            hashes.append(sha256(parallel(**fresh)[0]))
    return hashes[0], hashes[1]


@pytest.mark.parametrize(
    "fields", [ULYSSES, PIPEFUSION, {**PIPEFUSION, "warmup_steps": 0}], ids=["ulysses", "pipefusion", "no warm-up"]
)
def test_nothing_of_a_call_reaches_the_next(pool2: RankPool, fields: dict[str, int]) -> None:
    """F36."""
    (used, fresh), (used_too, fresh_too) = pool2.run(call_small_after_large, fields)
    assert used == fresh == used_too == fresh_too
