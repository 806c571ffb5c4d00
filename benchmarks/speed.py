"""Time of one picture on two CPU cores: one process against two ranks of one thread each.

    python benchmarks/speed.py                     # 768x768, 8 steps, 5 rounds
    python benchmarks/speed.py --methods ulysses ring --rounds 3

The model has the shape of FLUX (4 double and 8 single blocks of width 512, random weights) and runs in the stock
FluxPipeline up to the latents. Machines are noisy, so the methods take turns, each round compares with the one-thread
run of the same round, and medians over the rounds are reported. Every result is checked against that of one process.
Nothing else should run meanwhile: the one-thread run has a whole idle core beside it. What two cores can give at most
is the row "2 x one process at once": two plain one-thread processes, each painting a picture of its own.
"""

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from workers import Workers

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # before the processes import diffusers
# Left alone, glibc gives the memory of activations back and faults it in again, in some processes and not in others, by
# chance: 118 000 page faults and 7 % of a step. Here every process, the one-thread run first of all, keeps its memory.
os.environ.update(MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_=str(2**36))

# The plain pipeline in one process on one thread, for each job: one picture, one picture with two guidance branches,
# and two pictures of two prompts, decoded. The two longer jobs take half the steps.
BASELINES = {"picture": "one-thread", "guided": "one-thread-guided", "two prompts": "one-thread-two-prompts"}
BASELINE = BASELINES["picture"]
EXACT = 1e-4  # relative error above which an exact method is wrong
TEXT_TOKENS = 128
SEED = 0


@dataclass(frozen=True)
class Method:
    """One way to compute the picture.

    Args:
        label: its row in the table.
        ranks: processes that take part.
        threads: threads of each process.
        config: EngineConfig fields; None: the plain pipeline.
        bound: speedup that no implementation can exceed on `ranks * threads` cores.
        pictures: pictures painted in one run, by independent processes.
        job: what is computed, a key of BASELINES.
    """

    label: str
    ranks: int = 1
    threads: int = 1
    config: dict[str, int] | None = None
    bound: float = 2.0
    pictures: int = 1
    job: str = "picture"

    @property
    def baseline(self) -> str:
        """The method that it is compared with."""
        return BASELINES[self.job]

    def steps(self, steps: int) -> int:
        """Number of steps of its job."""
        return steps if self.job == "picture" else max(1, steps // 2)

    @property
    def is_exact(self) -> bool:
        """Whether it must give the result of one process."""
        return "pipefusion_degree" not in (self.config or {})


@dataclass
class Row:
    """What was measured of a method: one entry per round, and the largest error seen."""

    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    error: float = 0.0


def pipefusion_bound(steps: int, warmup: int, stages: int, patches: int) -> float:
    """Speedup with a serial warm-up and a pipeline that fills once: T / (W + (T-W)/N + (N-1)/(N*M))."""
    if steps <= warmup:
        return 1.0
    return steps / (warmup + (steps - warmup) / stages + (stages - 1) / (stages * patches))


def methods(steps: int) -> dict[str, Method]:
    """All methods by name, in the order of the table."""

    def pipefusion(patches: int) -> Method:
        config = {"pipefusion_degree": 2, "num_patches": patches, "warmup_steps": 1}
        bound = pipefusion_bound(steps, 1, 2, patches)
        return Method(f"pipefusion 2, {patches} patches, warm-up 1", ranks=2, config=config, bound=bound)

    return {
        BASELINE: Method("one process, 1 thread", bound=1.0),
        "wrapped": Method("one process, 1 thread, wrapped with all degrees 1", config={}, bound=1.0),
        "two-threads": Method("one process, 2 threads", threads=2),
        "at-once": Method("2 x one process at once (two pictures; time is per picture)", ranks=2, pictures=2),
        "ulysses": Method("ulysses 2", ranks=2, config={"ulysses_degree": 2}),
        "ring": Method("ring 2", ranks=2, config={"ring_degree": 2}),
        "pipefusion-2": pipefusion(2),
        "pipefusion-4": pipefusion(4),
        BASELINES["guided"]: Method("guided: one process, 1 thread", bound=1.0, job="guided"),
        "cfg": Method("guided: cfg 2", ranks=2, config={"cfg_degree": 2}, job="guided"),
        BASELINES["two prompts"]: Method("two prompts with VAE: one process, 1 thread", bound=1.0, job="two prompts"),
        "dp": Method("two prompts with VAE: dp 2", ranks=2, config={"dp_degree": 2}, job="two prompts"),
    }


# ---- in the processes ------------------------------------------------------------------------------------------------

_painters: dict[str, "Painter"] = {}


class Painter:
    """One process's model, and a pipeline around it for each method; they share the weights."""

    def __init__(self, size: int, limit: float) -> None:
        from diffusers import AutoencoderKL, FluxTransformer2DModel

        self.size, self.limit = size, limit
        torch.manual_seed(SEED)
        self.model = FluxTransformer2DModel(
            in_channels=64,
            num_layers=4,
            num_single_layers=8,
            attention_head_dim=64,
            num_attention_heads=8,
            joint_attention_dim=512,
            pooled_projection_dim=256,
            axes_dims_rope=(16, 24, 24),
            guidance_embeds=True,
        )
        self.model.eval().requires_grad_(False)
        draw = torch.Generator().manual_seed(SEED)
        self.noise = torch.randn(2, (size // 16) ** 2, 64, generator=draw)
        self.prompt = torch.randn(2, TEXT_TOKENS, 512, generator=draw)
        self.pooled = torch.randn(2, 256, generator=draw)
        self.vae = AutoencoderKL(
            block_out_channels=(32, 32, 64, 64),
            layers_per_block=1,
            latent_channels=16,
            norm_num_groups=8,
            shift_factor=0.1,
            scaling_factor=0.4,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
        )
        self.vae.eval().requires_grad_(False)
        self._pipes: dict[str, Any] = {}

    def pipe(self, name: str, method: Method) -> Any:
        """The pipeline of a method, made and wrapped on first use."""
        if name not in self._pipes:
            self._pipes[name] = self._make(method)
        return self._pipes[name]

    def _make(self, method: Method) -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

        from xpar import EngineConfig, Parallel

        # PipeFusion takes the weights of other stages out of its modules, so each method has modules of its own.
        model = copy.deepcopy(self.model, {id(p): p for p in self.model.parameters()})
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
        vae = copy.deepcopy(self.vae, {id(p): p for p in self.vae.parameters()})
        absent = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
        pipe = FluxPipeline(transformer=model, vae=vae, scheduler=scheduler, **absent)
        pipe.set_progress_bar_config(disable=True)
        if method.config is None:
            return pipe
        return Parallel(pipe, EngineConfig(**method.config, timeout=self.limit))

    def paint(self, pipe: Any, job: str, steps: int) -> torch.Tensor:
        """What the denoiser added to the noise in `steps` steps; for two prompts, the decoded pictures."""
        count = 2 if job == "two prompts" else 1
        call: dict[str, Any] = {
            "prompt_embeds": self.prompt[:count],
            "pooled_prompt_embeds": self.pooled[:count],
            "latents": self.noise[:count],
            "output_type": "pt" if count == 2 else "latent",
        }
        if job == "guided":
            negative = {"negative_prompt_embeds": self.prompt[1:], "negative_pooled_prompt_embeds": self.pooled[1:]}
            call |= {**negative, "true_cfg_scale": 2.0}
        images = pipe(height=self.size, width=self.size, num_inference_steps=steps, **call).images
        return images if count == 2 else images - self.noise[:count]


def build(size: int, limit: float) -> None:
    """Make the model of this process."""
    torch.set_num_threads(1)
    _painters["this"] = Painter(size, limit)


def measure(name: str, method: Method, steps: int) -> tuple[float, Any]:
    """Seconds of one run, and its result as an array."""
    painter = _painters["this"]
    torch.set_num_threads(method.threads)
    pipe = painter.pipe(name, method)
    if method.ranks > 1:
        torch.distributed.barrier()
    start = time.perf_counter()
    result = painter.paint(pipe, method.job, method.steps(steps))
    return time.perf_counter() - start, result.numpy()


# ---- in the parent ---------------------------------------------------------------------------------------------------


def run_all(args: argparse.Namespace, chosen: dict[str, Method]) -> dict[str, Row]:
    """Measure the chosen methods in rounds."""
    rows = {name: Row() for name in chosen}
    limit = args.limit
    with Workers(1, threads=2, limit=limit) as solo, Workers(2, threads=1, limit=limit) as pair:
        worlds = {1: solo, 2: pair}
        for world in worlds.values():
            world.call(build, args.size, limit)
        for name, method in chosen.items():  # first calls allocate and connect
            worlds[method.ranks].call(measure, name, method, min(2, args.steps))
        for number in range(args.rounds):
            answers = {}
            for name in order(list(chosen), number):
                method = chosen[name]
                answers[name] = worlds[method.ranks].call(measure, name, method, args.steps)
                seconds = max(seconds for seconds, _ in answers[name])
                print(f"round {number + 1}/{args.rounds}  {method.label}: {seconds:.2f} s", flush=True)
            for name, method in chosen.items():  # each one-thread run comes before what is compared with it
                record(rows, name, method, answers[name], answers[method.baseline][0][1])
    return rows


def order(names: list[str], number: int) -> list[str]:
    """Order of the methods in a round: it changes, but what is to differ by less than 1 % stays side by side."""
    first = [name for name in names if name in (BASELINE, "wrapped")]
    others = [name for name in names if name not in first]
    turn = number % max(1, len(others))
    return [*(first if number % 2 == 0 else first[::-1]), *others[turn:], *others[:turn]]


def record(rows: dict[str, Row], name: str, method: Method, answers: list[Any], reference: Any) -> None:
    """Add one run to its row; a run takes as long as its slowest rank."""
    row = rows[name]
    row.seconds.append(max(seconds for seconds, _ in answers) / method.pictures)
    row.ratios.append(rows[method.baseline].seconds[-1] / row.seconds[-1])
    scale = float((reference**2).sum() ** 0.5)
    errors = [float(((added - reference) ** 2).sum() ** 0.5) / scale for _, added in answers]
    row.error = max(row.error, *errors)


def hardware() -> str:
    """Processor, cores and torch in one line."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores, torch {torch.__version__}, fp32"


def settings(args: argparse.Namespace) -> str:
    """What was computed, in one line."""
    return (
        f"FLUX-shaped model, width 512, 8 heads, 4 double + 8 single blocks; {args.size}x{args.size} px, "
        f"{(args.size // 16) ** 2} image and {TEXT_TOKENS} text tokens, {args.steps} steps (guided, two prompts: "
        f"{max(1, args.steps // 2)}), {args.rounds} round(s)"
    )


def table(chosen: dict[str, Method], rows: dict[str, Row]) -> str:
    """The results as a markdown table."""
    lines = [
        "| method | processes x threads | seconds | speedup (median) | min..max | fastest | bound | relative error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, method in chosen.items():
        row, baseline = rows[name], rows[method.baseline]
        lines.append(
            f"| {method.label} | {method.ranks} x {method.threads} | {statistics.median(row.seconds):.2f} "
            f"| {statistics.median(row.ratios):.3f} | {min(row.ratios):.3f}..{max(row.ratios):.3f} "
            f"| {min(baseline.seconds) / min(row.seconds):.3f} | {method.bound:.3f} | {row.error:.1e} |"
        )
    return "\n".join(lines)


def report(args: argparse.Namespace, chosen: dict[str, Method], rows: dict[str, Row], load: float) -> str:
    """The page speed.md."""
    return (
        f"{table(chosen, rows)}\n\n{settings(args)}.\n\n{hardware()}; load average before the run {load:.2f}.\n\n"
        "Speedup: seconds of the one-thread run of the same round over seconds of the method; the median, smallest and "
        "largest over the rounds. Fastest: the fastest one-thread run of all rounds over the fastest of the method, "
        "which the neighbours on a shared machine disturb least. Relative error: against one process, of what the "
        "denoiser added to the noise (random weights, so that of pipefusion says nothing about pictures: see "
        "quality.md).\n"
    )


def draw(args: argparse.Namespace, chosen: dict[str, Method], rows: dict[str, Row], path: Path) -> None:
    """The chart: a bar for each median speedup, a line from min to max, a mark at the bound."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(chosen)
    medians = [statistics.median(rows[name].ratios) for name in names]
    low = [m - min(rows[name].ratios) for m, name in zip(medians, names, strict=True)]
    high = [max(rows[name].ratios) - m for m, name in zip(medians, names, strict=True)]
    places = range(len(names))
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.5 * len(names)))
    colours = ["#9aa5b1" if chosen[name].config in (None, {}) else "#2f6db5" for name in names]
    axes.barh(places, medians, color=colours, xerr=[low, high], error_kw={"lw": 1, "capsize": 3})
    bounds = [chosen[name].bound for name in names]
    axes.scatter(bounds, places, marker="|", s=420, color="#c0392b", zorder=3, label="bound")
    for place, median in enumerate(medians):
        axes.text(0.02, place, f"{median:.2f}x", va="center", color="white", fontsize=9, fontweight="bold")
    axes.set_yticks(places, [chosen[name].label.replace(" (", "\n(") for name in names], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(*bounds, *(max(rows[name].ratios) for name in names)) * 1.08)
    axes.set_xlabel("speedup over one process on one thread in the same job")
    axes.legend(loc="upper right", fontsize=9, markerscale=0.5)
    title = "\n".join(["One picture on two cores", *textwrap.wrap(settings(args), 100), hardware()])
    axes.set_title(title, fontsize=9, loc="left", x=-0.4)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def save(args: argparse.Namespace, chosen: dict[str, Method], rows: dict[str, Row], load: float) -> None:
    """Write speed.md, speed.json and speed.png."""
    folder: Path = args.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "speed.md").write_text(report(args, chosen, rows, load), encoding="utf-8")
    raw = {
        "hardware": hardware(),
        "settings": {"size": args.size, "steps": args.steps, "rounds": args.rounds, "text_tokens": TEXT_TOKENS},
        "load_average_before": load,
        "methods": {name: {**vars(chosen[name]), **vars(rows[name])} for name in chosen},
    }
    (folder / "speed.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    draw(args, chosen, rows, folder / "speed.png")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    names = [name for name in methods(1) if name not in BASELINES.values()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--size", type=int, default=768, help="side of the picture in px, a multiple of 16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", choices=names, default=names, help="beside one process on one thread")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--limit", type=float, default=600, help="seconds until one run counts as hung")
    args = parser.parse_args()
    if args.size % 16 or min(args.size, args.steps, args.rounds) < 1:
        parser.error("--size must be a multiple of 16, and --size, --steps and --rounds at least 1")
    return args


def main() -> int:
    """Measure, write, print; 1 if an exact method is wrong."""
    args = parse_arguments()
    every = methods(args.steps)
    needed = {every[name].baseline for name in args.methods}
    chosen = {name: method for name, method in every.items() if name in needed or name in args.methods}
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"load average is {load:.2f}: something else is running, so expect wrong ratios", file=sys.stderr)
    rows = run_all(args, chosen)
    save(args, chosen, rows, load)
    print(f"\n{table(chosen, rows)}\n\n{args.output_dir.resolve()}: speed.md, speed.json, speed.png")
    wrong = [name for name, row in rows.items() if chosen[name].is_exact and not row.error < EXACT]
    for name in wrong:
        print(f"{name}: relative error {rows[name].error:.1e} is above {EXACT:.0e}: WRONG RESULT", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
