"""The rank grid on real gloo ranks: several grids at once, parts of the world, and ranks that disagree."""

import contextlib
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from xpar import CommTimeoutError, ConfigError, EngineConfig, RankMismatchError
from xpar.core.distributed.grid import Axis, RankGrid

GROUP_TIMEOUT = timedelta(seconds=40)


def check(grid: RankGrid) -> None:
    """Every group reaches the ranks that the arithmetic names, in its order, under the grid's time-out."""
    groups = {axis: grid.group(axis) for axis in Axis if grid.size(axis) > 1}
    for axis, group in groups.items():
        heard = [torch.zeros(1, dtype=torch.int64) for _ in range(grid.size(axis))]
        dist.all_gather(heard, torch.tensor([dist.get_rank()]), group=group)
        assert tuple(int(rank) for rank in heard) == grid.axis_ranks(axis)
        assert dist.get_rank(group) == grid.coordinate(axis)
        assert grid.mesh[str(axis)].get_group() is group
    for group in (*groups.values(), grid.all_ranks):
        assert group._get_backend(torch.device("cpu")).options._timeout == grid.timeout


def live_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def two_grids_at_once() -> None:
    before = live_groups()
    for _ in range(3):
        first = RankGrid.build(EngineConfig(pipefusion_degree=2, ulysses_degree=2, timeout=20))
        second = RankGrid.build(EngineConfig(cfg_degree=2, ring_degree=2, timeout=15))
        check(first)
        check(second)
        first.close()
        check(second)
        third = RankGrid.build(EngineConfig(ulysses_degree=4, timeout=20))
        check(third)
        check(second)
        for grid in (second, third, third):
            grid.close()
        assert live_groups() == before


def part_of_the_world() -> None:
    """Rank 2 takes no part, and the members have different numbers of groups before."""
    group = dist.new_group([0, 1, 3], timeout=GROUP_TIMEOUT)
    own = dist.new_group([1], use_local_synchronization=True) if dist.get_rank() == 1 else None
    if dist.get_rank() != 2:
        for _ in range(4):
            first = RankGrid.build(EngineConfig(ulysses_degree=3, timeout=10), group=group)
            second = RankGrid.build(EngineConfig(pipefusion_degree=3, timeout=10), group=group)
            check(first)
            first.close()
            third = RankGrid.build(EngineConfig(ulysses_degree=3, timeout=10), group=group)
            check(second)
            check(third)
            second.close()
            third.close()
    dist.barrier()
    if own is not None:
        dist.destroy_process_group(own)
    if dist.get_rank() != 2:
        dist.destroy_process_group(group)


def two_parts_of_the_world() -> tuple[int, ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ulysses"))
    for _ in range(3):
        grid = RankGrid.build(EngineConfig(ulysses_degree=2, timeout=10), mesh=mesh["ulysses"])
        check(grid)
        ranks = grid.ranks
        grid.close()
    return ranks


def different_configs() -> str:
    degree = {"ulysses_degree": 4} if dist.get_rank() else {"ring_degree": 4}
    with pytest.raises(RankMismatchError) as error:
        RankGrid.build(EngineConfig(**degree, timeout=10))
    return str(error.value)


def different_products() -> str:
    """One rank could see by itself that its degrees are wrong; the others must hear of it all the same."""
    with pytest.raises(RankMismatchError) as error:
        RankGrid.build(EngineConfig(ulysses_degree=4 if dist.get_rank() else 3, timeout=10))
    return str(error.value)


def wrong_product() -> str:
    with pytest.raises(ConfigError) as error:
        RankGrid.build(EngineConfig(ulysses_degree=3, timeout=10))
    return str(error.value)


def absent_rank() -> float:
    """Rank 0 does not build its grid; the group is thrown away, its connections are dead after the time-out."""
    group = dist.new_group(timeout=GROUP_TIMEOUT)
    start = time.monotonic()
    if dist.get_rank() == 0:
        time.sleep(3)
    else:
        with pytest.raises(CommTimeoutError, match="timeout=1"):
            RankGrid.build(EngineConfig(ulysses_degree=dist.get_world_size(), timeout=1), group=group)
    seconds = time.monotonic() - start
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group(group)
    return seconds


def test_two_grids_at_once(pool4):
    pool4.run(two_grids_at_once)


def test_part_of_the_world(pool4):
    pool4.run(part_of_the_world)


def test_two_parts_of_the_world(pool4):
    assert pool4.run(two_parts_of_the_world) == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_different_configs_are_refused_on_every_rank(pool4):
    texts = set(pool4.run(different_configs))
    assert len(texts) == 1
    text = texts.pop()
    assert "ulysses_degree: rank0=1 rank1=4 rank2=4 rank3=4" in text
    assert "ring_degree: rank0=4 rank1=1" in text
    assert "dp_degree" not in text


def test_different_products_are_refused_on_every_rank(pool4):
    assert len(set(pool4.run(different_products))) == 1


def test_wrong_product_has_the_same_text_on_every_rank(pool4):
    texts = set(pool4.run(wrong_product))
    assert len(texts) == 1
    assert "ulysses_degree(3) = 3 does not equal the world size 4" in texts.pop()


def test_an_absent_rank_ends_the_wait_of_the_others(pool2):
    assert pool2.run(absent_rank)[1] < 5
