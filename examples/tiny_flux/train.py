"""Train tiny-flux on CPU: first the autoencoder, then the transformer, and write the pipeline folder.

    torchrun --nproc_per_node=2 examples/tiny_flux/train.py --threads 1 --minutes 75 --output DIR

Processes average their gradients; without torchrun one trains alone.

Budgets are wall-clock times, so a run always finishes. A checkpoint (averaged weights) replaces DIR every
`--checkpoint-minutes`; `--vae` takes a trained autoencoder and `--resume` a whole pipeline folder.
"""

import argparse
import copy
import json
import math
import os
import random
import shutil
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from autoencoder import train_vae
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from muon import Muon
from shapes import Scene, all_captions, all_scenes, draw, random_caption
from text import WIDTH, build_clip_encoder, build_clip_tokenizer, build_t5_encoder, build_t5_tokenizer

PEAK_RATE = 2e-3  # of AdamW, for everything but the blocks' matrices
MUON_RATE = 5e-3  # of Muon, for those, scaled as in https://arxiv.org/abs/2502.16982
EMA_DECAY = 0.998
TEXT_LENGTHS = {16: 0.45, 32: 0.40, 64: 0.10, 512: 0.05}  # how often each padded length is trained
BANK_SIZES = {128: 1000, 256: 2000, 384: 400}  # pictures kept as latents by each process, per picture size
BATCH_TOKENS = 4800  # text and picture tokens in one batch, at most


@dataclass
class Bank:
    """Latents of drawn pictures of one size, packed for the transformer, with the scenes they show."""

    latents: torch.Tensor
    scenes: list[Scene]


def build_pipeline(vae: AutoencoderKL) -> FluxPipeline:
    """A FluxPipeline with built text parts, FLUX.1-dev's schedule and an untrained transformer."""
    captions = all_captions()
    clip_tokenizer, t5_tokenizer = build_clip_tokenizer(captions), build_t5_tokenizer(captions)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * vae.config.latent_channels,
        num_layers=4,
        num_single_layers=8,
        attention_head_dim=12,
        num_attention_heads=8,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=False,
        # Nothing for FLUX's first axis, which text-to-image never uses: (4, 4, 4) would leave two frequencies per
        # direction, 1 and 1/100 per token, too few to place a shape on 16 tokens (it was tried: shapes repeat).
        axes_dims_rope=(0, 6, 6),
    )
    torch.nn.init.zeros_(transformer.proj_out.weight)
    torch.nn.init.zeros_(transformer.proj_out.bias)
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, max_image_seq_len=4096
        ),
        vae=vae,
        text_encoder=build_clip_encoder(clip_tokenizer),
        tokenizer=clip_tokenizer,
        text_encoder_2=build_t5_encoder(t5_tokenizer),
        tokenizer_2=t5_tokenizer,
        transformer=transformer,
    )


@torch.no_grad()
def build_bank(vae: AutoencoderKL, size: int, count: int, seed: int) -> Bank:
    """Draw and encode `count` pictures that training may see."""
    generator = torch.Generator().manual_seed(seed)
    scenes = random.Random(seed).choices(all_scenes(held_out=False), k=count)
    parts = []
    for i in range(0, count, 16):
        z = vae.encode(draw(scenes[i : i + 16], size, generator)).latent_dist.mode()
        z = (z - vae.config.shift_factor) * vae.config.scaling_factor
        parts.append(FluxPipeline._pack_latents(z, *z.shape))
    return Bank(torch.cat(parts), scenes)


def choose_size(rng: random.Random, progress: float, resumed: bool, large_share: float) -> int:
    """128 px mostly at first, then 256 px mostly; in the last third, or if resumed, a share at 384 px."""
    if progress < 0.3 and not resumed:
        return 256 if rng.random() < 0.1 else 128
    if (resumed or progress > 0.67) and rng.random() < large_share:
        return 384
    return 256 if rng.random() < 0.85 else 128


def sample_times(count: int, tokens: int) -> torch.Tensor:
    """Logit-normal times, a quarter uniform so that the ends are seen, shifted as the scheduler will."""
    times = torch.where(torch.rand(count) < 0.25, torch.rand(count), torch.randn(count).sigmoid())
    shift = math.exp(calculate_shift(tokens))
    return shift * times / (1 + (shift - 1) * times)


def batch_loss(pipe: FluxPipeline, bank: Bank, size: int, rng: random.Random) -> torch.Tensor:
    """Flow-matching loss of one batch with a random text length."""
    length = rng.choices(list(TEXT_LENGTHS), list(TEXT_LENGTHS.values()))[0]
    tokens = bank.latents.shape[1]
    count = min(32, BATCH_TOKENS // (tokens + length))
    chosen = rng.choices(range(len(bank.scenes)), k=count)
    captions = [random_caption(bank.scenes[i], rng) for i in chosen]
    with torch.no_grad():
        prompt_embeds, pooled, text_ids = pipe.encode_prompt(captions, max_sequence_length=length)
    data = bank.latents[chosen]
    noise = torch.randn_like(data)
    times = sample_times(count, tokens)
    mixed = torch.lerp(data, noise, times[:, None, None])
    velocity = pipe.transformer(
        hidden_states=mixed,
        encoder_hidden_states=prompt_embeds,
        pooled_projections=pooled,
        timestep=times,
        img_ids=FluxPipeline._prepare_latent_image_ids(1, size // 16, size // 16, "cpu", torch.float32),
        txt_ids=text_ids,
        return_dict=False,
    )[0]
    return F.mse_loss(velocity, noise - data)


def rate_factor(step: int, progress: float) -> float:
    """Warm-up over 100 steps, then constant, then a cosine decay over the last three quarters of the time."""
    decay = 0.5 * (1 + math.cos(math.pi * max(0.0, progress - 0.25) / 0.75))
    return min(1.0, (step + 1) / 100) * (0.01 + 0.99 * decay)


def build_optimizers(transformer: FluxTransformer2DModel) -> list[torch.optim.Optimizer]:
    """Muon (Keller Jordan 2024) for the blocks' matrices, AdamW for the rest."""
    matrices = [
        p
        for p in [*transformer.transformer_blocks.parameters(), *transformer.single_transformer_blocks.parameters()]
        if p.ndim == 2
    ]
    known = set(map(id, matrices))
    others = [p for p in transformer.parameters() if id(p) not in known]
    return [
        Muon(matrices, lr=MUON_RATE, weight_decay=0.01),
        torch.optim.AdamW(others, lr=PEAK_RATE, betas=(0.9, 0.99), weight_decay=0.01, fused=True),
    ]


def save(pipe: FluxPipeline, averaged: FluxTransformer2DModel, output: Path) -> None:
    """Write the pipeline with the averaged weights, without machine paths, replacing `output` in one move."""
    fresh = output.with_name(output.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    FluxPipeline(**{**pipe.components, "transformer": averaged}).save_pretrained(fresh)
    for path in fresh.rglob("*.json"):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and content.pop("_name_or_path", None) is not None:
            path.write_text(json.dumps(content, indent=2) + "\n")
    shutil.rmtree(output, ignore_errors=True)
    fresh.rename(output)


def average(parameters: list[torch.nn.Parameter], *numbers: float) -> list[float]:
    """Average the gradients, and the numbers, over the processes."""
    if not dist.is_initialized():
        return list(numbers)
    flat = torch.cat([*(p.grad.reshape(-1) for p in parameters if p.grad is not None), torch.tensor(numbers)])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat[: -len(numbers)].split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    return flat[-len(numbers) :].tolist()


def train_transformer(
    pipe: FluxPipeline,
    output: Path,
    minutes: float,
    checkpoint_minutes: float,
    seed: int,
    rank: int = 0,
    resumed: bool = False,
    rate: float = 1.0,
    large_share: float = 0.06,
) -> None:
    """Train the pipeline's transformer for the given time (encoding the pictures included)."""
    start = saved = time.monotonic()
    shared, own = random.Random(seed), random.Random(f"{seed} {rank}")  # all processes train the same size at a time
    torch.manual_seed(1000 * seed + rank)
    banks = {size: build_bank(pipe.vae, size, n, 1000 * seed + rank + size) for size, n in BANK_SIZES.items()}
    transformer = pipe.transformer.train()
    parameters = list(transformer.parameters())
    averaged = copy.deepcopy(transformer).eval().requires_grad_(False)
    optimizers = build_optimizers(transformer)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [rate * group["lr"] for group in groups]
    step, progress, losses = 0, 0.0, dict.fromkeys(banks, 0.0)
    begin = time.monotonic()
    budget = minutes * 60 - (begin - start)
    while progress < 1:
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * rate_factor(step, progress)
        size = choose_size(shared, progress, resumed, large_share)
        loss = batch_loss(pipe, banks[size], size, own)
        transformer.zero_grad()
        loss.backward()
        progress, mean_loss = average(parameters, (time.monotonic() - begin) / budget, loss.item())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        keep = min(EMA_DECAY, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(list(averaged.parameters()), parameters, 1 - keep)
        losses[size] = 0.97 * losses[size] + 0.03 * mean_loss if losses[size] else mean_loss
        step += 1
        if rank == 0 and step % 100 == 0:
            shown = ", ".join(f"{size} px {value:.4f}" for size, value in losses.items())
            print(f"step {step} at {progress:.1%} ({time.monotonic() - begin:.0f} s): {shown}", flush=True)
        if rank == 0 and time.monotonic() - saved > checkpoint_minutes * 60:
            save(pipe, averaged, output)
            saved = time.monotonic()
    if rank == 0:
        save(pipe, averaged, output)
        print(f"{step} steps in {time.monotonic() - begin:.0f} s", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="pipeline folder to write")
    parser.add_argument("--minutes", type=float, default=75, help="time for the transformer")
    parser.add_argument("--vae-minutes", type=float, default=20, help="time for the autoencoder")
    parser.add_argument("--checkpoint-minutes", type=float, default=5)
    parser.add_argument("--vae", type=Path, help="use this trained autoencoder folder instead")
    parser.add_argument("--resume", type=Path, help="continue from this pipeline folder instead of afresh")
    parser.add_argument("--rate", type=float, default=1.0, help="share of the learning rates, for a last polish")
    parser.add_argument("--large-share", type=float, default=0.06, help="share of the batches that are of 384 px")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(hours=2))
    rank = dist.get_rank() if dist.is_initialized() else 0
    if args.resume:
        pipe = FluxPipeline.from_pretrained(args.resume)
    else:
        vae = AutoencoderKL.from_pretrained(args.vae) if args.vae else shared_vae(args, rank)
        torch.manual_seed(args.seed)
        pipe = build_pipeline(vae)
    train_transformer(
        pipe,
        args.output,
        args.minutes,
        args.checkpoint_minutes,
        args.seed,
        rank,
        bool(args.resume),
        args.rate,
        args.large_share,
    )


def shared_vae(args: argparse.Namespace, rank: int) -> AutoencoderKL:
    """An autoencoder that the first process trains, with all threads, while the others wait for it."""
    folder = args.output.with_name(args.output.name + ".vae")
    if rank == 0:
        torch.set_num_threads(os.cpu_count() or 1)
        train_vae(args.vae_minutes, args.seed).save_pretrained(folder)
        torch.set_num_threads(args.threads)
    if dist.is_initialized():
        dist.barrier()
    return AutoencoderKL.from_pretrained(folder)


if __name__ == "__main__":
    main()
