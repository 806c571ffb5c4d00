"""The rank grid: its arithmetic for many layouts, and its groups as any rank of 64 on torch's fake backend."""

import math
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from xpar import ConfigError, EngineConfig
from xpar.core.distributed.attempt import Attempt
from xpar.core.distributed.grid import Axis, RankGrid
from xpar.core.distributed.group_factory import GroupFactory
from xpar.core.distributed.layout import GridLayout
from xpar.core.distributed.patient_store import PatientStore, StoreTimeoutError
from xpar.core.distributed.span import Span
from xpar.errors import CommTimeoutError, PeerFailedError, UnsupportedError

LAYOUTS = [
    (1, 1, 1, 1, 1),
    (1, 1, 1, 1, 4),
    (1, 1, 2, 1, 2),
    (2, 1, 1, 3, 1),
    (2, 2, 2, 2, 2),
    (1, 2, 4, 2, 4),
    (3, 1, 5, 1, 2),
]


def config_of(sizes) -> EngineConfig:
    return EngineConfig(**{f"{axis}_degree": size for axis, size in zip(Axis, sizes, strict=True)}, timeout=7)


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_layout_equals_the_view_of_a_range(sizes):
    layout = GridLayout.of(config_of(sizes))
    grid = torch.arange(math.prod(sizes)).view(sizes)
    assert layout.size == grid.numel()
    for index in range(layout.size):
        place = [layout.coordinate(index, axis) for axis in Axis]
        assert grid[tuple(place)] == index
        for dim, axis in enumerate(Axis):
            line = grid[tuple(slice(None) if d == dim else c for d, c in enumerate(place))]
            assert layout.members(index, axis) == tuple(line.tolist())


@pytest.mark.parametrize("sizes", LAYOUTS)
def test_slices_hold_every_index_once(sizes):
    layout = GridLayout.of(config_of(sizes))
    for axis in Axis:
        slices = layout.slices(axis)
        assert sorted(index for members in slices for index in members) == list(range(layout.size))
        assert all(layout.members(index, axis) == members for members in slices for index in members)


def test_order_of_the_axes():
    assert [str(axis) for axis in Axis] == ["dp", "cfg", "pipefusion", "ring", "ulysses"]


def test_one_process_needs_no_process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    grid = RankGrid.build(EngineConfig())
    assert not dist.is_initialized()
    assert (grid.rank, grid.index, grid.world_size, grid.is_main) == (0, 0, 1, True)
    assert grid.mesh is None and grid.all_ranks is None
    for axis in Axis:
        assert grid.group(axis) is None
        assert grid.size(axis) == 1 and grid.axis_ranks(axis) == (0,)
        assert grid.next(axis) == grid.previous(axis) == 0
    grid.close()
    grid.close()


def test_more_than_one_process_without_a_launcher_says_how_to_launch(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match=r"torchrun --nproc_per_node=8 .*init_process_group"):
        RankGrid.build(EngineConfig(ulysses_degree=8))


@pytest.fixture
def fake_world():
    """Start a fake world as a rank of it; the fake backend moves no data and waits for nobody."""

    def start(rank: int, size: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 5, 37, 63])
def test_groups_of_a_rank_of_64(fake_world, rank):
    fake_world(rank, 64)
    sizes = (2, 2, 4, 2, 2)
    grid = RankGrid.build(config_of(sizes))
    assert grid.rank == rank and grid.timeout == timedelta(seconds=7)
    for axis in Axis:
        group = grid.group(axis)
        assert tuple(dist.get_process_group_ranks(group)) == grid.axis_ranks(axis)
        assert dist.get_rank(group) == grid.coordinate(axis)
        assert grid.axis_ranks(axis)[grid.coordinate(axis)] == rank
        assert grid.mesh[str(axis)].get_group() is group
        assert grid.mesh.get_local_rank(str(axis)) == grid.coordinate(axis)
    assert grid.pipefusion_forward is grid.group(Axis.PIPEFUSION)
    assert grid.pipefusion_back is not grid.pipefusion_forward
    assert dist.get_process_group_ranks(grid.pipefusion_back) == list(grid.axis_ranks(Axis.PIPEFUSION))
    assert dist.get_world_size(grid.all_ranks) == 64
    assert tuple(grid.mesh.shape) == sizes


def test_neighbours_wrap_around(fake_world):
    fake_world(6, 8)
    grid = RankGrid.build(EngineConfig(pipefusion_degree=4, ulysses_degree=2))
    assert grid.axis_ranks(Axis.PIPEFUSION) == (0, 2, 4, 6)
    assert (grid.previous(Axis.PIPEFUSION), grid.next(Axis.PIPEFUSION)) == (4, 0)
    assert (grid.previous(Axis.ULYSSES), grid.next(Axis.ULYSSES)) == (7, 7)


def test_axes_of_size_one_cost_no_group(fake_world):
    fake_world(3, 8)
    before = len(dist.distributed_c10d._world.pg_map)
    grid = RankGrid.build(EngineConfig(ulysses_degree=8))
    assert [axis for axis in Axis if grid.group(axis) is not None] == [Axis.ULYSSES]
    assert grid.pipefusion_back is None
    assert len(dist.distributed_c10d._world.pg_map) == before + 3  # all ranks, their control, and ulysses
    assert grid.mesh.mesh_dim_names == ("ulysses",)
    grid.close()
    assert len(dist.distributed_c10d._world.pg_map) == before


def test_closing_one_grid_leaves_the_other(fake_world):
    fake_world(1, 4)
    first = RankGrid.build(EngineConfig(ulysses_degree=4))
    second = RankGrid.build(EngineConfig(pipefusion_degree=2, ring_degree=2))
    first.close()
    assert dist.get_process_group_ranks(second.group(Axis.RING)) == [0, 1]
    assert dist.get_process_group_ranks(second.group(Axis.PIPEFUSION)) == [1, 3]
    second.close()
    assert dist.is_initialized()


def test_close_after_the_world_is_gone(fake_world):
    fake_world(0, 2)
    grid = RankGrid.build(EngineConfig(ulysses_degree=2))
    dist.destroy_process_group()
    grid.close()


@pytest.mark.parametrize("size", [1, 2, 16])
def test_world_size_must_be_the_product(fake_world, size):
    fake_world(0, size)
    before = len(dist.distributed_c10d._world.pg_map)
    with pytest.raises(ConfigError, match=rf"ulysses_degree\(8\) = 8 does not equal the world size {size}"):
        RankGrid.build(EngineConfig(ulysses_degree=8))
    assert len(dist.distributed_c10d._world.pg_map) == before


def test_a_group_that_cannot_be_made_leaves_none_behind(fake_world, monkeypatch):
    fake_world(0, 4)
    before, make = len(dist.distributed_c10d._world.pg_map), GroupFactory.make

    def fail(self, name, slices, backend=None):
        if name == "ulysses":
            raise PeerFailedError("the making of group ulysses: connection lost")
        return make(self, name, slices, backend)

    monkeypatch.setattr(GroupFactory, "make", fail)
    with pytest.raises(PeerFailedError, match="group ulysses"):
        RankGrid.build(EngineConfig(ulysses_degree=4))
    assert len(dist.distributed_c10d._world.pg_map) == before


def test_a_rank_that_no_slice_holds(fake_world):
    fake_world(0, 2)
    factory = GroupFactory(Span((0, 1), (dist.group.WORLD,)), timedelta(seconds=7), "token")
    with pytest.raises(ValueError, match=r"slices=\[\[1\]\]: no slice holds rank 0"):
        factory.make("half", [[1]])


def test_a_part_of_a_world_that_is_bound_to_a_device(fake_world):
    fake_world(0, 4)
    half = dist.new_group([0, 1])
    dist.distributed_c10d._get_default_group().bound_device_id = torch.device("cpu", 0)
    with pytest.raises(UnsupportedError, match="call init_process_group without device_id"):
        RankGrid.build(EngineConfig(ulysses_degree=2), group=half)


def test_a_store_that_does_not_answer_is_said_in_time(monkeypatch):
    def late(*_):
        raise StoreTimeoutError("no answer within 7 s")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(PatientStore, "use", late)
        with pytest.raises(CommTimeoutError, match="the beginning of a rank grid: the job's store gives no"):
            Attempt((0, 1), 7)
    finally:
        dist.destroy_process_group()


def test_a_mesh_without_this_rank(fake_world):
    fake_world(0, 4)
    with pytest.raises(ConfigError, match="rank 0 is not in it; build Parallel on the mesh's ranks only"):
        RankGrid.build(EngineConfig(ulysses_degree=2), mesh=DeviceMesh("cpu", [1, 2]))


def test_world_of_one_rank(fake_world):
    fake_world(0, 1)
    grid = RankGrid.build(EngineConfig())
    assert grid.all_ranks is None and grid.mesh is None
    grid.close()
    assert dist.is_initialized()


class TestMesh:
    def test_dims_in_another_order(self, fake_world):
        fake_world(1, 4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "pipefusion"))
        grid = RankGrid.build(EngineConfig(ulysses_degree=2, pipefusion_degree=2, timeout=7), mesh=mesh)
        assert grid.ranks == (0, 2, 1, 3)
        assert grid.axis_ranks(Axis.ULYSSES) == (1, 3)
        assert grid.axis_ranks(Axis.PIPEFUSION) == (0, 1)

    def test_ranks_in_descending_order(self, fake_world):
        fake_world(1, 4)
        mesh = DeviceMesh("cpu", torch.tensor([[3, 1], [2, 0]]), mesh_dim_names=("cfg", "ring"))
        grid = RankGrid.build(EngineConfig(cfg_degree=2, ring_degree=2), mesh=mesh)
        assert grid.axis_ranks(Axis.RING) == (3, 1)
        assert dist.get_rank(grid.group(Axis.RING)) == grid.coordinate(Axis.RING) == 1

    def test_one_dim_without_a_name(self, fake_world):
        fake_world(2, 4)
        grid = RankGrid.build(EngineConfig(ring_degree=2, ulysses_degree=2), mesh=init_device_mesh("cpu", (4,)))
        assert grid.axis_ranks(Axis.RING) == (0, 2)

    def test_size_must_equal_the_degree(self, fake_world):
        fake_world(0, 4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
        with pytest.raises(ConfigError, match=r"ulysses_degree=4: the mesh .*'ulysses': 2.* has size 2 along ulysses"):
            RankGrid.build(EngineConfig(ring_degree=2, ulysses_degree=4), mesh=mesh)
        with pytest.raises(ConfigError, match=r"ring_degree=1: .* has size 2 along ring"):
            RankGrid.build(EngineConfig(ulysses_degree=2), mesh=mesh)
        with pytest.raises(ConfigError, match=r"dp_degree=2: .* has size 1 along dp"):
            RankGrid.build(EngineConfig(dp_degree=2, ring_degree=2, ulysses_degree=2), mesh=mesh)

    def test_dims_must_be_axes(self, fake_world):
        fake_world(0, 4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "ulysses"))
        with pytest.raises(ConfigError, match="dp, cfg, pipefusion, ring, ulysses"):
            RankGrid.build(EngineConfig(ulysses_degree=2), mesh=mesh)

    def test_mesh_and_group_exclude_each_other(self, fake_world):
        fake_world(0, 2)
        with pytest.raises(ConfigError, match="pass only one"):
            RankGrid.build(EngineConfig(ulysses_degree=2), mesh=init_device_mesh("cpu", (2,)), group=dist.group.WORLD)


class TestGroup:
    def test_part_of_the_world(self, fake_world):
        fake_world(6, 8)
        group = dist.new_group([2, 4, 5, 6])
        grid = RankGrid.build(EngineConfig(pipefusion_degree=2, ulysses_degree=2, timeout=7), group=group)
        assert grid.ranks == (2, 4, 5, 6) and grid.index == 3 and grid.rank == 6
        assert dist.get_process_group_ranks(grid.group(Axis.ULYSSES)) == [5, 6]
        assert dist.get_process_group_ranks(grid.group(Axis.PIPEFUSION)) == [4, 6]
        assert dist.get_global_rank(grid.group(Axis.ULYSSES), 0) == 5
        grid.close()
        assert dist.get_world_size(group) == 4

    def test_a_rank_outside_is_refused(self, fake_world):
        fake_world(0, 8)
        group = dist.new_group([2, 4])
        with pytest.raises(ConfigError, match="rank 0 is not a member"):
            RankGrid.build(EngineConfig(ulysses_degree=2), group=group)
