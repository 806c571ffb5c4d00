"""The few modules of autoencoders that must know that they see only a part of the picture.

An adapter gives the functions that stand in for methods of one module, on the instance, while a run is split.
"""

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from xpar.core.halo import Geometry
from xpar.wrappers.replacing import replaced
from xpar.wrappers.vae.ops import SplitOps

__all__ = ["adapted", "modules_to_adapt", "no_mask"]

Adapter = Callable[[Any, SplitOps], dict[str, Callable[..., Any]]]


def modules_to_adapt(vae: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules of these classes in an autoencoder."""
    return [module for module in vae.modules() if type(module).__name__ in names]


@contextmanager
def adapted(modules: Sequence[nn.Module], ops: SplitOps) -> Iterator[None]:
    """Have the adapters of some modules in place."""
    with ExitStack() as stack:
        for module in modules:
            for name, function in _ADAPTERS[type(module).__name__](module, ops).items():
                stack.enter_context(replaced(module, name, function))
        yield


def _halo_once(module: Any, ops: SplitOps) -> dict[str, Callable[..., Any]]:
    """A convolution that cuts its input into pieces along time, how many depends on its size: rows come before that."""
    inner = module.forward
    geometries = {dim: Geometry(*(attribute[dim] for attribute in _geometry(module))) for dim in ops.dims}
    pads = [geometries[dim].padding if dim in ops.dims else 0 for dim in (-1, -1, -2, -2)]

    def forward(hidden: Tensor) -> Tensor:
        if not any(pads):
            return inner(hidden)
        for geometry in geometries.values():
            geometry.check()
        with_rows = F.pad(hidden, pads)  # `ops` is at work and brings the neighbours' rows
        with ops.haloed():
            return inner(with_rows)

    return {"forward": forward}


def _geometry(module: Any) -> tuple[Any, Any, Any, Any]:
    return module.kernel_size, module.stride, module.padding, module.dilation


def _causal_block(module: Any, ops: SplitOps) -> dict[str, Callable[..., Any]]:
    """A block whose attention is causal over frames: the number of frames is known here only."""
    inner = module.forward

    def forward(hidden: Tensor) -> Tensor:
        before, ops.frames = ops.frames, hidden.shape[2]
        try:
            return inner(hidden)
        finally:
            ops.frames = before

    return {"forward": forward}


def _causal_attention(module: Any, ops: SplitOps) -> dict[str, Callable[..., Any]]:
    """The same, where the module also builds its mask row by row: it is not needed, and of no size here."""
    return {**_causal_block(module, ops), "prepare_causal_attention_mask": no_mask}


def no_mask(n_frame: int, n_hw: int, dtype: Any, device: Any, batch_size: int | None = None) -> Tensor:
    """Stands for the mask of HunyuanVideo 1.5's attention and takes no memory."""
    return torch.zeros((), dtype=dtype, device=device).expand(batch_size or 1, n_frame * n_hw, n_frame * n_hw)


def _linear_attention(module: Any, ops: SplitOps) -> dict[str, Callable[..., Any]]:
    """Linear attention: the sums over keys are all-reduced. A small picture's quadratic form equals it."""

    def attend(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # (B, heads, D, S); value gets a row of ones, whose product is the sum of the weights
        dtype = value.dtype
        query, key, value = query.float(), key.float(), value.float()
        value = torch.cat((value, torch.ones_like(value[:, :, :1])), dim=2)
        scores = torch.matmul(value, key.transpose(-1, -2))
        if ops.levels.is_idle:
            scores = torch.zeros_like(scores)
        if ops.group is not None:
            dist.all_reduce(scores, group=ops.group)
        hidden = torch.matmul(scores, query)
        return (hidden[:, :, :-1] / (hidden[:, :, -1:] + self.eps)).to(dtype)

    bound = types.MethodType(attend, module)
    return {"apply_linear_attention": bound, "apply_quadratic_attention": bound}


_ADAPTERS: dict[str, Adapter] = {
    "CogVideoXSafeConv3d": _halo_once,
    "EasyAnimateCausalConv3d": _halo_once,
    "HunyuanVideoMidBlock3D": _causal_block,
    "HunyuanVideo15AttnBlock": _causal_attention,
    "SanaMultiscaleLinearAttention": _linear_attention,
}
