"""Tiny autoencoders of every covered class, with random weights, and inputs for them."""

from typing import Any

import diffusers
from torch import nn

from tests.tiny_models import randomise
from xpar.wrappers.vae.plans import find_vae_plan

TWO = dict(down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)
WAN = dict(base_dim=8, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True])
STATS = dict(latents_mean=[0.0] * 4, latents_std=[1.0] * 4)

CONFIGS: dict[str, dict[str, Any]] = {
    "AutoencoderKL": dict(
        **TWO, block_out_channels=(8, 16), layers_per_block=1, latent_channels=4, norm_num_groups=4, sample_size=16
    ),
    "AutoencoderKLFlux2": dict(
        **TWO, block_out_channels=(8, 16), layers_per_block=1, latent_channels=4, norm_num_groups=4, sample_size=16
    ),
    "AutoencoderTiny": dict(
        encoder_block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        num_encoder_blocks=(1, 1, 1, 1),
        num_decoder_blocks=(1, 1, 1, 1),
    ),
    "AsymmetricAutoencoderKL": dict(
        **TWO,
        down_block_out_channels=(32, 32),
        up_block_out_channels=(32, 32),
        layers_per_down_block=1,
        layers_per_up_block=1,
        latent_channels=4,
        norm_num_groups=8,
    ),
    "AutoencoderKLWan": dict(**WAN, **STATS, scale_factor_spatial=4),
    "AutoencoderKLWan22": dict(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=8,
        **STATS,
    ),
    "AutoencoderKLQwenImage": dict(**WAN, **STATS),
    "AutoencoderKLQwenImage21": dict(**WAN, **STATS, in_channels=3, out_channels=3, scale_factor_spatial=4),
    "AutoencoderKLHunyuanVideo": dict(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    ),
    "AutoencoderKLHunyuanVideo15": dict(
        latent_channels=4,
        block_out_channels=(16, 16, 32),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    ),
    "AutoencoderKLHunyuanImageRefiner": dict(
        latent_channels=4,
        block_out_channels=(16, 16, 32),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    ),
    "AutoencoderKLHunyuanImage": dict(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32, 64),
        layers_per_block=1,
        spatial_compression_ratio=4,
        sample_size=32,
    ),
    "AutoencoderKLCogVideoX": dict(
        down_block_types=("CogVideoXDownBlock3D",) * 3,
        up_block_types=("CogVideoXUpBlock3D",) * 3,
        block_out_channels=(8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=4,
        temporal_compression_ratio=4,
        sample_height=32,
        sample_width=32,
    ),
    "AutoencoderKLLTXVideo": dict(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1, 1, 1, 1),
        patch_size=2,
        patch_size_t=1,
    ),
    "AutoencoderKLLTX2Video": dict(
        latent_channels=8,
        block_out_channels=(8, 16, 32, 32),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        patch_size=2,
        spatial_compression_ratio=16,
        temporal_compression_ratio=8,
    ),
    "AutoencoderKLMochi": dict(
        latent_channels=4,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    ),
    "AutoencoderKLAllegro": dict(
        block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4, sample_size=320
    ),
    "AutoencoderKLMagvit": dict(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        down_block_types=(
            "SpatialDownBlock3D",
            "SpatialTemporalDownBlock3D",
            "SpatialTemporalDownBlock3D",
            "SpatialTemporalDownBlock3D",
        ),
        up_block_types=(
            "SpatialUpBlock3D",
            "SpatialTemporalUpBlock3D",
            "SpatialTemporalUpBlock3D",
            "SpatialTemporalUpBlock3D",
        ),
        layers_per_block=1,
        norm_num_groups=4,
    ),
    "AutoencoderDC": dict(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
    ),
}

PICTURES = ("AutoencoderKL", "AutoencoderKLFlux2", "AutoencoderTiny", "AsymmetricAutoencoderKL")
PICTURES += ("AutoencoderKLHunyuanImage", "AutoencoderDC")


def tiny_vae(kind: str, **more: Any) -> Any:
    """An autoencoder of a kind (a class name, or AutoencoderKLWan22)."""
    name = "AutoencoderKLWan" if kind == "AutoencoderKLWan22" else kind
    vae: nn.Module = getattr(diffusers, name)(**{**CONFIGS[kind], **more})
    return randomise(vae)


def small_tiles(vae: Any) -> Any:
    """Turn tiling on, with tiles of four rows and columns of latents that overlap by one (Tiny: by two)."""
    shrink = find_vae_plan(vae).shrink(vae)
    size, stride = 4 * shrink, 3 * shrink
    if hasattr(vae, "kernel"):  # Allegro
        vae.kernel, vae.stride = (8, size, size), (4, stride, stride)
        vae.enable_tiling()
    elif hasattr(vae, "tile_sample_stride_height"):
        sizes = dict(tile_sample_min_height=size, tile_sample_min_width=size)
        vae.enable_tiling(**sizes, tile_sample_stride_height=stride, tile_sample_stride_width=stride)
    elif hasattr(vae, "tile_latent_min_height"):
        sizes = dict(tile_sample_min_height=size, tile_sample_min_width=size)
        vae.enable_tiling(**sizes)
        vae.tile_latent_min_height = vae.tile_latent_min_width = 4
    else:
        vae.enable_tiling()
        vae.tile_sample_min_size, vae.tile_latent_min_size = size, 4
        if hasattr(vae, "spatial_scale_factor"):
            vae.tile_overlap_factor = 0.5
    return vae
