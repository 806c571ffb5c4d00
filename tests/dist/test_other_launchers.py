"""Whole calls where something else than torchrun has made the processes and their groups."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from tests.tiny_models import call_arguments, pipeline, relative_error
from xpar import EngineConfig, Parallel

LIMIT = 150
TWO = EngineConfig(ulysses_degree=2, timeout=40)


def error_of(seed: int, config: EngineConfig, **where: Any) -> float:
    """How far a wrapped call is from the plain one of the same process."""
    pipe = pipeline("flux")
    expected = pipe(**call_arguments("flux", seed=seed))[0]
    with Parallel(pipe, config, **where) as parallel:
        return relative_error(parallel(**call_arguments("flux", seed=seed))[0], expected)


def two_pipelines_on_two_groups() -> float:
    """Both halves of the world paint at the same time, something else each; the user's group stays."""
    halves = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3))]
    half = dist.get_rank() // 2
    worst = max(error_of(10 * half + i, TWO, group=halves[half]) for i in range(2))
    total = torch.ones(1)
    dist.all_reduce(total, group=halves[half])
    assert total == 2
    dist.destroy_process_group(halves[half])
    return worst


def two_pipelines_on_a_mesh() -> float:
    """A job's own mesh of two axes, with one of them lent to xpar; then the whole mesh, its axes in another order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring"))
    worst = error_of(mesh.get_local_rank("ring"), TWO, mesh=mesh["ulysses"])  # a picture for each column of the mesh
    both = EngineConfig(ulysses_degree=2, ring_degree=2, timeout=40)
    return max(worst, error_of(3, both, mesh=mesh))


@pytest.mark.timeout(LIMIT)
def test_groups_of_a_larger_job(pool4) -> None:
    assert max(pool4.run(two_pipelines_on_two_groups)) < 1e-5


@pytest.mark.timeout(LIMIT)
def test_meshes_of_a_larger_job(pool4) -> None:
    assert max(pool4.run(two_pipelines_on_a_mesh)) < 1e-5


def spawned(rank: int, folder: str) -> None:
    """A process of torch.multiprocessing.spawn whose world the user has initialised, and keeps."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    error = max(error_of(seed, TWO) for seed in range(2))
    assert dist.is_initialized()
    dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"{rank}.error").write_text(str(error))


def on_another_node(rank: int, folder: str, port: int) -> None:
    """The only process of its node: local rank 0 everywhere; xpar itself joins the world."""
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    error = error_of(0, TWO)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
    dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"{rank}.error").write_text(str(error))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 30)
def test_torch_multiprocessing_spawn(tmp_path: Path) -> None:
    assert max(spawn(spawned, tmp_path)) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 30)
def test_nodes_of_one_process(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert max(spawn(on_another_node, tmp_path, port)) < 1e-5


def spawn(fn: Any, folder: Path, *args: Any) -> list[float]:
    """Run two processes to their end and return what they wrote; none is left after `LIMIT` seconds."""
    context = mp.spawn(fn, (str(folder), *args), nprocs=2, join=False)
    deadline = time.monotonic() + LIMIT
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, f"the processes have not ended in {LIMIT} s"
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    return [float((folder / f"{rank}.error").read_text()) for rank in range(2)]
