"""What is refused before anything is sent, on all ranks alike."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xpar.core.distributed.collectives import group_size
from xpar.errors import ConfigError, RankMismatchError, UnsupportedError
from xpar.wrappers.vae.plans import PLANS, VaePlan, find_vae_plan

__all__ = ["agree", "check_arguments", "check_free", "check_input", "check_layers", "check_tiles"]

_MODES = ("exact", "tile")
_OUTPUTS = ("all", "main")
_PROCESSORS = ("AttnProcessor2_0", "FusedAttnProcessor2_0")


def check_arguments(vae: Any, mode: str, output_ranks: str) -> VaePlan:
    """Check the arguments of `parallel_vae` and return the plan of the autoencoder.

    Raises:
        ConfigError: `mode` or `output_ranks` is none of the choices.
        UnsupportedError: the class is not known or cannot tile, or the autoencoder is wrapped already.
    """
    for name, value, choices in (("mode", mode, _MODES), ("output_ranks", output_ranks, _OUTPUTS)):
        if value not in choices:
            raise ConfigError(f"{name}={value!r} is none of {', '.join(map(repr, choices))}")
    plan = find_vae_plan(vae, mode)
    if mode == "tile" and not plan.tiles:
        able = ", ".join(sorted(name for name, each in PLANS.items() if each.tiles))
        raise UnsupportedError(f"{type(vae).__name__} cannot tile; use mode='exact' (those that tile: {able})")
    check_free(vae)
    return plan


def check_free(vae: Any) -> None:
    """Check that no wrapper is open on the autoencoder.

    Raises:
        UnsupportedError: one is.
    """
    if hasattr(vae.decode, "xpar_owner"):
        raise UnsupportedError(f"this {type(vae).__name__} is parallel already; close() the other wrapper first")


def check_input(vae: Any, plan: VaePlan, name: str, x: Tensor) -> None:
    """Check the input of `encode` or `decode`.

    Raises:
        ConfigError: it has other dims or channels than the autoencoder takes.
        UnsupportedError: it requires a gradient.
    """
    if name == "decode":
        channels = None if plan.latent_channels is None else vae.config[plan.latent_channels]
    else:
        channels = plan.picture_channels(vae)
    if x.ndim not in (4, 5) or x.shape[1] != (channels or x.shape[1]) or min(x.shape) < 1:
        raise ConfigError(
            f"{type(vae).__name__}.{name} got a tensor of shape {tuple(x.shape)}; it takes channels={channels} in "
            "dim 1, and height and width in the last two"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{type(vae).__name__}.{name} runs over ranks without gradients, but its input requires one; call it under "
            "torch.no_grad(), or close() the parallel autoencoder first"
        )


def check_layers(vae: Any, plan: VaePlan) -> None:
    """Check what a user may have changed since the autoencoder was wrapped.

    Raises:
        UnsupportedError: a layer would see only this rank's rows.
    """
    for module in vae.modules():
        processor = type(getattr(module, "processor", None)).__name__
        if plan.attention != "none" and hasattr(module, "set_processor") and processor not in _PROCESSORS:
            raise UnsupportedError(
                f"attention processor {processor} of {type(vae).__name__} cannot be split over ranks; call "
                "vae.set_attn_processor(AttnProcessor2_0()) or use vae_parallel='tile'"
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise UnsupportedError("batch norm in training mode sees a rank's rows only; call vae.eval()")
        if getattr(module, "padding_mode", "zeros") == "circular":
            raise UnsupportedError("circular padding cannot be split over ranks; use vae_parallel='off'")
    if getattr(vae.config, "upsample_fn", "nearest") != "nearest":
        raise UnsupportedError(
            f"upsample_fn={vae.config.upsample_fn!r} reaches over rows; use vae_parallel='tile' or 'off'"
        )


def check_tiles(vae: Any, draws: bool) -> None:
    """Check that tiles can be computed out of order.

    Raises:
        UnsupportedError: the decoder draws noise tile by tile.
    """
    if draws:
        raise UnsupportedError(
            f"the decoder of this {type(vae).__name__} draws noise, tile by tile, which tiles on several ranks cannot "
            "repeat; use vae_parallel='exact' without tiling, or 'off'"
        )


def agree(vae: Any, mode: str, output_ranks: str, group: ProcessGroup | None) -> None:
    """Compare what the ranks wrap. It is the group's first collective, which NCCL wants before a partial exchange.

    Raises:
        RankMismatchError: on every rank alike.
    """
    own = f"{type(vae).__name__}, mode={mode!r}, output_ranks={output_ranks!r}"
    every: list[Any] = [None] * group_size(group)
    dist.all_gather_object(every, own, group=group)
    if len(set(every)) > 1:
        seen = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(every))
        raise RankMismatchError(f"the ranks wrap different autoencoders or modes ({seen}); they must be the same")
