"""What a pipeline is made of and what it is called with, checked before anything is communicated."""

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from xpar.config import EngineConfig
from xpar.core.long_ctx_attention.backends import check_backend
from xpar.errors import ConfigError, UnsupportedError
from xpar.wrappers.layers.stage import check_freeable, check_stages
from xpar.wrappers.models import ModelPlan, find_plan
from xpar.wrappers.pipelines.processors import check_processors
from xpar.wrappers.vae.plans import can_tile, find_vae_plan

Denoisers = dict[str, tuple[nn.Module, ModelPlan]]


def find_denoisers(pipe: Any, config: EngineConfig, plans: Mapping[type, ModelPlan] | None) -> Denoisers:
    """The transformers of a pipeline that are to be wrapped, and their plans; none with all degrees 1.

    Raises:
        ConfigError: `config` is no EngineConfig, `plans` no mapping of classes to plans, or there are too many stages.
        UnsupportedError: the pipeline or one of its transformers cannot be spread as asked.
    """
    if not isinstance(config, EngineConfig):
        raise ConfigError(f"config must be an EngineConfig, got {type(config).__name__}")
    if not hasattr(pipe, "components"):
        raise UnsupportedError(f"{type(pipe).__name__} is no diffusers pipeline: it has no components")
    if config.world_size == config.patches == 1:
        return {}
    _check_plans(plans)
    _check_pipeline(pipe, config)
    check_backend(config.attention_backend, pipe._execution_device, has_mask=False)
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
            raise UnsupportedError(
                f"{name} has weights on the meta device, as after enable_sequential_cpu_offload(); load them first, or "
                "call pipe.remove_all_hooks(), so that every rank holds them"
            )
    return _with_plans(denoisers, config, plans)


def _check_pipeline(pipe: Any, config: EngineConfig) -> None:
    if getattr(pipe, "hf_device_map", None):
        raise UnsupportedError("the pipeline is spread by device_map; load it without one, every rank holds it whole")
    if config.patches > 1 and getattr(pipe, "controlnet", None) is not None:
        raise UnsupportedError(
            "num_patches > 1 with a ControlNet, which would see latents of mixed noise levels; use num_patches=1, "
            "ulysses_degree or ring_degree"
        )
    vae = pipe.components.get("vae")
    if config.vae_parallel != "off" and config.world_size > 1 and hasattr(vae, "decode") and not can_tile(vae):
        find_vae_plan(vae, config.vae_parallel)


def _check_plans(plans: Any) -> None:
    if plans is None:
        return
    pairs = plans.items() if isinstance(plans, Mapping) else [(None, plans)]
    for cls, plan in pairs:
        if not isinstance(cls, type) or not isinstance(plan, ModelPlan):
            raise ConfigError(
                f"plans={plans!r}: must map classes to ModelPlan; pass plans={{MyTransformer: ModelPlan(...)}}"
            )


def _with_plans(
    denoisers: Mapping[str, nn.Module], config: EngineConfig, plans: Mapping[type, ModelPlan] | None
) -> Denoisers:
    # Guidance branches that are calls of their own need no plan; what a pipeline does shows only when it is called.
    only_branches = config.cfg_degree == config.world_size and config.patches == 1
    otherwise = ModelPlan.of_branches if only_branches else None
    planned = {name: (module, find_plan(module, plans, otherwise)) for name, module in denoisers.items()}
    for name, (module, plan) in planned.items():
        if plan.blocks and config.cfg_degree * config.dp_degree > 1:
            plan.check_batch(module)
        _check_blocks(name, module, plan, config)
    return planned


def _check_blocks(name: str, module: nn.Module, plan: ModelPlan, config: EngineConfig) -> None:
    """Whether the blocks can be split as asked. Every rank looks at all of them, so that all say the same."""
    if config.world_size // (config.cfg_degree * config.dp_degree) * config.patches == 1:
        return
    blocks = plan.block_modules(module)
    check_stages(len(blocks), config.pipefusion_degree)
    for path, block in blocks:
        if config.pipefusion_degree > 1:
            check_freeable(f"{name}.{path}", block)
        for inner, attention, _ in plan.attention_modules(block):
            check_processors(f"{name}.{path}.{inner}", attention)


def bind_call(pipe: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a pipeline call by name, bound to the pipeline's own signature.

    Raises:
        TypeError: the pipeline takes no such argument.
    """
    signature = inspect.signature(type(pipe).__call__)
    try:
        arguments = dict(signature.bind(pipe, *args, **kwargs).arguments)
    except TypeError as error:
        raise TypeError(f"{type(pipe).__name__}: {error}; {_advice(list(signature.parameters)[1:], kwargs)}") from error
    arguments.pop(next(iter(signature.parameters)))
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
    return arguments


def _advice(names: list[str], kwargs: Mapping[str, Any]) -> str:
    unknown = next((name for name in kwargs if name not in names), None)
    close = difflib.get_close_matches(unknown or "", names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(names)}"
