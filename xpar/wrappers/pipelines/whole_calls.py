"""Runs a pipeline as it is, with its denoiser calls shared over ranks."""

from collections.abc import Sequence
from typing import Any

from xpar.wrappers.layers.token_flow import View
from xpar.wrappers.pipelines.sharing import BatchSharing
from xpar.wrappers.pipelines.step_watch import StepWatch
from xpar.wrappers.pipelines.steps import settling, steps_through
from xpar.wrappers.transformer import ParallelTransformer


class WholeCalls:
    """Calls a pipeline; every denoiser call runs the whole sequence of its rows.

    Args:
        pipe: the pipeline.
        transformers: its wrapped denoisers.
        sharing: the cfg and dp axes.
    """

    def __init__(self, pipe: Any, transformers: Sequence[ParallelTransformer], sharing: BatchSharing) -> None:
        self.pipe, self.transformers, self.sharing = pipe, transformers, sharing

    def __call__(self, arguments: dict[str, Any], pictures: int | None, watch: StepWatch) -> Any:
        """Call the pipeline and return its output."""
        with (
            self.sharing.installed(self.pipe, self.transformers, self, pictures),
            steps_through(self.pipe, settling),
            watch.installed(self.pipe, self.transformers),
        ):
            return type(self.pipe).__call__(self.pipe, **arguments)

    def denoise(self, transformer: ParallelTransformer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a call."""
        return transformer.run(View(), args, kwargs)

    def skip(self, transformer: ParallelTransformer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Nothing to keep in step with: ranks meet in the exchange."""

    def loop(self) -> int:
        """There is one loop."""
        return 0
