"""The cfg and dp axes give what one process gives, whatever the pipeline does with its guidance branches."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import StableDiffusion3PAGPipeline

from tests.dist.pool import RankPool
from tests.dist.recorder import recorded
from tests.tiny_models import (
    FAMILIES,
    VARIANTS,
    call_arguments,
    hunyuan_image,
    hunyuan_image_arguments,
    pipeline,
    relative_error,
    variant,
)
from xpar import EngineConfig, Parallel

SEQUENTIAL = ("flux", "qwen", "wan")


def tensor(output: Any) -> torch.Tensor:
    return torch.as_tensor(output[0])


def painted(family: str, fields: dict[str, int], call: dict[str, Any]) -> torch.Tensor:
    with Parallel(pipeline(family), EngineConfig(timeout=25, **fields)) as parallel:
        return tensor(parallel(**call_arguments(family, **call)))


def expected_of(family: str, call: dict[str, Any], patches: int = 1) -> torch.Tensor:
    with Parallel(pipeline(family), EngineConfig(num_patches=patches)) as parallel:
        return tensor(parallel(**call_arguments(family, **call)))


def check(pool: RankPool, family: str, fields: dict[str, int], call: dict[str, Any], exact: bool = False) -> None:
    expected = expected_of(family, call, fields.get("num_patches", 1))
    values = pool.run(painted, family, fields, call, timeout=30)
    for value in values:
        assert value.shape == expected.shape
        assert torch.equal(value, values[0]), "ranks differ"
    assert relative_error(values[0], expected) < 1e-5
    assert not exact or torch.equal(values[0], expected)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_branches_on_two_ranks(pool2: RankPool, family: str, batch: int) -> None:
    # a call that is computed whole by one rank is the same to the bit
    check(pool2, family, {"cfg_degree": 2}, {"batch": batch}, exact=batch == 1 and family in SEQUENTIAL)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_branches_on_three_ranks(pool3: RankPool, family: str, batch: int) -> None:
    check(pool3, family, {"cfg_degree": 3}, {"batch": batch}, exact=batch == 1 and family in SEQUENTIAL)


@pytest.mark.parametrize(
    "fields",
    [
        {"cfg_degree": 2, "ulysses_degree": 2},
        {"cfg_degree": 2, "ring_degree": 2},
        {"cfg_degree": 2, "pipefusion_degree": 2, "num_patches": 3},
        {"dp_degree": 2, "cfg_degree": 2},
        {"dp_degree": 2, "ulysses_degree": 2},
        {"dp_degree": 2, "pipefusion_degree": 2, "num_patches": 3},
    ],
    ids=lambda fields: "-".join(f"{k[:3]}{v}" for k, v in fields.items()),
)
@pytest.mark.parametrize("family", FAMILIES)
def test_hybrids(pool4: RankPool, family: str, fields: dict[str, int]) -> None:
    check(pool4, family, fields, {"batch": 2})


@pytest.mark.parametrize("batch", [2, 3, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_over_dp_keep_count_order_and_pixels(pool2: RankPool, family: str, batch: int) -> None:
    check(pool2, family, {"dp_degree": 2}, {"batch": batch})


def several_per_prompt(prompts: int, generators: str) -> torch.Tensor:
    """Two pictures per prompt with one generator, a list, or none; the global seed differs by rank."""
    with Parallel(pipeline("qwen"), EngineConfig(timeout=25, dp_degree=2)) as parallel:
        return several(parallel, prompts, generators, 5 + dist.get_rank())


def several(pipe: Any, prompts: int, generators: str, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    lists = [torch.Generator().manual_seed(i) for i in range(2 * prompts)]
    generator = {"one": torch.Generator().manual_seed(1), "list": lists, "none": None}[generators]
    call = call_arguments("qwen", batch=prompts, generator=generator, num_images_per_prompt=2)
    return tensor(pipe(**call))


@pytest.mark.parametrize("generators", ["one", "list", "none"])
@pytest.mark.parametrize("prompts", [1, 3])
def test_several_pictures_per_prompt(pool2: RankPool, prompts: int, generators: str) -> None:
    expected = several(pipeline("qwen"), prompts, generators, 5)
    assert expected.shape[0] == 2 * prompts
    for value in pool2.run(several_per_prompt, prompts, generators):
        assert relative_error(value, expected) < 1e-5


def counted(family: str, fields: dict[str, int], call: dict[str, Any]) -> tuple[int, list[int], dict[str, int], int]:
    """Forwards of the first block, their rows, exchanges, and elements sent."""
    rows: list[int] = []
    pipe = pipeline(family)
    block = next(m for m in pipe.transformer.modules() if isinstance(m, torch.nn.ModuleList))[0]

    def note(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows.append((args[0] if args else kwargs["hidden_states"]).shape[0])

    block.register_forward_pre_hook(note, with_kwargs=True)
    with Parallel(pipe, EngineConfig(timeout=25, **fields)) as parallel, recorded() as recorder:
        parallel(**call_arguments(family, **{"output_type": "latent", **call}))
    assert recorder.calls.pop("agreement") == 2  # at the start and at the end, none in a step
    recorder.elements.pop("agreement")
    return len(rows), rows, dict(recorder.calls), sum(recorder.elements.values())


@pytest.mark.parametrize("family", SEQUENTIAL)
def test_a_rank_computes_half_of_two_sequential_branches_and_exchanges_once_a_step(
    pool2: RankPool, family: str
) -> None:
    latent = {"flux": 24 * 16, "qwen": 24 * 16, "wan": 4 * 3 * 6 * 10}[family]
    for forwards, rows, calls, elements in pool2.run(counted, family, {"cfg_degree": 2}, {"batch": 2}):
        assert forwards == 4 and set(rows) == {2}
        assert calls == {"all_gather": 4} and elements == 4 * 2 * latent


def test_a_rank_computes_half_the_rows_of_two_batched_branches(pool2: RankPool) -> None:
    for forwards, rows, calls, elements in pool2.run(counted, "sd3", {"cfg_degree": 2}, {}):
        assert forwards == 4 and set(rows) == {1}
        assert calls == {"all_gather": 4} and elements == 4 * 4 * 6 * 9


def test_a_rank_computes_its_pictures_alone(pool2: RankPool) -> None:
    for _, rows, calls, _ in pool2.run(counted, "flux", {"dp_degree": 2}, {"batch": 2}):
        assert set(rows) == {1} and len(rows) == 8 and calls == {"all_gather": 8}


def guidance_that_changes(name: str) -> float:
    """Guidance that is off, on in an interval, or turned off by a callback; a first result that is sliced or read."""
    family, call = "wan", {"steps": 5}
    if name == "off":
        call |= {"guidance_scale": 1.0}
    elif name == "callback":
        call |= {"callback_on_step_end": turn_off}
    elif name == "batched callback":
        family = "sd3"
        names = ["latents", "prompt_embeds", "pooled_prompt_embeds"]
        call |= {"callback_on_step_end": drop_half, "callback_on_step_end_tensor_inputs": names}
    elif name == "three calls":
        family, call = "sd3", {"steps": 5, "skip_guidance_layers": [1], "skip_layer_guidance_start": 0.1}
        call |= {"skip_layer_guidance_stop": 0.9}
    elif name == "two denoisers":
        call |= {"guidance_scale_2": 3.0}
    pipes = [pipeline(family) for _ in range(2)]
    for pipe in pipes:
        if name == "two denoisers":
            pipe.register_modules(transformer_2=pipeline(family, layers=1).transformer)
            pipe.register_to_config(boundary_ratio=0.8)
        if name in ("sliced", "read"):
            adapt(pipe.transformer, name)
    expected = tensor(pipes[0](**call_arguments(family, **call)))
    with Parallel(pipes[1], EngineConfig(timeout=25, cfg_degree=2)) as parallel:
        return relative_error(tensor(parallel(**call_arguments(family, **call))), expected)


def turn_off(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    if step == 2:
        pipe._guidance_scale = 1.0
    return tensors


def drop_half(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    if step != 1:
        return tensors
    pipe._guidance_scale = 0.0
    return {name: x if name == "latents" else x.chunk(2)[1] for name, x in tensors.items()}


def adapt(model: Any, how: str) -> None:
    """Make the pipeline see an output that it slices and casts, or reads, before the second call."""
    call = type(model).__call__

    class Adapted(type(model)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            out = call(self, *args, **kwargs)[0]
            if how == "read":
                assert out.shape[0] == 1
            return (out[:, :4].to(torch.float32) * 1.0 + 0.0,)

        forward = type(model).forward

    model.__class__ = Adapted


@pytest.mark.parametrize(
    "name", ["off", "callback", "batched callback", "three calls", "two denoisers", "sliced", "read"]
)
def test_guidance_may_change_and_results_may_be_used_early(pool2: RankPool, name: str) -> None:
    assert max(pool2.run(guidance_that_changes, name, timeout=30)) < 1e-5


def variant_on_ranks(name: str, fields: dict[str, int]) -> float:
    pipes, more = zip(*(variant(name) for _ in range(2)), strict=True)
    expected = tensor(pipes[0](**call_arguments(**more[0])))
    with Parallel(pipes[1], EngineConfig(timeout=25, **fields)) as parallel:
        return relative_error(tensor(parallel(**call_arguments(**more[1]))), expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_edits_and_image_to_video_on_every_axis(pool2: RankPool, pool4: RankPool, name: str) -> None:
    for fields in ({"cfg_degree": 2}, {"ulysses_degree": 2}, {"ring_degree": 2}):
        assert max(pool2.run(variant_on_ranks, name, fields)) < 1e-5
    fields = {"cfg_degree": 2, "pipefusion_degree": 2, "num_patches": 2, "warmup_steps": 9}
    assert max(pool4.run(variant_on_ranks, name, fields)) < 1e-5


def perturbed(fields: dict[str, int], batch: int) -> float:
    """Perturbed-attention guidance: three branches in one call, of which a processor makes two and one."""
    errors = []
    for scale in (0.0, 4.0):  # with and without an unconditional branch
        pipes = []
        for _ in range(2):
            parts = {
                k: v for k, v in pipeline("sd3").components.items() if k not in ("image_encoder", "feature_extractor")
            }
            pipe = StableDiffusion3PAGPipeline(**parts, pag_applied_layers="blocks.1")
            pipe.set_progress_bar_config(disable=True)
            pipes.append(pipe)
        call = {"pag_scale": 2.0, "guidance_scale": scale, "batch": batch}
        expected = tensor(pipes[0](**call_arguments("sd3", **call)))
        with Parallel(pipes[1], EngineConfig(timeout=25, **fields)) as parallel:
            errors.append(relative_error(tensor(parallel(**call_arguments("sd3", **call))), expected))
    return max(errors)


@pytest.mark.parametrize("batch", [1, 2])
def test_three_batched_branches_of_a_processor_that_couples_them(pool2: RankPool, pool3: RankPool, batch: int) -> None:
    assert max(pool2.run(perturbed, {"cfg_degree": 2}, batch)) < 1e-5
    assert max(pool3.run(perturbed, {"cfg_degree": 3}, batch)) < 1e-5


def contexts_seen() -> tuple[float, list[str], list[str]]:
    """A pipeline with a guider, whose transformer has no plan: cache contexts seen where calls are computed."""
    pipes = [hunyuan_image() for _ in range(2)]
    expected = tensor(pipes[0](**hunyuan_image_arguments()))
    seen: list[str] = []
    model = pipes[1].transformer
    entered: list[str] = []
    cache_context = model.cache_context

    def noting(name: str, **kwargs: Any) -> Any:
        entered.append(name)
        return cache_context(name, **kwargs)

    model.cache_context = noting
    model.transformer_blocks[0].register_forward_pre_hook(lambda *_: seen.append(entered[-1]))
    with Parallel(pipes[1], EngineConfig(timeout=25, cfg_degree=2)) as parallel:
        error = relative_error(tensor(parallel(**hunyuan_image_arguments())), expected)
    return error, seen, entered


def test_guiders_and_cache_contexts_see_what_they_see_in_one_process(pool2: RankPool) -> None:
    for rank, (error, seen, entered) in enumerate(pool2.run(contexts_seen)):
        assert error < 1e-5
        assert entered == ["pred_cond", "pred_uncond"] * 3
        assert seen == [entered[rank]] * 3


def unplanned_batched() -> str:
    """A batched pipeline whose transformer has no plan is refused when it shows what it is."""
    pipe = pipeline("sd3")

    class Unplanned(type(pipe.transformer)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
            return super().forward(hidden_states, **kwargs)

    pipe.transformer.__class__ = Unplanned
    with Parallel(pipe, EngineConfig(timeout=25, cfg_degree=2)) as parallel:
        try:
            parallel(**call_arguments("sd3"))
        except NotImplementedError as error:
            return str(error)
    return "nothing was refused"


def test_batched_branches_without_a_plan_are_refused(pool2: RankPool) -> None:
    for text in pool2.run(unplanned_batched):
        assert "Unplanned is called with 2 rows for 1 picture" in text


def warnings_of_two_calls() -> list[str]:
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collect()
    logging.getLogger("xpar").addHandler(handler)
    with Parallel(pipeline("wan"), EngineConfig(timeout=25, cfg_degree=2)) as parallel:
        for scale in (4.0, 1.0, 1.0):
            parallel(**call_arguments("wan", guidance_scale=scale))
    logging.getLogger("xpar").removeHandler(handler)
    return messages


def test_an_idle_axis_is_said_once_on_the_main_rank(pool2: RankPool) -> None:
    first, second = pool2.run(warnings_of_two_calls)
    assert len(first) == 1 and "cfg_degree > 1" in first[0] and second == []


def refusals() -> tuple[list[str], dict[str, int]]:
    texts = []
    with Parallel(pipeline("flux"), EngineConfig(timeout=25, dp_degree=2)) as parallel, recorded() as recorder:
        generators = [torch.Generator() for _ in range(3)]
        for call in (
            {"batch": 1},
            {"batch": 2, "generator": generators},
            {"batch": 2, "latents": torch.zeros(3, 24, 16)},
        ):
            try:
                parallel(**call_arguments("flux", **call))
            except ValueError as error:
                texts.append(str(error))
    return texts, dict(recorder.calls)


def test_bad_batches_are_refused_before_anything_is_sent(pool2: RankPool) -> None:
    for texts, calls in pool2.run(refusals):
        assert "dp_degree(2) is more than the 1 picture" in texts[0]
        assert "generator is a list of 3, but the call makes 2" in texts[1]
        assert "latents have 3 rows" in texts[2]
        assert calls == {}
