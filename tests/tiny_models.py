"""Tiny transformers and pipelines of the four planned families, with no weight left at zero. Everything else that
tests need of diffusers comes from here."""

import math
from types import SimpleNamespace
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxImg2ImgPipeline,
    FluxInpaintPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    HunyuanImagePipeline,
    HunyuanImageTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.guiders import AdaptiveProjectedMixGuidance
from torch import nn

FAMILIES = ("flux", "sd3", "qwen", "wan")
KINDS = ("flux", "sd3", "qwen", "qwen_edit", "wan", "wan_i2v", "wan_ti2v")
GRIDS = {24: (1, 4, 6), 25: (1, 5, 5), 27: (3, 3, 3), 45: (3, 3, 5)}


def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Draw every weight anew: what diffusers initialises to zero would hide every error behind it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = 1 / math.sqrt(parameter[0].numel()) if parameter.ndim > 1 else 0.2
            centre = 1.0 if parameter.ndim == 1 and bool((parameter == 1).all()) else 0.0
            parameter.copy_(centre + scale * torch.randn(parameter.shape, generator=generator))
    return module.eval().requires_grad_(False)


def transformer(kind: str, heads: int = 6, layers: int = 2, in_channels: int = 4) -> nn.Module:
    """A tiny transformer of a kind: flux, sd3, qwen, qwen_edit, wan, wan_i2v or wan_ti2v."""
    if kind == "flux":
        model: nn.Module = FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=layers,
            num_single_layers=layers,
            attention_head_dim=16,
            num_attention_heads=heads,
            joint_attention_dim=32,
            pooled_projection_dim=16,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
        )
    elif kind == "sd3":
        model = SD3Transformer2DModel(
            sample_size=32,
            patch_size=1,
            in_channels=4,
            num_layers=layers + 1,
            attention_head_dim=8,
            num_attention_heads=heads,
            caption_projection_dim=heads * 8,
            joint_attention_dim=32,
            pooled_projection_dim=64,
            out_channels=4,
            pos_embed_max_size=96,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
    elif kind in ("qwen", "qwen_edit"):
        model = QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=layers,
            attention_head_dim=16,
            num_attention_heads=heads,
            joint_attention_dim=16,
            axes_dims_rope=(8, 4, 4),
            zero_cond_t=kind == "qwen_edit",
        )
    else:
        image = dict(image_dim=4, added_kv_proj_dim=heads * 12) if kind == "wan_i2v" else {}
        model = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=heads,
            attention_head_dim=12,
            in_channels=in_channels,
            out_channels=4,
            text_dim=16,
            freq_dim=32,
            ffn_dim=32,
            num_layers=layers,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
            **image,
        )
    return randomise(model)


def inputs(kind: str, tokens: int = 24, text: int = 7, batch: int = 1, seed: int = 1) -> dict[str, Any]:
    """Arguments for a forward over a number of image tokens, one of the keys of GRIDS (Wan: frames, height, width)."""
    generator = torch.Generator().manual_seed(seed)
    frames, height, width = GRIDS[tokens]
    if not kind.startswith("wan"):
        height *= frames

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def times(scale: float) -> torch.Tensor:
        return torch.linspace(0.4, 0.6, batch) * scale

    if kind == "flux":
        ids = torch.stack([torch.zeros(tokens), torch.arange(tokens) // width, torch.arange(tokens) % width], 1).float()
        return dict(
            hidden_states=rand(batch, tokens, 16),
            encoder_hidden_states=rand(batch, text, 32),
            pooled_projections=rand(batch, 16),
            timestep=times(1.0),
            img_ids=ids,
            txt_ids=torch.zeros(text, 3),
            guidance=torch.full((batch,), 3.5),
        )
    if kind == "sd3":
        return dict(
            hidden_states=rand(batch, 4, height, width),
            encoder_hidden_states=rand(batch, text, 32),
            pooled_projections=rand(batch, 64),
            timestep=times(1000.0),
        )
    if kind in ("qwen", "qwen_edit"):
        reference = 6 if kind == "qwen_edit" else 0
        mask = torch.ones(batch, text, dtype=torch.bool)
        mask[-1, text // 2 :] = False
        shapes = [(1, height, width), *([(1, 2, 3)] if reference else [])]
        return dict(
            hidden_states=rand(batch, tokens + reference, 16),
            encoder_hidden_states=rand(batch, text, 16),
            encoder_hidden_states_mask=mask,
            timestep=times(1.0),
            img_shapes=[shapes] * batch,
        )
    arguments = dict(
        hidden_states=rand(batch, 4, frames, 2 * height, 2 * width),
        encoder_hidden_states=rand(batch, 512 if kind == "wan_i2v" else text, 16),
        timestep=times(1000.0),
    )
    if kind == "wan_i2v":
        arguments["encoder_hidden_states_image"] = rand(batch, 257, 4)
    if kind == "wan_ti2v":
        arguments["timestep"] = 1000 * torch.rand(batch, tokens, generator=generator)
    return arguments


def bare_pipe(model: nn.Module) -> Any:
    """The least that `Parallel` needs of a pipeline, to test a transformer alone."""
    return SimpleNamespace(components={"transformer": model}, transformer=model, _execution_device=torch.device("cpu"))


def pipeline(family: str, heads: int = 4, layers: int = 2) -> Any:
    """A tiny pipeline of a family, without text encoders."""
    model = transformer(family, heads, layers)
    if family == "flux":
        scheduler = FlowMatchEulerDiscreteScheduler()
        none = dict(text_encoder=None, tokenizer=None, text_encoder_2=None, tokenizer_2=None)
        pipe: Any = FluxPipeline(transformer=model, vae=image_vae(), scheduler=scheduler, **none)
    elif family == "sd3":
        none = {f"{part}{i}": None for part in ("text_encoder", "tokenizer") for i in ("", "_2", "_3")}
        scheduler = FlowMatchEulerDiscreteScheduler()
        pipe = StableDiffusion3Pipeline(transformer=model, vae=image_vae(), scheduler=scheduler, **none)
    elif family == "qwen":
        pipe = QwenImagePipeline(
            transformer=model,
            vae=video_vae(AutoencoderKLQwenImage),
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            text_encoder=None,
            tokenizer=None,
        )
    else:
        scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
        )
        pipe = WanPipeline(
            tokenizer=None, text_encoder=None, transformer=model, vae=video_vae(AutoencoderKLWan), scheduler=scheduler
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image_vae() -> nn.Module:
    """A tiny AutoencoderKL of factor 2."""
    model = AutoencoderKL(
        sample_size=32,
        block_out_channels=(8, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.06,
        scaling_factor=1.5,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    return randomise(model)


def video_vae(cls: type) -> nn.Module:
    """A tiny Wan or Qwen-Image VAE of factor 8."""
    model = cls(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return randomise(model)


def call_arguments(
    family: str, text: int = 7, batch: int = 1, steps: int = 4, seed: int = 2, **more: Any
) -> dict[str, Any]:
    """Arguments for a call of `pipeline(family)`, with guidance; the generator is fresh in each."""
    draw = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    common: dict[str, Any] = dict(num_inference_steps=steps, output_type="pt", return_dict=False)
    if family == "flux":
        common |= dict(
            prompt_embeds=rand(batch, text, 32),
            pooled_prompt_embeds=rand(batch, 16),
            negative_prompt_embeds=rand(batch, text, 32),
            negative_pooled_prompt_embeds=rand(batch, 16),
            true_cfg_scale=2.0,
            height=16,
            width=24,
        )
    elif family == "sd3":
        common |= dict(
            prompt_embeds=rand(batch, text, 32),
            negative_prompt_embeds=rand(batch, text, 32),
            pooled_prompt_embeds=rand(batch, 64),
            negative_pooled_prompt_embeds=rand(batch, 64),
            height=12,
            width=18,
            guidance_scale=5.0,
        )
    elif family == "qwen":
        mask = torch.ones(batch, text, dtype=torch.bool)
        mask[-1, text - 2 :] = False
        common |= dict(
            prompt_embeds=rand(batch, text, 16),
            prompt_embeds_mask=mask,
            negative_prompt_embeds=rand(batch, text - 3, 16),
            negative_prompt_embeds_mask=torch.ones(batch, text - 3, dtype=torch.bool),
            height=64,
            width=96,
        )
    else:
        common |= dict(
            prompt_embeds=rand(batch, text, 16),
            negative_prompt_embeds=rand(batch, text, 16),
            height=48,
            width=80,
            num_frames=9,
            guidance_scale=4.0,
        )
    return {**common, "generator": torch.Generator().manual_seed(7), **more}


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return float((value - reference).norm() / reference.norm())


def hunyuan_image() -> Any:
    """A tiny HunyuanImage pipeline: a guider, and a transformer without a plan. Only latents come out of it."""
    model = HunyuanImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=(1, 1),
        text_embed_dim=16,
        text_embed_2_dim=8,
        rope_axes_dim=(4, 6),
    )
    none = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    guider = AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=1)
    pipe = HunyuanImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), transformer=randomise(model), guider=guider, **none
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def hunyuan_image_arguments() -> dict[str, Any]:
    """Arguments for a call of `hunyuan_image()`; the branches' prompts differ in length."""
    draw = torch.Generator().manual_seed(2)
    arguments: dict[str, Any] = {"height": 128, "width": 192, "num_inference_steps": 3, "output_type": "latent"}
    for prefix, lengths in (("", (7, 5)), ("negative_", (4, 3))):
        for suffix, length, width in (("", lengths[0], 16), ("_2", lengths[1], 8)):
            arguments[f"{prefix}prompt_embeds{suffix}"] = torch.randn(1, length, width, generator=draw)
            arguments[f"{prefix}prompt_embeds_mask{suffix}"] = torch.ones(1, length, dtype=torch.long)
    return {**arguments, "return_dict": False, "generator": torch.Generator().manual_seed(7)}


def variant(name: str) -> tuple[Any, dict[str, Any]]:
    """A pipeline of one of the families that is no text-to-image one, and its further arguments."""
    draw = torch.Generator().manual_seed(4)
    family = "wan" if name.startswith("wan") else "flux"
    pipe = pipeline(family)
    parts = dict(pipe.components)
    picture = torch.rand(1, 3, 16, 24, generator=draw)
    if name == "flux img2img":
        pipe, more = FluxImg2ImgPipeline(**parts), {"image": picture, "strength": 0.8, "steps": 5}
    elif name == "flux inpaint":
        mask = torch.zeros(1, 1, 16, 24)
        mask[..., :7, 5:] = 1.0
        pipe, more = FluxInpaintPipeline(**parts), {"image": picture, "mask_image": mask, "strength": 0.8, "steps": 5}
    elif name == "flux kontext":
        pipe = FluxKontextPipeline(**parts)
        more = {"image": picture, "max_area": 16 * 24, "_auto_resize": False}
    elif name == "wan per-token times":
        pipe, more = WanPipeline(**parts, expand_timesteps=True), {}
    else:
        parts["transformer"] = transformer("wan", 4, in_channels=12)  # latents, mask and condition
        pipe = WanImageToVideoPipeline(**parts, image_encoder=None, image_processor=None)
        more = {"image": torch.rand(1, 3, 48, 80, generator=draw)}
    pipe.set_progress_bar_config(disable=True)
    return pipe, {"family": family, **more}


VARIANTS = ("flux img2img", "flux inpaint", "flux kontext", "wan per-token times", "wan image to video")
