"""The cfg and dp axes around one pipeline call: denoiser calls, text encoders and decoding are shared over ranks."""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from xpar.wrappers.models.plan import map_tensors, tensors_of
from xpar.wrappers.pipelines.coupled_rows import CoupledRows, attention_modules
from xpar.wrappers.pipelines.guidance import Compute, GuidanceSplit
from xpar.wrappers.pipelines.rows import RowSplit
from xpar.wrappers.replacing import replaced
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
        guidance = None
        with ExitStack() as stack:
            if self.cfg is not None or self.dp is not None:
                guidance = GuidanceSplit(compute, cfg=self.cfg, dp=self.dp, pictures=pictures)
                self._share_rows(stack, pipe, transformers, guidance)
            for transformer in transformers:
                transformer.schedule = guidance or compute
                stack.callback(setattr, transformer, "schedule", None)
            yield
        if guidance is not None:
            self._warn_if_idle(guidance)

    def _share_rows(
        self, stack: ExitStack, pipe: Any, transformers: Sequence[ParallelTransformer], guidance: GuidanceSplit
    ) -> None:
        """Text encoders are shared by dp, decoding by both axes; attention that couples rows is given all of them."""
        denoisers = [transformer.module for transformer in transformers]
        for name, module in pipe.components.items():
            if not isinstance(module, nn.Module) or any(module is denoiser for denoiser in denoisers):
                continue
            method, groups = "", [self.dp]
            if hasattr(module, "decode"):
                if hasattr(module.decode, "xpar_owner"):
                    continue  # a parallel VAE shares rows itself
                method, groups = "decode", [self.dp, self.cfg]
            elif name.startswith("text_encoder") and self.dp is not None:
                method = "forward"
            if method:
                shared = by_rows(getattr(module, method), RowSplit(groups))
                stack.enter_context(replaced(module, method, shared))
        for denoiser in denoisers:
            for module in attention_modules(denoiser):
                coupled = CoupledRows(module, lambda: guidance.current_split)
                stack.enter_context(replaced(module, "forward", coupled))

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
    """A module's method whose batch is shared over ranks.

    Every rank computes the whole call where it cannot be shared: a batch of one, or an argument without its rows (the
    patches of several pictures in one tensor, say).
    """

    @functools.wraps(function)
    def shared(*args: Any, **kwargs: Any) -> Any:
        tensors = tensors_of([list(args), kwargs])
        sizes = {x.shape[0] if x.ndim > 0 else 0 for x in tensors}
        rows = sizes.pop() if len(sizes) == 1 else 0
        if rows < 2:
            return function(*args, **kwargs)
        held = split.held(rows)

        def cut(x: torch.Tensor) -> torch.Tensor:
            return x[held]

        return split.gather(function(*map_tensors(cut, args), **map_tensors(cut, kwargs)), rows)

    return shared
