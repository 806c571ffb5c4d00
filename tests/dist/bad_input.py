"""What must be refused before anything is communicated: each function does one such thing on every rank.

A row returns the action that must raise. `refused` runs rows on a rank where every collective raises instead.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from diffusers.models.attention_processor import AttnProcessor
from torch import nn

from tests.tiny_models import bare_pipe, call_arguments, pipeline, transformer, variant
from xpar import EngineConfig, Parallel
from xpar.core.distributed.channel import Channel
from xpar.wrappers.models.flux import FLUX

Action = Callable[[], Any]

# Everything by which a rank could wait for another one.
_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce_scatter_tensor",
    "send",
)


@contextmanager
def silence(allowed: tuple[str, ...] = ()) -> Iterator[None]:
    """Have every communication raise inside, those allowed excepted."""
    with ExitStack() as stack:
        for name in set(_COLLECTIVES) - set(allowed):
            if hasattr(dist, name):
                error = AssertionError(f"{name} was called before the refusal")
                stack.enter_context(patch.object(dist, name, side_effect=error))
        error = AssertionError("a message was sent before the refusal")
        stack.enter_context(patch.object(Channel, "send", side_effect=error))
        yield


def refused(action: Action, allowed: tuple[str, ...] = ()) -> tuple[str, list[str], float]:
    """What an action raises with all communication forbidden: its text, its classes, and the seconds of work
    it took: the clock of the wall would tell how busy the machine is."""
    start = time.process_time()
    try:
        with silence(allowed):
            action()
    except Exception as error:
        return str(error), [cls.__name__ for cls in type(error).__mro__], time.process_time() - start
    return "nothing was refused", [], time.process_time() - start


def config(**fields: Any) -> EngineConfig:
    """Two ranks, ulysses unless the fields say otherwise."""
    return EngineConfig(**({"ulysses_degree": 2} | {"timeout": 25} | fields))


def stages(**fields: Any) -> EngineConfig:
    """Two stages of PipeFusion."""
    return config(ulysses_degree=1, pipefusion_degree=2, **fields)


# Constructions: name -> (pipe, arguments of Parallel).


def wrap(pipe: Any, settings: Any = None, **more: Any) -> Action:
    return lambda: Parallel(pipe, settings or config(), **more)


def wrong_product() -> Action:
    return wrap(pipeline("flux"), config(ring_degree=2))


def more_stages_than_blocks() -> Action:
    return wrap(bare_pipe(transformer("wan", layers=1)), stages())


def no_pipeline() -> Action:
    return wrap(nn.Linear(1, 1))


def a_dict_for_config() -> Action:
    return wrap(pipeline("flux"), {"ulysses_degree": 2})


def no_transformer() -> Action:
    pipe = bare_pipe(transformer("flux"))
    pipe.components = {"unet": pipe.transformer}
    return wrap(pipe)


class MyTransformer(nn.Module):
    """A transformer that nobody has a plan for."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


def unknown_transformer() -> Action:
    return wrap(bare_pipe(MyTransformer()))


def plan_for_a_name() -> Action:
    return wrap(pipeline("flux"), plans={"FluxTransformer2DModel": FLUX})


def plan_key_that_matches_nothing() -> Action:
    pipe = pipeline("flux")
    return wrap(pipe, plans={type(pipe.transformer): replace(FLUX, streams=("hidden",))})


def own_attention() -> Action:
    pipe = pipeline("sd3")
    pipe.transformer.transformer_blocks[1].attn.set_processor(AttnProcessor())
    return wrap(pipe)


def own_attention_backend() -> Action:
    pipe = pipeline("flux")
    for module in pipe.transformer.modules():
        if getattr(module, "processor", None) is not None:
            module.processor._attention_backend = "sage"
    return wrap(pipe)


def unknown_autoencoder() -> Action:
    class Upscaler(nn.Module):
        def encode(self, x: Any) -> Any:
            return x

        def decode(self, x: Any) -> Any:
            return x

    pipe = pipeline("flux")
    pipe.register_modules(vae=Upscaler())
    return wrap(pipe, config(vae_parallel="exact"))


def wrapped_already() -> Action:
    pipe = pipeline("flux")
    open_objects.append(Parallel(pipe, config()))
    return wrap(pipe)


def device_map() -> Action:
    pipe = pipeline("flux")
    pipe.hf_device_map = {"transformer": 0}
    return wrap(pipe)


def sequential_offload() -> Action:
    pipe = pipeline("flux")
    pipe.transformer.to("meta")  # where accelerate keeps the weights between calls
    return wrap(pipe)


class Quantised(nn.Parameter):
    """A weight that is no plain tensor."""

    def __new__(cls, data: torch.Tensor) -> Any:
        return torch.Tensor._make_subclass(cls, data, False)


def quantised_layer() -> Action:
    pipe = pipeline("flux")  # the last block, which the last stage keeps: the first one alone would have to refuse
    linear = pipe.transformer.single_transformer_blocks[-1].proj_out
    linear.weight = Quantised(linear.weight.data)
    return wrap(pipe, stages())


def backend_for_another_device() -> Action:
    return wrap(pipeline("flux"), config(attention_backend="flash_attn3"))


# Calls. The object is made first, in which ranks do communicate; only the call must not.


def call(family: str, settings: EngineConfig | None = None, **arguments: Any) -> Action:
    """A call of a tiny pipeline; arguments that are None are left out."""
    return call_of(pipeline(family), settings, **call_arguments(family, **arguments))


def call_of(pipe: Any, settings: EngineConfig | None = None, **arguments: Any) -> Action:
    parallel = Parallel(pipe, settings or config())
    open_objects.append(parallel)
    return lambda: parallel(**{name: value for name, value in arguments.items() if value is not None})


# What rows have wrapped, closed after each of them. Ranks are processes of their own.
open_objects: list[Parallel] = []


def dp_more_than_batch() -> Action:
    return call("flux", config(ulysses_degree=1, dp_degree=2))


def generators_of_another_number() -> Action:
    return call("flux", batch=2, generator=[torch.Generator() for _ in range(3)])


def unknown_keyword() -> Action:
    return call("flux", guidance_scales=3.5)


def prompt_and_embeds() -> Action:
    return call("flux", prompt="a fox")


def neither_prompt_nor_embeds() -> Action:
    return call("sd3", prompt_embeds=None, pooled_prompt_embeds=None)


def neither_under_dp() -> Action:
    return call("wan", config(ulysses_degree=1, dp_degree=2), prompt_embeds=None)


def empty_prompts() -> Action:
    return call("qwen", prompt=[], prompt_embeds=None, prompt_embeds_mask=None)


def empty_embeds() -> Action:
    return call("wan", prompt_embeds=torch.zeros(0, 7, 16))


def no_pictures() -> Action:
    return call("flux", num_images_per_prompt=0)


def unknown_output_type() -> Action:
    return call("flux", output_type="jpeg")


def unknown_video_output_type() -> Action:
    return call("wan", stages(), output_type="mp4")


def latents_of_too_many_tokens() -> Action:
    return call("flux", latents=torch.zeros(1, 25, 16))


def latents_not_packed() -> Action:
    return call("qwen", latents=torch.zeros(1, 4, 8, 12))


def latents_of_other_channels() -> Action:
    return call("sd3", latents=torch.zeros(1, 5, 6, 9))


def latents_of_other_rows() -> Action:
    return call("wan", latents=torch.zeros(2, 4, 3, 6, 10))


def latents_of_a_picture_for_a_video() -> Action:
    return call("wan", latents=torch.zeros(1, 4, 6, 10))


def more_patches_than_tokens() -> Action:
    return call("flux", stages(num_patches=25))


def more_patches_than_tokens_of_a_picture() -> Action:
    return call("sd3", stages(num_patches=8), height=2, width=14)


def more_patches_than_tokens_of_a_video() -> Action:
    return call("wan", stages(num_patches=46))


def height_in_words() -> Action:
    return call("flux", height="tall")


def no_steps() -> Action:
    return call("flux", steps=0)


def negative_steps() -> Action:
    return call("wan", stages(), steps=-1)


def steps_in_words() -> Action:
    return call("sd3", steps="four")


def no_steps_after_strength() -> Action:
    pipe, more = variant("flux img2img")
    return call_of(pipe, **call_arguments(more.pop("family"), **{**more, "strength": 0.0}))


def strength_above_one() -> Action:
    pipe, more = variant("flux inpaint")
    return call_of(pipe, **call_arguments(more.pop("family"), **{**more, "strength": 1.5}))


def height_that_does_not_divide() -> Action:
    return call("sd3", height=13)


def width_that_does_not_divide() -> Action:
    return call("wan", stages(), width=81)


def callback_tensors_that_are_none() -> Action:
    return call("flux", callback_on_step_end_tensor_inputs=["noise"])
