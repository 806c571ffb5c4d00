"""Attention whose processor works across the rows of a batch, inside a call whose rows are shared over ranks.

Perturbed-attention guidance (arXiv 2403.17377) splits its batch into branches inside the processor. Such a module is
given all rows and its output is cut to this rank's again; everything else of the model stays shared. Pipelines use
these processors in few layers.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from xpar.wrappers.models.plan import map_tensors
from xpar.wrappers.pipelines.rows import RowSplit

Sharing = tuple[RowSplit, int]


class CoupledRows:
    """Stands in for the forward of one attention module.

    Args:
        module: the attention module; which processor it has is looked up in each call.
        current: gives the row split and number of rows of the denoiser call that is running, or None.
    """

    def __init__(self, module: nn.Module, current: Callable[[], Sharing | None]) -> None:
        self.module, self.inner, self.current = module, module.forward, current

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, on all rows if its processor needs them."""
        sharing = self.current()
        if sharing is None or not type(getattr(self.module, "processor", None)).__name__.startswith("PAG"):
            return self.inner(*args, **kwargs)
        split, rows = sharing
        held = split.held(rows)
        whole = split.gather([list(args), kwargs], rows)
        return map_tensors(lambda x: x[held], self.inner(*whole[0], **whole[1]))


def attention_modules(transformer: nn.Module) -> list[nn.Module]:
    """The modules of a transformer that have an attention processor."""
    return [module for module in transformer.modules() if hasattr(module, "processor")]
