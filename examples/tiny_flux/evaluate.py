"""Generate left-out captions with a stock FluxPipeline and judge the pictures from their pixels.

    python examples/tiny_flux/evaluate.py --size 256 --count 60 --steps 28 --seed 0

A picture follows its prompt when the shape's colour and the background's colour are both nearest to the
named ones. The kind of shape and its place are judged as well and reported separately.
"""

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FluxPipeline
from PIL import Image
from shapes import (
    BACKGROUNDS,
    COLOURS,
    PLACES,
    SHADE,
    SHAPES,
    Scene,
    all_scenes,
    caption,
    names,
    signed_distance,
)

DEFAULT_PIPELINE = Path(__file__).resolve().parents[1] / "assets" / "tiny-flux"
_CONTRAST = 0.2  # a pixel this far from the background's colour belongs to the shape
_TEMPLATE = 48  # side of the silhouettes that kinds of shapes are compared at


@dataclass
class Scores:
    """Shares of pictures, each in 0..1."""

    follows: float  # the shape's colour and the background are right
    colour: float
    background: float
    kind: float
    place: float
    all_right: float

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value:.1%}" for name, value in vars(self).items())


def _nearest(value: np.ndarray, table: dict[str, tuple[float, float, float]]) -> int:
    return int(((np.array(list(table.values())) - value) ** 2).sum(1).argmin())


def _silhouette(mask: np.ndarray) -> np.ndarray:
    """A mask cut to its bounding box (lines with very few pixels ignored) and resized to a fixed square."""
    rows = np.flatnonzero(mask.sum(1) > 1)
    columns = np.flatnonzero(mask.sum(0) > 1)
    box = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return np.array(Image.fromarray(box).resize((_TEMPLATE, _TEMPLATE), Image.Resampling.BILINEAR))


def _templates() -> list[np.ndarray]:
    axis = (torch.arange(200) + 0.5) / 100 - 1
    dy, dx = torch.meshgrid(axis, axis, indexing="ij")
    return [_silhouette((signed_distance(kind, dx, dy, 0.7) < 0).numpy()) for kind in range(len(SHAPES))]


def classify(image: Image.Image) -> Scene | None:
    """What a picture shows, or None where no shape stands out from the background."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.float64) / 255
    size = len(pixels)
    margin = max(2, size // 40)
    flat = pixels / (1 - SHADE * (np.arange(size) + 0.5) / size)[:, None, None]  # background without its shading
    ground = np.median(np.concatenate([flat[:, :margin], flat[:, -margin:]], axis=1), axis=(0, 1))
    mask = np.linalg.norm(flat - ground, axis=2) > _CONTRAST
    mask = np.pad(mask[margin:-margin, margin:-margin], margin)  # no shape reaches the rim
    if mask.sum() < 0.01 * mask.size or mask.sum() > 0.5 * mask.size:
        return None
    inner = mask.copy()  # without the blended pixels of the outline
    inner[1:-1, 1:-1] &= mask[:-2, 1:-1] & mask[2:, 1:-1] & mask[1:-1, :-2] & mask[1:-1, 2:]
    if not inner.any():
        return None
    colour = np.median(pixels[inner], axis=0)
    shape = _silhouette(mask)
    overlaps = [(shape & template).sum() / (shape | template).sum() for template in _templates()]
    rows, columns = np.nonzero(mask)
    middle = np.array([(columns.min() + columns.max() + 1) / 2, (rows.min() + rows.max() + 1) / 2]) / size
    place = int(((np.array(list(PLACES.values())) - middle) ** 2).sum(1).argmin())
    return Scene(_nearest(colour, COLOURS), int(np.argmax(overlaps)), _nearest(ground, BACKGROUNDS), place)


def score(scenes: list[Scene], images: list[Image.Image]) -> Scores:
    """Compare pictures with the scenes they were meant to show."""
    found = [classify(image) or Scene(-1, -1, -1, -1) for image in images]
    hits = np.array([[a == b for a, b in zip(*pair, strict=True)] for pair in zip(scenes, found, strict=True)])
    colour, kind, background, place = hits.mean(0)
    follows = (hits[:, 0] & hits[:, 2]).mean()
    return Scores(follows, colour, background, kind, place, hits.all(1).mean())


def choose_scenes(count: int, seed: int) -> list[Scene]:
    """`count` left-out scenes in a fixed random order, repeated where there are not enough."""
    scenes = all_scenes(held_out=True)
    random.Random(seed).shuffle(scenes)
    return [scenes[i % len(scenes)] for i in range(count)]


def generate(
    pipe: FluxPipeline, scenes: list[Scene], size: int, steps: int, seed: int, batch: int = 10, **options: Any
) -> list[Image.Image]:
    """Pictures for the scenes' full captions; picture i starts from the noise of seed + i."""
    images: list[Image.Image] = []
    for start in range(0, len(scenes), batch):
        part = scenes[start : start + batch]
        generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(part))]
        if options.get("true_cfg_scale", 1.0) > 1:
            options["negative_prompt"] = [""] * len(part)
        result = pipe(
            [caption(scene) for scene in part],
            height=size,
            width=size,
            num_inference_steps=steps,
            generator=generators,
            **options,
        )
        images += result.images
    return images


def evaluate(
    pipe: FluxPipeline, size: int = 256, count: int = 60, steps: int = 28, seed: int = 0, **options: Any
) -> float:
    """Share of left-out captions followed in colour and background; `options` go to the pipeline."""
    scenes = choose_scenes(count, seed)
    return score(scenes, generate(pipe, scenes, size, steps, seed, **options)).follows


def save_grid(images: list[Image.Image], path: Path, columns: int = 10) -> None:
    """All pictures on one sheet."""
    width, height = images[0].size
    sheet = Image.new("RGB", (columns * width, -(-len(images) // columns) * height))
    for i, image in enumerate(images):
        sheet.paste(image, (i % columns * width, i // columns * height))
    sheet.save(path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", type=Path, default=DEFAULT_PIPELINE)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--max-sequence-length", type=int, default=512, help="FluxPipeline's own default is 512")
    parser.add_argument("--true-cfg-scale", type=float, default=1.0, help="above 1 with an empty negative prompt")
    parser.add_argument("--grid", type=Path, help="write all pictures to this PNG")
    args = parser.parse_args()
    pipe = FluxPipeline.from_pretrained(args.pipeline)
    pipe.set_progress_bar_config(disable=True)
    options = {"max_sequence_length": args.max_sequence_length, "true_cfg_scale": args.true_cfg_scale}
    scenes = choose_scenes(args.count, args.seed)
    start = time.monotonic()
    images = generate(pipe, scenes, args.size, args.steps, args.seed, args.batch, **options)
    seconds = time.monotonic() - start
    print(f"{args.count} pictures of {args.size} px in {seconds:.0f} s: {score(scenes, images)}")
    for scene, image in zip(scenes, images, strict=True):
        found = classify(image)
        if found != scene:
            print(f"  asked for {names(scene)}, got {names(found) if found else 'nothing clear'}")
    if args.grid:
        save_grid(images, args.grid)


if __name__ == "__main__":
    main()
