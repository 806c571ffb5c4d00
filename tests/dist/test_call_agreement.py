"""Ranks that are called with different arguments all say so, before anything is computed."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.pool import RankPool
from tests.tiny_models import call_arguments, pipeline
from xpar import EngineConfig, Parallel, RankMismatchError
from xpar.core.distributed.call_agreement import CallHeader, agree_on_call


def by_rank(name: str, rank: int) -> dict[str, Any]:
    """Arguments of a call that differ by rank in one thing."""
    values = {
        "num_inference_steps": {"num_inference_steps": 4 - rank},
        "height": {"height": 16 + 4 * rank},
        "generator": {"generator": torch.Generator().manual_seed(rank)},
        "no generator": {"generator": None if rank else torch.Generator().manual_seed(0)},
        "latents": {"latents": torch.full((1, 24, 16), float(rank))},
        "latents shape": {"latents": torch.zeros(1, 24 + rank, 16)},
        "prompt_embeds": {"prompt_embeds": torch.full((1, 7, 32), 1.0 + rank)},
        "callback": {"callback_on_step_end": (lambda *a: a[3]) if rank else None},
        "other": {"joint_attention_kwargs": {"scale": 1.0 + rank}},
    }
    return values[name]


NAMES = {
    "num_inference_steps": "num_inference_steps: rank0=4 rank1=3",
    "height": "height: rank0=16 rank1=20",
    "generator": "generator: rank0=seed 0",
    "no generator": "rank1=None",
    "latents": "latents: rank0=(1, 24, 16) torch.float32 #",
    "latents shape": "rank1=(1, 25, 16)",
    "prompt_embeds": "prompt_embeds: rank0=(1, 7, 32)",
    "callback": "callback_on_step_end: rank0=None rank1=function",
    "other": "other arguments: rank0={joint_attention_kwargs={scale=1.0}",
}


def mismatches(fields: dict[str, int]) -> tuple[dict[str, str], bool]:
    """What is said of each difference, and whether the object still works."""
    texts = {}
    with Parallel(pipeline("flux"), EngineConfig(timeout=20, **fields)) as parallel:
        for name in NAMES:
            try:
                parallel(**{**call_arguments("flux"), **by_rank(name, dist.get_rank())})
            except RankMismatchError as error:
                texts[name] = str(error)
        works = torch.as_tensor(parallel(**call_arguments("flux"))[0]).isfinite().all()
    return texts, bool(works)


@pytest.mark.parametrize("fields", [{"ulysses_degree": 2}, {"pipefusion_degree": 2}])
def test_every_rank_names_the_field_and_the_values(pool2: RankPool, fields: dict[str, int]) -> None:
    for texts, works in pool2.run(mismatches, fields):
        assert works
        assert set(texts) == set(NAMES)
        for name, part in NAMES.items():
            assert part in texts[name] and "pass the same on every rank" in texts[name], texts[name]


def other_dtype() -> str:
    pipe = pipeline("flux")
    if dist.get_rank() == 1:
        pipe.to(torch.bfloat16)
    try:
        Parallel(pipe, EngineConfig(timeout=20, ulysses_degree=2))
    except RankMismatchError as error:
        return str(error)
    return "nothing was refused"


def test_a_rank_of_another_dtype_is_named(pool2: RankPool) -> None:
    for text in pool2.run(other_dtype):
        assert "transformer: rank0=FluxTransformer2DModel of torch.float32 on cpu rank1=" in text
        assert "torch.bfloat16" in text and "load the same on every rank" in text


def codes(latents: torch.Tensor) -> list[int]:
    return CallHeader(1, {}, {"latents": latents}).codes()


@pytest.mark.parametrize("size", [4, 1 << 17], ids=["small", "large"])
def test_a_tensor_is_known_by_its_values_in_order_its_shape_and_its_dtype(size: int) -> None:
    latents = torch.arange(size, dtype=torch.float32).view(2, -1)
    changed = latents.clone()
    changed[1, -1] += 0.5
    others = [changed, latents.flip(0), latents.view(-1), latents.view(torch.int32), latents[:, :0], latents[0, 0]]
    assert codes(latents.t().contiguous().t()) == codes(latents)
    assert len({tuple(codes(x)) for x in (latents, *others)}) == 7


def cost() -> float:
    """Milliseconds of one comparison, the median of many."""
    group = dist.new_group()
    arguments = call_arguments("flux")
    times = []
    for _ in range(50):
        start = time.perf_counter()
        agree_on_call(CallHeader(1, {"dtype": "torch.float32"}, arguments), group)
        times.append(time.perf_counter() - start)
    dist.destroy_process_group(group)
    return 1000 * sorted(times)[25]


def test_agreeing_costs_milliseconds_at_most(pool2: RankPool) -> None:
    assert max(pool2.run(cost)) < 20  # about half of one on an idle machine; this bound is for a loaded one
