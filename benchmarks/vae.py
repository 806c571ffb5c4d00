"""Exact decoding of autoencoders on several ranks: time, memory, and distvae beside it.

    python benchmarks/vae.py                                   # 1024x1024, 17 frames of 832x480, 5 rounds, memory
    python benchmarks/vae.py --distvae /tmp/distvae            # with distvae 0.1.0 in the same rounds
    python benchmarks/vae.py --parts memory

The autoencoders have the architectures of FLUX (AutoencoderKL) and Wan 2.1 at small width, with random weights.

Time: one process on one thread against two ranks of one thread each. Machines are noisy, so the methods take turns,
each round compares with the one-process run of the same round, and medians over the rounds are reported. Nothing else
should run meanwhile. Every result is checked against that of one process.

Memory: how far the resident set of a process rises over its level before the call (VmHWM after the mark was reset by
/proc/self/clear_refs), on four ranks of one thread and in one process, each in processes of their own that have
decoded something small before, so that code and threads are there. Beside it what `peak_bytes` counts.

distvae is no dependency: pip install --no-deps --target /tmp/distvae distvae==0.1.0. It runs on CPU and gloo as it is.
"""

import argparse
import copy
import ctypes
import gc
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from speed import hardware
from workers import Workers

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # before the processes import diffusers

EXACT = 2e-5  # relative error above which xpar is wrong
TARGETS = {"speed": 1.85, "memory": 0.32}
SEED = 0
# Freed memory goes back at once, so that the resident set is what is alive: read by malloc as a process starts.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Job:
    """One autoencoder and the latents that it decodes.

    Args:
        label: its name in the tables.
        kind: "kl" or "wan".
        shape: of the latents.
        width: channels of the Wan decoder's finest resolution.
    """

    label: str
    kind: str
    shape: tuple[int, ...]
    width: int = 8

    def autoencoder(self) -> Any:
        """The autoencoder, with random weights."""
        from diffusers import AutoencoderKL, AutoencoderKLWan

        torch.manual_seed(SEED)
        if self.kind == "wan":
            vae = AutoencoderKLWan(base_dim=self.width)
        else:
            vae = AutoencoderKL(
                block_out_channels=(32, 64, 64, 64),
                layers_per_block=2,
                latent_channels=16,
                use_quant_conv=False,
                use_post_quant_conv=False,
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
            )
        return vae.eval().requires_grad_(False)

    def latents(self, small: bool = False) -> torch.Tensor:
        """Random latents, of 8x8 positions if small."""
        shape = (*self.shape[:-2], 8, 8) if small else self.shape
        return torch.randn(shape, generator=torch.Generator().manual_seed(SEED))


@dataclass(frozen=True)
class Method:
    """One way to decode on one thread a rank: "plain", "xpar" or "distvae"."""

    name: str
    label: str
    ranks: int


PLAIN = Method("plain", "one process", 1)
XPAR = Method("xpar", "xpar, exact, 2 ranks", 2)
DISTVAE = Method("distvae", "distvae 0.1.0, 2 ranks", 2)


@dataclass
class Row:
    """What was measured of a method in a job: one entry per round, and the largest error seen."""

    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    error: float = 0.0


@dataclass
class Memory:
    """Bytes by rank: how far the resident set rose, and what `peak_bytes` counts."""

    resident: list[int]
    counted: list[int]


# ---- in the processes ------------------------------------------------------------------------------------------------

_decoders: dict[tuple[str, str], Callable[[torch.Tensor], torch.Tensor]] = {}


def build(job: Job, method: Method, distvae: str | None) -> None:
    """Make the decoder of a job and method, and decode something small: first calls allocate and connect."""
    torch.set_num_threads(1)
    vae = job.autoencoder()
    if method.name == "xpar":
        from xpar import parallel_vae

        parallel_vae(vae, torch.distributed.group.WORLD)
    elif method.name == "distvae":
        if distvae is not None and distvae not in sys.path:
            sys.path.append(distvae)
        from distvae.vae import parallelize_decoder

        vae = copy.deepcopy(vae)
        parallelize_decoder(vae, torch.distributed.group.WORLD)

    def decode(z: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return vae.decode(z).sample

    decode(job.latents(small=True))
    _decoders[job.label, method.name] = decode


def measure_time(job: Job, method: Method) -> tuple[float, Any]:
    """Seconds of one run, and what it decoded as an array."""
    decode, z = _decoders[job.label, method.name], job.latents()
    if method.ranks > 1:
        torch.distributed.barrier()
    start = time.perf_counter()
    result = decode(z)
    return time.perf_counter() - start, result.numpy()


def measure_memory(job: Job, method: Method) -> int:
    """Bytes by which the resident set of this process rose in one run."""
    decode, z = _decoders[job.label, method.name], job.latents()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if method.ranks > 1:
        torch.distributed.barrier()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status("VmRSS")
    result = decode(z)
    peak = _status("VmHWM")
    del result
    return peak - before


def _status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def count_memory(job: Job, ranks: int) -> list[int]:
    """What `peak_bytes` counts, by rank. It asks no other rank."""
    from xpar import parallel_vae

    group = torch.distributed.group.WORLD if ranks > 1 else None
    wrapper = parallel_vae(job.autoencoder(), group)
    counted = wrapper.peak_bytes(job.shape)
    wrapper.close()
    return counted


# ---- in the parent ---------------------------------------------------------------------------------------------------


def run_speed(args: argparse.Namespace, jobs: list[Job], methods: dict[str, list[Method]]) -> dict[str, dict[str, Row]]:
    """Time the methods of each job in rounds; rows by label of the job and name of the method."""
    rows = {job.label: {method.name: Row() for method in methods[job.kind]} for job in jobs}
    with Workers(1, threads=1, limit=args.limit) as solo, Workers(2, threads=1, limit=args.limit) as pair:
        worlds = {1: solo, 2: pair}
        for job in jobs:
            for method in methods[job.kind]:
                worlds[method.ranks].call(build, job, method, args.distvae)
        for number in range(args.rounds):
            for job in jobs:
                turn = number % len(methods[job.kind])
                answers = {}
                for method in (*methods[job.kind][turn:], *methods[job.kind][:turn]):
                    answers[method.name] = worlds[method.ranks].call(measure_time, job, method)
                    seconds = max(seconds for seconds, _ in answers[method.name])
                    print(f"round {number + 1}/{args.rounds}  {job.label}, {method.label}: {seconds:.2f} s", flush=True)
                record(rows[job.label], answers)
    return rows


def record(rows: dict[str, Row], answers: dict[str, list[tuple[float, Any]]]) -> None:
    """Add one round of a job; a run takes as long as its slowest rank."""
    ((baseline, reference),) = answers[PLAIN.name]
    for name, ranks in answers.items():
        row = rows[name]
        row.seconds.append(max(seconds for seconds, _ in ranks))
        row.ratios.append(baseline / row.seconds[-1])
        errors = [float(abs(result - reference).max() / abs(reference).max()) for _, result in ranks]
        row.error = max(row.error, *errors)


def run_memory(args: argparse.Namespace, jobs: list[Job]) -> dict[str, dict[int, Memory]]:
    """Measure memory of each job, by label and number of ranks; each in processes of its own."""
    os.environ.update(MALLOC)
    try:
        return {job.label: {ranks: _memory(args, job, ranks) for ranks in (1, args.memory_ranks)} for job in jobs}
    finally:
        for name in MALLOC:
            del os.environ[name]


def _memory(args: argparse.Namespace, job: Job, ranks: int) -> Memory:
    method = PLAIN if ranks == 1 else Method("xpar", f"xpar, exact, {ranks} ranks", ranks)
    with Workers(ranks, threads=1, limit=args.limit) as world:
        world.call(build, job, method, None)
        resident = world.call(measure_memory, job, method)
        memory = Memory(resident, world.call(count_memory, job, ranks)[0])
    print(f"memory  {job.label}, {ranks} process(es): {max(resident) / 2**20:.0f} MiB", flush=True)
    return memory


def speed_table(methods: dict[str, list[Method]], jobs: list[Job], rows: dict[str, dict[str, Row]]) -> str:
    """Times as a markdown table."""
    lines = [
        "| decode | method | processes x threads | seconds | speedup (median) | min..max | relative error |",
        "|---|---|---|---|---|---|---|",
    ]
    for job in jobs:
        for method in methods[job.kind]:
            row = rows[job.label][method.name]
            lines.append(
                f"| {job.label} | {method.label} | {method.ranks} x 1 | {statistics.median(row.seconds):.2f} "
                f"| {statistics.median(row.ratios):.3f} | {min(row.ratios):.3f}..{max(row.ratios):.3f} "
                f"| {row.error:.1e} |"
            )
    return "\n".join(lines)


def memory_table(memory: dict[str, dict[int, Memory]]) -> str:
    """Memory as a markdown table: of the busiest rank, and its share of what one process needs."""
    lines = [
        "| decode | ranks | measured peak, MiB | share of one process | counted peak, MiB | share of one process |",
        "|---|---|---|---|---|---|",
    ]
    for label, by_ranks in memory.items():
        alone = by_ranks[1]
        for ranks, each in by_ranks.items():
            measured, counted = max(each.resident), max(each.counted)
            lines.append(
                f"| {label} | {ranks} | {measured / 2**20:.1f} | {measured / max(alone.resident):.3f} "
                f"| {counted / 2**20:.1f} | {counted / max(alone.counted):.3f} |"
            )
    return "\n".join(lines)


def report(args: argparse.Namespace, tables: list[str], load: float) -> str:
    """The page vae.md."""
    frames, height, width = args.video
    body = "\n\n".join(tables)
    return (
        f"{body}\n\nFLUX's autoencoder with widths (32, 64, 64, 64), {args.size}x{args.size} px; Wan 2.1's with base "
        f"width {args.wan_width}, {frames} frames of {width}x{height} px; random weights; {args.rounds} round(s).\n\n"
        f"{hardware()}; load average before the run {load:.2f}.\n\n"
        "Speedup: seconds of the one-process run of the same round over seconds of the method; the median, smallest "
        "and largest over the rounds. Relative error: the largest difference from one process, over the largest value. "
        "Measured peak: how far the resident set rose over its level before the call, on the rank where it rose most; "
        "what `peak_bytes` counts beside it is without scratch memory of the kernels, halos and the final gather. "
        f"Targets: {TARGETS['speed']} times as fast on 2 ranks, {TARGETS['memory']} of the memory on 4.\n"
    )


def save(
    args: argparse.Namespace,
    page: str,
    rows: dict[str, dict[str, Row]],
    memory: dict[str, dict[int, Memory]],
    load: float,
) -> None:
    """Write vae.md and vae.json."""
    folder: Path = args.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vae.md").write_text(page, encoding="utf-8")
    raw = {
        "hardware": hardware(),
        "settings": {name: getattr(args, name) for name in ("size", "video", "wan_width", "rounds")},
        "load_average_before": load,
        "speed": {job: {name: vars(row) for name, row in each.items()} for job, each in rows.items()},
        "memory": {job: {ranks: vars(one) for ranks, one in each.items()} for job, each in memory.items()},
    }
    (folder / "vae.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="side of the picture in px, a multiple of 8")
    parser.add_argument(
        "--video",
        type=int,
        nargs=3,
        default=(17, 480, 832),
        metavar=("FRAMES", "HEIGHT", "WIDTH"),
        help="4n + 1 frames",
    )
    parser.add_argument("--wan-width", type=int, default=8, help="channels of Wan's finest resolution")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", choices=("speed", "memory"), default=("speed", "memory"))
    parser.add_argument("--memory-ranks", type=int, default=4)
    parser.add_argument("--distvae", help="folder that distvae 0.1.0 is installed in")
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--limit", type=float, default=600, help="seconds until one run counts as hung")
    args = parser.parse_args()
    frames, height, width = args.video
    if args.size % 8 or height % 8 or width % 8 or frames % 4 != 1:
        parser.error("sizes must be multiples of 8, and the number of frames one more than a multiple of 4")
    if min(args.size, height, width, frames, args.wan_width, args.rounds) < 1 or args.memory_ranks < 2:
        parser.error("sizes and --rounds must be at least 1, and --memory-ranks 2")
    return args


def has_distvae(args: argparse.Namespace) -> bool:
    """Whether distvae is there."""
    if args.distvae is not None and not (Path(args.distvae) / "distvae").is_dir():
        return False
    return args.distvae is not None or importlib.util.find_spec("distvae") is not None


def main() -> int:
    """Measure, write, print; 1 if xpar's result is wrong."""
    args = parse_arguments()
    frames, height, width = args.video
    jobs = [
        Job(f"FLUX's KL, {args.size}x{args.size} px", "kl", (1, 16, args.size // 8, args.size // 8)),
        Job(
            f"Wan, {frames} frames, {width}x{height} px",
            "wan",
            (1, 16, (frames + 3) // 4, height // 8, width // 8),
            args.wan_width,
        ),
    ]
    methods = {"kl": [PLAIN, XPAR], "wan": [PLAIN, XPAR]}
    if has_distvae(args):
        methods["kl"].append(DISTVAE)
    else:
        print("distvae is not there, so it is left out; see --distvae")
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"load average is {load:.2f}: something else is running, so expect wrong ratios", file=sys.stderr)
    rows = run_speed(args, jobs, methods) if "speed" in args.parts else {}
    memory = run_memory(args, jobs) if "memory" in args.parts else {}
    tables = [speed_table(methods, jobs, rows)] if rows else []
    tables += [memory_table(memory)] if memory else []
    save(args, report(args, tables, load), rows, memory, load)
    print("\n" + "\n\n".join(tables) + f"\n\n{args.output_dir.resolve()}: vae.md, vae.json")
    wrong = {label: each[XPAR.name].error for label, each in rows.items() if not each[XPAR.name].error < EXACT}
    for label, error in wrong.items():
        print(f"{label}: relative error {error:.1e} is above {EXACT:.0e}: WRONG RESULT", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
