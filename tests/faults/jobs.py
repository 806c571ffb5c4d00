"""What ranks do in fault tests, and the faults: changes to a pipeline that make one rank fail at a certain place."""

import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives

from tests.faults.harness import GROUP_TIMEOUT, Rank
from tests.tiny_models import call_arguments, pipeline, relative_error
from xpar import EngineConfig, Parallel, XparError

ULYSSES = {"ulysses_degree": 2}
PIPEFUSION = {"pipefusion_degree": 2, "num_patches": 2}
ULYSSES3 = {"ulysses_degree": 3}
FROM_FIRST_STAGE = {"pipefusion_degree": 3, "num_patches": 3}


def config(**fields: Any) -> EngineConfig:
    """A configuration with the tests' time limit."""
    return EngineConfig(**{"timeout": GROUP_TIMEOUT, **fields})


def faulty_call(where: Rank, fields: dict[str, Any], place: str, fault: str, failing: int = 1) -> Any:
    """A good call, then one in which a rank fails at a place in a way; returns what the object says afterwards."""
    pipe = pipeline("flux")
    parallel = Parallel(pipe, config(**fields))
    parallel(**call_arguments("flux"))
    arguments = call_arguments("flux", steps=6)
    if place == "callback":
        arguments["callback_on_step_end"] = _callback
    if where.rank == failing:
        place_fault(pipe, place, arguments, lambda: FAULTS[fault](where))
    parallel(**arguments)


def _callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    return tensors


def place_fault(pipe: Any, place: str, arguments: dict[str, Any], fault: Callable[[], None]) -> None:
    """Have a fault happen at a place of the next call."""
    block = (
        pipe.transformer.transformer_blocks[0]
        if dist.get_rank() == 0
        else pipe.transformer.single_transformer_blocks[-1]
    )
    if place == "first step":
        pipe.transformer.register_forward_pre_hook(lambda *_: fault())
    elif place == "block":
        at = _Countdown(4, fault)  # the third step, or its first patches
        block.register_forward_pre_hook(lambda *_: at())
    elif place == "all_to_all":
        at = _Countdown(20, fault)
        _before(dist, "all_to_all_single", at)
        _before(functional_collectives, "all_to_all_single", at)  # what diffusers uses
    elif place == "receive":
        _before(dist, "irecv", _Countdown(8, fault))
    elif place == "callback":
        at = _Countdown(3, fault)

        def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            at()
            return tensors

        callback.__name__ = callback.__qualname__ = _callback.__name__
        arguments["callback_on_step_end"] = callback
    else:
        at = _Countdown(1, fault)
        pipe.vae.decoder.mid_block.register_forward_pre_hook(lambda *_: at())


class _Countdown:
    """Runs a fault at the n-th call."""

    def __init__(self, count: int, fault: Callable[[], None]) -> None:
        self.count, self.fault = count, fault

    def __call__(self) -> None:
        self.count -= 1
        if self.count == 0:
            self.fault()


def _before(owner: Any, name: str, first: Callable[[], None]) -> None:
    inner = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        first()
        return inner(*args, **kwargs)

    setattr(owner, name, changed)


def _die(where: Rank) -> None:
    where.inject()
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(where: Rank) -> None:
    where.inject()
    raise ValueError(f"boom on rank {where.rank}")


def _sleep(where: Rank) -> None:
    where.inject()
    time.sleep(600)


def _freeze(where: Rank) -> None:
    where.inject()
    os.kill(os.getpid(), signal.SIGSTOP)


def _out_of_memory(where: Rank) -> None:
    where.inject()
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


FAULTS: dict[str, Callable[[Rank], None]] = {
    "die": _die,
    "raise": _raise,
    "sleep": _sleep,
    "freeze": _freeze,
    "out of memory": _out_of_memory,
}


def allocate_too_much(where: Rank) -> dict[str, Any]:
    """A call in which rank 1 asks the system for more than it may have, then one of a new object."""
    pipe = pipeline("flux")
    expected = pipe(**call_arguments("flux"))[0]
    parallel = Parallel(pipe, config(**ULYSSES))
    answer = {}
    if where.rank == 1:
        block = pipe.transformer.transformer_blocks[1]
        handle = block.register_forward_pre_hook(lambda *_: torch.empty(2**40, dtype=torch.uint8))
        resource.setrlimit(resource.RLIMIT_AS, (2**37, resource.RLIM_INFINITY))
    try:
        parallel(**call_arguments("flux"))
    except RuntimeError as error:
        answer.update(kind=type(error).__name__, text=str(error))
    parallel.close()
    if where.rank == 1:
        handle.remove()
    with Parallel(pipe, config(**ULYSSES)) as parallel:
        answer["error afterwards"] = relative_error(parallel(**call_arguments("flux"))[0], expected)
    return answer


def call_after_time_out(where: Rank) -> tuple[str, str, float]:
    """What two calls say of which the first times out, and the seconds of the second."""
    pipe = pipeline("flux")
    parallel = Parallel(pipe, config(**ULYSSES, timeout=2.0))
    if where.rank == 1:
        place_fault(pipe, "block", {}, lambda: FAULTS["sleep"](where))
    texts, times = [], []
    for _ in range(2):
        times.append(time.monotonic())
        try:
            parallel(**call_arguments("flux"))
        except XparError as error:
            texts.append(str(error))
    seconds = time.monotonic() - times[-1]
    parallel.close()
    return texts[0], texts[1], seconds


@dataclass
class Answer:
    """What a call returned or raised, and when."""

    kind: str
    """Class of the error, or "" """
    text: str
    seconds: float
    value: Any = None


def answer_of(function: Callable[[], Any]) -> Answer:
    """Call a function that may raise."""
    start = time.monotonic()
    try:
        value = function()
    except BaseException as error:
        return Answer(type(error).__name__, str(error), time.monotonic() - start)
    return Answer("", "", time.monotonic() - start, value)
