"""The wrapper object: attributes, undo, use after close."""

import logging
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler

from tests.tiny_models import call_arguments, pipeline, relative_error, transformer
from xpar import EngineConfig, Parallel, XparError
from xpar.errors import UnsupportedError

PATCHED = EngineConfig(num_patches=3)


def test_attributes_are_the_pipelines_to_read_and_to_set() -> None:
    pipe = pipeline("flux")
    with Parallel(pipe, PATCHED) as parallel:
        assert parallel.pipe is pipe and parallel.vae is pipe.vae and parallel.to(torch.float32) is parallel
        scheduler = FlowMatchEulerDiscreteScheduler(shift=2.0)
        parallel.scheduler = scheduler
        assert pipe.scheduler is scheduler
        with pytest.raises(UnsupportedError, match="transformer is wrapped"):
            parallel.transformer = transformer("flux")
        with pytest.raises(AttributeError):
            _ = parallel.no_such_attribute


def test_a_second_order_scheduler_set_on_the_wrapper_runs_in_every_patch() -> None:
    pipe = pipeline("sd3")
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    expected = pipe(**call_arguments("sd3"))[0]
    with Parallel(pipe, EngineConfig(num_patches=3, warmup_steps=8)) as parallel:
        parallel.scheduler = FlowMatchHeunDiscreteScheduler()
        assert torch.equal(parallel(**call_arguments("sd3"))[0], expected)
    with Parallel(pipe, PATCHED) as parallel:
        assert relative_error(parallel(**call_arguments("sd3"))[0], expected) < 0.1


def test_arguments_may_be_positional_and_unknown_ones_are_refused() -> None:
    pipe = pipeline("wan")
    call = call_arguments("wan")
    names = ("prompt", "negative_prompt", "height", "width", "num_frames")
    positional: list[Any] = [None, None, *(call.pop(name) for name in names[2:])]
    with Parallel(pipe, PATCHED) as parallel:
        first = torch.as_tensor(parallel(*positional, **call)[0])
        again = torch.as_tensor(parallel(**call_arguments("wan"))[0])
        assert torch.equal(first, again)
        with pytest.raises(TypeError, match="no_such_argument"):
            parallel(no_such_argument=1)


def test_output_types_are_the_pipelines_own() -> None:
    pipe = pipeline("flux")
    with Parallel(pipe, PATCHED) as parallel:
        image = parallel(**call_arguments("flux", output_type="pil", return_dict=True)).images[0]
        assert image.size == (24, 16)
        latents = parallel(**call_arguments("flux", output_type="latent"))[0]
        assert latents.shape == (1, 24, 16)


def test_a_wrapped_pipeline_is_refused_and_can_be_wrapped_again_once_closed() -> None:
    pipe = pipeline("flux")
    first = Parallel(pipe, PATCHED)
    with pytest.raises(UnsupportedError, match="wrapped already"):
        Parallel(pipe, PATCHED)
    first.close()
    first.close()
    with pytest.raises(XparError, match="closed"):
        first(**call_arguments("flux"))
    with Parallel(pipe, PATCHED) as second:
        second(**call_arguments("flux"))


def test_closing_gives_back_processors_forwards_blocks_and_keys(caplog: pytest.LogCaptureFixture) -> None:
    pipe = pipeline("flux")
    model = pipe.transformer
    before = (
        dict(model.attn_processors),
        [module.forward for module in model.modules()],
        list(model.modules()),
        list(model.state_dict()),
        [len(module._forward_pre_hooks) for module in model.modules()],
    )
    with caplog.at_level(logging.WARNING, "xpar"), Parallel(pipe, PATCHED) as parallel:
        parallel(**call_arguments("flux"))
        assert list(model.state_dict()) == before[3]
    after = (
        dict(model.attn_processors),
        [module.forward for module in model.modules()],
        list(model.modules()),
        list(model.state_dict()),
        [len(module._forward_pre_hooks) for module in model.modules()],
    )
    assert after == before and not caplog.records


def test_grad_mode_and_autocast_of_the_caller_hold_in_every_patch() -> None:
    pipe = pipeline("flux")
    dtypes: list[tuple[bool, bool]] = []

    def note(*_: Any) -> None:
        dtypes.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    handle = pipe.transformer.norm_out.register_forward_hook(note)
    with Parallel(pipe, EngineConfig(num_patches=3, warmup_steps=0)) as parallel, torch.autocast("cpu", torch.bfloat16):
        parallel(**call_arguments("flux"))
    handle.remove()
    assert set(dtypes) == {(False, True)}
