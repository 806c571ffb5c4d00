"""Makes and destroys the process groups of one rank grid."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from xpar.core.distributed.operations import named
from xpar.core.distributed.patient_store import job_store
from xpar.core.distributed.span import Span
from xpar.errors import UnsupportedError


class GroupFactory:
    """Makes groups inside a span, remembers them, and destroys them in the reverse order.

    Every rank of the span must call `make` with the same arguments in the same order. Each group gets the
    given time-out: a group made without one falls back to torch's 10 or 30 minutes, not to the world's.
    """

    def __init__(self, span: Span, timeout: timedelta, token: str) -> None:
        self._span = span
        self._timeout = timeout
        self._token = token
        self._made: list[dist.ProcessGroup] = []

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups made so far."""
        return list(self._made)

    def make(self, name: str, slices: Sequence[Sequence[int]], backend: str | None = None) -> dist.ProcessGroup:
        """Make one group for each slice, and return the one that this rank is in.

        Args:
            name: says what the group is for, in errors and flight records.
            slices: disjoint sequences of grid indices; one of them holds this rank. A rank's position in its
                sequence becomes its rank in the group.
            backend: None for that of the world.

        Raises:
            CommTimeoutError, PeerFailedError: another rank did not come, or left.
        """
        with named(f"the making of group {name}"):
            mine = self._make(name, slices, backend)
        self._made.append(mine)
        return mine

    def _make(self, name: str, slices: Sequence[Sequence[int]], backend: str | None) -> dist.ProcessGroup:
        rank = dist.get_rank()
        mine = None
        for indices in slices:
            ranks = [self._span.ranks[index] for index in indices]
            if self._span.is_world:
                group = dist.new_group(
                    ranks, timeout=self._timeout, backend=backend, group_desc=f"xpar {name}", sort_ranks=False
                )
                mine = group if rank in ranks else mine
            elif rank in ranks:
                mine = self._make_in_part_of_world(name, ranks, backend)
        if mine is None:
            raise ValueError(f"slices={slices}: no slice holds rank {rank}")
        return mine

    def _make_in_part_of_world(self, name: str, ranks: list[int], backend: str | None) -> dist.ProcessGroup:
        """Make a group when other processes of the job are busy elsewhere and will not take part.

        `new_group(use_local_synchronization=True)` is meant for this, but it names a group by its ranks and
        the number of live groups. A second grid on the same ranks so finds the addresses of the first one in
        the store and hangs (seen with gloo), and ranks with unequal histories disagree on the name. So we do
        what it does, with a name that is new for each grid.
        """
        world = c10d._get_default_group()
        if world.bound_device_id is not None:
            # nccl would split the world's communicator, for which every process of the job must take part.
            raise UnsupportedError(
                "group= or mesh= on a part of a world that was initialised with device_id=; "
                "call init_process_group without device_id"
            )
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            dist.Backend(backend or c10d._world.pg_map[world][0]),
            job_store(),
            c10d.GroupName(f"xpar_{self._token}_{name}_{ranks[0]}"),
            timeout=self._timeout,
            group_desc=f"xpar {name}",
        )
        c10d._world.pg_group_ranks[group] = {rank: position for position, rank in enumerate(ranks)}
        return group

    def destroy(self) -> None:
        """Destroy what was made, last first; groups that went with the world are skipped."""
        while self._made:
            group = self._made.pop()
            if dist.is_initialized() and group in c10d._world.pg_map:
                dist.destroy_process_group(group)
