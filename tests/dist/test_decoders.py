"""The autoencoder of a pipeline on all ranks, whatever the denoiser's layout."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL
from torch import nn

from tests.dist.pool import RankPool
from tests.tiny_models import call_arguments, pipeline, relative_error, variant
from xpar import ConfigError, EngineConfig, Parallel, UnsupportedError

SIZE = {"height": 96, "width": 104}  # 48 x 52 latents: more than are computed whole
LAYOUTS = ({"ulysses_degree": 2}, {"cfg_degree": 2}, {"pipefusion_degree": 2, "warmup_steps": 9})
FOUR = ({"ulysses_degree": 2, "ring_degree": 2}, {"dp_degree": 2, "cfg_degree": 2}, {"pipefusion_degree": 4})


def rows_seen(vae: nn.Module) -> list[tuple[int, int]]:
    """Height and width of what the decoder is given, from now on."""
    seen: list[tuple[int, int]] = []
    vae.decoder.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape[-2:])))
    return seen


def plain(batch: int = 1, **more: Any) -> torch.Tensor:
    return pipeline("flux")(**call_arguments("flux", batch=batch, steps=2, **SIZE, **more))[0]


def painted(fields: dict[str, Any], batch: int = 1) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    pipe = pipeline("flux")
    seen = rows_seen(pipe.vae)
    with Parallel(pipe, EngineConfig(timeout=30, **fields)) as parallel:
        picture = parallel(**call_arguments("flux", batch=batch, steps=2, **SIZE))[0]
    return picture, seen


@pytest.mark.parametrize("fields", LAYOUTS)
def test_two_ranks_decode_half_a_picture_each(pool2: RankPool, fields: dict[str, Any]) -> None:
    expected = plain()
    for picture, seen in pool2.run(painted, fields):
        assert relative_error(picture, expected) < 1e-5
        assert len(seen) == 1 and seen[0][0] * seen[0][1] < 0.6 * 48 * 52


@pytest.mark.parametrize("fields", FOUR)
def test_four_ranks_share_a_picture_in_every_layout(pool4: RankPool, fields: dict[str, Any]) -> None:
    batch = fields.get("dp_degree", 1)
    fields = {"warmup_steps": 9, **fields}
    expected = plain(batch)
    for picture, seen in pool4.run(painted, fields, batch):
        assert relative_error(picture, expected) < 1e-5
        assert len(seen) == 1 and seen[0][0] * seen[0][1] < 0.4 * 48 * 52


def test_a_small_picture_is_decoded_whole_and_off_means_off(pool2: RankPool) -> None:
    for _, seen in pool2.run(painted, {"ulysses_degree": 2, "vae_parallel": "off"}):
        assert seen == [(48, 52)]
    for seen in pool2.run(small):
        assert seen == [(8, 12)]


def small() -> list[tuple[int, int]]:
    pipe = pipeline("flux")
    seen = rows_seen(pipe.vae)
    with Parallel(pipe, EngineConfig(timeout=30, ulysses_degree=2)) as parallel:
        parallel(**call_arguments("flux", steps=1))
    return seen


def in_tiles() -> tuple[float, bool]:
    """Error against one process that tiles, and whether tiling is off again."""
    pipe = pipeline("flux")
    for name, value in (("tile_latent_min_size", 32), ("tile_sample_min_size", 64)):
        setattr(pipe.vae, name, value)
    arguments = call_arguments("flux", steps=1, **SIZE)
    with Parallel(pipe, EngineConfig(timeout=30, vae_parallel="tile", ulysses_degree=2)) as parallel:
        latents = parallel(**{**arguments, "output_type": "latent", "generator": torch.Generator().manual_seed(3)})[0]
        picture = parallel(**{**arguments, "generator": torch.Generator().manual_seed(3)})[0]
    was_on = pipe.vae.use_tiling
    pipe.vae.enable_tiling()
    z = pipe._unpack_latents(latents, 96, 104, pipe.vae_scale_factor)
    z = z / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
    expected = pipe.image_processor.postprocess(pipe.vae.decode(z, return_dict=False)[0], output_type="pt")
    return float((picture - expected).abs().max()), was_on


def test_tiles_are_those_of_one_process_to_the_bit(pool2: RankPool) -> None:
    assert pool2.run(in_tiles) == [(0.0, False)] * 2


def encoded() -> torch.Tensor:
    pipe, more = variant("flux img2img")
    more.pop("family")
    more["image"] = torch.rand(1, 3, 96, 104, generator=torch.Generator().manual_seed(5))
    steps = more.pop("steps")
    arguments = call_arguments("flux", steps=steps, **SIZE, **more)
    if not dist.is_initialized():
        return pipe(**arguments)[0]
    with Parallel(pipe, EngineConfig(timeout=30, ulysses_degree=2)) as parallel:
        return parallel(**arguments)[0]


def test_a_picture_is_encoded_on_all_ranks_with_the_same_sample(pool2: RankPool) -> None:
    expected = encoded()
    for picture in pool2.run(encoded):
        assert relative_error(picture, expected) < 1e-5


def alone() -> float:
    """The first rank decodes by itself between two calls, which would hang if it took all."""
    pipe = pipeline("flux")
    with Parallel(pipe, EngineConfig(timeout=10, ulysses_degree=2)) as parallel:
        arguments = call_arguments("flux", steps=1, output_type="latent", **SIZE)
        latents = parallel(**arguments)[0]
        if parallel.is_main:
            z = pipe._unpack_latents(latents, 96, 104, pipe.vae_scale_factor)
            pipe.vae.decode(z)
        return float(parallel(**{**arguments, "generator": torch.Generator().manual_seed(7)})[0].std())


def test_one_rank_may_decode_by_itself_outside_of_calls(pool2: RankPool) -> None:
    first, second = pool2.run(alone)
    assert first == second > 0


class HomeMade(AutoencoderKL):
    """A class whose layers are not known, but that tiles."""


class Opaque(nn.Module):
    """A class of which nothing is known."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return z


def unknown() -> tuple[list[str], bool, str, str]:
    """Warnings, whether the picture is finite, the refusal of what cannot tile, and of a bad component."""
    pipe = pipeline("flux")
    pipe.vae.__class__ = HomeMade
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("xpar.wrappers.pipelines.decoders")
    logger.addHandler(handler)
    with Parallel(pipe, EngineConfig(timeout=30, ulysses_degree=2)) as parallel:
        finite = bool(torch.as_tensor(parallel(**call_arguments("flux", steps=1, **SIZE))[0]).isfinite().all())
        with pytest.raises(ConfigError, match="component='sound' is not shared") as missing:
            parallel.vae_report((1, 4, 48, 52), component="sound")
    logger.removeHandler(handler)
    pipe.vae = Opaque()
    with pytest.raises(UnsupportedError, match="Opaque cannot be run in parallel") as refusal:
        Parallel(pipe, EngineConfig(timeout=30, ulysses_degree=2))
    return records, finite, str(refusal.value), str(missing.value)


def test_an_unknown_class_is_tiled_with_one_warning_or_refused(pool2: RankPool) -> None:
    (first, finite, refusal, _), (second, *_) = pool2.run(unknown)
    assert finite and "vae_parallel='off'" in refusal
    assert second == [] and len(first) == 1
    assert "HomeMade (vae) are not known" in first[0] and "tiles" in first[0]


def reported() -> tuple[list[int], int, str]:
    with Parallel(pipeline("flux"), EngineConfig(timeout=30, ulysses_degree=4)) as parallel:
        report = parallel.vae_report((1, 4, 64, 64))
    return list(report.peak_bytes), report.single_peak_bytes, report.mode


def test_the_report_counts_a_share_of_the_bytes_on_each_rank(pool4: RankPool) -> None:
    for peaks, single, mode in pool4.run(reported):
        assert mode == "exact" and len(peaks) == 4
        assert 0.2 * single < max(peaks) < 0.45 * single  # halos of a tiny picture
