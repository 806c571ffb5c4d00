"""Runs a pipeline's own `__call__` once per patch, interleaved.

Each patch has a loop: the pipeline's unchanged `__call__`, on a shallow copy of the pipeline with its own scheduler.
Exactly one loop runs at a time and the order is fixed, so every rank does the same. The last loop runs on the caller's
thread and on the pipeline itself, ends with the complete latents and alone decodes them.
"""

import copy
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from diffusers.configuration_utils import ConfigMixin
from torch import nn

from xpar.core.distributed.channel import Channel
from xpar.errors import AgreedError
from xpar.wrappers.pipelines.callbacks import CALLBACK, SharedCallback, with_callback
from xpar.wrappers.pipelines.deferred import settle
from xpar.wrappers.pipelines.encoders import EncoderReplay
from xpar.wrappers.pipelines.patched_call import PatchedCall
from xpar.wrappers.pipelines.random_state import RandomState, clone_generators, copy_containers
from xpar.wrappers.pipelines.sharing import BatchSharing
from xpar.wrappers.pipelines.step_watch import StepWatch
from xpar.wrappers.pipelines.steps import latents_of, sample_of, steps_through, with_latents
from xpar.wrappers.pipelines.turns import LoopEnded, Turns, inherit_thread_state
from xpar.wrappers.transformer import ParallelTransformer


class PatchLoops:
    """Calls a pipeline patch by patch.

    Args:
        pipe: the pipeline.
        transformers: its wrapped denoisers.
        patches: number of patches M.
        warmup: steps that run the whole sequence.
        stages: number of pipefusion stages.
        back: channel last stage -> other stages, None with one stage.
        sharing: the cfg and dp axes.
    """

    def __init__(
        self,
        pipe: Any,
        transformers: Sequence[ParallelTransformer],
        *,
        patches: int,
        warmup: int,
        stages: int,
        back: Channel | None,
        sharing: BatchSharing,
    ) -> None:
        self.sharing = sharing
        self.pipe, self.transformers = pipe, transformers
        self.patches, self.warmup, self.stages, self.back = patches, warmup, stages, back

    def __call__(self, arguments: dict[str, Any], pictures: int | None, watch: StepWatch) -> Any:
        """Call the pipeline and return its output.

        Raises:
            Exception: whatever a loop raised, with the traceback of that loop.
        """
        device = self.pipe._execution_device
        turns = Turns(self.patches, device)
        call = PatchedCall(turns, patches=self.patches, warmup=self.warmup, back=self.back, stages=self.stages)
        with ExitStack() as stack:
            stack.enter_context(self.sharing.installed(self.pipe, self.transformers, call, pictures))
            stack.enter_context(steps_through(self.pipe, functools.partial(_composing, call=call)))
            replay = EncoderReplay(self._encoders(), self._decoders(), lambda: turns.current, self.patches - 1)
            stack.enter_context(watch.installed(self.pipe, self.transformers))
            stack.enter_context(replay.installed())
            stack.enter_context(self._left_in_order())
            return self._run(call, turns, arguments, RandomState.now(device))

    @contextmanager
    def _left_in_order(self) -> Iterator[None]:
        """All ranks leave at the same place, with a result or an error of all: no message stays under way."""
        try:
            yield
        except AgreedError:
            self._flush()
            raise
        self._flush()

    def _run(self, call: PatchedCall, turns: Turns, arguments: dict[str, Any], random: RandomState) -> Any:
        *followers, leading = self._arguments_of_loops(arguments, turns)
        threads = [self._thread(loop, own, call, turns, random) for loop, own in enumerate(followers)]
        result = None
        try:
            for thread in threads:
                thread.start()
            turns.start()
            turns.begin(self.patches - 1)
            random.set()
            result = type(self.pipe).__call__(self.pipe, **leading)
        except LoopEnded:
            pass
        except AgreedError:
            turns.is_orderly = True
            raise
        finally:
            turns.stop()
            for thread in threads:
                thread.join()
        if turns.error is not None:
            raise turns.error
        return result

    def _thread(
        self, loop: int, arguments: dict[str, Any], call: PatchedCall, turns: Turns, random: RandomState
    ) -> threading.Thread:
        """The thread of a loop other than the last, which says to `turns` how it ended."""

        def follow() -> None:
            try:
                turns.begin(loop)
                random.set()
                pipe = self._copy_of_pipe(call)
                type(pipe).__call__(pipe, **arguments)
            except LoopEnded:
                turns.finish(loop)
            except BaseException as error:  # noqa: BLE001 - raised again on the caller's thread
                turns.finish(loop, error)
            else:
                turns.finish(loop)

        return threading.Thread(target=inherit_thread_state(follow), name=f"xpar-patch-{loop}", daemon=True)

    def _copy_of_pipe(self, call: PatchedCall) -> Any:
        """A shallow copy for one loop: models are shared; schedulers and guiders, which a loop changes, are its own."""
        pipe = copy.copy(self.pipe)
        for name, component in self.pipe.components.items():
            if isinstance(component, nn.Module) or not isinstance(component, ConfigMixin):
                continue
            composed = component.__dict__.pop("step", None)
            try:
                own = copy.deepcopy(component)
            finally:
                if composed is not None:
                    component.__dict__["step"] = composed
            if composed is not None:
                own.__dict__["step"] = _composing(own.step, call)
            pipe.__dict__[name] = own
        pipe._progress_bar_config = {**getattr(self.pipe, "_progress_bar_config", {}), "disable": True}
        return pipe

    def _arguments_of_loops(self, arguments: dict[str, Any], turns: Turns) -> list[dict[str, Any]]:
        """Arguments for each loop, the last loop's the caller's own; a callback is called once per step for all."""
        loops = [*(_arguments_of_follower(arguments) for _ in range(self.patches - 1)), dict(arguments)]
        if arguments.get(CALLBACK) is None:
            return loops
        shared = SharedCallback(arguments[CALLBACK], self.pipe, turns)
        return [*(with_callback(own, shared.follow) for own in loops[:-1]), with_callback(loops[-1], shared.lead)]

    def _encoders(self) -> list[tuple[nn.Module, str]]:
        denoisers = [transformer.module for transformer in self.transformers]
        found: list[tuple[nn.Module, str]] = []
        for module in self.pipe.components.values():
            if isinstance(module, nn.Module) and not any(module is d for d in denoisers):
                found.append((module, "encode" if hasattr(module, "decode") else "forward"))
        return [(module, method) for module, method in found if hasattr(module, method)]

    def _decoders(self) -> list[tuple[nn.Module, str]]:
        return [
            (m, "decode") for m in self.pipe.components.values() if isinstance(m, nn.Module) and hasattr(m, "decode")
        ]

    def _flush(self) -> None:
        for channel in {id(c): c for c in (self.back, *(t.stage.forward for t in self.transformers))}.values():
            if channel is not None:
                channel.flush()


def _arguments_of_follower(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments for a loop other than the last: own generators in the same state, own containers."""
    own = {name: clone_generators(copy_containers(value)) for name, value in arguments.items()}
    if own.get("callback") is not None:  # the older form of callback, called by the last loop alone
        own["callback"] = None
    return own


def _composing(step: Any, call: PatchedCall) -> Any:
    """A scheduler's `step` whose new latents are composed over the patch loops."""

    @functools.wraps(step)
    def composed(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = settle(args), settle(kwargs)
        result = step(*args, **kwargs)
        return with_latents(result, call.compose(latents_of(result), sample_of(args, kwargs)))

    return composed
