"""Ranks that differ all say so, naming the field and the values by rank, before anything is computed."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.pool import RankPool
from tests.faults.harness import GROUP_TIMEOUT, SLACK, SOON, record
from tests.faults.jobs import PIPEFUSION, ULYSSES, Answer, answer_of, config
from tests.tiny_models import call_arguments, pipeline, relative_error
from xpar import Parallel

BOTH = pytest.mark.parametrize("fields", [ULYSSES, PIPEFUSION], ids=["ulysses", "pipefusion"])
AT_ONCE = 1.0 * SLACK


def different_arguments(rank: int, name: str) -> dict[str, Any]:
    """Arguments of a rank that differ from the other's in one thing."""
    arguments = call_arguments("flux")
    changes: dict[str, Callable[[], Any]] = {
        "num_inference_steps": lambda: 4 - rank,
        "prompt_embeds": lambda: arguments["prompt_embeds"] + rank,
        "generator": lambda: torch.Generator().manual_seed(rank),
        "height": lambda: 16 + 4 * rank,
        "latents": lambda: torch.zeros(1, 24, 16) + rank,
        "latents shape": lambda: torch.zeros(1, 24 + rank, 16),
    }
    return {**arguments, name.split()[0]: changes[name]()}


def call_differently(fields: dict[str, int], name: str) -> tuple[Answer, int, bool]:
    """What a call says, how often the transformer ran meanwhile, and whether the next call works."""
    pipe = pipeline("flux")
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    with Parallel(pipe, config(**fields)) as parallel:
        handle = pipe.transformer.register_forward_pre_hook(count)
        arguments = different_arguments(dist.get_rank(), name)
        dist.barrier()
        answer = answer_of(lambda: parallel(**arguments))
        handle.remove()
        works = parallel(**call_arguments("flux"))[0].isfinite().all()
    return answer, runs, bool(works)


CASES = {
    "num_inference_steps": ("F10", "num_inference_steps: rank0=4 rank1=3"),
    "prompt_embeds": ("F11", "prompt_embeds: rank0=(1, 7, 32) torch.float32 #"),
    "generator": ("F12", "generator: rank0=seed 0 #"),
    "latents": ("F12, given as latents", "latents: rank0=(1, 24, 16) torch.float32 #"),
    "height": ("F14", "height: rank0=16 rank1=20"),
}


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_different_arguments(pool2: RankPool, fields: dict[str, int], name: str) -> None:
    """F10, F11, F12 and F14."""
    results = pool2.run(call_differently, fields, name)
    record(*(answer.seconds for answer, _, _ in results))
    for answer, runs, works in results:
        assert answer.kind == "RankMismatchError", answer
        assert CASES[name][1] in answer.text and "pass the same on every rank" in answer.text
        assert answer.seconds < AT_ONCE
        assert runs == 0
        assert works


@BOTH
def test_latents_of_another_shape_on_one_rank(pool2: RankPool, fields: dict[str, int]) -> None:
    """F16. The rank whose latents fit no call refuses it, and all ranks are told."""
    results = pool2.run(call_differently, fields, "latents shape")
    record(*(answer.seconds for answer, _, _ in results))
    for answer, runs, works in results:
        assert answer.kind == "RankMismatchError", answer
        assert "(1, 25, 16)" in answer.text, answer
        assert answer.seconds < SOON and runs == 0 and works


def call_with_unknown_keyword(fields: dict[str, int]) -> tuple[Answer, bool]:
    with Parallel(pipeline("flux"), config(**fields)) as parallel:
        more = {"hieght": 16} if dist.get_rank() == 1 else {}
        dist.barrier()
        answer = answer_of(lambda: parallel(**call_arguments("flux"), **more))
        works = parallel(**call_arguments("flux"))[0].isfinite().all()
    return answer, bool(works)


@BOTH
def test_an_argument_that_one_rank_alone_refuses(pool2: RankPool, fields: dict[str, int]) -> None:
    """F16, with an argument that no call has."""
    results = pool2.run(call_with_unknown_keyword, fields)
    record(*(answer.seconds for answer, _ in results))
    for answer, works in results:
        assert answer.kind == "RankMismatchError", answer
        assert "refused with: rank0=None rank1=" in answer.text and "hieght" in answer.text
        assert answer.seconds < SOON
        assert works


def wrap_late_or_never(seconds: float) -> tuple[Answer, Answer]:
    """A call that rank 1 refuses a while before rank 0 makes it, and the next call."""
    parallel = Parallel(pipeline("flux"), config(**ULYSSES))
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(seconds)
    more = {"hieght": 16} if dist.get_rank() == 1 else {}
    first = answer_of(lambda: parallel(**call_arguments("flux"), **more))
    dist.barrier()
    second = answer_of(lambda: parallel(**call_arguments("flux")))
    parallel.close()
    return first, second


def test_a_call_that_another_rank_has_refused_long_ago(pool2: RankPool) -> None:
    """F16, with ranks that do not call at the same time: too late for an agreement, and still no hang."""
    (late, after), (refused, too) = pool2.run(wrap_late_or_never, 2.0)
    assert refused.kind == "ConfigError" or refused.kind == "TypeError", refused
    assert late.kind == "PeerFailedError" and "hieght" in late.text and late.seconds < 2 * SOON
    for answer in (after, too):
        assert answer.kind == "XparError" and "hieght" in answer.text, answer


def wrap_differently(what: str) -> Answer:
    """What wrapping a pipeline says where rank 1 has another one, or another configuration."""
    pipe, fields = pipeline("flux"), {**ULYSSES}
    if what == "dtype":
        pipe.to((torch.float16, torch.bfloat16)[dist.get_rank()])
    elif what == "weights":
        fields["verify_weights"] = True
        if dist.get_rank() == 1:
            pipe.transformer.transformer_blocks[0].attn.to_k.weight.data[0, 0] += 1e-3
            pipe.transformer.transformer_blocks[1].attn.to_k.weight.data[0, 0] += 1e-3
    elif dist.get_rank() == 1:
        fields = {"ring_degree": 2}
    dist.barrier()
    return answer_of(lambda: Parallel(pipe, config(**fields)))


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("dtype", ("rank0=FluxTransformer2DModel of torch.float16", "rank1=FluxTransformer2DModel of torch.bfloat16")),
        ("weights", ("verify_weights", "first parameter that differs is transformer.transformer_blocks.0.attn.to_k")),
        ("configuration", ("ulysses_degree: rank0=2 rank1=1", "ring_degree: rank0=1 rank1=2")),
    ],
)
def test_different_pipelines(pool2: RankPool, what: str, parts: tuple[str, ...]) -> None:
    """F15, F17 and F18: refused when the pipelines are wrapped."""
    answers = pool2.run(wrap_differently, what)
    record(*(answer.seconds for answer in answers))
    for answer in answers:
        assert answer.kind == "RankMismatchError", answer
        assert all(part in answer.text for part in parts), answer
        assert answer.seconds < min(3 * SLACK, GROUP_TIMEOUT)


def change_dtype_afterwards() -> Answer:
    pipe = pipeline("flux")
    with Parallel(pipe, config(**ULYSSES)) as parallel:
        parallel.to((torch.float16, torch.bfloat16)[dist.get_rank()])
        return answer_of(lambda: parallel(**call_arguments("flux")))


def test_a_dtype_that_is_changed_on_one_rank_after_wrapping(pool2: RankPool) -> None:
    """F15."""
    for answer in pool2.run(change_dtype_afterwards):
        assert answer.kind == "RankMismatchError", answer
        assert "dtype: rank0='torch.float16' rank1='torch.bfloat16'" in answer.text


def refuse_then_call(seconds: float) -> tuple[Answer, float, Answer]:
    """Rank 1 refuses a call, and makes the next one, before rank 0 comes; then a call that rank 0 cancels."""
    parallel = Parallel(pipeline("flux"), config(**ULYSSES))
    expected = parallel(**call_arguments("flux"))[0]
    dist.barrier()
    refusal = answer_of(lambda: None)
    if dist.get_rank() == 1:
        refusal = answer_of(lambda: parallel(**call_arguments("flux"), hieght=16))
    else:
        time.sleep(seconds)
    error = relative_error(parallel(**call_arguments("flux"))[0], expected)

    def cancel(*arguments: Any) -> dict[str, Any]:
        if dist.get_rank() == 0 and arguments[1] == 1:
            parallel.cancel()
        time.sleep(0.3)
        return {}

    arguments = call_arguments("flux", steps=12) | {"callback_on_step_end": cancel}
    cancelled = answer_of(lambda: parallel(**arguments))
    parallel.close()
    return refusal, error, cancelled


def test_a_rank_that_refuses_a_call_alone_and_makes_the_next(pool2: RankPool) -> None:
    """The ranks number their calls differently then, until they agree on the next."""
    results = pool2.run(refuse_then_call, 2.0)
    assert results[1][0].kind == "TypeError"
    for _, error, cancelled in results:
        assert error == 0
        assert cancelled.kind == "CallCancelledError", cancelled


def wrap_unless_refused(seconds: float) -> tuple[Answer, bool]:
    """Rank 1 cannot spread its pipeline, rank 0 waits for it; then both wrap a good one, rank 1 a while later."""
    is_late = dist.get_rank() == 1
    bad, group = pipeline("flux"), dist.new_group(timeout=timedelta(seconds=60))
    bad.hf_device_map = {"": "cpu"} if is_late else None
    for _ in range(2 if is_late else 0):  # which the other rank never hears of
        assert answer_of(lambda: Parallel(bad, config(**ULYSSES))).kind == "UnsupportedError"
    Parallel(pipeline("flux"), config(**ULYSSES)).close()
    dist.barrier()
    first = answer_of(lambda: Parallel(bad, config(**ULYSSES), group=group))
    fresh = dist.new_group(timeout=timedelta(seconds=60))
    if is_late:
        time.sleep(seconds)
    with Parallel(pipeline("flux"), config(**ULYSSES), group=fresh) as parallel:
        works = parallel(**call_arguments("flux"))[0].isfinite().all()
    return first, bool(works)


def test_a_pipeline_that_one_rank_alone_cannot_spread(pool2: RankPool) -> None:
    """The other rank does not wait for its time-out, and what it was told is forgotten by the next try."""
    (waiting, works), (refused, too) = pool2.run(wrap_unless_refused, 2.5)
    record(waiting.seconds)
    assert refused.kind == "UnsupportedError" and "device_map" in refused.text
    assert waiting.kind == "PeerFailedError" and waiting.seconds < SOON
    assert "rank 1 has not wrapped its pipeline: UnsupportedError: the pipeline is spread by device_map" in waiting.text
    assert works and too


def refused_by_both_then_late(seconds: float) -> tuple[Answer, bool]:
    """Both ranks refuse a pipeline; then both wrap a good one, rank 1 a while later."""
    bad = pipeline("flux")
    bad.hf_device_map = {"": "cpu"}
    first = answer_of(lambda: Parallel(bad, config(**ULYSSES)))
    if dist.get_rank() == 1:
        time.sleep(seconds)
    with Parallel(pipeline("flux"), config(**ULYSSES)) as parallel:
        return first, bool(parallel(**call_arguments("flux"))[0].isfinite().all())


def test_a_refusal_of_both_ranks_leaves_no_trace(pool2: RankPool) -> None:
    for first, works in pool2.run(refused_by_both_then_late, 2.5):
        assert first.kind == "UnsupportedError" and works
