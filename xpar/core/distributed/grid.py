"""`RankGrid`: where this rank sits in the grid, who shares each axis with it, and the groups to reach them."""

from __future__ import annotations

import logging
from contextlib import closing
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from xpar.config import EngineConfig
from xpar.core.distributed import launch
from xpar.core.distributed.attempt import Attempt
from xpar.core.distributed.config_agreement import agree_on_config
from xpar.core.distributed.connections import Connections
from xpar.core.distributed.failure_board import FailureBoard
from xpar.core.distributed.group_factory import GroupFactory
from xpar.core.distributed.layout import Axis, GridLayout
from xpar.core.distributed.patient_store import job_store
from xpar.core.distributed.span import Span, find_span

__all__ = ["Axis", "RankGrid"]

logger = logging.getLogger(__name__)

_GIVE_UP_PATIENCE = 1.5  # seconds in which a rank that gives up tells the others, or leaves it


class RankGrid:
    """The processes of one `Parallel` as a grid with the axes dp, cfg, pipefusion, ring and ulysses.

    Build it with `RankGrid.build`, on every rank of the grid; `close` destroys the groups that it made and
    nothing else. Grids are independent: several may live in one process. All ranks below are global ranks,
    which is what `dist.send(dst=...)` takes; the position in a group is the coordinate along its axis.
    """

    def __init__(self, layout: GridLayout, ranks: tuple[int, ...], index: int, timeout: timedelta) -> None:
        self.layout = layout
        self.ranks = ranks
        """Global rank by grid index."""
        self.index = index
        """Position of this rank in the grid."""
        self.timeout = timeout
        """Time-out of every group of this grid."""
        self.all_ranks: dist.ProcessGroup | None = None
        """Group of the whole grid; None when it has one rank."""
        self.pipefusion_back: dist.ProcessGroup | None = None
        """Same ranks as `pipefusion_forward`; carries only what the last stage sends to the others."""
        self.control: dist.ProcessGroup | None = None
        """Group of the whole grid for small numbers on the host, gloo on any device; None when it has one rank."""
        self.failure_board: FailureBoard | None = None
        """Where the ranks leave errors for each other; None when there is one rank."""
        self._groups: dict[Axis, dist.ProcessGroup] = {}
        self._factory: GroupFactory | None = None
        self._mesh: DeviceMesh | None = None
        self._connections: Connections | None = None

    @classmethod
    def build(
        cls,
        config: EngineConfig,
        *,
        mesh: DeviceMesh | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> RankGrid:
        """Build the grid that `config` asks for over `mesh`, over `group`, or over all processes.

        Every rank of the grid must call this; other ranks of the job need not. With all degrees 1 and no
        process group nothing of torch.distributed is touched. Under torchrun a missing default process group
        is initialised; it then belongs to the process, as if the script had made it (`launch.start` says why).

        Args:
            config: the degrees and the time-out.
            mesh: 1-D without names, or with dim names that are axes; an axis that it lacks has size 1.
            group: ranks are laid out in the order of the group.
            device: where the pipeline lives; only used to choose a backend when none is initialised.

        Raises:
            ConfigError: degrees, processes, mesh and group do not fit together.
            RankMismatchError: the ranks have different configurations.
            CommTimeoutError, PeerFailedError: not all ranks of the grid took part.
        """
        layout, timeout = GridLayout.of(config), timedelta(seconds=config.timeout)
        if not launch.is_initialized():
            if mesh is None and group is None and layout.size == 1 and not launch.is_launched():
                return cls(layout, (0,), 0, timeout)
            launch.start(config, device)
        span = find_span(config, mesh, group)
        # Before the sizes are compared: a rank that left now would keep a better configured one waiting.
        token = cls._agree(config, span) if len(span.ranks) > 1 and _has_peers() else ""
        config.check_world_size(len(span.ranks))
        grid = cls(layout, span.ranks, span.ranks.index(dist.get_rank()), timeout)
        grid._make_groups(span, token)
        return grid

    @staticmethod
    def _agree(config: EngineConfig, span: Span) -> str:
        with closing(Attempt(span.ranks, config.timeout)) as attempt:
            return agree_on_config(config, span, attempt)

    @staticmethod
    def give_up(
        error: BaseException, *, mesh: DeviceMesh | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        """Tell the ranks that wait in `build` that this one will not come; waits for nobody and raises nothing.

        Args:
            error: why; the others quote it.
            mesh: as it would be given to `build`.
            group: likewise.
        """
        if not launch.is_initialized() or not _has_peers():
            return
        try:
            ranks = mesh.mesh.flatten().tolist() if mesh is not None else dist.get_process_group_ranks(group)
            with closing(Attempt(ranks, _GIVE_UP_PATIENCE)) as attempt:
                attempt.give_up(error)
        except Exception:  # no such group, or no store: what matters is the error on its way
            logger.warning("the other ranks could not be told that this one gave up", exc_info=True)

    def _make_groups(self, span: Span, token: str) -> None:
        """Make all groups, in one order on all ranks: the grid, then axis by axis, pipefusion twice."""
        if self.world_size == 1:
            return
        self._factory = factory = GroupFactory(span, self.timeout, token)
        connections = Connections()
        has_peers = _has_peers()
        try:
            self.control = factory.make("control", [range(self.world_size)], backend="gloo" if has_peers else None)
            self.all_ranks = factory.make("all", [range(self.world_size)])
            for axis in Axis:
                if self.size(axis) > 1:
                    self._groups[axis] = factory.make(axis, self.layout.slices(axis))
            if self.size(Axis.PIPEFUSION) > 1:
                # A communicator for each direction: large messages on one could wait on each other in a circle.
                self.pipefusion_back = factory.make("pipefusion_back", self.layout.slices(Axis.PIPEFUSION))
            if has_peers:
                connections.settle(factory.groups, self.control)
        except BaseException:
            factory.destroy()
            raise
        if has_peers:
            self._connections = connections
            self.failure_board = FailureBoard(job_store(), token, self.ranks, self.rank)

    @property
    def world_size(self) -> int:
        """Number of ranks in the grid."""
        return self.layout.size

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.ranks[self.index]

    @property
    def is_main(self) -> bool:
        """Whether this is the first rank of the grid, the one to print and to save."""
        return self.index == 0

    @property
    def pipefusion_forward(self) -> dist.ProcessGroup | None:
        """The pipefusion axis group; point-to-point traffic on it only goes from a stage to the next."""
        return self.group(Axis.PIPEFUSION)

    def size(self, axis: Axis) -> int:
        """Number of ranks along `axis`."""
        return self.layout.axis_size(axis)

    def coordinate(self, axis: Axis) -> int:
        """Coordinate of this rank along `axis`."""
        return self.layout.coordinate(self.index, axis)

    def axis_ranks(self, axis: Axis) -> tuple[int, ...]:
        """Global ranks that differ from this one in `axis` only, by coordinate."""
        return tuple(self.ranks[index] for index in self.layout.members(self.index, axis))

    def group(self, axis: Axis) -> dist.ProcessGroup | None:
        """Process group of `axis_ranks(axis)`; None when that is this rank alone."""
        return self._groups.get(axis)

    def next(self, axis: Axis) -> int:
        """Global rank of the next coordinate along `axis`; the last one is followed by the first."""
        return self.axis_ranks(axis)[(self.coordinate(axis) + 1) % self.size(axis)]

    def previous(self, axis: Axis) -> int:
        """Global rank of the previous coordinate along `axis`; the first one is preceded by the last."""
        return self.axis_ranks(axis)[self.coordinate(axis) - 1]

    @property
    def mesh(self) -> DeviceMesh | None:
        """The axes of size > 1 as a DeviceMesh over this grid's groups; None when the grid has one rank."""
        if self._mesh is None and self._groups:
            self._mesh = self._make_mesh()
        return self._mesh

    def _make_mesh(self) -> DeviceMesh:
        axes = [axis for axis in Axis if axis in self._groups]
        groups = [self._groups[axis] for axis in axes]
        device_type = "cuda" if dist.get_backend(groups[0]) == "nccl" else "cpu"
        names = tuple(str(axis) for axis in axes)
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
        ranks = torch.tensor(self.ranks).view([self.size(axis) for axis in axes])
        return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)

    def break_off(self) -> None:
        """End every communication on this grid's groups, for good; the ranks that wait in one raise."""
        if self._connections is not None:
            self._connections.break_off()

    def close(self) -> None:
        """Destroy the groups that this grid made, in the same order on each rank; calling it again is fine."""
        self._mesh = self.all_ranks = self.pipefusion_back = self.control = None
        self._groups.clear()
        if self._factory is not None:
            self._factory.destroy()


def _has_peers() -> bool:
    """Whether there are other processes: torch's fake backend is for one that tries out a layout."""
    return bool(dist.get_backend() != "fake")
