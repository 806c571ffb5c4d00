"""The check of a call's arguments: what it leaves alone, and what it relies on in diffusers."""

import ast
import logging
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    FlowMatchLCMScheduler,
    FluxPipeline,
    UniPCMultistepScheduler,
)

from tests.tiny_models import (
    FAMILIES,
    VARIANTS,
    call_arguments,
    hunyuan_image,
    hunyuan_image_arguments,
    pipeline,
    variant,
)
from xpar import ConfigError, EngineConfig, Parallel
from xpar.wrappers.pipelines.call_checks import check_call
from xpar.wrappers.pipelines.dry_run import changes_size_later, own_check

# What pipelines do before they check their inputs: nothing that encodes or draws.
_BEFORE_THE_CHECK = {
    "classify_height_width_bin",
    "get_default_height_width",
    "get_default_resolution",
    "preprocess_video",
    "resize_center_crop",
    "to",
}


def legal_calls() -> list[tuple[str, Any, dict[str, Any]]]:
    calls = [(family, pipeline(family), call_arguments(family)) for family in FAMILIES]
    calls.append(("hunyuan image", hunyuan_image(), hunyuan_image_arguments()))
    for name in VARIANTS:
        pipe, more = variant(name)
        calls.append((name, pipe, call_arguments(more.pop("family"), **more)))
    return calls


def test_legal_calls_pass_and_are_left_as_they_were() -> None:
    for name, pipe, arguments in legal_calls():
        before, state, drawn = dict(pipe.__dict__), arguments["generator"].get_state(), torch.get_rng_state()
        assert check_call(pipe, arguments, EngineConfig()) == 1, name
        assert pipe.__dict__ == before and torch.equal(torch.get_rng_state(), drawn)
        assert torch.equal(arguments["generator"].get_state(), state)


@pytest.mark.parametrize("kind", ["pil", "np", "pt", "latent"])
def test_output_types_of_diffusers_are_known(kind: str) -> None:
    for name, pipe, arguments in legal_calls():
        assert check_call(pipe, {**arguments, "output_type": kind}, EngineConfig()) == 1, name


def test_a_pipeline_of_the_users_own_may_have_its_own_output_type() -> None:
    pipe = pipeline("flux")

    class OwnPipeline(type(pipe)):  # type: ignore[misc]
        def __call__(self, *args: Any, output_type: str = "tiff", **kwargs: Any) -> Any:
            return super().__call__(*args, output_type="np", **kwargs)

    pipe.__class__ = OwnPipeline
    assert check_call(pipe, call_arguments("flux", output_type="tiff"), EngineConfig()) == 1


def test_steps_that_come_from_sigmas_need_no_number() -> None:
    assert check_call(pipeline("flux"), call_arguments("flux", steps=0, sigmas=[1.0, 0.5]), EngineConfig()) == 1


def test_a_pipeline_says_what_it_says_once(caplog: pytest.LogCaptureFixture) -> None:
    """FLUX takes a height that it cannot paint, with a warning."""
    pipe, logger = pipeline("flux"), logging.getLogger("diffusers")
    logger.addHandler(caplog.handler)
    try:
        check_call(pipe, call_arguments("flux", height=17), EngineConfig())
        assert not caplog.records
        pipe(**call_arguments("flux", height=17))
        assert "divisible by 4 but are 17" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


def test_the_check_sees_the_sizes_that_the_pipeline_fills_in() -> None:
    pipe = pipeline("sd3")
    arguments = call_arguments("sd3")
    del arguments["height"], arguments["width"]
    checked = own_check(pipe, arguments)
    assert checked is not None
    assert checked["height"] == checked["width"] == pipe.default_sample_size * pipe.vae_scale_factor


class Hasty(FluxPipeline):
    """Encodes before it checks, which its code does not show."""

    def __call__(self, prompt: Any = None, is_checked: bool = False) -> Any:
        if is_checked:
            self.check_inputs(prompt)
        return self.encode_prompt(prompt)


def test_a_pipeline_that_comes_to_work_before_its_check_is_stopped_there() -> None:
    pipe = pipeline("flux")
    pipe.__class__ = Hasty
    with patch.object(FluxPipeline, "encode_prompt", side_effect=AssertionError("it was run")):
        assert own_check(pipe, {"prompt": "a fox"}) is None


def test_latents_that_are_packed_later_are_not_held_against_their_size() -> None:
    assert not changes_size_later(pipeline("flux"))
    assert changes_size_later(pipeline("wan"))


def test_latents_of_a_size_of_their_own_pass() -> None:
    for family, shape in (
        ("sd3", (1, 4, 7, 8)),
        ("wan", (1, 4, 5, 4, 6)),
        ("flux", (1, 24, 16)),
        ("qwen", (1, 24, 16)),
    ):
        assert check_call(pipeline(family), call_arguments(family, latents=torch.zeros(shape)), EngineConfig()) == 1
    with pytest.raises(ConfigError, match=r"works with \(1, 24, 16\) for 1 picture"):
        check_call(pipeline("flux"), call_arguments("flux", latents=torch.zeros(1, 24, 17)), EngineConfig())


def test_nothing_is_computed_before_a_pipeline_checks_its_inputs() -> None:
    """The check runs the pipelines' own code up to there; a release of diffusers that encodes first must be noticed."""
    root, found = Path(diffusers.__file__).parent / "pipelines", 0
    for path in sorted(root.rglob("pipeline_*.py")):
        text = path.read_text(encoding="utf-8")
        if "self.transformer" not in text or "self.check_inputs(" not in text:
            continue
        for call in (node for node in ast.walk(ast.parse(text)) if getattr(node, "name", "") == "__call__"):
            before = _methods_before_the_check(call)  # type: ignore[arg-type]
            if before is not None:
                assert before <= _BEFORE_THE_CHECK, f"{path.name}: {before - _BEFORE_THE_CHECK}"
                found += 1
    assert found > 100


def _methods_before_the_check(call: ast.FunctionDef) -> set[str] | None:
    """Methods of the pipeline and its parts that are called before `check_inputs`; None if it is not called."""
    methods: set[str] = set()
    for statement in call.body:
        names = {
            node.func.attr
            for node in ast.walk(statement)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func).startswith("self.")
        }
        if "check_inputs" in names:
            return methods
        methods |= names
    return None


# Legal whatever the scheduler: the loop is the pipeline's own.
SCHEDULERS = {
    "euler": FlowMatchEulerDiscreteScheduler(shift=3.0),
    "heun": FlowMatchHeunDiscreteScheduler(),
    "lcm": FlowMatchLCMScheduler(),
    "unipc": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    "dpm": DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_scheduler_runs_patch_by_patch(name: str) -> None:
    """Also with more steps of warm-up than steps, which is one process to the last bit."""
    pipe = pipeline("wan")
    pipe.scheduler = SCHEDULERS[name]
    call = {"output_type": "latent", "steps": 5}
    torch.manual_seed(3)  # some schedulers draw, from the default generator
    expected = pipe(**call_arguments("wan", **call))[0]
    for warmup, limit in ((20, 0.0), (1, 0.3)):
        with Parallel(pipe, EngineConfig(num_patches=3, warmup_steps=warmup)) as parallel:
            torch.manual_seed(3)
            value = parallel(**call_arguments("wan", **call))[0]
        assert float((value - expected).norm() / expected.norm()) <= limit
