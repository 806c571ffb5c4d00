"""A pipeline's autoencoders, each shared over all ranks of the grid while a call runs."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from xpar.errors import ConfigError, UnsupportedError
from xpar.wrappers.vae.parallel_vae import ParallelVae
from xpar.wrappers.vae.plans import can_tile, find_vae_plan

__all__ = ["Decoders", "VaeReport"]

# A picture of fewer latent positions (some 360 x 360 pixels at factor 8) is computed whole on every rank: the halos of
# its many layers cost more than the split saves, and its bits are those of one process.
_WHOLE_BELOW = 2048

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class VaeReport:
    """Peak activation bytes of one call of an autoencoder."""

    component: str
    """The pipeline's name of the autoencoder."""
    mode: str
    """"exact" or "tile": how the ranks share it."""
    shape: tuple[int, ...]
    """Shape of the whole input."""
    peak_bytes: tuple[int, ...]
    """Most bytes of activations alive at a time, by rank."""
    single_peak_bytes: int
    """The same in one process."""


class Decoders:
    """Outside of calls the autoencoders are as they were, so that one rank alone may decode a picture for itself.

    Args:
        pipe: the pipeline.
        mode: "exact", "tile" or "off", see `EngineConfig.vae_parallel`.
        group: all ranks of the grid, or None for one; they must all make this.
        is_main: whether this rank speaks for all.
    """

    def __init__(self, pipe: Any, mode: str, group: ProcessGroup | None, is_main: bool) -> None:
        self._shared: dict[str, ParallelVae] = {}
        if mode == "off" or group is None:
            return
        for name, module in pipe.components.items():
            if isinstance(module, nn.Module) and hasattr(module, "decode") and hasattr(module, "encode"):
                chosen = _choose_mode(name, module, mode, is_main)
                if chosen is not None:
                    self._shared[name] = ParallelVae(module, group, chosen, "all", whole_below=_WHOLE_BELOW)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Have all ranks share each `encode` and `decode` inside."""
        try:
            for shared in self._shared.values():
                shared.open()
            yield
        finally:
            for shared in self._shared.values():
                shared.close()

    def report(self, shape: Sequence[int], name: str, component: str) -> VaeReport:
        """Peak activation bytes by rank, without computing.

        Raises:
            ConfigError: the component is not shared, or it has no such method.
        """
        shared = self._shared.get(component)
        if shared is None:
            raise ConfigError(
                f"component={component!r} is not shared over ranks (shared are: {', '.join(self._shared) or 'none'}); "
                "use vae_parallel='exact' or 'tile' on more than one rank"
            )
        with self.opened():
            peaks = shared.peak_bytes(shape, name)
        single = ParallelVae(shared.vae, None, shared.mode, "all").peak_bytes(shape, name)[0]
        return VaeReport(
            component=component,
            mode=shared.mode,
            shape=tuple(shape),
            peak_bytes=tuple(peaks),
            single_peak_bytes=single,
        )


def _choose_mode(name: str, module: nn.Module, mode: str, is_main: bool) -> str | None:
    """The mode for a component; None for one beside the `vae` (for sound, say) that stays whole on every rank."""
    try:
        find_vae_plan(module, mode)
        return mode
    except UnsupportedError:  # a `vae` that cannot be tiled either was refused when the pipeline was inspected
        pass
    kind = type(module).__name__
    if can_tile(module):
        text, chosen = "is shared in tiles, by its own tiling, which changes the picture slightly", "tile"
    else:
        text, chosen = "is run whole on every rank", None
    if is_main:
        logger.warning(
            "the layers of %s (%s) are not known, so it %s; vae_parallel='off' leaves it alone", kind, name, text
        )
    return chosen
