"""One FLUX picture from many processes: the example to start from.

    torchrun --nproc_per_node=4 examples/flux.py --ulysses_degree 2 --pipefusion_degree 2
    torchrun --nproc_per_node=4 examples/flux.py --dp_degree 2 --cfg_degree 2 --negative_prompt "" \
        --prompt "a blue ring on a black background" "a green square on a cream background"
    torchrun --nproc_per_node=8 examples/flux.py --ulysses_degree 4 --pipefusion_degree 2 \
        --model black-forest-labs/FLUX.1-dev --height 1024 --width 1024 --guidance_scale 3.5

The product of the degrees is the number of processes. Without --model a small checkpoint that comes with this
repository is used; it paints coloured shapes, on CPUs within seconds.
"""

import argparse
import os
import time
from pathlib import Path

import diffusers
import numpy as np
import torch
import torch.distributed as dist
import transformers
from diffusers import FluxPipeline
from PIL import Image

from xpar import EngineConfig, Parallel, load_pipeline

TINY_FLUX = Path(__file__).parent / "assets" / "tiny-flux"


def parse_arguments() -> argparse.Namespace:
    """What to paint, and one flag for each field of EngineConfig."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(TINY_FLUX), help="folder or hub id of a FLUX checkpoint")
    parser.add_argument("--prompt", nargs="+", default=["a red circle on a white background at the top left"])
    parser.add_argument("--negative_prompt", help="guide away from this, in a second branch (see --cfg_degree)")
    parser.add_argument("--true_cfg_scale", type=float, default=3.0, help="how far; only with --negative_prompt")
    parser.add_argument("--height", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--num_inference_steps", type=int, default=28)
    parser.add_argument("--guidance_scale", type=float, default=3.5)
    parser.add_argument("--max_sequence_length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("flux.png"))
    parser.add_argument("--compare", action="store_true", help="paint it in one process too (always with tiny-flux)")
    EngineConfig.add_arguments(parser)
    return parser.parse_args()


def load(model: str) -> FluxPipeline:
    """The stock pipeline, on this process's GPU or on the CPU."""
    for logging in (diffusers.utils.logging, transformers.utils.logging):
        logging.disable_progress_bar()  # each process would draw one for each file that it loads
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return load_pipeline(model, dtype=torch.bfloat16).to("cuda")
    return load_pipeline(model, dtype=torch.float32)


def paint(pipe: FluxPipeline | Parallel, args: argparse.Namespace) -> tuple[list[Image.Image], float]:
    """One call, the same for the plain and for the parallel pipeline; the pictures and the seconds it took."""
    guided = args.negative_prompt is not None
    start = time.perf_counter()
    output = pipe(
        prompt=args.prompt,
        negative_prompt=[args.negative_prompt] * len(args.prompt) if guided else None,
        true_cfg_scale=args.true_cfg_scale if guided else 1.0,
        height=args.height,
        width=args.width,
        num_inference_steps=args.num_inference_steps,
        guidance_scale=args.guidance_scale,
        max_sequence_length=args.max_sequence_length,
        generator=torch.Generator().manual_seed(args.seed),
    )
    return output.images, time.perf_counter() - start


def difference(images: list[Image.Image], references: list[Image.Image]) -> str:
    """How far pictures are apart, on the scale 0..255."""
    pairs = zip(images, references, strict=True)
    delta = np.stack([np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64) for a, b in pairs])
    error = float((delta**2).mean())
    psnr = f"PSNR {10 * np.log10(255**2 / error):.1f} dB" if error else "no pixel differs"
    return f"{psnr}, largest difference {int(abs(delta).max())} of 255"


def autoencoder_row(parallel: Parallel, args: argparse.Namespace) -> str:
    """Memory that decoding takes on each rank, counted and not measured."""
    if parallel.config.world_size == 1 or parallel.config.vae_parallel == "off":
        return "autoencoder: whole on every rank"
    factor = parallel.vae_scale_factor
    shape = (len(args.prompt), parallel.vae.config.latent_channels, args.height // factor, args.width // factor)
    report = parallel.vae_report(shape)
    share, whole = max(report.peak_bytes) / 2**20, report.single_peak_bytes / 2**20
    return f"autoencoder ({report.mode}): {share:.1f} MB of activations on a rank, {whole:.1f} MB in one process"


def main() -> None:
    """Paint on all processes; the first one saves, and compares with one process."""
    args = parse_arguments()
    config = EngineConfig.from_arguments(args)
    with Parallel(load(args.model), config) as parallel:
        images, seconds = paint(parallel, args)
        autoencoder = autoencoder_row(parallel, args)
    is_main = parallel.is_main
    del parallel  # its pipeline may fill a GPU
    if dist.is_initialized():
        dist.destroy_process_group()
    if not is_main:
        return
    for index, image in enumerate(images):
        path = args.output if index == 0 else args.output.with_stem(f"{args.output.stem}-{index + 1}")
        image.save(path)
        print(f"{path.resolve()}: {image.width}x{image.height}, {args.prompt[index]}")
    print(f"{seconds:.2f} s on {config.world_size} process(es); {autoencoder}")
    if args.compare or args.model == str(TINY_FLUX):
        # After the parallel call: the other processes have nothing left to wait for.
        references, seconds = paint(load(args.model), args)
        print(f"one process: {seconds:.2f} s; {difference(images, references)}")


if __name__ == "__main__":
    main()
