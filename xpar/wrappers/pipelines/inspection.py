"""What a pipeline is made of and what it is called with, checked before anything is communicated."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from xpar.config import EngineConfig
from xpar.errors import ConfigError, UnsupportedError
from xpar.wrappers.models import ModelPlan, find_plan

Denoisers = dict[str, tuple[nn.Module, ModelPlan]]


def find_denoisers(pipe: Any, config: EngineConfig, plans: Mapping[type, ModelPlan] | None) -> Denoisers:
    """The transformers of a pipeline that are to be wrapped, and their plans; none with all degrees 1.

    Raises:
        ConfigError: `config` is no EngineConfig.
        UnsupportedError: the pipeline or one of its transformers cannot be spread as asked.
    """
    if not isinstance(config, EngineConfig):
        raise ConfigError(f"config must be an EngineConfig, got {type(config).__name__}")
    if not hasattr(pipe, "components"):
        raise UnsupportedError(f"{type(pipe).__name__} is no diffusers pipeline: it has no components")
    if config.world_size == config.patches == 1:
        return {}
    _check_pipeline(pipe, config)
    denoisers = {
        name: module
        for name, module in pipe.components.items()
        if isinstance(module, nn.Module) and "transformer" in name
    }
    if not denoisers:
        raise UnsupportedError(
            f"{type(pipe).__name__} has no transformer component (it has {', '.join(pipe.components)}); "
            "only transformer pipelines can be spread"
        )
    for name, module in denoisers.items():
        if hasattr(module.forward, "xpar_owner"):
            raise UnsupportedError(f"{name} is wrapped already; close() the other Parallel object first")
        if any(parameter.is_meta for parameter in module.parameters()):
            raise UnsupportedError(f"{name} has weights on the meta device (sequential offload?); load them first")
    return _with_plans(denoisers, config, plans)


def _check_pipeline(pipe: Any, config: EngineConfig) -> None:
    if getattr(pipe, "hf_device_map", None):
        raise UnsupportedError("the pipeline is spread by device_map; load it without one, every rank holds it whole")
    if config.patches > 1 and getattr(pipe, "controlnet", None) is not None:
        raise UnsupportedError(
            "num_patches > 1 with a ControlNet, which would see latents of mixed noise levels; use num_patches=1, "
            "ulysses_degree or ring_degree"
        )


def _with_plans(
    denoisers: Mapping[str, nn.Module], config: EngineConfig, plans: Mapping[type, ModelPlan] | None
) -> Denoisers:
    # Guidance branches that are calls of their own need no plan; what a pipeline does shows only when it is called.
    only_branches = config.cfg_degree == config.world_size and config.patches == 1
    otherwise = ModelPlan.of_branches if only_branches else None
    planned = {name: (module, find_plan(module, plans, otherwise)) for name, module in denoisers.items()}
    for module, plan in planned.values():
        if plan.blocks and config.cfg_degree * config.dp_degree > 1:
            plan.check_batch(module)
    return planned


def bind_call(pipe: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a pipeline call by name, bound to the pipeline's own signature.

    Raises:
        TypeError: the pipeline takes no such argument.
    """
    signature = inspect.signature(type(pipe).__call__)
    arguments = dict(signature.bind(pipe, *args, **kwargs).arguments)
    arguments.pop(next(iter(signature.parameters)))
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
    return arguments
