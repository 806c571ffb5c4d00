"""What happens when a rank fails or differs: xpar beside diffusers' own context parallelism, as a markdown table.

    python -m benchmarks.faults_peers                  # all rows
    python -m benchmarks.faults_peers --rows F4 F7

Two gloo ranks on this machine, a tiny FLUX, Ulysses of degree 2, a time limit of 5 seconds for both. diffusers' starts
on a machine without accelerators only if it is told that there are some, so `torch.accelerator.device_count` is patched
from outside; nothing else of it is changed. The ranks and the faults are those of tests/faults.
"""

import argparse
import os
import signal
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig

from tests.faults.harness import GROUP_TIMEOUT, Outcome, Rank, run_ranks
from tests.faults.jobs import FAULTS, ULYSSES, config, place_fault
from tests.tiny_models import call_arguments, pipeline
from xpar import Parallel

LIMIT = 30.0
"""Seconds until a process counts as hung."""


@dataclass(frozen=True)
class Row:
    """A fault: where it happens and in which way, or what is different on rank 1."""

    name: str
    words: str
    place: str = ""
    fault: str = ""
    differs: str = ""


ROWS = (
    Row("F1", "rank 1 killed before the first step", "first step", "die"),
    Row("F2", "rank 1 killed in an all-to-all", "all_to_all", "die"),
    Row("F4", "exception in a block of rank 1", "block", "raise"),
    Row("F7", "rank 1 sleeps in a block", "block", "sleep"),
    Row("F8", "rank 1 frozen (SIGSTOP)", "block", "freeze"),
    Row("F10", "3 steps instead of 4 on rank 1", differs="num_inference_steps"),
    Row("F11", "another prompt of the same length on rank 1", differs="prompt_embeds"),
    Row("F11b", "a prompt of another length on rank 1", differs="prompt length"),
    Row("F12", "another seed on rank 1", differs="generator"),
    Row("F14", "another height on rank 1", differs="height"),
    Row("F15", "bf16 on rank 1, fp16 on rank 0", differs="dtype"),
)


def call(where: Rank, subject: str, row: Row) -> str:
    """Make a call with one fault in it; returns a digest of the picture if one comes out."""
    pipe = pipeline("flux")
    arguments = _arguments(row, where.rank, pipe)
    if subject == "xpar":
        run: Any = Parallel(pipe, config(**ULYSSES))
    else:
        with patch.object(torch.accelerator, "device_count", return_value=2):
            pipe.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
        run = pipe
    if row.fault and where.rank == 1:
        place_fault(pipe, row.place, arguments, lambda: FAULTS[row.fault](where))
    dist.barrier()
    if row.differs:
        where.inject()
    picture = run(**arguments)[0].float()
    return f"{float(picture.sum()):.3f}" if picture.isfinite().all() else "not finite"


def _arguments(row: Row, rank: int, pipe: Any) -> dict[str, Any]:
    """Arguments that both products can take: 24 tokens and 8 tokens of text divide by two."""
    arguments = call_arguments("flux", text=8)
    if row.differs == "dtype":
        pipe.to((torch.float16, torch.bfloat16)[rank])
        return {name: x.to(pipe.dtype) if torch.is_tensor(x) else x for name, x in arguments.items()}
    if rank == 0 or not row.differs:
        return arguments
    changes: dict[str, dict[str, Any]] = {
        "num_inference_steps": {"num_inference_steps": 3},
        "prompt_embeds": {"prompt_embeds": call_arguments("flux", text=8, seed=5)["prompt_embeds"]},
        "prompt length": {
            name: call_arguments("flux", text=12)[name] for name in ("prompt_embeds", "negative_prompt_embeds")
        },
        "generator": {"generator": torch.Generator().manual_seed(8)},
        "height": {"height": 24},
    }
    return {**arguments, **changes[row.differs]}


def run_row(subject: str, row: Row) -> list[Outcome]:
    """The outcomes of one row; the ranks' groups have the time limit of xpar's."""
    hangs = row.fault in ("sleep", "freeze")
    return run_ranks(call, arguments=(subject, row), timeout=LIMIT, group_timeout=GROUP_TIMEOUT, as_launcher=hangs)


def describe(outcome: Outcome) -> str:
    """How a rank ended, in a cell of a table."""
    if outcome.stack_if_hung:
        return f"**hangs** (killed after {LIMIT:g} s)"
    if outcome.error_class:
        text = " ".join(outcome.error_text.split()).replace("|", "/")
        shown = text if len(text) <= 150 else f"{text[:150]}..."
        return f"{outcome.error_class} after {outcome.seconds:.1f} s: {shown}"
    if outcome.exit_code == -signal.SIGABRT:
        return "**SIGABRT**, no Python exception"
    if outcome.exit_code:
        return f"ended by signal {-outcome.exit_code}" if outcome.exit_code < 0 else f"exit {outcome.exit_code}"
    return f"**no error**, exit 0, sum of the picture {outcome.value}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[row.name for row in ROWS], help="rows to run")
    chosen = parser.parse_args().rows
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print("| row | fault | rank | xpar | diffusers' context parallelism |\n|---|---|---|---|---|")
    for row in ROWS:
        if row.name in chosen:
            ours, theirs = (run_row(subject, row) for subject in ("xpar", "diffusers"))
            for mine, other in zip(ours, theirs, strict=True):
                name, words = (row.name, row.words) if mine.rank == 0 else ("", "")
                print(f"| {name} | {words} | {mine.rank} | {describe(mine)} | {describe(other)} |", flush=True)


if __name__ == "__main__":
    main()
