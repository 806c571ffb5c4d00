"""Patch loops in one process: what a user sees of a pipeline that runs patch by patch on one stage."""

import threading
import traceback
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from tests.tiny_models import FAMILIES, VARIANTS, call_arguments, pipeline, relative_error, variant
from xpar import EngineConfig, Parallel


def patched(pipe: Any, patches: int = 3, warmup: int = 1) -> Parallel:
    return Parallel(pipe, EngineConfig(num_patches=patches, warmup_steps=warmup))


def tensor(output: Any) -> torch.Tensor:
    return torch.as_tensor(output[0])


@pytest.mark.parametrize("patches", [2, 3, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_warm_up_over_all_steps_is_the_plain_pipeline_to_the_bit(family: str, patches: int) -> None:
    pipe = pipeline(family)
    expected = tensor(pipe(**call_arguments(family)))
    with patched(pipe, patches, warmup=4) as parallel:
        assert torch.equal(tensor(parallel(**call_arguments(family))), expected)
    assert torch.equal(tensor(pipe(**call_arguments(family))), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_error_falls_as_the_warm_up_grows(family: str) -> None:
    pipe = pipeline(family)
    expected = tensor(pipe(**call_arguments(family, steps=6)))
    errors = []
    for warmup in (0, 2, 5):
        with patched(pipe, 4, warmup) as parallel:
            errors.append(relative_error(tensor(parallel(**call_arguments(family, steps=6))), expected))
    assert errors[0] > errors[1] > errors[2] > 0


def collecting(seen: list[Any], effect: Any = None) -> Any:
    def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        seen.append((step, tensors["latents"].clone()))
        return {**tensors, **(effect(pipe, step, tensors) or {})} if effect else tensors

    return callback


@pytest.mark.parametrize("family", FAMILIES)
def test_the_callback_runs_once_a_step_with_complete_latents(family: str) -> None:
    pipe = pipeline(family)
    plain: list[Any] = []
    expected = tensor(pipe(**call_arguments(family, callback_on_step_end=collecting(plain))))
    with patched(pipe, warmup=4) as parallel:
        seen: list[Any] = []
        value = tensor(parallel(**call_arguments(family, callback_on_step_end=collecting(seen))))
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(seen, plain, strict=True))
    assert torch.equal(value, expected)
    with patched(pipe) as parallel:
        seen.clear()
        watched = tensor(parallel(**call_arguments(family, callback_on_step_end=collecting(seen))))
        assert torch.equal(watched, tensor(parallel(**call_arguments(family))))
    assert all(relative_error(a, b) < 0.2 for (_, a), (_, b) in zip(seen, plain, strict=True))


def test_what_a_callback_changes_holds_in_every_patch() -> None:
    """Guidance off after the second step, latents scaled after the third, interrupted after the fourth."""

    def effect(pipe: Any, step: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if step == 1:
            pipe._guidance_scale = 1.0
        if step == 3:
            pipe._interrupt = True
        return {"latents": tensors["latents"] * 0.5} if step == 2 else {}

    pipe = pipeline("wan")
    call = {"steps": 6, "callback_on_step_end": collecting([], effect)}
    expected = tensor(pipe(**call_arguments("wan", **call)))
    with patched(pipe, warmup=6) as parallel:
        assert torch.equal(tensor(parallel(**call_arguments("wan", **call))), expected)
    with patched(pipe, warmup=1) as parallel:
        assert relative_error(tensor(parallel(**call_arguments("wan", **call))), expected) < 0.1


def test_a_batched_pipeline_may_drop_its_guidance_half_midway() -> None:
    def effect(pipe: Any, step: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if step != 1:
            return {}
        pipe._guidance_scale = 0.0
        return {name: x.chunk(2)[1] for name, x in tensors.items() if name != "latents"}

    pipe = pipeline("sd3")
    names = ["latents", "prompt_embeds", "pooled_prompt_embeds"]
    call = {
        "steps": 6,
        "callback_on_step_end": collecting([], effect),
        "callback_on_step_end_tensor_inputs": names,
    }
    expected = tensor(pipe(**call_arguments("sd3", **call)))
    with patched(pipe, warmup=1) as parallel:
        assert relative_error(tensor(parallel(**call_arguments("sd3", **call))), expected) < 0.05


def test_an_exception_surfaces_with_its_own_traceback_and_leaves_no_thread() -> None:
    pipe = pipeline("flux")
    block = pipe.transformer.single_transformer_blocks[1]
    before = threading.active_count()
    calls = []

    def failing_norm(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("third call of the norm")
        return type(block.norm).forward(block.norm, *args, **kwargs)

    block.norm.forward = failing_norm
    with patched(pipe) as parallel, pytest.raises(ZeroDivisionError, match="third call") as caught:
        parallel(**call_arguments("flux"))
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "failing_norm" in frames
    assert threading.active_count() == before
    del block.norm.forward
    assert tensor(pipe(**call_arguments("flux"))).isfinite().all()


def test_a_wrong_argument_is_refused_by_the_pipeline_itself() -> None:
    with patched(pipeline("flux")) as parallel:
        with pytest.raises(ValueError, match="prompt"):
            parallel(prompt=None)
        assert tensor(parallel(**call_arguments("flux"))).isfinite().all()


def test_generators_end_as_in_one_process() -> None:
    pipe = pipeline("flux")
    arguments = call_arguments("flux", batch=2)
    arguments["generator"] = [torch.Generator().manual_seed(i) for i in (3, 4)]
    expected = tensor(pipe(**arguments))
    states = [generator.get_state() for generator in arguments["generator"]]
    arguments["generator"] = [torch.Generator().manual_seed(i) for i in (3, 4)]
    with patched(pipe, warmup=4) as parallel:
        assert torch.equal(tensor(parallel(**arguments)), expected)
    assert all(torch.equal(a, g.get_state()) for a, g in zip(states, arguments["generator"], strict=True))


def test_a_scheduler_that_draws_noise_draws_the_same_in_every_patch() -> None:
    pipe = pipeline("flux")
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    for generator in (None, 5):

        def call(target: Any, seed: int | None = generator) -> torch.Tensor:
            torch.manual_seed(9)
            own = None if seed is None else torch.Generator().manual_seed(seed)
            return tensor(target(**call_arguments("flux", generator=own)))

        expected, state = call(pipe), torch.get_rng_state()
        with patched(pipe, warmup=4) as parallel:
            assert torch.equal(call(parallel), expected)
            assert torch.equal(torch.get_rng_state(), state)
        with patched(pipe, warmup=1) as parallel:
            assert relative_error(call(parallel), expected) < 0.1


@pytest.mark.parametrize("name", VARIANTS)
def test_edits_and_image_to_video_run_patch_by_patch_and_encode_once(name: str) -> None:
    pipe, more = variant(name)
    expected = tensor(pipe(**call_arguments(**more)))
    encoded: list[int] = []
    handle = pipe.vae.encoder.register_forward_hook(lambda *_: encoded.append(1))
    pipe(**call_arguments(**more))
    once = len(encoded)
    with patched(pipe, warmup=9) as parallel:
        assert torch.equal(tensor(parallel(**call_arguments(**more))), expected)
    handle.remove()
    assert len(encoded) == 2 * once
    with patched(pipe, warmup=1) as parallel:
        assert relative_error(tensor(parallel(**call_arguments(**more))), expected) < 0.1


def test_the_pipeline_is_left_as_one_process_leaves_it() -> None:
    pipe, other = pipeline("flux"), pipeline("flux")
    other(**call_arguments("flux"))
    with patched(pipe) as parallel:
        parallel(**call_arguments("flux"))
    assert "step" not in vars(pipe.scheduler) and "forward" not in vars(pipe.transformer)
    assert pipe.num_timesteps == other.num_timesteps
    assert torch.equal(pipe.scheduler.timesteps, other.scheduler.timesteps)
    assert "decode" not in vars(pipe.vae) and "encode" not in vars(pipe.vae)


def test_all_degrees_one_is_the_plain_pipeline_to_the_bit() -> None:
    for family in FAMILIES:
        pipe = pipeline(family)
        expected = tensor(pipe(**call_arguments(family)))
        with Parallel(pipe, EngineConfig()) as parallel:
            assert torch.equal(tensor(parallel(**call_arguments(family))), expected)
            assert parallel.is_main and parallel.rank == 0 and parallel.transformer is pipe.transformer
