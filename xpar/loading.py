"""Loading a pipeline from files that are what they should be, and that run no code of their own.

A pickled checkpoint can run anything when it is read, and a file that was cut short on its way fails late, on one rank
of many and in words that do not name it. So a folder is looked through before diffusers loads it: of each safetensors
file the header alone is read, which takes milliseconds.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from diffusers import DiffusionPipeline
from safetensors import SafetensorError

from xpar.errors import ConfigError

__all__ = ["check_folder", "check_safetensors", "load_pipeline"]

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_INDEX = "model_index.json"
_POINTER = b"version https://git-lfs"


def load_pipeline(path: str | Path, *, allow_pickle: bool = False, **from_pretrained_arguments: Any) -> Any:
    """`DiffusionPipeline.from_pretrained`, of safetensors files whose sizes are right.

        pipe = load_pipeline("black-forest-labs/FLUX.1-dev", dtype=torch.bfloat16)

    Args:
        path: a folder with a pipeline in it, or the name of one on the hub, which is downloaded first.
        allow_pickle: load pickled weights (.bin, .pt, .ckpt) where there are no others. torch reads them with
            `weights_only=True`, but only do this with files that you trust.
        from_pretrained_arguments: as `from_pretrained` takes them.

    Returns:
        The pipeline, of the class that its folder names.

    Raises:
        ConfigError: a file is missing, cut short, corrupt or pickled; the text names it, its size and what is wrong. A
            rank with the same files says the same.
    """
    use_safetensors = from_pretrained_arguments.pop("use_safetensors", None)
    if use_safetensors is not None and bool(use_safetensors) == allow_pickle:
        raise ConfigError(
            f"use_safetensors={use_safetensors!r} with allow_pickle={allow_pickle!r}: they contradict each other; "
            "leave use_safetensors out"
        )
    options = {**from_pretrained_arguments, "use_safetensors": None if allow_pickle else True}
    folder = Path(path) if Path(path).exists() else _download(str(path), options)
    if not folder.is_dir():
        raise ConfigError(f"path={str(path)!r} is a file; pass the folder of a whole pipeline")
    check_folder(folder, allow_pickle=allow_pickle, passed=set(from_pretrained_arguments))
    try:
        return DiffusionPipeline.from_pretrained(folder, **options)
    except (OSError, SafetensorError, UnpicklingError) as error:
        raise ConfigError(f"path={str(path)!r} cannot be loaded: {error}") from error


def _download(name: str, options: Mapping[str, Any]) -> Path:
    try:
        return Path(DiffusionPipeline.download(name, **options))
    except (OSError, ValueError) as error:
        raise ConfigError(f"path={name!r} is no folder here, and the hub does not give it: {error}") from error


def check_folder(folder: Path, *, allow_pickle: bool = False, passed: set[str] | frozenset[str] = frozenset()) -> None:
    """Look through the folder of a pipeline without loading anything.

    Args:
        folder: holds `model_index.json` and a folder for each component.
        allow_pickle: whether components may have pickled weights only.
        passed: names of components that are not loaded from the folder.

    Raises:
        ConfigError: see `load_pipeline`.
    """
    for name, component in _components(folder):
        if name in passed:
            continue
        if not component.is_dir():
            raise ConfigError(f"{component} is missing, but {folder / _INDEX} names it; complete the download")
        for path in sorted(component.glob("*.safetensors")):
            check_safetensors(path)
        for path in sorted(component.glob("*.safetensors.index*.json")):
            _check_shards(path)
        if (component / "config.json").exists():  # a model; schedulers and tokenizers have other names for theirs
            _check_has_weights(component, allow_pickle)


def check_safetensors(path: Path) -> None:
    """Compare the size of a safetensors file with what its header says.

    Raises:
        ConfigError: it is missing, cut short, too long, or no safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            header = file.read(length) if length <= size else start
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); complete the download") from error
    if (start + header).startswith(_POINTER[:8]):
        raise ConfigError(
            f"{path} ({size} bytes) is a git-lfs pointer and no weights; run `git lfs pull` in its folder"
        )
    if len(start) < 8 or length > size - 8:
        raise ConfigError(
            f"{path} has {size} bytes, fewer than the {8 + length} of its header: it is cut short or corrupt; "
            "download it again"
        )
    expected = 8 + length + _bytes_of_tensors(path, size, header)
    if size != expected:
        what = "cut short" if size < expected else "too long"
        raise ConfigError(f"{path} has {size} bytes, and by its header {expected}: it is {what}; download it again")


def _bytes_of_tensors(path: Path, size: int, header: bytes) -> int:
    """Where the last tensor ends, by the header."""
    try:
        entries = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
        return int(max(ends, default=0))
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{path} ({size} bytes) has no readable header ({type(error).__name__}: {error}): it is corrupt or no "
            "safetensors file; download it again"
        ) from error


def _components(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name, folder) of the components that a pipeline loads."""
    index = _read_json(folder / _INDEX)
    for name, entry in sorted(index.items()):
        if isinstance(entry, list) and len(entry) == 2 and entry[0] is not None and not name.startswith("_"):
            yield name, folder / name


def _check_shards(index: Path) -> None:
    """A list of shards may name nothing but safetensors files that are there, beside it."""
    shards = _read_json(index).get("weight_map", {})
    for name in sorted(set(map(str, shards.values()))):
        if Path(name).suffix != ".safetensors" or Path(name).name != name:
            raise ConfigError(
                f"{index} lists {name!r} as a file with weights, which is no safetensors file beside it; "
                "download the checkpoint again from where you trust it"
            )
        if not (index.parent / name).exists():
            raise ConfigError(f"{index.parent / name} is missing, but {index.name} lists it; complete the download")


def _check_has_weights(component: Path, allow_pickle: bool) -> None:
    if any(component.glob("*.safetensors")):
        return
    pickled = sorted(path.name for path in component.iterdir() if path.suffix in _PICKLED)
    if not pickled:
        raise ConfigError(f"{component} holds a config.json but no weights (*.safetensors); complete the download")
    if not allow_pickle:
        raise ConfigError(
            f"{component} holds pickled weights only ({', '.join(pickled)}), which can run code when they are read; "
            "convert them to safetensors (save_pretrained), or pass allow_pickle=True if you trust them"
        )


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing; pass the folder of a whole pipeline") from error
    except ValueError as error:
        raise ConfigError(f"{path} ({path.stat().st_size} bytes) is no JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object but a {type(content).__name__}; download it again")
    return content
