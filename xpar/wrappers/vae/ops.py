"""The torch functions of an autoencoder that look beyond their own position, over a split picture.

Only five do: padding, convolution, group norm, attention, and noise of the picture's size. They are taken over where
the modules call them, so that every module's `forward` runs unchanged, quantised and LoRA layers included. Everything
else works on each position by itself and stays local; what does neither is refused.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from xpar.core.distributed.collectives import group_rank
from xpar.core.halo import (
    Geometry,
    Levels,
    Split,
    Splits,
    areas,
    pads_of,
    split_convolution,
    split_group_norm,
    split_pad,
)
from xpar.core.long_ctx_attention.ring import ring_attention
from xpar.errors import UnsupportedError
from xpar.wrappers.vae.causal_attention import frame_causal_attention
from xpar.wrappers.vae.gather import cut_out

__all__ = ["SplitOps"]


class SplitOps(TorchFunctionMode):
    """While entered, torch functions see the positions of all ranks.

    Args:
        levels: which rows or columns, or both, this rank holds at each resolution.
        group: the ranks.
        attention: see `VaePlan.attention`.
    """

    def __init__(self, levels: Levels, group: ProcessGroup | None, attention: str) -> None:
        super().__init__()
        self.levels, self.group, self.attention = levels, group, attention
        self.dims = tuple(levels.base)
        """The split dims: -2, -1 or both."""
        self.frames: int | None = None
        """Frames in the attention under way, where it is causal over frames."""
        self.is_haloed = False
        """Whether an adapter has brought the neighbours' rows already."""
        self._padded: dict[int, tuple[int, Split, int]] = {}
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
        pads = [int(p) for p in pad]
        dims = [dim for dim in self.dims if any(pads_of(pads, dim))]
        if x.ndim < 4 or not dims:
            return F.pad(x, pads, mode, value)
        if self.is_haloed:
            raise UnsupportedError(f"padding mode {mode!r} in a convolution that works in pieces cannot be split")
        splits = {dim: self.levels.at(dim, x.shape[dim]) for dim in dims}
        padded = split_pad(x, pads, mode, value, splits=splits, group=self.group)
        for dim, split in splits.items():
            self._padded[dim] = (padded.shape[dim], split, sum(pads_of(pads, dim)))
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

        def convolve(x: Tensor, around: Mapping[int, int]) -> Tensor:
            pads = [around.get(dim, paddings[dim]) for dim in range(-count, 0)]
            return function(x, weight, bias, strides, pads, dilations, groups)

        if self.is_haloed:
            return convolve(input, dict.fromkeys(self.dims, 0))
        geometries = {
            dim: Geometry(weight.shape[dim], strides[dim], paddings[dim], dilations[dim]) for dim in self.dims
        }
        # Where there is no padding it was done before, by `_pad`, or none is needed.
        splits = {dim: self.levels.at(dim, input.shape[dim]) for dim in self.dims if geometries[dim].padding}
        out = split_convolution(convolve, input, geometries, splits=splits, group=self.group)
        for dim, geometry in geometries.items():
            if geometry.stride > 1:
                self._reduce(dim, geometry, splits.get(dim), input.shape[dim])
        return out

    def _reduce(self, dim: int, geometry: Geometry, split: Split | None, rows: int) -> None:
        """Make the resolution known that a strided convolution of `rows` leaves; no split: it was padded before."""
        if split is not None:
            total = geometry.rows(split.total)
        else:
            padded = self._padded.get(dim)
            _, split, pads = padded if padded and padded[0] == rows else (rows, self.levels.at(dim, rows), 0)
            total = (split.total + pads - geometry.reach - 1) // geometry.stride + 1
        self.levels.add(dim, split.reduced(geometry.stride, total))

    def _group_norm(
        self,
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        splits = self.levels.base if input.ndim < 4 else self.levels.of(input.shape)
        return split_group_norm(
            input,
            num_groups,
            weight,
            bias,
            eps,
            shares=self._shares_of(splits, input.device),
            is_idle=self.levels.is_idle,
            group=self.group,
        )

    def _shares_of(self, splits: Splits, device: torch.device) -> Tensor:
        sizes = tuple(areas(splits))
        if (sizes, device) not in self._shares:
            counts = torch.tensor(sizes, dtype=torch.float64)
            self._shares[sizes, device] = (counts / counts.sum()).to(device)
        return self._shares[sizes, device]

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
            frames = self._frames()
            lengths = self.levels.tokens(q.shape[2] // frames)
            out = frame_causal_attention(q, k, v, frames, lengths, self.group, scale=scale)
        else:
            lengths = self.levels.tokens(q.shape[2])
            own = lengths[group_rank(self.group)]
            out = ring_attention(q, k[:, :, :own], v[:, :, :own], lengths, self.group, scale=scale)
        return out if heads else out.squeeze(1)

    def _frames(self) -> int:
        if self.frames is None:
            raise UnsupportedError("attention over frames was called outside of the module that is known to call it")
        return self.frames

    def _interpolate(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = F.interpolate(input, *args, **kwargs)
        mode = kwargs.get("mode", args[2] if len(args) > 2 else "nearest")
        if not mode.startswith("nearest") and any(out.shape[dim] != input.shape[dim] for dim in self.dims):
            raise UnsupportedError(f"interpolation with mode={mode!r} reaches over rows and cannot be split over ranks")
        return out

    def _randn(self, *size: Any, **kwargs: Any) -> Tensor:
        """Noise over the picture: all ranks draw all of it, as one process would, and keep their part."""
        shape = list(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        splits = self.levels.of(shape)
        for dim, split in splits.items():
            shape[dim] = split.total
        return cut_out(torch.randn(shape, **kwargs), splits)

    @contextmanager
    def haloed(self) -> Iterator[None]:
        """Convolutions find the neighbours' rows in their input and add no padding along the split dims."""
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
