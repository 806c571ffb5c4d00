"""The small AutoencoderKL of tiny-flux: FLUX's layout (factor 8, no quant convolutions), 8 latent channels.

    python examples/tiny_flux/autoencoder.py --minutes 20 --output DIR
    python examples/tiny_flux/autoencoder.py --minutes 20 --vae DIR --decoder-only --output DIR2

`train.py` trains one itself or takes such a folder. With `--decoder-only` the latents keep their meaning,
so that an already trained transformer still fits.
"""

import argparse
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from shapes import Scene, all_scenes, draw

PEAK_RATE = 1.5e-3
KL_WEIGHT = 2e-4
COLOUR_WEIGHT = 0.1
LATENT_NOISE = 0.08  # largest share of the latents' spread added as noise, so that decoding forgives small errors


def build_vae() -> AutoencoderKL:
    """A fresh, untrained autoencoder.

    Few normalisation groups: with two channels in each, colours would depend on the rest of the picture.
    """
    return AutoencoderKL(
        block_out_channels=(16, 32, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=2,
        sample_size=256,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    )


def _batch(scenes: list[Scene], rng: random.Random, progress: float) -> torch.Tensor:
    """Windows around the shapes and whole pictures, of several sizes; whole 256 px ones later on.

    Group normalisation makes colours depend on how much of a picture a shape fills, hence the variety.
    """
    kind = rng.random()
    size = rng.choice((128, 256, 384))
    if kind < 0.3:
        return draw(rng.choices(scenes, k=12), size, crop=64)
    if kind < 0.5:
        return draw(rng.choices(scenes, k=6), size, crop=96)
    if kind < 0.8 or progress < 0.3:
        return draw(rng.choices(scenes, k=4), 128)
    return draw(rng.choices(scenes, k=2), 256)


def _loss(vae: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    """Differences of the round trip and of its edges, with two pulls on the latents.

    The first three latent channels are drawn to the mean colour of their 8x8 pixels, which makes colours
    easy to learn; a slight KL term keeps the other channels at a similar spread.
    """
    posterior = vae.encode(pictures).latent_dist
    latents = posterior.sample()
    noise = torch.rand(len(latents), 1, 1, 1) * LATENT_NOISE * latents.detach().std()
    decoded = vae.decode(latents + noise * torch.randn_like(latents)).sample
    loss = F.l1_loss(decoded, pictures) + F.mse_loss(decoded, pictures)
    for dim in (2, 3):
        loss = loss + 0.5 * F.l1_loss(decoded.diff(dim=dim), pictures.diff(dim=dim))
    colour = F.l1_loss(posterior.mean[:, :3], 2.5 * F.avg_pool2d(pictures, 8))
    return loss + COLOUR_WEIGHT * colour + KL_WEIGHT * posterior.kl().mean() / latents[0].numel()


def train_vae(
    minutes: float, seed: int = 0, vae: AutoencoderKL | None = None, decoder_only: bool = False
) -> AutoencoderKL:
    """Train for a wall-clock time (a fresh one unless given), then measure the latents' shift and scale."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    scenes = all_scenes(held_out=False)
    vae = (vae or build_vae()).to(memory_format=torch.channels_last)
    vae.train().requires_grad_(True).encoder.requires_grad_(not decoder_only)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=PEAK_RATE, weight_decay=1e-4)
    start, step, progress = time.monotonic(), 0, 0.0
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = (
                PEAK_RATE * min(1, (step + 1) / 100) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))
            )
        pictures = _batch(scenes, rng, progress)
        loss = _loss(vae, pictures.contiguous(memory_format=torch.channels_last))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"vae step {step} loss {loss.item():.4f} at {progress:.0%}", flush=True)
        step += 1
        progress = (time.monotonic() - start) / (minutes * 60)
    vae = vae.to(memory_format=torch.contiguous_format).eval().requires_grad_(False)
    if not decoder_only:
        with torch.no_grad():
            latents = torch.cat([vae.encode(draw(rng.choices(scenes, k=8), 256)).latent_dist.mean for _ in range(8)])
        vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
    print(f"vae: {step} steps, {round_trip_psnr(vae, 256):.1f} dB round trip at 256 px on left-out scenes")
    return vae


@torch.no_grad()
def round_trip_psnr(vae: AutoencoderKL, size: int, count: int = 44) -> float:
    """PSNR in dB of decode(encode(picture)) on left-out scenes, for values in 0..1."""
    generator = torch.Generator().manual_seed(1)
    error = []
    for scene in all_scenes(held_out=True)[:: max(1, 88 // count)]:
        picture = draw([scene], size, generator)
        decoded = vae.decode(vae.encode(picture).latent_dist.mean).sample.clamp(-1, 1)
        error.append(((decoded - picture) / 2).pow(2).mean())
    return -10 * torch.stack(error).mean().log10().item()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="autoencoder folder to write")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--vae", type=Path, help="start from this autoencoder folder")
    parser.add_argument("--decoder-only", action="store_true", help="leave the encoder as it is")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    vae = AutoencoderKL.from_pretrained(args.vae) if args.vae else None
    train_vae(args.minutes, args.seed, vae, args.decoder_only).save_pretrained(args.output)


if __name__ == "__main__":
    main()
