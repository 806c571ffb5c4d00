"""What a pipeline call may ask for, checked on every rank before anything of the call is communicated.

Refused is what the plain pipeline could not compute either; what is not certain to be wrong is left to the pipeline.
"""

from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from xpar.config import EngineConfig
from xpar.errors import ConfigError
from xpar.wrappers.pipelines.dry_run import own_check, strings_in_call
from xpar.wrappers.pipelines.latents import check_latents, check_patches
from xpar.wrappers.pipelines.pictures import PER_PROMPT, check_pictures

_OUTPUT_TYPES = ("pil", "np", "pt", "latent")
_SIZES = ("height", "width", "num_frames")
_BATCHES = ("prompt", "prompt_embeds", "class_labels", "latents")
# What pipelines say whose steps after `strength` must not be none; others then return their input.
_NEEDS_STEPS = "After adjusting the num_inference_steps by strength parameter: "


def check_call(pipe: Any, arguments: Mapping[str, Any], config: EngineConfig) -> int | None:
    """Check the arguments of a pipeline call.

    Args:
        pipe: the pipeline.
        arguments: what it is called with, by name; its defaults need not be among them.
        config: how many ranks share the pictures, and into how many patches those are cut.

    Returns:
        Number of pictures (videos, sounds) of the call; None if no argument tells.

    Raises:
        ConfigError, UnsupportedError: the call cannot be computed; the text names the argument, its value, the rule
            and the fix.
    """
    _check_batches(arguments)
    _check_sizes(arguments)
    _check_steps(pipe, arguments)
    _check_output_type(pipe, arguments)
    checked = own_check(pipe, arguments)
    pictures = check_pictures(dict(arguments), config.dp_degree)
    if checked is not None and pictures is not None:
        check_latents(pipe, arguments, checked, pictures)
        check_patches(pipe, arguments, checked, pictures, config.patches)
    return pictures


def _check_batches(arguments: Mapping[str, Any]) -> None:
    for name in _BATCHES:
        value = arguments.get(name)
        if isinstance(value, (list, tuple, torch.Tensor)) and not isinstance(value, str) and _is_empty(value):
            shown = f"a tensor of shape {tuple(value.shape)}" if torch.is_tensor(value) else repr(value)
            raise ConfigError(f"{name} is {shown}: a call makes at least one picture; pass at least one entry")
    for name in PER_PROMPT:
        value = arguments.get(name)
        if isinstance(value, Real) and value < 1:
            raise ConfigError(f"{name}={value!r}: must be at least 1; leave it out for one")


def _is_empty(value: Any) -> bool:
    return value.shape[:1] == (0,) if torch.is_tensor(value) else not value


def _check_sizes(arguments: Mapping[str, Any]) -> None:
    for name in _SIZES:
        value = arguments.get(name)
        if value is not None and not isinstance(value, Real):
            raise ConfigError(f"{name}={value!r} ({type(value).__name__}): must be a number; pass an int")


def _check_steps(pipe: Any, arguments: Mapping[str, Any]) -> None:
    steps = arguments.get("num_inference_steps")
    has_own = any(arguments.get(name) is not None for name in ("timesteps", "sigmas"))
    is_number = isinstance(steps, Real) or torch.is_tensor(steps)
    if steps is not None and not has_own and (not is_number or steps < 1):
        raise ConfigError(f"num_inference_steps={steps!r}: must be a number of steps >= 1; pass 1 or more")
    strength = arguments.get("strength")
    if isinstance(strength, Real) and strength == 0 and _NEEDS_STEPS in strings_in_call(pipe):
        raise ConfigError(
            f"strength={strength!r} leaves none of the num_inference_steps, and {type(pipe).__name__} needs one; "
            "pass a strength above 0"
        )


def _check_output_type(pipe: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse an output type that nothing in diffusers gives; image processors take it for "np", with a warning."""
    value = arguments.get("output_type", "pil")
    # A pipeline from elsewhere may have its own, and one of diffusers too ("latents" in a few).
    if value in _OUTPUT_TYPES or not type(pipe).__call__.__module__.startswith("diffusers."):
        return
    if value is None or value not in strings_in_call(pipe):
        raise ConfigError(f"output_type={value!r} is unknown; choose one of {', '.join(map(repr, _OUTPUT_TYPES))}")
