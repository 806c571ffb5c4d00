"""How a process finds its world and its device: RANK and WORLD_SIZE make the group, LOCAL_RANK picks the GPU."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from xpar import ConfigError, EngineConfig
from xpar.core.distributed import launch

CONFIG = EngineConfig(ulysses_degree=16, timeout=7)
NODES, GPUS = 2, 8


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A node with eight GPUs; the devices that were made current."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: GPUS)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    return chosen


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """How the default process group was initialised; none is."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: calls.append({"backend": backend, **more}))
    return calls


def launched(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """The environment that torchrun gives a rank of two nodes."""
    values = {"RANK": rank, "LOCAL_RANK": rank % GPUS, "WORLD_SIZE": NODES * GPUS, "MASTER_ADDR": "a", "MASTER_PORT": 1}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("rank", [0, 7, 8, 13])
def test_local_rank_picks_the_gpu_on_every_node(
    monkeypatch: pytest.MonkeyPatch, gpus: list[int], started: list[dict[str, Any]], rank: int
) -> None:
    launched(monkeypatch, rank)
    launch.start(CONFIG, torch.device("cuda"))
    assert gpus == [rank % GPUS]
    # The rank and the size are torch's to read from the environment: nothing is passed that could contradict it.
    assert started == [{"backend": "nccl", "timeout": timedelta(seconds=7)}]


def test_a_device_with_an_index_is_kept(
    monkeypatch: pytest.MonkeyPatch, gpus: list[int], started: list[dict[str, Any]]
) -> None:
    launched(monkeypatch, 9)
    launch.start(CONFIG, torch.device("cuda", 5))
    assert gpus == [5]


def test_fewer_visible_gpus_than_local_ranks(
    monkeypatch: pytest.MonkeyPatch, gpus: list[int], started: list[dict[str, Any]]
) -> None:
    """A launcher that shows each process its own GPU only leaves one device, number 0."""
    launched(monkeypatch, 13)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    launch.start(CONFIG, torch.device("cuda"))
    assert gpus == [0]


def test_a_pipeline_on_the_cpu_touches_no_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: list[int], started: list[dict[str, Any]]
) -> None:
    launched(monkeypatch, 3)
    launch.start(CONFIG, torch.device("cpu"))
    assert not gpus
    assert started[0]["backend"] == "gloo"


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_an_environment_is_no_launch(
    monkeypatch: pytest.MonkeyPatch, started: list[dict[str, Any]], missing: str
) -> None:
    launched(monkeypatch, 0)
    monkeypatch.delenv(missing)
    assert not launch.is_launched()
    with pytest.raises(ConfigError, match="torchrun --nproc_per_node=16"):
        launch.start(CONFIG, None)
    assert not started
