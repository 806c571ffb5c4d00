"""`PipelineGroups`: calls dealt to several process groups of Ray actors, each with one wrapped pipeline."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ray

from xpar.config import EngineConfig
from xpar.errors import CommError, ConfigError, PeerFailedError, XparError
from xpar.ray.actor_group import ActorGroup, Member
from xpar.ray.settings import GroupSettings, Strategy, bundle_of, check_int, pickled

if TYPE_CHECKING:
    from xpar.wrappers.models import ModelPlan

logger = logging.getLogger(__name__)


class PipelineGroups:
    """Several process groups of Ray actors; each holds one wrapped pipeline and serves one call at a time.

    A group is `config.world_size` actors in a placement group of its own. A group in which a rank dies, hangs or fails
    alone is logged with the cause, ended, and replaced, and its call runs again; the other groups go on meanwhile. An
    error that all ranks raise is the call's own: it is raised to the caller as it is and not run again, and the group
    stays, unless the error has left its ranks out of step.

        ray.init()
        with PipelineGroups(load, EngineConfig(ulysses_degree=2), groups=4, num_gpus=1) as groups:
            outputs = groups.map({"prompt": prompt, "generator": seeded(0)} for prompt in prompts)

    Args:
        build: makes the stock pipeline, on `"cuda"` where ranks have a GPU; runs in every actor, so it must be
            picklable and give every rank the same.
        config: how each group spreads it.
        groups: number of process groups.
        num_cpus, num_gpus, resources: what Ray reserves for each rank; num_gpus is 0 or 1.
        strategy: how Ray places the ranks of a group: PACK keeps them on one node if they fit.
        plans: as in `Parallel`.
        retries: how often a call runs again because its group failed.
        start_timeout: seconds for a group to be placed, and for its pipelines to be built.
        call_timeout: seconds for a call, after which its group counts as hung.

    Raises:
        ConfigError: an argument does not fit, Ray is not initialised, or the cluster has no room.
        PeerFailedError, CommTimeoutError: a group could not be started.
        Exception: what `build` or wrapping raised on every rank of a group.
    """

    def __init__(
        self,
        build: Callable[[], Any],
        config: EngineConfig,
        *,
        groups: int = 1,
        num_cpus: float = 1,
        num_gpus: int = 0,
        resources: Mapping[str, float] | None = None,
        strategy: Strategy = "PACK",
        plans: Mapping[type, ModelPlan] | None = None,
        retries: int = 2,
        start_timeout: float = 600.0,
        call_timeout: float = 3600.0,
    ) -> None:
        check_int("groups", groups, 1)
        check_int("retries", retries, 0)
        settings = GroupSettings(
            recipe=pickled("build and plans", (build, None if plans is None else dict(plans))),
            config=config,
            bundle=bundle_of(num_cpus, num_gpus, resources),
            strategy=strategy,
            start_timeout=start_timeout,
            call_timeout=call_timeout,
        )
        if not ray.is_initialized():
            raise ConfigError("ray: is not initialised, so there is no cluster to place actors on; call ray.init()")
        self._retries = retries
        self._numbers = itertools.count()
        self._closing = threading.Event()
        self._groups = [ActorGroup(index, settings, self._closing) for index in range(groups)]
        self._idle: queue.SimpleQueue[ActorGroup] = queue.SimpleQueue()
        # A thread for each group: whoever gets a thread finds an idle group.
        self._threads = ThreadPoolExecutor(groups, thread_name_prefix="xpar-ray")
        self._start()

    def _start(self) -> None:
        try:
            list(self._threads.map(ActorGroup.start, self._groups))
        except BaseException:
            self.close()
            raise
        for group in self._groups:
            self._idle.put(group)

    @property
    def members(self) -> list[tuple[Member, ...]]:
        """Node and process id of each rank, by group; empty for a group that is down until its next call."""
        return [group.members for group in self._groups]

    def submit(self, **arguments: Any) -> Future[Any]:
        """Have the next idle group call the pipeline with `arguments`.

        They are pickled, so a generator is copied: every call starts from the state it has now. A call without one
        draws from the default generator of whichever group it meets: pass a seeded one where results should repeat.

        Returns:
            A future with the pipeline's output, its tensors on the CPU. Its error is the call's own, or
            PeerFailedError or CommTimeoutError if the call's groups failed `1 + retries` times.

        Raises:
            ConfigError: an argument cannot be pickled.
            XparError: the object is closed.
        """
        if self._closing.is_set():
            raise XparError("this PipelineGroups object is closed; make a new one")
        return self._threads.submit(self._serve, next(self._numbers), pickled("the arguments", arguments))

    def map(self, calls: Iterable[Mapping[str, Any]], *, return_exceptions: bool = False) -> list[Any]:
        """Deal calls to the groups and return their outputs in the order of the calls.

        Args:
            calls: the pipeline's keyword arguments of each call.
            return_exceptions: put the error of a call in the place of its output, as `asyncio.gather` does. Otherwise
                the first error ends the map: calls that no group has begun are dropped.

        Raises:
            Exception: see `submit`.
        """
        futures = [self.submit(**call) for call in calls]
        outputs = []
        try:
            # No time limit is needed here: each wait inside a call has one, and a call a bounded number of waits.
            for future in futures:
                error = future.exception() if return_exceptions else None
                outputs.append(future.result() if error is None else error)
        finally:
            for future in futures:
                future.cancel()
        return outputs

    def _serve(self, number: int, arguments: bytes) -> Any:
        """Run one call on an idle group, again if the group fails."""
        group = self._idle.get_nowait()
        try:
            for attempt in itertools.count(1):
                try:
                    return self._attempt(group, arguments)
                except CommError as failure:
                    again = attempt <= self._retries
                    what = "the group is replaced and the call run again" if again else "the call is given up"
                    logger.error("call %d failed (attempt %d of %d): %s; %s", number, attempt, 1 + self._retries,
                                 failure, what)  # fmt: skip
                    if not again:
                        raise type(failure)(
                            f"call {number}: its group failed in {attempt} of {attempt} attempts "
                            f"(retries={self._retries}), the last time with: {failure}"
                        ) from failure
        finally:
            self._idle.put(group)

    def _attempt(self, group: ActorGroup, arguments: bytes) -> Any:
        """Run a call on a group that is started if it is down, and taken down if it cannot serve another call."""
        if not group.members:
            self._restart(group)
        try:
            return group.call(arguments)
        except CommError:
            group.stop()
            raise
        except Exception as error:
            if not self._closing.is_set() and not group.is_usable():
                logger.warning("%s: is replaced, since %s left it unusable", group.name, type(error).__name__)
                group.stop()
            raise

    def _restart(self, group: ActorGroup) -> None:
        """Start a group that has been taken down; whatever goes wrong is the group's fault, not the call's."""
        try:
            group.start()
        except Exception as error:
            group.stop()
            if self._closing.is_set() or isinstance(error, CommError):
                raise
            raise PeerFailedError(
                f"{group.name}: could not be started again: {type(error).__name__}: {error}"
            ) from error

    def close(self) -> None:
        """End all actors; calls under way fail with `XparError`, those not begun are cancelled. Twice is fine."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._closing.set()
        for group in self._groups:
            group.stop()
        self._threads.shutdown(wait=True)  # every wait in a thread ends once _closing is set
        for group in self._groups:
            group.stop()  # what a thread had started meanwhile

    def __enter__(self) -> PipelineGroups:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
