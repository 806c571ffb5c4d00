"""The connections of a grid's groups, and how to break them so that no rank stays blocked.

NCCL communicators can be aborted. Gloo's cannot: a rank that waits in one is woken by nothing but its time-out or the
end of a TCP connection (torch 2.13: `ProcessGroup.abort` has no effect on gloo). So the sockets that were opened while
the groups were made are remembered, and shut down when a rank has failed; gloo then raises on both sides at once.
"""

import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["Connections"]


@dataclass(frozen=True)
class _Socket:
    """An open TCP connection of this process."""

    descriptor: int
    inode: int
    ports: tuple[int, int]
    """Own port and the other side's."""


class Connections:
    """Connections made between `Connections()` and `settle`; all ranks of the grid do both.

    Which new sockets are the groups' is certain because their other end is another rank's new socket: others that this
    process opens at the same time, for whatever purpose, are no rank's.
    """

    def __init__(self) -> None:
        self._before = {found.inode for found in _open_sockets()}
        self._sockets: list[_Socket] = []
        self._groups: list[ProcessGroup] = []
        self._lock = threading.Lock()
        self._broken = False

    def settle(self, groups: Sequence[ProcessGroup], control: ProcessGroup) -> None:
        """Find the sockets of the groups that have been made.

        Args:
            groups: the groups of this rank.
            control: all ranks of the grid, for objects.
        """
        self._groups = list(groups)
        new = [found for found in _open_sockets() if found.inode not in self._before]
        by_rank: list[Any] = [None] * dist.get_world_size(control)
        dist.all_gather_object(by_rank, [found.ports for found in new], group=control)
        del by_rank[dist.get_rank(control)]
        others = {tuple(ports) for of_rank in by_rank for ports in of_rank}
        self._sockets = [found for found in new if (found.ports[1], found.ports[0]) in others]

    def break_off(self) -> None:
        """End every communication of the groups, on this side and on the others; may be called from any thread."""
        with self._lock:
            if self._broken:
                return
            self._broken = True
        for found in self._sockets:
            _shut_down(found)
        for group in self._groups:
            if "nccl" in str(dist.get_backend(group)):
                group._get_backend(torch.device("cuda")).abort()


def _open_sockets() -> list[_Socket]:
    """The connected TCP sockets of this process; none where the system does not list them (no Linux)."""
    try:
        descriptors = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    except OSError:
        return []
    found = []
    for descriptor in descriptors:
        try:
            if not str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6):
                    ports = end.getsockname()[1], end.getpeername()[1]
                    found.append(_Socket(descriptor, os.fstat(descriptor).st_ino, ports))
        except OSError:  # closed meanwhile, or not connected
            continue
    return found


def _shut_down(found: _Socket) -> None:
    try:
        if os.fstat(found.descriptor).st_ino != found.inode:  # closed, and the number used again
            return
        with socket.socket(fileno=os.dup(found.descriptor)) as end:
            end.shutdown(socket.SHUT_RDWR)
    except OSError:  # ended already
        return
