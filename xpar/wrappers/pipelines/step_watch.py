"""One pipeline call, step by step: how far it is, whether its latents are finite, whether somebody wants it to end."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from xpar.core.distributed.call_guard import start_agreement
from xpar.core.distributed.cancellation import Cancellation
from xpar.core.distributed.grid import Axis, RankGrid
from xpar.core.distributed.progress import Progress
from xpar.errors import CallCancelledError, NonFiniteError
from xpar.wrappers.pipelines.callbacks import with_callback
from xpar.wrappers.pipelines.steps import latents_of, sample_of, steps_through
from xpar.wrappers.replacing import replaced
from xpar.wrappers.transformer import ParallelTransformer

__all__ = ["StepWatch"]


class StepWatch:
    """Watches one call.

    Args:
        grid: the ranks.
        progress: kept up to date, for the messages of failures.
        check: when latents are checked, see `EngineConfig.check_finite`. For "step" the ranks exchange a few integers
            after each step and look at what came of it one step later, so that none waits.
        cancellation: counts the steps.
    """

    def __init__(self, grid: RankGrid, progress: Progress, check: str, cancellation: Cancellation) -> None:
        self.grid, self.progress, self.check = grid, progress, check
        self.cancellation = cancellation
        self._pending: Callable[[], list[list[int]]] | None = None
        self._latents: Tensor | None = None
        self._received_bad = self._sent_bad = False

    @contextmanager
    def installed(self, pipe: Any, transformers: Sequence[ParallelTransformer]) -> Iterator[None]:
        """Watch the steps, denoisers and autoencoders of a pipeline inside; afterwards the last look."""
        with ExitStack() as stack:
            stack.enter_context(steps_through(pipe, self._around))
            for transformer in transformers:
                stack.enter_context(self._phase_of(transformer.module))
                if self.check == "step":
                    transformer.observe = self._observe
                    stack.callback(setattr, transformer, "observe", None)
            for module in pipe.components.values():
                if isinstance(module, nn.Module) and hasattr(module, "decode"):
                    stack.enter_context(replaced(module, "decode", self._decoding(getattr(module, "decode"))))  # noqa: B009
            yield
        self.progress.phase = "the end of the call"
        self._look("end")

    def arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The call's arguments, with a callback by which an interruption on one rank becomes one on all."""
        user = arguments.get("callback_on_step_end")
        if user is None or self.grid.control is None:
            return arguments

        def interrupted_alike(pipe: Any, *args: Any) -> Any:
            returned = user(pipe, *args)
            wanted = bool(getattr(pipe, "_interrupt", False))
            if any(flag for (flag,) in start_agreement([wanted], self.grid.control)()):
                pipe._interrupt = True
            return returned

        return with_callback(arguments, interrupted_alike)

    def _around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self._after_step(sample_of(args, kwargs), latents_of(result))
            return result

        return watched

    def _after_step(self, sample: Tensor, latents: Tensor) -> None:
        self.cancellation.pass_step()
        self._latents = latents
        if self.check == "step":
            self._judge_pending()
            self._pending = self._start(not _is_finite(sample), not _is_finite(latents))
            self._received_bad = self._sent_bad = False

    def _start(self, sample_bad: bool, latents_bad: bool) -> Callable[[], list[list[int]]]:
        flags = (self.cancellation.is_requested, sample_bad, self._received_bad, self._sent_bad, latents_bad)
        return start_agreement([self.progress.step, *map(int, flags)], self.grid.control)

    def _judge_pending(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._judge(pending(), "")

    def _judge(self, by_rank: list[list[int]], when: str) -> None:
        """End the call on all ranks if one has latents that are not finite."""
        step = by_rank[0][0]
        if not any(any(flags[2:]) for flags in by_rank):
            return
        began = [i for i, (_, _, sample, received, sent, _) in enumerate(by_rank) if sample or (sent and not received)]
        where = began or [i for i, flags in enumerate(by_rank) if flags[5]]
        named = [f"rank {self.grid.ranks[i]} (stage {self.grid.layout.coordinate(i, Axis.PIPEFUSION)})" for i in where]
        since = "began" if began else "were found"
        raise NonFiniteError(
            f"the latents hold NaN or infinity: they {since} {when or f'in step {step}'} on {_list(named)}; "
            + ("check_finite='step' says in which step they begin; " if when else "")
            + "look at the inputs and the dtype, or use check_finite='off'"
        )

    def _look(self, when: str) -> None:
        """The look before decoding, and at the end of the call: all ranks are there."""
        self._judge_pending()
        bad = self.check != "off" and self._latents is not None and not _is_finite(self._latents)
        by_rank = self._start(False, bad)()
        if when == "decoding" and any(flags[1] for flags in by_rank):
            raise CallCancelledError("the call was cancelled; all ranks stopped before decoding")
        self._judge(by_rank, f"after the last step ({self.progress.step})")

    def _decoding(self, decode: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(decode)
        def watched(*args: Any, **kwargs: Any) -> Any:
            before, self.progress.phase = self.progress.phase, "vae"
            if self._latents is not None:
                self._look("decoding")
            self._latents = None
            result = decode(*args, **kwargs)
            self.progress.phase = before
            return result

        return watched

    @contextmanager
    def _phase_of(self, module: nn.Module) -> Iterator[None]:
        def denoising(*_: Any) -> None:
            self.progress.phase = "denoising"

        handle = module.register_forward_pre_hook(denoising)
        try:
            yield
        finally:
            handle.remove()

    def _observe(self, what: str, tensors: Sequence[Tensor | None]) -> None:
        """See what a stage receives and sends."""
        bad = not all(x is None or _is_finite(x) for x in tensors)
        self._received_bad |= bad and what == "received"
        self._sent_bad |= bad and what == "sent"


def _is_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _list(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))
