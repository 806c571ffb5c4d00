"""load_pipeline: which files it takes, which it refuses, and that refused ones run nothing."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from safetensors.torch import load_file

from xpar import ConfigError, load_pipeline
from xpar.loading import check_folder, check_safetensors

TINY_FLUX = Path(__file__).resolve().parents[2] / "examples" / "assets" / "tiny-flux"
COMPONENTS = {
    "transformer": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
    "text_encoder": "pytorch_model",
    "text_encoder_2": "pytorch_model",
}


class Payload:
    """What a malicious checkpoint holds: reading it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.path}'",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of tiny-flux, its weights as links so that nothing large is copied."""
    target = tmp_path / "pipeline"
    shutil.copytree(TINY_FLUX, target, copy_function=lambda a, b: Path(b).symlink_to(Path(a).resolve()))
    return target


def weights(folder: Path, component: str) -> Path:
    (path,) = (folder / component).glob("*.safetensors")
    return path


def own_copy(path: Path) -> bytes:
    """The bytes of a linked file, which is unlinked so that it can be written anew."""
    content = path.read_bytes()
    path.unlink()
    return content


def pickled(folder: Path, component: str, content: Any) -> None:
    """Put pickled weights in the place of a component's safetensors."""
    weights(folder, component).unlink()
    (folder / component / f"{COMPONENTS[component]}.bin").write_bytes(content)


def test_a_good_folder_gives_the_stock_pipeline() -> None:
    pipe = load_pipeline(TINY_FLUX, dtype=torch.float32)
    assert type(pipe) is FluxPipeline
    stock = load_file(weights(TINY_FLUX, "transformer"))
    assert all(torch.equal(stock[name].float(), value) for name, value in pipe.transformer.state_dict().items())


@pytest.mark.parametrize("component", COMPONENTS)
def test_pickled_weights_are_refused_and_their_code_does_not_run(folder: Path, tmp_path: Path, component: str) -> None:
    trace = tmp_path / "it-ran"
    malicious = pickle.dumps(Payload(trace))
    pickle.loads(malicious)
    assert trace.exists(), "the payload of this test does nothing"
    trace.unlink()
    pickled(folder, component, malicious)
    with pytest.raises(ConfigError, match=rf"{component} holds pickled weights only .*\.bin.*allow_pickle=True"):
        load_pipeline(folder)
    with pytest.raises(ConfigError, match="cannot be loaded"):  # torch's own limits on what a pickle may hold
        load_pipeline(folder, allow_pickle=True)
    assert not trace.exists()


@pytest.mark.parametrize("component", COMPONENTS)
def test_diffusers_and_transformers_are_told_to_take_no_pickle(
    folder: Path, tmp_path: Path, component: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should the look through the folder miss a file, the loaders refuse it too."""
    trace = tmp_path / "it-ran"
    pickled(folder, component, pickle.dumps(Payload(trace)))
    monkeypatch.setattr("xpar.loading.check_folder", lambda *_, **__: None)
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*safetensors"):
        load_pipeline(folder)
    assert not trace.exists()


def test_pickled_weights_are_loaded_when_the_user_asks(folder: Path) -> None:
    state = load_file(weights(folder, "vae"))
    weights(folder, "vae").unlink()
    torch.save(state, folder / "vae" / "diffusion_pytorch_model.bin")
    pipe = load_pipeline(folder, allow_pickle=True, dtype=torch.float32)
    assert all(torch.equal(state[name].float(), value) for name, value in pipe.vae.state_dict().items())


def test_safetensors_and_pickles_cannot_both_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="use_safetensors=False with allow_pickle=False: they contradict"):
        load_pipeline(TINY_FLUX, use_safetensors=False)
    with pytest.raises(ConfigError, match="use_safetensors=True with allow_pickle=True: they contradict"):
        load_pipeline(TINY_FLUX, allow_pickle=True, use_safetensors=True)


def cut_short(path: Path) -> None:
    content = own_copy(path)
    path.write_bytes(content[: len(content) * 2 // 3])


def cut_in_the_header(path: Path) -> None:
    path.write_bytes(own_copy(path)[:100])


def empty(path: Path) -> None:
    own_copy(path)
    path.touch()


def too_long(path: Path) -> None:
    path.write_bytes(own_copy(path) + b"more")


def with_a_broken_header(path: Path) -> None:
    content = own_copy(path)
    path.write_bytes(content[:8] + b"#" + content[9:])


def without_offsets(path: Path) -> None:
    own_copy(path)
    header = b'{"weight":{"dtype":"F32","shape":[1]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def a_pointer(path: Path) -> None:
    own_copy(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1234\n")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (cut_short, r"has \d+ bytes, and by its header \d+: it is cut short; download it again"),
        (cut_in_the_header, r"has 100 bytes, fewer than the \d+ of its header: it is cut short or corrupt"),
        (empty, r"has 0 bytes, fewer than the 8 of its header: it is cut short"),
        (too_long, r"has \d+ bytes, and by its header \d+: it is too long"),
        (with_a_broken_header, r"\(\d+ bytes\) has no readable header .*it is corrupt or no safetensors file"),
        (without_offsets, r"\(\d+ bytes\) has no readable header \(KeyError"),
        (a_pointer, r"\(\d+ bytes\) is a git-lfs pointer and no weights; run `git lfs pull`"),
    ],
)
@pytest.mark.parametrize("component", ["text_encoder_2", "transformer"])
def test_a_damaged_file_is_named_with_its_size(
    folder: Path, damage: Callable[[Path], None], text: str, component: str
) -> None:
    path = weights(folder, component)
    damage(path)
    with pytest.raises(ConfigError, match=rf"{component}/{path.name} {text}"):
        load_pipeline(folder)


def test_a_missing_file_is_named(folder: Path, tmp_path: Path) -> None:
    weights(folder, "vae").unlink()
    with pytest.raises(ConfigError, match=r"vae holds a config\.json but no weights"):
        load_pipeline(folder)
    shutil.rmtree(folder / "vae")
    with pytest.raises(ConfigError, match=r"vae is missing, but .*model_index\.json names it"):
        load_pipeline(folder)
    check_folder(folder, passed={"vae"})
    with pytest.raises(ConfigError, match=r"model_index\.json is missing; pass the folder of a whole pipeline"):
        load_pipeline(tmp_path)
    with pytest.raises(ConfigError, match=r"absent\.safetensors cannot be read"):
        check_safetensors(tmp_path / "absent.safetensors")


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_a_broken_index_is_named(folder: Path, content: str) -> None:
    (folder / "model_index.json").unlink()
    (folder / "model_index.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model_index\.json .*download it again"):
        load_pipeline(folder)


def sharded(folder: Path, names: list[str]) -> Path:
    """An index of shards in the place of the transformer's weights; the first shard is there."""
    path = weights(folder, "transformer")
    shutil.copy(path, path.parent / names[0])
    path.unlink()
    index = path.parent / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"weight{i}": name for i, name in enumerate(names)}}))
    return index


@pytest.mark.parametrize("other", ["part.bin", "../vae/part.safetensors", "part.safetensors.pt"])
def test_an_index_that_lists_other_files_is_refused(folder: Path, tmp_path: Path, other: str) -> None:
    trace = tmp_path / "it-ran"
    index = sharded(folder, ["part-1.safetensors", other])
    (index.parent / other).write_bytes(pickle.dumps(Payload(trace)))
    with pytest.raises(ConfigError, match=r"index\.json lists '.*' as a file with weights, which is no safetensors"):
        load_pipeline(folder)
    assert not trace.exists()


def test_a_missing_shard_is_named(folder: Path) -> None:
    sharded(folder, ["part-1.safetensors", "part-2.safetensors"])
    with pytest.raises(ConfigError, match=r"part-2\.safetensors is missing, but .*index\.json lists it"):
        load_pipeline(folder)


def test_a_path_that_is_no_folder_and_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ConfigError, match=r"model\.safetensors' is a file; pass the folder"):
        load_pipeline(file)
    with pytest.raises(ConfigError, match=r"is no folder here, and the hub does not give it"):
        load_pipeline(tmp_path / "no" / "such" / "folder")
