"""diffusers' own tiling with the tiles dealt over ranks.

The autoencoder's tiled method runs twice. First to find the tiles: each rank computes those that are its own as they
come, and gives the method nothing but shapes for the others, while blending is switched off. Then the tiles are
exchanged, and the method runs again with every tile's true values, blending as ever. So the result is that of one
process, bit for bit, and no tiling code is copied.

A tile of a video is decoded in chunks of frames that hand a cache on; all chunks of a tile are one rank's.
"""

import functools
import hashlib
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xpar.core.distributed.collectives import all_gather_uneven, group_rank, group_size
from xpar.errors import RankMismatchError
from xpar.wrappers.replacing import replaced

__all__ = ["TileDeal", "will_tile"]

_TILED = ("tiled_decode", "tiled_encode", "_tiled_decode", "_tiled_encode")
_BLENDS = ("blend_v", "blend_h", "blend_t")
_CLEARS = ("clear_cache", "_clear_conv_cache")


class _Answer(Exception):
    """Ends the question whether a call would tile."""

    def __init__(self, tiles: bool) -> None:
        super().__init__()
        self.tiles = tiles


def will_tile(vae: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an `encode` or `decode` would go through the autoencoder's tiling: asked of its own code."""

    def answer(tiles: bool) -> Callable[..., Any]:
        def stop(*_: Any, **__: Any) -> Any:
            raise _Answer(tiles)

        return stop

    with ExitStack() as stack:
        for name in _TILED:
            if hasattr(vae, name):
                stack.enter_context(replaced(vae, name, answer(True)))
        for coder in (vae.encoder, vae.decoder):
            stack.enter_context(replaced(coder, "forward", answer(False)))
        try:
            function(*args, **kwargs)
        except _Answer as reply:
            return reply.tiles
        except NotImplementedError:  # one that works in tiles only, and is told not to tile
            return False
    return False


@dataclass
class _Call:
    """One call of the encoder or decoder inside of the tiled method."""

    owner: int
    shape: torch.Size
    dtype: torch.dtype
    value: Tensor | None
    rest: tuple[Any, ...] | None
    """What comes after the tensor where the coder returns a tuple."""

    def returned(self, value: Tensor, rest: tuple[Any, ...] | None) -> Any:
        """What the coder returns."""
        return value if rest is None else (value, *rest)


class TileDeal:
    """One tiled call over the ranks of a group.

    Args:
        vae: the autoencoder, with tiling on.
        group: the ranks.
    """

    def __init__(self, vae: Any, group: ProcessGroup | None) -> None:
        self.vae, self.group = vae, group
        self._rank, self._size = group_rank(group), group_size(group)
        self._calls: list[_Call] = []
        self._known: dict[tuple[Any, ...], _Call] = {}
        self._loads = [0] * self._size
        self._owner, self._chunk, self._fresh = 0, 0, True

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `encode` or `decode`; every rank returns what one process would."""
        coders = [self.vae.encoder, self.vae.decoder]
        with ExitStack() as stack:
            for coder in coders:
                stack.enter_context(replaced(coder, "forward", self._finding(coder, coder.forward)))
            for name in _CLEARS:
                if hasattr(self.vae, name):
                    stack.enter_context(replaced(self.vae, name, self._clearing(getattr(self.vae, name))))
            for name in _BLENDS:
                if hasattr(self.vae, name):
                    stack.enter_context(replaced(self.vae, name, lambda a, b, extent: b))
            function(*args, **kwargs)
        values = self._exchange(_device_of(args, kwargs))
        replies = (call.returned(value, call.rest) for call, value in zip(self._calls, values, strict=True))
        with ExitStack() as stack:
            for coder in coders:
                stack.enter_context(replaced(coder, "forward", lambda *_, **__: next(replies)))
            return function(*args, **kwargs)

    def _clearing(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Clearing the caches is how some models begin or end a tile."""

        def clear() -> None:
            self._fresh = True
            inner()

        return clear

    def _finding(self, coder: nn.Module, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Stands in for the coder while tiles are found."""
        has_caches = any(hasattr(self.vae, name) for name in _CLEARS)

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._fresh or not (has_caches or kwargs.get("conv_cache")):
                # to the rank with least to do: tiles at the right and lower border are smaller
                self._owner, self._chunk, self._fresh = self._loads.index(min(self._loads)), 0, False
            else:
                self._chunk += 1
            self._loads[self._owner] += x.numel()
            call, rest = self._found(coder, inner, x, args, kwargs)
            self._calls.append(call)
            return call.returned(torch.zeros((), dtype=call.dtype, device=x.device).expand(call.shape), rest)

        return forward

    def _found(
        self, coder: nn.Module, inner: Callable[..., Any], x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Call, tuple[Any, ...] | None]:
        """One call: computed where the tile is this rank's, else as one of its shape was; also the caches it left."""
        owner, key = self._owner, self._key(x)
        if owner != self._rank and key in self._known:
            call = replace(self._known[key], owner=owner)
            return call, call.rest
        compute = inner if owner == self._rank else functools.partial(_on_meta, coder, inner)
        output = compute(x, *args, **kwargs)
        value, rest = (output[0], tuple(output[1:])) if isinstance(output, tuple) else (output, None)
        call = _Call(owner, value.shape, value.dtype, None, None if rest is None else (_Cache(),))
        self._known.setdefault(key, call)
        return replace(call, value=value.contiguous()) if owner == self._rank else call, rest

    def _key(self, x: Tensor) -> tuple[Any, ...]:
        return (x.shape, x.dtype, min(self._chunk, 2))  # what follows the second chunk is like it

    def _exchange(self, device: torch.device) -> list[Tensor]:
        """The values of all calls, on all ranks: one all-gather for each dtype."""
        self._check_shapes(device)
        values: list[Tensor] = [torch.empty(0)] * len(self._calls)
        for dtype in dict.fromkeys(call.dtype for call in self._calls):
            places = [(i, call) for i, call in enumerate(self._calls) if call.dtype == dtype]
            own = [call.value.flatten() for _, call in places if call.value is not None]
            for _, call in places:
                call.value = None
            sizes = [sum(call.shape.numel() for _, call in places if call.owner == r) for r in range(self._size)]
            flat = torch.cat(own) if own else torch.empty(0, dtype=dtype, device=device)
            own.clear()
            pieces = list(all_gather_uneven(flat, 0, sizes, self.group).split(sizes))
            for i, call in places:
                count = call.shape.numel()
                values[i] = pieces[call.owner][:count].view(call.shape)
                pieces[call.owner] = pieces[call.owner][count:]
        return values

    def _check_shapes(self, device: torch.device) -> None:
        """Compare the shapes that a rank expects of the others' tiles with theirs."""
        text = repr([(call.owner, tuple(call.shape), call.dtype) for call in self._calls])
        code = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
        every = all_gather_uneven(torch.tensor([code], device=device), 0, [1] * self._size, self.group)
        if bool((every != code).any()):
            raise RankMismatchError(
                f"the ranks found different tiles in a call of {type(self.vae).__name__}; call it with the same "
                f"arguments and tile sizes on all ranks (rank {self._rank} found {len(self._calls)})"
            )


class _Cache(dict[str, Any]):
    """Stands for a cache that another call goes on with."""

    def __bool__(self) -> bool:
        return True


def _on_meta(coder: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a coder on the meta device, which computes shapes and nothing else."""
    tensors = {**dict(coder.named_parameters()), **dict(coder.named_buffers())}
    weights = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}

    def moved(value: Any) -> Any:
        return value.to("meta") if torch.is_tensor(value) else value

    named = {name: moved(value) for name, value in kwargs.items()}
    with replaced(coder, "forward", inner):
        return torch.func.functional_call(coder, weights, tuple(map(moved, args)), named)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    return next(value.device for value in itertools.chain(args, kwargs.values()) if torch.is_tensor(value))
