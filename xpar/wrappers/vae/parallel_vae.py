"""`ParallelVae`: an autoencoder whose `encode` and `decode` run on all ranks of a group, until `close`."""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xpar.core.distributed.collectives import group_rank, group_size
from xpar.core.distributed.operations import named
from xpar.core.halo import Split
from xpar.core.partition import share
from xpar.errors import ConfigError
from xpar.wrappers.models.plan import map_tensors
from xpar.wrappers.pipelines.random_state import share_random_state
from xpar.wrappers.replacing import replaced
from xpar.wrappers.vae.adapters import modules_to_adapt
from xpar.wrappers.vae.checks import agree, check_arguments, check_free, check_input, check_layers, check_tiles
from xpar.wrappers.vae.exact import Cut, choose_cut, run_split
from xpar.wrappers.vae.gather import gather
from xpar.wrappers.vae.memory import peak_bytes
from xpar.wrappers.vae.outputs import map_output
from xpar.wrappers.vae.tiles import TileDeal, will_tile

__all__ = ["ParallelVae", "parallel_vae"]


class ParallelVae:
    """An autoencoder whose `encode` and `decode` run on all ranks of a group while it is open; see `parallel_vae`.

    All ranks make it, which compares what they wrap; opening and closing do not communicate.
    """

    def __init__(
        self, vae: Any, group: ProcessGroup | None, mode: str, output_ranks: str, *, whole_below: int = 0
    ) -> None:
        self.vae, self.group, self.mode = vae, group, mode
        self._whole_below = whole_below  # pictures of fewer latent positions are not split
        self._to_all = output_ranks == "all"
        self._plan = check_arguments(vae, mode, output_ranks)
        self._ranks, self._rank = group_size(group), group_rank(group)
        if mode == "exact" and self._plan.exact:
            check_layers(vae, self._plan)
        if self._ranks > 1:
            agree(vae, mode, output_ranks, group)
        self._adapters = modules_to_adapt(vae, self._plan.adapters)
        self._draws = any(getattr(module, "per_channel_scale1", None) is not None for module in vae.modules())
        self._inner = {name: getattr(vae, name) for name in ("encode", "decode")}
        self._undo = ExitStack()

    def open(self) -> "ParallelVae":
        """Have the ranks share each call from now on; with one rank nothing changes.

        Raises:
            UnsupportedError: another wrapper is open on the autoencoder.
        """
        if self._ranks == 1:
            return self
        check_free(self.vae)
        if self.mode == "tile":
            before = dict(self.vae.__dict__)
            self.vae.enable_tiling()
            settings = {name: value for name, value in before.items() if self.vae.__dict__[name] is not value}
            self._undo.callback(self.vae.__dict__.update, settings)
        for name in self._inner:
            self._inner[name] = getattr(self.vae, name)
            self._undo.enter_context(replaced(self.vae, name, self._method(name)))
        return self

    def close(self) -> None:
        """Give the autoencoder back as it was; closing again does nothing."""
        self._undo.close()

    def __enter__(self) -> "ParallelVae":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _method(self, name: str) -> Callable[..., Any]:
        inner = self._inner[name]

        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            x = _first_tensor(args, kwargs)
            with named(f"{name} of the autoencoder", self.group):
                return inner(*args, **kwargs) if x is None else self._run(name, x, args, kwargs)

        call.xpar_owner = self  # type: ignore[attr-defined]
        return call

    def _run(self, name: str, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call, shared in the way that fits it."""
        check_input(self.vae, self._plan, name, x)
        inner = self._inner[name]
        with torch.no_grad():
            if getattr(self.vae, "use_tiling", False) and will_tile(self.vae, inner, args, kwargs):
                check_tiles(self.vae, self._draws and name == "decode")
                return TileDeal(self.vae, self.group).run(inner, args, kwargs)
            if self._draws and name == "decode":  # its noise comes from the default generator
                share_random_state(x.device, self.group)
            if x.shape[0] >= self._ranks:
                return self._run_batch(name, x.shape[0], args, kwargs)
            cut = self._cut(name, x.shape, self._rank)
            if cut is None:
                return inner(*args, **kwargs)
            check_layers(self.vae, self._plan)
            return run_split(
                inner,
                args,
                kwargs,
                cut,
                group=self.group,
                attention=self._plan.attention,
                adapters=self._adapters,
                to_all=self._to_all or name == "encode",
            )

    def _run_batch(self, name: str, rows: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Deal the pictures of a batch over the ranks."""
        split = Split.deal(rows, self._ranks, self._rank)
        start, stop = split.own

        def held(x: Tensor) -> Tensor:
            return x[start:stop] if x.ndim and x.shape[0] == rows else x

        output = self._inner[name](*map_tensors(held, args), **map_tensors(held, kwargs))
        to_all = self._to_all or name == "encode"
        return map_output(lambda x: gather(x, {-x.ndim: split}, self.group, to_all=to_all), output)

    def _cut(self, name: str, shape: Sequence[int], rank: int) -> Cut | None:
        """How an input is split; None where it is not."""
        shrink = 1 if name == "decode" or not self._plan.exact else self._plan.shrink(self.vae)
        odd = not self._plan.any_size and any(size % shrink for size in shape[-2:])
        positions = math.prod(shape[2:]) // shrink**2
        if self.mode == "tile" or not self._plan.exact or odd or positions < self._whole_below:
            return None
        return choose_cut(shape, shrink, self._ranks, rank)

    def peak_bytes(self, shape: Sequence[int], name: str = "decode", dtype: torch.dtype | None = None) -> list[int]:
        """Most bytes of activations alive at a time, by rank; found without computing and without communication.

        What the run itself needs is counted, not the gathering of its output afterwards.

        Args:
            shape: of the whole input of the call.
            name: "decode" or "encode".
            dtype: of the input; None for that of the weights.

        Raises:
            ConfigError: there is no such method.
        """
        if name not in ("decode", "encode"):
            raise ConfigError(f"name={name!r} is neither 'decode' nor 'encode'")
        function = self._inner[name]
        dtype = dtype or next(self.vae.parameters()).dtype
        shapes = [self._held_shape(shape, name, rank) for rank in range(self._ranks)]
        peaks = {held: peak_bytes(self.vae, function, held, dtype) for held in dict.fromkeys(shapes)}
        return [peaks[held] for held in shapes]

    def _held_shape(self, shape: Sequence[int], name: str, rank: int) -> tuple[int, ...]:
        """Shape of what a rank runs on."""
        held = list(shape)
        cut = self._cut(name, shape, rank)
        if shape[0] >= self._ranks and not getattr(self.vae, "use_tiling", False):
            start, stop = share(shape[0], self._ranks, rank)
            held[0] = stop - start
        elif cut is not None:
            for dim, split in cut.whole.items():
                held[dim] = split.held
        return tuple(held)


def parallel_vae(
    vae: Any,
    group: ProcessGroup | None,
    *,
    mode: Literal["exact", "tile"] = "exact",
    output_ranks: Literal["all", "main"] = "all",
) -> ParallelVae:
    """Have all ranks of a group work on each `encode` and `decode` of an autoencoder.

    Every rank holds the same autoencoder and calls it with the same arguments; every rank gets the same result.
    Both run without gradients.

        with parallel_vae(pipe.vae, group):
            image = pipe(prompt).images[0]

    Args:
        vae: one of diffusers' autoencoders; it is changed in place until `close()`.
        group: the ranks that share the work; all must call this. None, or one rank, changes nothing.
        mode: "exact" splits rows, columns or both and equals one process to rounding. "tile" turns on the autoencoder's
            own tiling and deals the tiles: equal to one process that tiles, bit for bit. An autoencoder that tiles
            already is dealt tiles in both modes, because that is what one process would compute.
        output_ranks: "main" saves the gather: only the first rank gets what `decode` returns, the others zeros of its
            shape (tiles are exchanged all the same, so there every rank gets it).

    Raises:
        ConfigError: an argument is none of these.
        UnsupportedError: the class of the autoencoder is not covered, or it is wrapped already.
        RankMismatchError: the ranks wrap different autoencoders or ask for different modes.
    """
    return ParallelVae(vae, group, mode, output_ranks).open()


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    named = (kwargs.get(name) for name in ("z", "x", "sample"))
    return next((value for value in (*args[:1], *named) if torch.is_tensor(value)), None)
