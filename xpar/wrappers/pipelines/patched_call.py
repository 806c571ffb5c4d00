"""One pipeline call, run patch by patch: what a denoiser call and a scheduler step do in each patch loop.

PipeFusion (arXiv 2405.14430) over the pipeline's own loop. In a denoiser call a patch loop sends its patch through this
rank's stage, hands the turn over, and when it comes back waits for its patch's prediction from the last stage; what
follows (guidance, `scheduler.step`, ...) is the pipeline's own code. The first `warmup` calls of each denoiser and
guidance branch run the whole sequence instead and fill the caches.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from xpar.core.distributed.channel import Channel
from xpar.core.distributed.operations import NamedWork
from xpar.core.stale_cache.kv_cache import LayerCache
from xpar.wrappers.layers.token_flow import View
from xpar.wrappers.models.plan import map_tensors, tensors_of
from xpar.wrappers.pipelines.regions import Regions
from xpar.wrappers.pipelines.turns import Turns
from xpar.wrappers.transformer import ParallelTransformer

Signature = tuple[tuple[torch.Size, torch.dtype], ...]
CallKey = tuple[str, int, Signature]


@dataclass
class PatchLoop:
    """Progress of one patch loop.

    Args:
        index: the patch that it computes.
        branches: denoiser calls since the last scheduler step, by denoiser.
        seen: calls made so far, by denoiser, branch and shapes.
        complete: whether its latents are up to date everywhere, not only in its own region.
        regions: the regions of its last denoiser call.
    """

    index: int
    branches: Counter[str] = field(default_factory=Counter)
    seen: Counter[CallKey] = field(default_factory=Counter)
    complete: bool = True
    regions: Regions | None = None


class PatchedCall:
    """State of one pipeline call; nothing of it reaches the next.

    Args:
        turns: hands the turn from loop to loop.
        patches: number of patches M, and of loops.
        warmup: calls of each denoiser and branch that run the whole sequence.
        back: channel last stage -> other stages, None with one stage.
        stages: number of stages.
    """

    def __init__(self, turns: Turns, *, patches: int, warmup: int, back: Channel | None, stages: int) -> None:
        self.turns, self.patches, self.back, self.stages = turns, patches, back, stages
        self.warmup = warmup
        self.loops = [PatchLoop(index) for index in range(patches)]
        self._caches: dict[CallKey, dict[str, LayerCache]] = {}
        self._regions: dict[tuple[str, Signature], Regions] = {}
        self._predictions: dict[CallKey, Any] = {}
        self._latents: dict[torch.Size, torch.Tensor] = {}

    def denoise(self, transformer: ParallelTransformer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the newest known prediction for the whole input, with this loop's own region fresh."""
        loop = self.loops[self.turns.current]
        key, is_whole = self._count(loop, transformer, args, kwargs)
        if is_whole:
            return self._whole(loop, transformer, key, args, kwargs)
        return self._patch(loop, transformer, key, args, kwargs)

    def skip(self, transformer: ParallelTransformer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a call that other ranks compute, and hand the turn over as they do."""
        loop = self.loops[self.turns.current]
        key, is_whole = self._count(loop, transformer, args, kwargs)
        if not is_whole:
            loop.regions = self._regions_of(transformer, key[2], args, kwargs)
        self.turns.pass_on()

    def loop(self) -> int:
        """The loop that has the turn."""
        return self.turns.current

    def _count(
        self, loop: PatchLoop, transformer: ParallelTransformer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CallKey, bool]:
        """Which call this is, and whether it runs the whole sequence."""
        signature = tuple((x.shape, x.dtype) for x in tensors_of([args, kwargs]))
        key = (transformer.name, loop.branches[transformer.name], signature)
        loop.branches[transformer.name] += 1
        loop.seen[key] += 1
        is_whole = self.patches == 1 or loop.seen[key] <= self.warmup
        loop.complete = loop.complete and is_whole
        return key, is_whole

    def _whole(
        self, loop: PatchLoop, transformer: ParallelTransformer, key: CallKey, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """A synchronous call: computed once, by the last loop (its latents are complete), for all of them."""
        if loop.index < self.patches - 1:
            self.turns.pass_on()
            return self._newest(key)
        view = View(caches=self._caches_of(key) if self.patches > 1 else None)
        result = transformer.run(view, args, kwargs)
        self._predictions[key] = map_tensors(torch.Tensor.contiguous, self._broadcast(transformer, result))
        newest = self._newest(key)
        self.turns.pass_on()
        return newest

    def _broadcast(self, transformer: ParallelTransformer, result: Any) -> Any:
        """The last stage's result on every stage."""
        if self.back is None:
            return result
        if transformer.stage.is_last:
            self._send_back(torch.cat([x.reshape(-1) for x in tensors_of(result)]), "the prediction")
            return result
        outputs = tensors_of(result)
        message = outputs[0].new_empty(sum(x.numel() for x in outputs))
        self.back.receive(message, self.stages - 1, "the prediction").wait()
        parts = iter(message.split([x.numel() for x in outputs]))
        return map_tensors(lambda x: next(parts).view(x.shape), result)

    def _patch(
        self, loop: PatchLoop, transformer: ParallelTransformer, key: CallKey, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """This loop's patch through this rank's stage; its prediction arrives while the other loops run."""
        regions = loop.regions = self._regions_of(transformer, key[2], args, kwargs)
        result = transformer.run(View(patch=loop.index, caches=self._caches_of(key)), args, kwargs)
        if key not in self._predictions:
            self._predictions[key] = map_tensors(
                lambda x: torch.zeros_like(x, memory_format=torch.contiguous_format), result
            )
        values, arrival = self._exchange(transformer, regions, tensors_of(result), loop.index)
        try:
            self.turns.pass_on()
        finally:
            if arrival is not None and not self.turns.is_broken:
                arrival.wait()
        regions.put(tensors_of(self._predictions[key]), loop.index, values)
        return self._newest(key)

    def _exchange(
        self, transformer: ParallelTransformer, regions: Regions, outputs: list[torch.Tensor], patch: int
    ) -> tuple[torch.Tensor, NamedWork | None]:
        what = f"the prediction of patch {patch}"
        if self.back is not None and not transformer.stage.is_last:
            values = outputs[0].new_empty(regions.size(patch))
            return values, self.back.receive(values, self.stages - 1, what)
        values = regions.take(outputs, patch)
        if self.back is not None:
            self._send_back(values, what)
        return values, None

    def _send_back(self, values: torch.Tensor, what: str) -> None:
        for stage in range(self.stages - 1):
            self.back.send(values, stage, what)  # type: ignore[union-attr]

    def _newest(self, key: CallKey) -> Any:
        return map_tensors(torch.Tensor.clone, self._predictions[key])

    def _caches_of(self, key: CallKey) -> dict[str, LayerCache]:
        """The caches of a denoiser and branch; those of other shapes (guidance was turned off, say) are dropped."""
        if key not in self._caches:
            for other in [k for k in self._caches if k[:2] == key[:2]]:
                del self._caches[other]
            self._caches[key] = {}
        return self._caches[key]

    def _regions_of(
        self, transformer: ParallelTransformer, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Regions:
        where = (transformer.name, signature)
        if where not in self._regions:
            self._regions[where] = Regions.probe(
                lambda patch: transformer.run(View(probe=patch), args, kwargs), self.patches
            )
        return self._regions[where]

    def compose(self, latents: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """A scheduler step's result with every region as new as any loop has it, or as in `sample` if none has."""
        loop = self.loops[self.turns.current]
        loop.branches.clear()
        if not loop.complete and loop.regions is not None:
            known = self._latents.get(latents.shape, sample)
            latents = torch.where(loop.regions.mask(latents, loop.index), latents, known)
        self._latents[latents.shape] = latents
        return latents.clone()
