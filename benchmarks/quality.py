"""How far PipeFusion's pictures are from those of one process, on the trained model of this repository.

    python benchmarks/quality.py                                    # 20 prompts, M = 2, 4, 8, warm-up 0..4
    python benchmarks/quality.py --prompts 4 --patches 4 --warmups 0 1

The error depends on the number of patches and of warm-up steps and not on the number of stages, so no picture needs
more than one process; several share the prompts. Prompts are captions that the model was not trained on; seeds are
fixed. PSNR is that of the decoded pictures as floats in 0..1, before they are rounded to 8 bits.
"""

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "tiny_flux"))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402 - after the path of the next import
from shapes import all_scenes, caption  # noqa: E402
from workers import Workers  # noqa: E402

from xpar import EngineConfig, Parallel  # noqa: E402

SEED = 0


@dataclass
class Setting:
    """Results for one number of patches and of warm-up steps, by prompt."""

    patches: int
    warmup: int
    psnr: list[float]
    seconds: list[float]

    @property
    def median(self) -> float:
        """Median PSNR in dB over the prompts."""
        return statistics.median(self.psnr)

    @property
    def worst(self) -> float:
        """Smallest PSNR in dB over the prompts."""
        return min(self.psnr)


def prompts(count: int) -> list[str]:
    """Captions that were left out of training, in a fixed random order."""
    scenes = all_scenes(held_out=True)
    random.Random(SEED).shuffle(scenes)
    return [caption(scenes[i % len(scenes)]) for i in range(count)]


def load(folder: Path) -> Any:
    """The stock pipeline."""
    import diffusers
    import transformers

    for logging in (diffusers.utils.logging, transformers.utils.logging):
        logging.disable_progress_bar()
    pipe = diffusers.FluxPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def paint(pipe: Any, args: argparse.Namespace, index: int, prompt: str) -> tuple[np.ndarray, float]:
    """One picture, [height, width, 3] in 0..1, and the seconds it took."""
    start = time.perf_counter()
    output = pipe(
        prompt=prompt,
        height=args.size,
        width=args.size,
        num_inference_steps=args.steps,
        max_sequence_length=32,
        generator=torch.Generator().manual_seed(SEED + index),
        output_type="np",
    )
    return output.images[0], time.perf_counter() - start


def psnr(picture: np.ndarray, reference: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB; infinite if nothing differs."""
    error = float(((picture.astype(np.float64) - reference) ** 2).mean())
    return math.inf if error == 0 else -10 * math.log10(error)


@dataclass
class Outcome:
    """What was painted for some prompts, in their order."""

    settings: list[Setting]
    seconds: list[float]
    """Of the plain pictures."""
    shown: dict[str, list[np.ndarray]]
    """Pictures for the contact sheet by how they were painted."""

    def extend(self, other: "Outcome") -> None:
        """Add the prompts that another process painted."""
        self.seconds += other.seconds
        for setting, more in zip(self.settings, other.settings, strict=True):
            setting.psnr += more.psnr
            setting.seconds += more.seconds
        for label, pictures in other.shown.items():
            self.shown[label] += pictures


def run_share(args: argparse.Namespace, indices: range) -> Outcome:
    """Paint some of the prompts in every setting."""
    torch.set_num_threads(args.threads)
    pipe, captions = load(args.pipeline), prompts(args.prompts)
    plain = [paint(pipe, args, index, captions[index]) for index in indices]
    references = [picture for picture, _ in plain]
    on_sheet = sum(index < args.sheet for index in indices)
    outcome = Outcome([], [second for _, second in plain], {"one process": references[:on_sheet]})
    for patches in args.patches:
        for warmup in args.warmups:
            with Parallel(pipe, EngineConfig(num_patches=patches, warmup_steps=warmup)) as parallel:
                results = [paint(parallel, args, index, captions[index]) for index in indices]
            errors = [psnr(picture, reference) for (picture, _), reference in zip(results, references, strict=True)]
            setting = Setting(patches, warmup, errors, [second for _, second in results])
            outcome.settings.append(setting)
            if patches == max(args.patches) and warmup in args.warmups[:2]:
                outcome.shown[f"M={patches}, warm-up {warmup}"] = [picture for picture, _ in results[:on_sheet]]
            print(f"M={patches} warm-up {warmup}: {setting.median:.1f} dB, prompts from {indices.start}", flush=True)
    return outcome


def run(args: argparse.Namespace) -> Outcome:
    """Paint every prompt in every setting, on as many processes as asked."""
    bounds = [args.prompts * i // args.processes for i in range(args.processes + 1)]
    with contextlib.ExitStack() as stack:
        # each is alone, no rank of a world: the processes paint different prompts
        workers = [
            stack.enter_context(Workers(1, threads=args.threads, limit=args.limit)) for _ in range(args.processes)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(args.processes))
        shares = map(range, bounds[:-1], bounds[1:])
        answers = pool.map(lambda worker, share: worker.call(run_share, args, share), workers, shares)
        first, *others = (outcome for (outcome,) in answers)
    for other in others:
        first.extend(other)
    return first


def describe(args: argparse.Namespace) -> str:
    """What was computed, in one line."""
    return f"{args.prompts} left-out captions, {args.size}x{args.size} px, {args.steps} steps, fp32"


def table(settings: list[Setting], args: argparse.Namespace) -> str:
    """Median / worst PSNR as a markdown table: a row for each warm-up, a column for each number of patches."""
    by_key = {(s.patches, s.warmup): s for s in settings}
    lines = [
        "| warm-up | " + " | ".join(f"M = {patches}" for patches in args.patches) + " |",
        "|---|" + "---|" * len(args.patches),
    ]
    for warmup in args.warmups:
        cells = [by_key[patches, warmup] for patches in args.patches]
        lines.append(f"| {warmup} | " + " | ".join(f"{s.median:.1f} / {s.worst:.1f}" for s in cells) + " |")
    return "\n".join(lines)


def draw(settings: list[Setting], args: argparse.Namespace, path: Path) -> None:
    """PSNR over warm-up steps: a full line for the median, a dashed one for the worst picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for number, patches in enumerate(args.patches):
        chosen = [s for s in settings if s.patches == patches and math.isfinite(s.median)]
        steps, colour = [s.warmup for s in chosen], f"C{number}"
        axes.plot(steps, [s.median for s in chosen], "o-", color=colour, label=f"{patches} patches, median")
        axes.plot(steps, [s.worst for s in chosen], "v--", color=colour, label=f"{patches} patches, worst", lw=1)
    axes.set_xticks(args.warmups)
    axes.set_xlabel("warm-up steps")
    axes.set_ylabel("PSNR against one process, dB")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title(f"PipeFusion on the bundled model: {describe(args)}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def contact_sheet(shown: dict[str, list[np.ndarray]], path: Path) -> None:
    """A column for each way to paint, a row for each prompt."""
    from PIL import Image, ImageDraw

    header = 20
    size = next(iter(shown.values()))[0].shape[0]
    sheet = Image.new("RGB", (size * len(shown), header + size * max(map(len, shown.values()))), "white")
    pen = ImageDraw.Draw(sheet)
    for column, (label, pictures) in enumerate(shown.items()):
        pen.text((column * size + 4, 4), label, fill="black")
        for row, picture in enumerate(pictures):
            image = Image.fromarray((picture * 255).round().astype("uint8"))
            sheet.paste(image, (column * size, header + row * size))
    sheet.save(path)


def save(args: argparse.Namespace, settings: list[Setting], seconds: list[float]) -> None:
    """Write quality.md, quality.json and quality.png."""
    folder: Path = args.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    text = (
        f"{table(settings, args)}\n\nPSNR in dB against one process, median / worst; {describe(args)}. "
        f"A plain picture took {statistics.median(seconds):.2f} s on {args.threads} thread(s), "
        f"{args.processes} at a time.\n"
    )
    (folder / "quality.md").write_text(text, encoding="utf-8")
    raw = {
        "settings": {"size": args.size, "steps": args.steps, "threads": args.threads, "torch": torch.__version__},
        "prompts": prompts(args.prompts),
        "seconds_one_process": seconds,
        # JSON knows no infinity: null stands for a picture without any difference
        "results": [{**vars(s), "psnr": [p if math.isfinite(p) else None for p in s.psnr]} for s in settings],
    }
    (folder / "quality.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    draw(settings, args, folder / "quality.png")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", type=Path, default=ROOT / "examples" / "assets" / "tiny-flux")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--patches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--warmups", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--processes", type=int, default=2, help="that share the prompts")
    parser.add_argument("--limit", type=float, default=3600, help="seconds until the processes count as hung")
    parser.add_argument("--sheet", type=int, default=4, help="prompts on the contact sheet; 0 for none")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    args.processes = max(1, min(args.processes, args.prompts))
    return args


def main() -> None:
    """Measure, write, print."""
    args = parse_arguments()
    start = time.perf_counter()
    outcome = run(args)
    save(args, outcome.settings, outcome.seconds)
    if args.sheet:
        contact_sheet(outcome.shown, args.output_dir / "quality_pictures.png")
    count = args.prompts * (len(outcome.settings) + 1)
    seconds = time.perf_counter() - start
    print(f"\n{table(outcome.settings, args)}\n\n{count} pictures in {seconds:.0f} s: {args.output_dir}")


if __name__ == "__main__":
    main()
