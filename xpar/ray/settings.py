"""What all groups of one `PipelineGroups` have in common, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import ray.cloudpickle

from xpar.config import EngineConfig
from xpar.errors import ConfigError

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """How each group is placed and built, and how long that and a call may take.

    Raises:
        ConfigError: a value does not fit.
    """

    recipe: bytes
    """The pickled pair of the user's `build` and `plans`."""

    config: EngineConfig
    """How the group spreads its pipeline."""

    bundle: dict[str, float]
    """What Ray reserves for each rank, by resource."""

    strategy: Strategy
    """How Ray places the ranks of the group."""

    start_timeout: float
    """Seconds for the group to be placed, and again for its pipelines to be built."""

    call_timeout: float
    """Seconds for a call."""

    def __post_init__(self) -> None:
        for name, amount in self.bundle.items():
            if type(amount) not in (int, float) or not 0 < amount < math.inf:
                raise ConfigError(
                    f"resources: {name}={amount!r}: must be a finite number > 0; leave out what is unused"
                )
        if not self.bundle:
            raise ConfigError("num_cpus=0: Ray places nothing that needs nothing; pass num_cpus=1")
        # A share of a GPU would be placed, and NCCL would then refuse two ranks on one GPU.
        check_choice("num_gpus", self.bundle.get("GPU", 0), (0, 1), "each rank drives one GPU or none")
        check_choice("strategy", self.strategy, get_args(Strategy), "Ray knows no others")
        for name in ("start_timeout", "call_timeout"):
            seconds = getattr(self, name)
            if type(seconds) not in (int, float) or not 0 < seconds < math.inf:
                raise ConfigError(f"{name}={seconds!r}: must be a finite number of seconds > 0; the default is longer")


def bundle_of(num_cpus: float, num_gpus: int, resources: Mapping[str, float] | None) -> dict[str, float]:
    """Ray's resources of one rank under one roof; zeros are left out."""
    bundle = {"CPU": num_cpus, "GPU": num_gpus, **(resources or {})}
    return {name: amount for name, amount in bundle.items() if amount != 0}


def pickled(what: str, value: Any) -> bytes:
    """`value` as bytes for the actors.

    Raises:
        ConfigError: it cannot be pickled.
    """
    try:
        return bytes(ray.cloudpickle.dumps(value))
    except Exception as error:  # whatever the object's own reduction raises
        raise ConfigError(
            f"{what}: cannot be pickled for the actors ({type(error).__name__}: {error}); leave out open files, locks, "
            "loaded models and what lives on a GPU"
        ) from error


def check_int(name: str, value: object, minimum: int) -> None:
    """Raise `ConfigError` unless `value` is an int of at least `minimum`."""
    if type(value) is not int or value < minimum:
        raise ConfigError(f"{name}={value!r}: must be an int >= {minimum}; the least is {name}={minimum}")


def check_choice(name: str, value: object, choices: tuple[object, ...], why: str) -> None:
    """Raise `ConfigError` unless `value` is one of `choices`."""
    if isinstance(value, bool) or value not in choices:
        raise ConfigError(f"{name}={value!r}: {why}; use one of {', '.join(map(str, choices))}")
