"""The torch functions of an autoencoder that look beyond their own row, over a split picture.

Only five do: padding, convolution, group norm, attention, and noise of the picture's size. They are taken over where
the modules call them, so that every module's `forward` runs unchanged, quantised and LoRA layers included. Everything
else works on each position by itself and stays local; what does neither is refused.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from xpar.core.halo import Geometry, Levels, Split, split_convolution, split_group_norm, split_pad
from xpar.core.long_ctx_attention.ring import ring_attention
from xpar.errors import UnsupportedError
from xpar.wrappers.vae.causal_attention import frame_causal_attention

__all__ = ["SplitOps"]


class SplitOps(TorchFunctionMode):
    """While entered, torch functions see the rows of all ranks.

    Args:
        levels: which rows this rank holds at each resolution.
        dim: the split dim, -2 or -1.
        group: the ranks.
        attention: see `VaePlan.attention`.
    """

    def __init__(self, levels: Levels, dim: int, group: ProcessGroup | None, attention: str) -> None:
        super().__init__()
        self.levels, self.dim, self.group, self.attention = levels, dim, group, attention
        self.frames: int | None = None
        """Frames in the attention under way, where it is causal over frames."""
        self.is_haloed = False
        """Whether an adapter has brought the neighbours' rows already."""
        self._padded: tuple[int, Split, int] | None = None
        self._shares: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
        self._handlers: dict[Any, Callable[..., Any]] = {
            F.pad: self._pad,
            torch.conv2d: functools.partial(self._convolve, torch.conv2d),
            torch.conv3d: functools.partial(self._convolve, torch.conv3d),
            F.group_norm: self._group_norm,
            F.scaled_dot_product_attention: self._attend,
            F.interpolate: self._interpolate,
            torch.randn: self._randn,
        }
        self._handlers |= {function: functools.partial(_refuse, function) for function in _REFUSED}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Hand a function over to its handler, or run it as it is."""
        handler = self._handlers.get(func)
        return (func if handler is None else handler)(*args, **(kwargs or {}))

    def _pad(self, x: Tensor, pad: Any, mode: str = "constant", value: float | None = None) -> Tensor:
        place = 2 * (-self.dim - 1)
        pads = [int(p) for p in pad]
        if x.ndim < 4 or len(pads) < place + 2 or not any(pads[place : place + 2]):
            return F.pad(x, pads, mode, value)
        if self.is_haloed:
            raise UnsupportedError(f"padding mode {mode!r} in a convolution that works in pieces cannot be split")
        split = self.levels.at(x.shape[self.dim])
        padded = split_pad(x, pads, mode, value, dim=self.dim, split=split, group=self.group)
        self._padded = (padded.shape[self.dim], split, pads[place] + pads[place + 1])
        return padded

    def _convolve(
        self,
        function: Callable[..., Tensor],
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        if isinstance(padding, str) and padding != "valid":
            raise UnsupportedError(f"a convolution with padding={padding!r} cannot be split over ranks")
        count = weight.ndim - 2
        strides, paddings, dilations = (
            _tuple(x, count) for x in (stride, 0 if padding == "valid" else padding, dilation)
        )

        def convolve(x: Tensor, rows: int) -> Tensor:
            around = list(paddings)
            around[self.dim] = rows
            return function(x, weight, bias, strides, around, dilations, groups)

        geometry = Geometry(weight.shape[self.dim], strides[self.dim], paddings[self.dim], dilations[self.dim])
        if self.is_haloed:
            return convolve(input, 0)
        if geometry.padding:
            split = self.levels.at(input.shape[self.dim])
            out = split_convolution(convolve, input, geometry, dim=self.dim, split=split, group=self.group)
            self._reduce(split, geometry, geometry.rows(split.total))
            return out
        # Padding was done before, by `_pad`, or none is needed.
        if geometry.stride > 1:
            rows = input.shape[self.dim]
            _, split, pads = (
                self._padded if self._padded and self._padded[0] == rows else (rows, self.levels.at(rows), 0)
            )
            self._reduce(split, geometry, (split.total + pads - geometry.reach - 1) // geometry.stride + 1)
        return convolve(input, 0)

    def _reduce(self, split: Split, geometry: Geometry, total: int) -> None:
        if geometry.stride > 1:
            self.levels.add(split.reduced(geometry.stride, total))

    def _group_norm(
        self,
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        split = self.levels.base if input.ndim < 4 else self.levels.at(input.shape[self.dim])
        return split_group_norm(
            input,
            num_groups,
            weight,
            bias,
            eps,
            shares=self._shares_of(split, input.device),
            is_idle=split.is_idle,
            group=self.group,
        )

    def _shares_of(self, split: Split, device: torch.device) -> Tensor:
        key = (split.bounds, device)
        if key not in self._shares:
            lengths = torch.tensor(split.lengths, dtype=torch.float64)
            self._shares[key] = (lengths / split.total).to(device)
        return self._shares[key]

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if self.attention == "none":  # over time, or within a position
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if dropout_p or is_causal or enable_gqa or (attn_mask is None) is (self.attention == "causal"):
            raise UnsupportedError(
                f"attention with a mask: {attn_mask is not None}, dropout_p={dropout_p}, is_causal={is_causal} is not "
                "what this autoencoder is known to compute; use vae_parallel='off'"
            )
        heads = query.ndim == 4
        q, k, v = (query, key, value) if heads else (x.unsqueeze(1) for x in (query, key, value))
        if self.attention == "causal":
            out = frame_causal_attention(q, k, v, self._frames(), self.levels.base, self.group, scale=scale)
        else:
            lengths = self.levels.tokens(q.shape[2])
            own = lengths[self.levels.base.rank]
            out = ring_attention(q, k[:, :, :own], v[:, :, :own], lengths, self.group, scale=scale)
        return out if heads else out.squeeze(1)

    def _frames(self) -> int:
        if self.frames is None:
            raise UnsupportedError("attention over frames was called outside of the module that is known to call it")
        return self.frames

    def _interpolate(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = F.interpolate(input, *args, **kwargs)
        mode = kwargs.get("mode", args[2] if len(args) > 2 else "nearest")
        if not mode.startswith("nearest") and out.shape[self.dim] != input.shape[self.dim]:
            raise UnsupportedError(f"interpolation with mode={mode!r} reaches over rows and cannot be split over ranks")
        return out

    def _randn(self, *size: Any, **kwargs: Any) -> Tensor:
        """Noise over the picture: all ranks draw all of it, as one process would, and keep their rows."""
        shape = list(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        split = self.levels.at(shape[self.dim])
        shape[self.dim] = split.total
        held = split.held_slice
        return torch.randn(shape, **kwargs).narrow(self.dim, held.start, held.stop - held.start)

    @contextmanager
    def haloed(self) -> Iterator[None]:
        """Convolutions find the neighbours' rows in their input and add no padding along the split dim."""
        before, self.is_haloed = self.is_haloed, True
        try:
            yield
        finally:
            self.is_haloed = before


def _tuple(value: Any, count: int) -> list[int]:
    values = [value] * count if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def _refuse(function: Any, *args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        f"{getattr(function, '__name__', function)} is not known to be right over a split picture; use "
        "vae_parallel='tile' or 'off'"
    )


_REFUSED = (
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    F.avg_pool2d,
    F.avg_pool3d,
    F.max_pool2d,
    F.max_pool3d,
    F.adaptive_avg_pool2d,
    F.adaptive_avg_pool3d,
    F.instance_norm,
    F.grid_sample,
    F.unfold,
    F.fold,
)
