"""What `encode` and `decode` of an autoencoder take and return, as tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xpar.wrappers.models.plan import map_tensors

__all__ = ["map_output"]


def map_output(function: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Apply a function to the tensors of an output, and rebuild the posteriors in it from their moments."""
    if isinstance(output, dict):  # diffusers' output classes are
        return type(output)(**{key: map_output(function, value) for key, value in output.items()})
    if isinstance(output, (list, tuple)):
        return type(output)(map_output(function, value) for value in output)
    if torch.is_tensor(output):
        return function(output)
    if torch.is_tensor(getattr(output, "parameters", None)):  # a posterior
        known = {"deterministic": output.deterministic} if hasattr(output, "deterministic") else {}
        return type(output)(function(output.parameters), **known)
    return map_tensors(function, output)
