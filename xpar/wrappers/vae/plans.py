"""What is known about each autoencoder class, as data.

Almost nothing has to be: layers are met where they call torch (`ops.py`). A plan says how many latent channels there
are, by how much the encoder shrinks a picture, which attention the middle of the model has, and which few modules
carry state or choose a path by the size of their input, so that they need an adapter (`adapters.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from xpar.errors import UnsupportedError

__all__ = ["PLANS", "VaePlan", "can_tile", "find_vae_plan"]


@dataclass(frozen=True, kw_only=True)
class VaePlan:
    """One autoencoder class."""

    shrink: Callable[[Any], int] = lambda vae: int(vae.spatial_compression_ratio)
    """Rows of a picture for one row of latents."""
    latent_channels: str | None = "latent_channels"
    """Config entry with the number of channels that `decode` takes; None if it is not known."""
    picture_channels: Callable[[Any], int | None] = lambda vae: int(vae.config.in_channels)
    """Number of channels that `encode` takes."""
    attention: Literal["all", "causal", "none"] = "all"
    """What attention spans: all positions (of a frame or of all), those of this and earlier frames, or none that is
    split."""
    any_size: bool = False
    """Whether the encoder takes pictures that are no multiple of `shrink` (strided layers do, unshuffling does not)."""
    exact: bool = True
    """Whether rows can be split; where not, the class only works in tiles."""
    tiles: bool = True
    """Whether the class can tile."""
    adapters: tuple[str, ...] = ()
    """Names of module classes that need an adapter."""


def _blocks(entry: str) -> Callable[[Any], int]:
    return lambda vae: int(2 ** (len(vae.config[entry]) - 1))


_KL = VaePlan(shrink=_blocks("block_out_channels"), any_size=True)
_WAN = VaePlan(
    latent_channels="z_dim",
    picture_channels=lambda vae: int(vae.config.in_channels // (vae.config.patch_size or 1) ** 2),
    any_size=True,
)

PLANS: dict[str, VaePlan] = {
    "AutoencoderKL": _KL,
    "AutoencoderKLFlux2": _KL,
    "AutoencoderTiny": VaePlan(shrink=_blocks("encoder_block_out_channels"), any_size=True, attention="none"),
    "AsymmetricAutoencoderKL": VaePlan(shrink=_blocks("down_block_out_channels"), any_size=True, tiles=False),
    "AutoencoderKLWan": _WAN,
    "AutoencoderKLQwenImage": VaePlan(
        latent_channels="z_dim", picture_channels=lambda vae: int(vae.config.input_channels), any_size=True
    ),
    "AutoencoderKLQwenImage21": _WAN,
    "AutoencoderKLHunyuanVideo": VaePlan(attention="causal", any_size=True, adapters=("HunyuanVideoMidBlock3D",)),
    "AutoencoderKLHunyuanVideo15": VaePlan(attention="causal", adapters=("HunyuanVideo15AttnBlock",)),
    "AutoencoderKLHunyuanImage": VaePlan(),
    "AutoencoderKLHunyuanImageRefiner": VaePlan(),
    "AutoencoderKLCogVideoX": VaePlan(
        shrink=_blocks("block_out_channels"), any_size=True, attention="none", adapters=("CogVideoXSafeConv3d",)
    ),
    "AutoencoderKLLTXVideo": VaePlan(attention="none"),
    "AutoencoderKLLTX2Video": VaePlan(attention="none"),
    "AutoencoderKLMochi": VaePlan(
        picture_channels=lambda vae: int(vae.config.out_channels), attention="none", adapters=("CogVideoXSafeConv3d",)
    ),
    "AutoencoderKLAllegro": VaePlan(exact=False),
    "AutoencoderKLMagvit": VaePlan(attention="none", any_size=True, adapters=("EasyAnimateCausalConv3d",)),
    "AutoencoderDC": VaePlan(attention="none", adapters=("SanaMultiscaleLinearAttention",)),
}


_OWN_TILING = VaePlan(exact=False, latent_channels=None, picture_channels=lambda vae: None)
"""Of a class that is not known but tiles: its coders are called tile by tile, whatever they compute."""


def find_vae_plan(vae: Any, mode: str = "exact") -> VaePlan:
    """The plan of an autoencoder's class.

    Raises:
        UnsupportedError: the class has none, and cannot tile where that is the mode; a subclass does not inherit one,
            for it may compute something else.
    """
    plan = PLANS.get(type(vae).__name__)
    if plan is not None and type(vae).__module__.startswith("diffusers."):
        return plan
    if can_tile(vae) and mode == "tile":
        return _OWN_TILING
    reason, fix = ("", "'tile' or 'off'") if can_tile(vae) else (" and it does not tile", "'off'")
    raise UnsupportedError(
        f"{type(vae).__name__} cannot be run in parallel: its layers are not known{reason}. Known are "
        f"{', '.join(sorted(PLANS))}; use vae_parallel={fix}"
    )


def can_tile(vae: Any) -> bool:
    """Whether an autoencoder has a tiling of its own, over an encoder and a decoder."""
    return hasattr(vae, "enable_tiling") and hasattr(vae, "tiled_decode") and hasattr(vae, "decoder")
