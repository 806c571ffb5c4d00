"""What the tests send into actors: functions found there by name."""

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.tiny_models import call_arguments, pipeline
from xpar import XparError


def build() -> Any:
    """The pipeline that every rank builds."""
    return pipeline("flux")


def refuse_to_build() -> Any:
    """A loader that finds nothing."""
    raise FileNotFoundError("no checkpoint at /nowhere")


def calls(count: int) -> list[dict[str, Any]]:
    """Calls that differ in everything that the seed draws."""
    return [call_arguments("flux", steps=3, seed=seed) for seed in range(count)]


def held(call: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`call`, standing still after its first step: every rank leaves a file named after its process id in `folder`
    and goes on once there is one named `go`."""
    return {**call, "callback_on_step_end": partial(_hold, folder)}


def wait_for(folder: Path, pattern: str, count: int, limit: float = 60) -> list[Path]:
    """The files of a pattern, once there are `count` of them."""
    deadline = time.monotonic() + limit
    while len(found := sorted(folder.glob(pattern))) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(found)} of {count} files {pattern} in {folder} after {limit} s")
        time.sleep(0.02)
    return found


def _hold(folder: Path, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    if step == 0:
        (folder / f"{os.getpid()}.pid").touch()
        wait_for(folder, "go", 1)
    return tensors


def die(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """A callback that ends the process, whenever it is called."""
    os._exit(3)


def sleep(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """A callback that takes longer than a test allows."""
    time.sleep(60)
    return tensors


class AwkwardError(XparError):
    """Can be pickled, and not be built again: its constructor wants more than its text."""

    def __init__(self, text: str, response: int) -> None:
        super().__init__(f"{text} ({response})")


def raise_awkward(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """A callback that raises what does not survive pickling."""
    raise AwkwardError("the hub said no", 404)
