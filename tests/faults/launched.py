"""What torchrun starts in the tests of launchers: one long call, or one that crashes in the first attempt.

torchrun --standalone --nproc_per_node 2 tests/faults/launched.py FOLDER long|restart
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.faults.harness import GROUP_TIMEOUT
from tests.tiny_models import call_arguments, pipeline, relative_error
from xpar import EngineConfig, Parallel

RANK = int(os.environ["RANK"])


def note(folder: Path, name: str, **facts: Any) -> None:
    """Leave something for the test; the file appears whole."""
    path = folder / f"{name}{RANK}"
    path.with_suffix(".part").write_text(json.dumps(facts))
    path.with_suffix(".part").rename(path)


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    pipe = pipeline("flux")
    with Parallel(pipe, EngineConfig(ulysses_degree=2, timeout=GROUP_TIMEOUT)) as parallel:
        if what == "restart":
            crash = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and RANK == 1
            restart(folder, pipe, parallel, crash)
        else:
            run_long(folder, parallel)


def run_long(folder: Path, parallel: Parallel) -> None:
    """A call that does not end within the test."""

    def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 3:
            note(folder, "running", pid=os.getpid(), launcher=os.getppid())
        return tensors

    try:
        parallel(**call_arguments("flux", steps=20000, callback_on_step_end=callback))
    except BaseException as error:
        note(folder, "ended", kind=type(error).__name__, text=str(error), at=time.monotonic())
        raise


def restart(folder: Path, pipe: Any, parallel: Parallel, crash: bool) -> None:
    """A call in which a rank dies in the first attempt; the second must be right."""

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if crash:
        pipe.transformer.transformer_blocks[1].register_forward_pre_hook(die)
    result = parallel(**call_arguments("flux"))[0]
    expected = pipeline("flux")(**call_arguments("flux"))[0]
    note(folder, "done", error=relative_error(result, expected), attempt=os.environ["TORCHELASTIC_RESTART_COUNT"])


if __name__ == "__main__":
    main()
