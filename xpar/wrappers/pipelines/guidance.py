"""Guidance branches and pictures, shared over the cfg and dp axes at the denoiser call.

The pipeline's own loop and guidance formula stay. A call whose batch holds several branches ([uncond; cond]) is split
by rows over both axes. Where a pipeline makes one call per branch, rank n of the cfg axis computes call n at once, and
a call computed elsewhere returns a value that is waited for at first use (arXiv 2207.12598 for the formula).
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from xpar.core.distributed.collectives import all_gather_uneven, group_rank, group_size
from xpar.core.distributed.operations import named
from xpar.errors import UnsupportedError
from xpar.wrappers.models.plan import map_tensors, named_arguments, tensors_of
from xpar.wrappers.pipelines.deferred import Deferred, settle
from xpar.wrappers.pipelines.rows import RowSplit, cut_batch
from xpar.wrappers.transformer import ParallelTransformer


class Compute(Protocol):
    """Computes denoiser calls on this rank: whole, or patch by patch."""

    def denoise(self, transformer: ParallelTransformer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a call."""

    def skip(self, transformer: ParallelTransformer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep in step with the ranks that compute a call."""

    def loop(self) -> int:
        """The patch loop that has the turn."""


@dataclass
class Branch:
    """A sequential call of the current step: who computes it, what its input is like, and its output."""

    owner: int
    shape: torch.Size
    device: torch.device
    key: tuple[Any, ...]
    output: Any = None
    arrived: bool = False


class GuidanceSplit:
    """One pipeline call's denoiser calls, shared over branches and pictures.

    Args:
        compute: computes what falls to this rank.
        cfg: the group of the cfg axis, or None.
        dp: the group of the dp axis, or None.
        pictures: number of pictures of the pipeline call, or None if it is not known.
    """

    def __init__(
        self, compute: Compute, *, cfg: ProcessGroup | None, dp: ProcessGroup | None, pictures: int | None
    ) -> None:
        self.compute, self.cfg, self.pictures = compute, cfg, pictures
        self.used = cfg is None
        self.current_split: tuple[RowSplit, int] | None = None
        self._by_picture, self._by_row = RowSplit([dp]), RowSplit([dp, cfg])
        self._branches: defaultdict[int, list[Branch]] = defaultdict(list)
        self._forms: dict[tuple[Any, ...], Any] = {}

    def denoise(self, transformer: ParallelTransformer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute this rank's share of a call; return the output, or what will be the output."""
        arguments = named_arguments(transformer.module, settle(args), settle(kwargs))
        main = arguments[transformer.plan.batch[0]]
        rows = len(main)
        if self.pictures is not None and rows > self.pictures:
            self.used = True
            if not transformer.plan.blocks:
                raise UnsupportedError(
                    f"{type(transformer.module).__name__} is called with {rows} rows for {self.pictures} picture(s), "
                    "and without a plan it is not known which arguments have rows; pass a ModelPlan with batch and "
                    "unbatched, or use cfg_degree=1"
                )
            return self._shared(self._by_row, transformer, arguments, rows)
        if self.cfg is None:
            return self._shared(self._by_picture, transformer, arguments, rows)
        return self._sequential(transformer, arguments, rows)

    def _shared(self, split: RowSplit, transformer: ParallelTransformer, arguments: dict[str, Any], rows: int) -> Any:
        if split.parts == 1:
            return self.compute.denoise(transformer, (), arguments)
        held = split.held(rows)
        self.current_split = (split, rows)
        try:
            own = cut_batch(arguments, rows, held, transformer.plan, transformer.name)
            return split.gather(self.compute.denoise(transformer, (), own), rows)
        finally:
            self.current_split = None

    def _sequential(self, transformer: ParallelTransformer, arguments: dict[str, Any], rows: int) -> Any:
        loop = self.compute.loop()
        pending = self._branches[loop]
        main = arguments[transformer.plan.batch[0]]
        shapes = tuple((x.shape, x.dtype) for x in tensors_of(arguments))
        branch = Branch(len(pending), main.shape, main.device, (transformer.name, len(pending), shapes))
        pending.append(branch)
        if branch.owner == group_rank(self.cfg):
            branch.output = self._shared(self._by_picture, transformer, arguments, rows)
        else:
            if self._by_picture.parts > 1:
                held = self._by_picture.held(rows)
                arguments = cut_batch(arguments, rows, held, transformer.plan, transformer.name)
            self.compute.skip(transformer, (), arguments)
        if len(pending) == group_size(self.cfg):
            self.flush(loop)
            return branch.output
        # also where the value is at hand: all ranks must come to the exchange alike
        return Deferred(lambda: self._value(loop, branch), lambda: branch.arrived)

    def _value(self, loop: int, branch: Branch) -> Any:
        if not branch.arrived:
            self.flush(loop)
        return branch.output

    def flush(self, loop: int) -> None:
        """Exchange the outputs of the calls made since the last exchange. All ranks of the cfg axis come here alike."""
        pending, self._branches[loop] = self._branches[loop], []
        if len(pending) > 1:
            self.used = True
        if len(pending) == group_size(self.cfg) and len({branch.shape for branch in pending}) == 1:
            self._gather(pending)
        else:
            for branch in pending:
                self._broadcast(branch)
        for branch in pending:
            branch.arrived = True

    def _gather(self, pending: list[Branch]) -> None:
        """Every rank has computed one of the calls, and all outputs have one form: one all-gather."""
        own = pending[group_rank(self.cfg)].output
        packed = torch.cat([x.reshape(-1) for x in tensors_of(own)])
        everything = all_gather_uneven(packed, 0, [packed.numel()] * len(pending), self.cfg)
        for branch, message in zip(pending, everything.split(packed.numel()), strict=True):
            branch.output = _unpack(message, own)

    def _broadcast(self, branch: Branch) -> None:
        """One rank has computed the call; the others learn the form of its output the first time."""
        is_owner = branch.owner == group_rank(self.cfg)
        if branch.key not in self._forms:
            form = [map_tensors(lambda x: torch.empty_like(x, device="meta"), branch.output) if is_owner else None]
            with named("broadcast of a branch's form", self.cfg, branch.owner):
                dist.broadcast_object_list(form, group=self.cfg, group_src=branch.owner)
            self._forms[branch.key] = form[0]
        form_of_output = self._forms[branch.key]
        like = tensors_of(form_of_output)
        if is_owner:
            message = torch.cat([x.reshape(-1) for x in tensors_of(branch.output)])
        else:
            message = torch.empty(sum(x.numel() for x in like), dtype=like[0].dtype, device=branch.device)
        with named("broadcast of a branch", self.cfg, branch.owner):
            dist.broadcast(message, group=self.cfg, group_src=branch.owner)
        branch.output = _unpack(message, form_of_output)


def _unpack(message: torch.Tensor, form: Any) -> Any:
    """A tree of the same form with tensors cut from a flat message."""
    parts = iter(message.split([x.numel() for x in tensors_of(form)]))
    return map_tensors(lambda x: next(parts).view(x.shape), form)
