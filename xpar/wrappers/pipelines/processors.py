"""Whether an attention module computes attention where xpar can take it over, as far as that shows beforehand.

What does not show is found in the first forward (`ParallelAttnProcessor`), on all ranks alike.
"""

import inspect
from typing import Any

from torch import nn

from xpar.errors import UnsupportedError

# Calls in a processor's code that end in F.scaled_dot_product_attention, and calls that are attention of its own.
_TAKEN_OVER = {"scaled_dot_product_attention", "dispatch_attention_fn"}
_OWN = {"get_attention_scores", "memory_efficient_attention", "baddbmm", "npu_fusion_attention"}


def check_processors(name: str, attention: nn.Module) -> None:
    """Refuse an attention module that is certain not to call `F.scaled_dot_product_attention`.

    Args:
        name: the module's name, for the message.
        attention: the module.

    Raises:
        UnsupportedError: its processor computes attention in a way of its own, or was given a backend that does.
    """
    processor: Any = getattr(attention, "processor", None)
    if processor is None:
        return
    kind = type(processor).__name__
    backend = getattr(processor, "_attention_backend", None)
    text = str(getattr(backend, "value", backend))
    if backend is not None and not text.removeprefix("_").startswith("native"):
        raise UnsupportedError(
            f"{name} computes attention with the backend {text!r}, which xpar cannot take over; call "
            "transformer.set_attention_backend('native') and choose a kernel by EngineConfig(attention_backend=...)"
        )
    code = getattr(inspect.unwrap(type(processor).__call__), "__code__", None)
    names = set(code.co_names) if code is not None else set()
    if names & _OWN and not names & _TAKEN_OVER:
        raise UnsupportedError(
            f"{name} has the processor {kind}, which computes attention in a way of its own "
            f"({', '.join(sorted(names & _OWN))}) and would see this rank's tokens only; set one that calls "
            "F.scaled_dot_product_attention"
        )
