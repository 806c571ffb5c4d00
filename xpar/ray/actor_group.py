"""`ActorGroup`: the actors of one process group, from placement to their end."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
import ray.cloudpickle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from xpar.errors import CommTimeoutError, ConfigError, PeerFailedError, XparError
from xpar.ray.answers import Answer, result
from xpar.ray.rank import Rank
from xpar.ray.settings import GroupSettings

logger = logging.getLogger(__name__)

# Seconds between looks at whether the groups are being closed; that other ranks get to answer once one has died; that
# Ray gets for its own work (starting a process, fetching a result).
_POLL = 0.5
_GRACE = 5.0
_RAY_LIMIT = 60.0


class Member(NamedTuple):
    """Where one rank of a group runs."""

    node: str
    """Address of the node."""

    pid: int
    """Process id on that node."""


class ActorGroup:
    """One process group: a placement group with one bundle, and one actor, for each rank.

    Args:
        index: the number of this group, for messages.
        settings: what it has in common with its siblings.
        closing: set when all waits should end.
    """

    def __init__(self, index: int, settings: GroupSettings, closing: threading.Event) -> None:
        self.name = f"group {index}"
        self.members: tuple[Member, ...] = ()
        """Where its ranks run; empty while it is down."""
        self._settings = settings
        self._closing = closing
        self._placement: PlacementGroup | None = None
        self._actors: list[Any] = []

    def start(self) -> None:
        """Place the actors, have them build the pipeline, join and wrap it.

        Raises:
            ConfigError: the cluster has no room.
            PeerFailedError, CommTimeoutError: a rank failed, or was too slow.
            Exception: what building or wrapping raised on every rank.
        """
        settings, limit = self._settings, self._settings.start_timeout
        placement = self._place()
        self._actors = [self._make_actor(placement, rank) for rank in range(settings.config.world_size)]
        where = self._ask(self._actors, "where", limit=limit)
        result(self.name, where)
        self.members = tuple(Member(*answer.value) for answer in where)
        result(self.name, self._ask(self._actors, "build", settings.recipe, limit=limit))
        address = None
        if settings.config.world_size > 1:
            address = result(self.name, self._ask(self._actors[:1], "open_store", limit=_RAY_LIMIT))
        result(self.name, self._ask(self._actors, "join", address, limit=settings.config.timeout + _RAY_LIMIT))
        logger.info("%s: serves on %s", self.name, ", ".join(f"{node} pid {pid}" for node, pid in self.members))

    def call(self, arguments: bytes) -> Any:
        """Call the pipeline on all ranks with pickled keyword arguments, and return the output of rank 0.

        Raises:
            PeerFailedError, CommTimeoutError: the group is at fault and should be replaced.
            Exception: the call is at fault.
        """
        output = result(self.name, self._ask(self._actors, "call", arguments, limit=self._settings.call_timeout))
        return ray.cloudpickle.loads(output)

    def is_usable(self) -> bool:
        """Whether it can serve another call, after one that was at fault itself."""
        answers = self._ask(self._actors, "check_usable", limit=_RAY_LIMIT)
        return all(answer.error is None for answer in answers)

    def stop(self) -> None:
        """End the actors and give their place back; stopping again does nothing."""
        placement, actors = self._placement, self._actors
        self._placement, self._actors, self.members = None, [], ()
        if not ray.is_initialized():  # everything went with the cluster, and Ray would start another one
            return
        with contextlib.suppress(RayError):  # what is gone already
            for actor in actors:
                ray.kill(actor)
            if placement is not None:
                remove_placement_group(placement)

    def _place(self) -> PlacementGroup:
        settings = self._settings
        world_size = settings.config.world_size
        placement = placement_group([settings.bundle] * world_size, strategy=settings.strategy)
        self._placement = placement
        deadline = time.monotonic() + settings.start_timeout
        while not placement.wait(_POLL):
            self._check_open()
            if time.monotonic() > deadline:
                free, total = ray.available_resources(), ray.cluster_resources()
                there = ", ".join(f"{free.get(name, 0)} of {total.get(name, 0)} {name}" for name in settings.bundle)
                raise ConfigError(
                    f"{self.name}: no room for {world_size} ranks with {settings.bundle} each ({settings.strategy}) "
                    f"within start_timeout={settings.start_timeout} s; free in the cluster: {there}; use fewer groups "
                    "or smaller degrees, or add nodes"
                )
        return placement

    def _make_actor(self, placement: PlacementGroup, rank: int) -> Any:
        bundle = dict(self._settings.bundle)
        strategy = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=rank)
        options = dict(num_cpus=bundle.pop("CPU", 0), num_gpus=bundle.pop("GPU", 0), resources=bundle)
        # A rank that Ray restarted alone could not join its group again.
        remote = ray.remote(Rank).options(**options, scheduling_strategy=strategy, max_restarts=0)
        return remote.remote(rank, self._settings.config)

    def _ask(self, actors: Sequence[Any], method: str, *arguments: Any, limit: float) -> list[Answer]:
        """Have each of `actors` run a method, at the same time; the answers in their order.

        Once a rank has failed the others get less time: until their communication with it must have timed out.
        """
        waiting = {getattr(actor, method).remote(*arguments): rank for rank, actor in enumerate(actors)}
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + limit
        while waiting and (left := deadline - time.monotonic()) > 0:
            self._check_open()
            ready, _ = ray.wait(list(waiting), timeout=min(_POLL, left))
            for reference in ready:
                rank = waiting.pop(reference)
                answers[rank] = answer = self._receive(rank, reference)
                if answer.error is not None:
                    grace = _GRACE if answer.lost else self._settings.config.timeout + _GRACE
                    deadline = min(deadline, time.monotonic() + grace)
        for rank in waiting.values():
            silence = CommTimeoutError(f"nothing came back from {method!r} in time (at most {limit} s)")
            answers[rank] = Answer(self._describe(rank), error=silence, lost=True)
        return [answers[rank] for rank in range(len(actors))]

    def _receive(self, rank: int, reference: Any) -> Answer:
        name = self._describe(rank)
        try:
            return Answer(name, value=ray.get(reference, timeout=_RAY_LIMIT))
        except RayTaskError as error:
            # Ray's text is the traceback in the actor, in colour.
            error.cause.add_note(f"{name} of {self.name}:\n" + re.sub(r"\x1b\[\d+m", "", str(error)))
            return Answer(name, error=error.cause)
        except GetTimeoutError as error:
            return Answer(name, error=CommTimeoutError(f"its result could not be fetched: {error}"), lost=True)
        except RayError as error:
            return Answer(name, error=PeerFailedError(f"{error}"), lost=True)

    def _describe(self, rank: int) -> str:
        if rank >= len(self.members):
            return f"rank {rank}"
        return f"rank {rank} (pid {self.members[rank].pid} on {self.members[rank].node})"

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise XparError(f"{self.name}: was closed before the call had ended")
