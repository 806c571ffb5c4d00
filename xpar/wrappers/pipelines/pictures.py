"""What a pipeline call asks for, checked before anything is communicated."""

from typing import Any

import torch

from xpar.errors import ConfigError

PER_PROMPT = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")
_BATCHES = ("prompt", "prompt_embeds", "class_labels", "latents")


def count_pictures(arguments: dict[str, Any]) -> int | None:
    """Number of pictures (videos, sounds) that a pipeline call makes; None if no argument tells."""
    for name in _BATCHES:
        value = arguments.get(name)
        if value is None:
            continue
        count = 1 if isinstance(value, str) else len(value)
        per_prompt = 1 if name == "latents" else next((arguments[n] for n in PER_PROMPT if arguments.get(n)), 1)
        return count * per_prompt
    return None


def check_pictures(arguments: dict[str, Any], dp_degree: int) -> int | None:
    """Number of pictures of a call.

    Raises:
        ConfigError: fewer pictures than dp_degree, or a list of generators of another length.
    """
    pictures = count_pictures(arguments)
    if dp_degree > 1 and (pictures is None or pictures < dp_degree):
        found = "an unknown number of" if pictures is None else str(pictures)
        raise ConfigError(
            f"dp_degree({dp_degree}) is more than the {found} picture(s) of this call; pass more prompts or raise "
            f"num_images_per_prompt, or use dp_degree <= {pictures or 1}"
        )
    generator = arguments.get("generator")
    if isinstance(generator, (list, tuple)) and pictures is not None and len(generator) != pictures:
        raise ConfigError(
            f"generator is a list of {len(generator)}, but the call makes {pictures} picture(s); pass one generator "
            "for each picture, or a single one"
        )
    if isinstance(arguments.get("latents"), torch.Tensor) and pictures is not None and dp_degree > 1:
        rows = arguments["latents"].shape[0]
        if rows != pictures:
            raise ConfigError(f"latents have {rows} rows, but the call makes {pictures} picture(s)")
    return pictures
