"""`EngineConfig`: how one pipeline is spread over processes."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

from xpar.config import arguments
from xpar.errors import ConfigError

VaeParallel = Literal["exact", "tile", "off"]
CheckFinite = Literal["off", "end", "step"]
AttentionBackend = Literal["auto", "cpu", "math", "flash", "efficient", "cudnn", "flash_attn2", "flash_attn3"]

# Order of the axes of the rank grid, outermost first (ranks that differ in the last axis are neighbours).
_DEGREES = ("dp_degree", "cfg_degree", "pipefusion_degree", "ring_degree", "ulysses_degree")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How one pipeline is spread over processes.

    The product of the five degrees is the number of processes. Every field is also a command-line flag
    (`add_arguments`, `from_arguments`); the line under a field is its help text.

    Raises:
        ConfigError: a field has a wrong type or value. Types are exact: `True`, `"2"` and `2.0` are refused.
    """

    ulysses_degree: int = 1
    """Split the attention heads over this many processes (exact)."""

    ring_degree: int = 1
    """Split the keys and values over this many processes that pass them around a ring (exact)."""

    pipefusion_degree: int = 1
    """Split the transformer blocks into this many stages (approximate after the warm-up steps)."""

    cfg_degree: int = 1
    """Split the guidance branches over this many processes (exact)."""

    dp_degree: int = 1
    """Split the batch of prompts and images over this many processes (exact)."""

    num_patches: int | None = None
    """Patches that move through the pipefusion stages; None chooses twice the number of stages."""

    warmup_steps: int = 1
    """First steps that pipefusion runs on the whole sequence, exactly as one process would; 0 is legal."""

    vae_parallel: VaeParallel = "exact"
    """How the autoencoder is shared: exact splits the picture, tile deals diffusers' own tiles, off runs it whole."""

    attention_backend: AttentionBackend = "auto"
    """Local attention kernel; auto takes the fastest one that is right for the device and the mask."""

    timeout: float = 600.0
    """Seconds a communication may take before every process ends with an error."""

    check_finite: CheckFinite = "end"
    """When latents are checked for NaN and infinity; step says where they began but waits for the device each step."""

    verify_weights: bool = False
    """Compare the weights of all processes when the pipeline is wrapped (reads every weight once)."""

    def __post_init__(self) -> None:
        for name in _DEGREES:
            _check_int(name, getattr(self, name), minimum=1, fix="use 1 to leave this axis unsplit")
        if self.num_patches is not None:
            _check_int("num_patches", self.num_patches, minimum=1, fix="use None to have it chosen")
        _check_int("warmup_steps", self.warmup_steps, minimum=0, fix="use 0 for no warm-up")
        _check_choice("vae_parallel", self.vae_parallel, get_args(VaeParallel), fix='use "exact" if in doubt')
        _check_choice("attention_backend", self.attention_backend, get_args(AttentionBackend), 'use "auto" if in doubt')
        _check_choice("check_finite", self.check_finite, get_args(CheckFinite), fix='the default is "end"')
        if type(self.verify_weights) is not bool:
            raise _refuse("verify_weights", self.verify_weights, "must be True or False", "the default is False")
        _check_seconds("timeout", self.timeout)

    @property
    def degrees(self) -> dict[str, int]:
        """Degree by field name, in the order of the rank grid (outermost axis first)."""
        return {name: getattr(self, name) for name in _DEGREES}

    @property
    def world_size(self) -> int:
        """Number of processes that this configuration needs: the product of the degrees."""
        return math.prod(self.degrees.values())

    @property
    def patches(self) -> int:
        """Number of patches in use: `num_patches`, or a default that follows from the number of stages.

        One stage needs no patches. With N stages a stage has work at every moment once M >= N patches are
        under way; M = 2N leaves a second patch to compute while the first one is being sent, which hides
        the transfer. More patches only make the matrix products smaller.
        """
        if self.num_patches is not None:
            return self.num_patches
        return 1 if self.pipefusion_degree == 1 else 2 * self.pipefusion_degree

    def check_world_size(self, world_size: int) -> None:
        """Raise `ConfigError`, with the whole equation, unless the product of the degrees is `world_size`."""
        if world_size == self.world_size:
            return
        equation = " * ".join(f"{name}({degree})" for name, degree in self.degrees.items())
        raise ConfigError(
            f"{equation} = {self.world_size} does not equal the world size {world_size}; "
            f"launch {_processes(self.world_size)}, or change the degrees so that their product is "
            f"{world_size}, e.g. {self._suggestion(world_size)}"
        )

    def _suggestion(self, world_size: int) -> str:
        """Degrees whose product is `world_size` and that keep as much of this configuration as fits."""
        left, parts = world_size, []
        for name in ("pipefusion_degree", "cfg_degree", "dp_degree", "ring_degree"):
            kept = math.gcd(left, getattr(self, name))
            left //= kept
            if kept != 1:
                parts.append(f"{name}={kept}")
        parts.append(f"ulysses_degree={left}")
        others = " and the others 1" if len(parts) < len(_DEGREES) else ""
        return ", ".join(parts) + others

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add one flag for each field to `parser`, e.g. `--ulysses_degree`."""
        arguments.add_arguments(cls, parser)

    @classmethod
    def from_arguments(cls, namespace: argparse.Namespace) -> EngineConfig:
        """Build the configuration from parsed flags; attributes of `namespace` that are no field are ignored.

        Raises:
            ConfigError: a value is refused, or the namespace holds none of the fields.
        """
        values = {field.name: getattr(namespace, field.name) for field in fields(cls) if hasattr(namespace, field.name)}
        if not values:
            raise ConfigError(
                "namespace holds no field of EngineConfig; call EngineConfig.add_arguments(parser) before parsing"
            )
        return cls(**values)


def _processes(count: int) -> str:
    return f"{count} process{'es' if count != 1 else ''}"


def _refuse(name: str, value: object, rule: str, fix: str) -> ConfigError:
    return ConfigError(f"{name}={value!r} ({type(value).__name__}): {rule}; {fix}")


def _check_int(name: str, value: object, *, minimum: int, fix: str) -> None:
    # `type(...) is` and not isinstance: bool is an int, and True as a degree is a slip of the caller's.
    if type(value) is not int or value < minimum:
        raise _refuse(name, value, f"must be an int >= {minimum}", fix)


def _check_choice(name: str, value: object, choices: tuple[str, ...], fix: str) -> None:
    if type(value) is not str or value not in choices:
        raise _refuse(name, value, f"must be one of {', '.join(choices)}", fix)


def _check_seconds(name: str, value: object) -> None:
    if type(value) not in (int, float) or not 0 < value < math.inf:  # type: ignore[operator]
        raise _refuse(name, value, "must be a finite number of seconds > 0", "the default is 600")
