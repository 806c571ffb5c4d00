"""The shape of the noise that a call begins with: whether a user's latents fit it, and whether it has tokens enough."""

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from xpar.errors import ConfigError, UnsupportedError
from xpar.wrappers.pipelines.dry_run import changes_size_later

_CHANNELS = ("num_channels_latents", "num_latents_channels")
_SIZES = ("height", "width", "num_frames")
# What `prepare_latents` of a pipeline that starts from noise alone takes.
_PLAIN = {"batch_size", *_CHANNELS, *_SIZES, "dtype", "device", "generator", "latents"}
_META = torch.device("meta")


def check_latents(pipe: Any, arguments: Mapping[str, Any], checked: Mapping[str, Any], pictures: int) -> None:
    """Compare latents with those that the pipeline would draw itself, which are drawn without memory.

    Compared are the number of dims, rows and channels, and for packed tokens [B, S, C], whose positions follow from
    height and width, their number. Other latents may have another size, which is then that of the picture.

    Args:
        pipe: the pipeline.
        arguments: what it is called with, by name.
        checked: what it hands to its own check of them, defaults filled in.
        pictures: number of pictures of the call.

    Raises:
        ConfigError: the latents do not fit.
    """
    latents = arguments.get("latents")
    if not isinstance(latents, torch.Tensor) or not hasattr(pipe, "prepare_latents"):
        return
    sizes = _sizes_of(pipe, arguments, checked)
    drawn = {count: _prepared(pipe, sizes, pictures, count, None) for count in _channel_counts(pipe)}
    shapes = [shape for shape in drawn.values() if shape is not None]
    if not shapes or len(shapes) < len(drawn) or len({len(shape) for shape in shapes}) > 1:
        return  # not a `prepare_latents` as we know them
    dims = _compared_dims(pipe, shapes)
    for count, shape in drawn.items():
        given = _prepared(pipe, sizes, pictures, count, latents.to(_META))
        if given is None or (len(given) == len(shapes[0]) and all(given[dim] == shape[dim] for dim in dims)):  # type: ignore[index]
            return
    raise ConfigError(_text(pipe, latents, shapes, sizes, pictures))


def check_patches(
    pipe: Any, arguments: Mapping[str, Any], checked: Mapping[str, Any], pictures: int, patches: int
) -> None:
    """Refuse more patches than the transformer has tokens, where the noise of the call tells how many those are.

    Args:
        pipe: the pipeline.
        arguments: what it is called with, by name.
        checked: what it hands to its own check of them, defaults filled in.
        pictures: number of pictures of the call.
        patches: number of patches that its tokens are cut into.

    Raises:
        UnsupportedError: there are fewer tokens.
    """
    if patches == 1 or not hasattr(pipe, "prepare_latents"):
        return
    latents = arguments.get("latents")
    given = latents.to(_META) if isinstance(latents, torch.Tensor) else None
    sizes = _sizes_of(pipe, arguments, checked)
    found = (_prepared(pipe, sizes, pictures, count, given) for count in _channel_counts(pipe))
    shapes = [shape for shape in found if shape is not None]
    tokens = _count_tokens(pipe, shapes)
    if tokens is not None and tokens < patches:
        raise UnsupportedError(
            f"num_patches={patches} is more than the {tokens} tokens of {pictures} picture(s) of "
            f"{', '.join(f'{name}={value}' for name, value in sizes.items())}; use num_patches <= {tokens}, or a "
            "larger picture"
        )


def _count_tokens(pipe: Any, shapes: Sequence[torch.Size]) -> int | None:
    """Tokens of noise that is packed [B, S, C], or cut up by the transformer; `shapes` differ in the channels."""
    if not shapes or {len(shape) for shape in shapes} != {len(shapes[0])}:
        return None
    if len(shapes[0]) == 3:
        return shapes[0][1]
    channels = _channel_dims(shapes)
    places = [size for dim, size in enumerate(shapes[0]) if dim and dim not in channels]
    config = getattr(getattr(pipe, "transformer", None), "config", {})
    size, size_t = config.get("patch_size"), config.get("patch_size_t") or 1
    if len(channels) != 1 or not size:
        return None
    of_patch = math.prod(size) if isinstance(size, (tuple, list)) else size * size * size_t
    return math.prod(places) // of_patch


def _compared_dims(pipe: Any, shapes: Sequence[torch.Size]) -> list[int]:
    """Rows, channels and packed tokens."""
    channels = _channel_dims(shapes)
    is_packed = len(shapes[0]) == 3 and channels == [2]
    return [0, *channels, *([1] if is_packed and not changes_size_later(pipe) else [])]


def _channel_dims(shapes: Sequence[torch.Size]) -> list[int]:
    """The dims, rows apart, in which shapes of different channel counts differ."""
    return [dim for dim in range(1, len(shapes[0])) if len({shape[dim] for shape in shapes}) > 1]


def _text(
    pipe: Any, latents: torch.Tensor, shapes: Sequence[torch.Size], sizes: Mapping[str, Any], pictures: int
) -> str:
    # Of the shapes that are possible one with the transformer's own channels, else the one that comes nearest.
    own = getattr(getattr(pipe, "transformer", None), "config", {}).get("in_channels")
    nearest = min(
        shapes,
        key=lambda shape: (own not in shape[1:], sum(abs(a - b) for a, b in zip(latents.shape, shape, strict=False))),
    )
    size = ", ".join(f"{name}={value}" for name, value in sizes.items())
    return (
        f"latents have shape {tuple(latents.shape)}, but {type(pipe).__name__} works with {tuple(nearest)} for "
        f"{pictures} picture(s) of {size}; pass that shape, or leave latents out"
    )


def _channel_counts(pipe: Any) -> Iterator[int]:
    """Every number of latent channels that a pipeline of diffusers takes from its models' configurations."""
    found = []
    for name in ("transformer", "transformer_2", "vae"):
        config = getattr(getattr(pipe, name, None), "config", {})
        for key in ("in_channels", "out_channels", "in_visual_dim", "z_dim", "latent_channels"):
            count = config.get(key)
            if isinstance(count, int):
                found += [count, count - 1, *(count // factor for factor in (2, 4, 8))]
    yield from dict.fromkeys(count for count in found if count > 0)


def _sizes_of(pipe: Any, arguments: Mapping[str, Any], checked: Mapping[str, Any]) -> dict[str, Any]:
    """Height, width and number of frames of a call: as checked, else as called with, else by default."""
    parameters = inspect.signature(type(pipe).__call__).parameters
    sizes = {}
    for name in _SIZES:
        if name in parameters:
            value = checked.get(name, arguments.get(name, parameters[name].default))
            if isinstance(value, int):
                sizes[name] = value
    return sizes


def _prepared(
    pipe: Any, sizes: Mapping[str, Any], pictures: int, channels: int, latents: torch.Tensor | None
) -> torch.Size | None:
    """Shape of what a pipeline's `prepare_latents` returns; None if it needs more than noise or does not return."""
    parameters = inspect.signature(pipe.prepare_latents).parameters
    known = {"batch_size": pictures, "dtype": torch.float32, "device": _META, "generator": None, "latents": latents}
    known |= dict.fromkeys(_CHANNELS, channels) | dict(sizes)
    needed = {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
    if not needed <= _PLAIN or not needed <= set(known) or "latents" not in parameters:
        return None
    try:
        with _WithoutDrawing():
            result = copy.copy(pipe).prepare_latents(**{name: known[name] for name in parameters if name in known})
    except (TypeError, ValueError, AttributeError, RuntimeError):  # the call itself will say what it is
        return None
    first = result[0] if isinstance(result, tuple) else result
    return first.shape if isinstance(first, torch.Tensor) else None


class _WithoutDrawing(TorchFunctionMode):
    """Noise without values: torch draws on the meta device too, for which it first loads its compiler, in seconds."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.randn:
            return torch.empty(*args, **{name: value for name, value in options.items() if name != "generator"})
        return func(*args, **options)
