"""Which ranks a grid covers: the world, a process group or a device mesh of the caller's."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from xpar.config import EngineConfig
from xpar.core.distributed.layout import Axis
from xpar.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Span:
    """The ranks of a grid, and groups through which all of them can be reached."""

    ranks: tuple[int, ...]
    """Global rank by grid index."""

    links: tuple[dist.ProcessGroup, ...]
    """Existing groups of this rank; following one after the other, each rank hears of every other rank."""

    @property
    def is_world(self) -> bool:
        """Whether every process of the job takes part."""
        return len(self.ranks) == dist.get_world_size()


def find_span(config: EngineConfig, mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> Span:
    """The span that `mesh` or `group` says, or the world if both are None.

    Raises:
        ConfigError: both are given, this rank is in neither, or the mesh does not fit the degrees.
    """
    if mesh is not None and group is not None:
        raise ConfigError("mesh and group: both are given, but a grid has one span; pass only one of them")
    if mesh is not None:
        return _span_of_mesh(config, mesh)
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        # What new_group returns to a rank that is not in the group.
        raise ConfigError(
            f"group={group!r}: rank {dist.get_rank()} is not a member; build Parallel on the group's ranks only"
        )
    return Span(tuple(dist.get_process_group_ranks(group)), (group,))


def _span_of_mesh(config: EngineConfig, mesh: DeviceMesh) -> Span:
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"mesh={mesh!r}: rank {dist.get_rank()} is not in it; build Parallel on the mesh's ranks only"
        )
    links = tuple(mesh.get_group(dim) for dim in range(mesh.ndim))
    if mesh.mesh_dim_names is None and mesh.ndim == 1:
        return Span(tuple(mesh.mesh.flatten().tolist()), links)
    names = mesh.mesh_dim_names or ()
    axes = [axis for axis in Axis if axis in names]
    if len(axes) != mesh.ndim:
        raise ConfigError(
            f"mesh={mesh!r}: its dim names must be axes of the rank grid ({', '.join(Axis)}); "
            f"rename them, or pass a 1-D mesh without names"
        )
    _check_sizes(config, mesh, names)
    # The dims of a mesh may come in any order; the grid has one.
    ordered = mesh.mesh.permute([names.index(axis) for axis in axes])
    return Span(tuple(ordered.flatten().tolist()), links)


def _check_sizes(config: EngineConfig, mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    for axis in Axis:
        degree = getattr(config, f"{axis}_degree")
        size = mesh.size(names.index(axis)) if axis in names else 1
        if size != degree:
            raise ConfigError(
                f"{axis}_degree={degree}: the mesh {dict(zip(names, mesh.shape, strict=True))} has size {size} "
                f"along {axis}; make them equal (an axis that the mesh does not name has size 1)"
            )
