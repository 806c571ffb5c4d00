"""Peak activation memory of an autoencoder's run, found on the meta device: nothing is computed or allocated."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xpar.wrappers.replacing import replaced
from xpar.wrappers.vae.adapters import no_mask

__all__ = ["peak_bytes"]


def peak_bytes(vae: nn.Module, function: Callable[[Tensor], Any], shape: Sequence[int], dtype: torch.dtype) -> int:
    """Most bytes of activations that are alive at a time in one `encode` or `decode`, input and output included.

    Args:
        vae: the autoencoder; its weights do not count.
        function: its method, for one process.
        shape: of the input.
        dtype: of the input.
    """
    tensors = {f"vae.{name}": tensor for name, tensor in (*vae.named_parameters(), *vae.named_buffers())}
    weights = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    live = _LiveBytes(list(weights.values()))
    with ExitStack() as stack:
        for module in vae.modules():
            if hasattr(module, "prepare_causal_attention_mask"):
                stack.enter_context(replaced(module, "prepare_causal_attention_mask", no_mask))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_LeanAttention())
        stack.enter_context(live)
        torch.func.functional_call(
            _Method(vae, function), weights, (torch.empty(tuple(shape), dtype=dtype, device="meta"),)
        )
    return live.peak


class _Method(nn.Module):
    """A method of a module as a module, for `functional_call`."""

    def __init__(self, vae: nn.Module, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.vae, self.function = vae, function

    def forward(self, x: Tensor) -> Any:
        """Call the method."""
        return self.function(x)


class _LeanAttention(TorchFunctionMode):
    """Attention that needs its output only, as the fused kernels do; the meta device would take the plain one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            query, _, value = args[:3]
            return query.new_empty(*query.shape[:-1], value.shape[-1])
        return func(*args, **(kwargs or {}))


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, until they are freed."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._weights = weights
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in weights)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if torch.is_tensor(tensor):
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return output

    def _add(self, storage: Any) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.live += size
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.live -= size
