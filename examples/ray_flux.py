"""FLUX pictures from several process groups of Ray actors, prompts dealt to whichever group is idle.

    python examples/ray_flux.py                                # two groups of two CPU actors on this machine
    python examples/ray_flux.py --groups 4 --ulysses_degree 2 --address auto \
        --model black-forest-labs/FLUX.1-dev --size 1024       # four groups of two GPUs each, on a running cluster

Each group is as many actors as the product of the degrees. A group that loses an actor is replaced and its prompt
painted again. Every prompt has a seed of its own, so a picture does not depend on the group that painted it.
"""

import argparse
import logging
import time
from functools import partial
from pathlib import Path

import diffusers
import ray
import torch
import transformers
from diffusers import FluxPipeline

from xpar import EngineConfig
from xpar.ray import PipelineGroups

TINY_FLUX = Path(__file__).parent / "assets" / "tiny-flux"
PROMPTS = [
    "a red circle on a white background at the top left",
    "a blue ring on a black background",
    "a green square on a cream background",
    "a yellow triangle on a blue background at the bottom right",
    "a black star on a white background",
]


def parse_arguments() -> argparse.Namespace:
    """What to paint and on how many groups, and one flag for each field of EngineConfig."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(TINY_FLUX), help="folder (on every node) or hub id of a FLUX checkpoint")
    parser.add_argument("--prompts", nargs="+", default=PROMPTS)
    parser.add_argument("--groups", type=int, default=2, help="process groups; each holds one wrapped pipeline")
    parser.add_argument("--address", default="local", help="of a Ray cluster (auto finds one); local starts one here")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--size", type=int, default=256, help="height and width")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt; each further one takes the next")
    parser.add_argument("--output", type=Path, default=Path("ray_flux"), help="folder for the pictures")
    EngineConfig.add_arguments(parser)
    parser.set_defaults(ulysses_degree=2)
    return parser.parse_args()


def load(model: str, use_gpu: bool) -> FluxPipeline:
    """The stock pipeline; runs in every actor, where Ray shows a rank its own GPU only."""
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.disable_progress_bar()
    pipe = FluxPipeline.from_pretrained(model, dtype=torch.bfloat16 if use_gpu else torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to("cuda") if use_gpu else pipe


def join_cluster(address: str, actors: int) -> bool:
    """Join a cluster, or start one that counts a CPU for each actor; whether it has a GPU for each of them."""
    if address == "local":
        ray.init(address=address, num_cpus=actors, include_dashboard=False)
    else:
        ray.init(address=address)
    return bool(ray.cluster_resources().get("GPU", 0) >= actors)


def main() -> None:
    """Paint all prompts and save them in their order."""
    args = parse_arguments()
    config = EngineConfig.from_arguments(args)
    logging.basicConfig(level=logging.WARNING)  # shows which group was replaced, and why
    use_gpu = join_cluster(args.address, args.groups * config.world_size)
    calls = [
        {
            "prompt": prompt,
            "height": args.size,
            "width": args.size,
            "num_inference_steps": args.steps,
            "generator": torch.Generator().manual_seed(args.seed + index),
        }
        for index, prompt in enumerate(args.prompts)
    ]
    model = args.model if not Path(args.model).exists() else str(Path(args.model).resolve())  # actors start elsewhere
    with PipelineGroups(partial(load, model, use_gpu), config, groups=args.groups, num_gpus=int(use_gpu)) as groups:
        start = time.perf_counter()
        outputs = groups.map(calls)
        seconds = time.perf_counter() - start
    ray.shutdown()
    args.output.mkdir(parents=True, exist_ok=True)
    for index, (prompt, output) in enumerate(zip(args.prompts, outputs, strict=True)):
        path = args.output / f"{index:03d}.png"
        output.images[0].save(path)
        print(f"{path.resolve()}: {prompt}")
    print(f"{len(outputs)} pictures in {seconds:.2f} s on {args.groups} x {config.world_size} actors")


if __name__ == "__main__":
    main()
