"""Random legal calls of tiny pipelines in random layouts, and what one process makes of them."""

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.tiny_models import FAMILIES, call_arguments, pipeline
from xpar import ConfigError, EngineConfig, Parallel, UnsupportedError

SIDES = {"flux": 4, "sd3": 2, "qwen": 16, "wan": 16}  # pictures are multiples of it
GUIDED = {"flux": "true_cfg_scale", "sd3": "guidance_scale", "qwen": "true_cfg_scale", "wan": "guidance_scale"}
AXES = ("dp_degree", "cfg_degree", "pipefusion_degree", "ring_degree", "ulysses_degree")


@dataclass(frozen=True)
class Case:
    """A model, how it is spread, and a call."""

    family: str
    heads: int
    layers: int
    fields: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)

    @property
    def reference_fields(self) -> dict[str, Any]:
        """PipeFusion's result depends on its patches and warm-up, not on its stages: one process has those."""
        config = EngineConfig(**self.fields)
        return {"num_patches": config.patches, "warmup_steps": config.warmup_steps}

    def arguments(self) -> dict[str, Any]:
        """The arguments of the call; a fresh generator each time."""
        call = dict(self.call)
        if self.family == "wan":
            call["num_frames"] = call.pop("frames")
        else:
            call.pop("frames")
        if not call.pop("guided"):
            call[GUIDED[self.family]] = 1.0
        return call_arguments(self.family, **call)


def draw_layout(rng: random.Random, world: int) -> dict[str, Any]:
    """Degrees whose product is `world`, and what goes with them."""
    fields: dict[str, Any] = {}
    left = world
    while left > 1:
        axis = rng.choice(AXES)
        fields[axis] = fields.get(axis, 1) * 2
        left //= 2
    if rng.random() < 0.3 or "pipefusion_degree" in fields:
        fields["num_patches"] = rng.randint(1, 4)
        fields["warmup_steps"] = rng.randint(0, 4)
    fields["vae_parallel"] = rng.choice(("exact", "tile", "off"))
    return fields


def draw_call(rng: random.Random, family: str, pictures: int = 1) -> dict[str, Any]:
    """Any size, batch of at least some pictures, text length and number of steps; guidance or none."""
    side = SIDES[family]
    return {
        "text": rng.randint(1, 9) if family != "qwen" else rng.randint(4, 9),
        "batch": max(pictures, rng.randint(1, 3)),
        "steps": rng.randint(1, 4),
        "seed": rng.randint(0, 999),
        "height": side * rng.randint(2, 6),
        "width": side * rng.randint(2, 6),
        "frames": rng.choice((1, 5, 9)),
        "guided": rng.random() < 0.6,
        "output_type": rng.choice(("latent", "pt")),
    }


def draw_case(rng: random.Random, world: int) -> Case:
    """One of everything."""
    family = rng.choice(FAMILIES)
    return Case(family, rng.randint(1, 6), rng.randint(1, 3), draw_layout(rng, world), draw_call(rng, family))


def answer(case: Case, fields: dict[str, Any]) -> torch.Tensor | str:
    """The picture, or the text of a refusal, which must come in one of the two ways that say so."""
    pipe = pipeline(case.family, case.heads, case.layers)
    try:
        with Parallel(pipe, EngineConfig(timeout=30, **fields)) as parallel:
            return torch.as_tensor(parallel(**case.arguments())[0])
    except (ConfigError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
