"""The cfg and dp axes around one pipeline call: denoiser calls, text encoders and decoding are shared over ranks."""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from xpar.wrappers.models.plan import map_tensors
from xpar.wrappers.pipelines.deferred import settle
from xpar.wrappers.pipelines.guidance import Compute, GuidanceSplit
from xpar.wrappers.pipelines.regions import tensors_of
from xpar.wrappers.pipelines.rows import RowSplit
from xpar.wrappers.transformer import ParallelTransformer

logger = logging.getLogger(__name__)


class BatchSharing:
    """Shares pictures over the dp axis and guidance branches over the cfg axis.

    Args:
        cfg: group of the cfg axis, or None.
        dp: group of the dp axis, or None.
        is_main: whether this rank speaks for all.
    """

    def __init__(self, cfg: ProcessGroup | None, dp: ProcessGroup | None, is_main: bool) -> None:
        self.cfg, self.dp, self.is_main = cfg, dp, is_main
        self._warned = False

    @contextmanager
    def installed(
        self, pipe: Any, transformers: Sequence[ParallelTransformer], compute: Compute, pictures: int | None
    ) -> Iterator[None]:
        """Send the denoiser calls of a pipeline call through `compute`, shared over both axes; undo it afterwards."""
        schedule: Any = compute
        replaced: list[tuple[nn.Module, str, Any]] = []
        if self.cfg is not None or self.dp is not None:
            schedule = GuidanceSplit(compute, cfg=self.cfg, dp=self.dp, pictures=pictures)
            replaced = self._share_ends(pipe, transformers)
        for transformer in transformers:
            transformer.schedule = schedule
        try:
            yield
        finally:
            for transformer in transformers:
                transformer.schedule = None
            for module, method, before in reversed(replaced):
                if before is None:
                    module.__dict__.pop(method)
                else:
                    module.__dict__[method] = before
        if schedule is not compute:
            self._warn_if_idle(schedule)

    def _share_ends(self, pipe: Any, transformers: Sequence[ParallelTransformer]) -> list[tuple[nn.Module, str, Any]]:
        """Text encoders by dp, decoding by both axes."""
        denoisers = [transformer.module for transformer in transformers]
        replaced: list[tuple[nn.Module, str, Any]] = []
        for name, module in pipe.components.items():
            if not isinstance(module, nn.Module) or any(module is denoiser for denoiser in denoisers):
                continue
            if hasattr(module, "decode"):
                method, split = "decode", RowSplit([self.dp, self.cfg])
            elif name.startswith("text_encoder") and self.dp is not None:
                method, split = "forward", RowSplit([self.dp])
            else:
                continue
            replaced.append((module, method, module.__dict__.get(method)))
            module.__dict__[method] = by_rows(getattr(module, method), split)
        return replaced

    def _warn_if_idle(self, guidance: GuidanceSplit) -> None:
        if guidance.used or self._warned:
            return
        self._warned = True
        if self.is_main:
            logger.warning(
                "cfg_degree > 1, but this call had one guidance branch a step, so the ranks of the cfg axis had "
                "nothing to share; without guidance use cfg_degree=1 and another axis"
            )


def by_rows(function: Callable[..., Any], split: RowSplit) -> Callable[..., Any]:
    """A module's method whose batch is shared over ranks. Batches of one are computed by all."""

    @functools.wraps(function)
    def shared(*args: Any, **kwargs: Any) -> Any:
        tensors = tensors_of([list(args), kwargs])
        rows = tensors[0].shape[0] if tensors and tensors[0].ndim > 0 else 0
        if rows < 2:
            return function(*args, **kwargs)
        held = split.held(rows)

        def cut(x: torch.Tensor) -> torch.Tensor:
            return x[held] if x.ndim > 0 and x.shape[0] == rows else x

        return split.gather(function(*map_tensors(cut, args), **map_tensors(cut, kwargs)), rows)

    return shared


@contextmanager
def steps_through(pipe: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace `step` of the pipeline's schedulers on the instances, and put it back."""
    schedulers = [c for c in pipe.components.values() if hasattr(c, "step") and not isinstance(c, nn.Module)]
    for scheduler in schedulers:
        scheduler.__dict__["step"] = around(scheduler.step)
    try:
        yield
    finally:
        for scheduler in schedulers:
            scheduler.__dict__.pop("step", None)


def settling(step: Callable[..., Any]) -> Callable[..., Any]:
    """A scheduler's step that waits for deferred values."""

    @functools.wraps(step)
    def settled(*args: Any, **kwargs: Any) -> Any:
        return step(*settle(args), **settle(kwargs))

    return settled
