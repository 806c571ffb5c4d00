"""`Parallel`: one diffusers pipeline on many devices. The whole story, in order."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from xpar.config import EngineConfig
from xpar.core.distributed.call_agreement import CallHeader
from xpar.core.distributed.call_guard import CallGuard
from xpar.core.distributed.channel import Channel
from xpar.core.distributed.grid import Axis, RankGrid
from xpar.core.shard_groups import ShardGroups
from xpar.errors import UnsupportedError, XparError
from xpar.wrappers.layers.stage import Stage, balance, block_cost
from xpar.wrappers.models import ModelPlan
from xpar.wrappers.pipelines.call_checks import check_call
from xpar.wrappers.pipelines.decoders import Decoders, VaeReport
from xpar.wrappers.pipelines.inspection import Denoisers, bind_call, find_denoisers
from xpar.wrappers.pipelines.patch_loops import PatchLoops
from xpar.wrappers.pipelines.pipeline_agreement import agree_on_pipeline
from xpar.wrappers.pipelines.random_state import share_random_state
from xpar.wrappers.pipelines.sharing import BatchSharing
from xpar.wrappers.pipelines.step_watch import StepWatch
from xpar.wrappers.pipelines.whole_calls import WholeCalls
from xpar.wrappers.transformer import ParallelTransformer

logger = logging.getLogger(__name__)


class Parallel:
    """Wraps a diffusers pipeline so that all ranks of a grid compute one call together.

    Every rank builds the same pipeline, wraps it, and calls it with the same arguments; every rank gets the pipeline's
    own output. Attributes that `Parallel` has not are the pipeline's.

        pipe = FluxPipeline.from_pretrained(path, dtype=torch.bfloat16).to(device)
        with Parallel(pipe, EngineConfig(ulysses_degree=4, pipefusion_degree=2)) as parallel:
            image = parallel(prompt="a red fox", num_inference_steps=28).images[0]

    Args:
        pipe: a diffusers pipeline with a planned transformer; it is changed in place until `close()`.
        config: how to spread it.
        mesh: a user's DeviceMesh to use, see `RankGrid.build`.
        group: a user's process group to use instead of all processes.
        plans: plans for transformer classes that xpar does not know, by class.

    Raises:
        ConfigError: configuration, launch, mesh and group do not fit together.
        UnsupportedError: the pipeline or a transformer in it cannot be spread as asked.
    """

    def __init__(
        self,
        pipe: Any,
        config: EngineConfig,
        *,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        plans: Mapping[type, ModelPlan] | None = None,
    ) -> None:
        try:
            denoisers = find_denoisers(pipe, config, plans)
        except BaseException as error:
            RankGrid.give_up(error, mesh=mesh, group=group)
            raise
        self.pipe, self.config = pipe, config
        self.grid = RankGrid.build(config, mesh=mesh, group=group, device=pipe._execution_device)
        self._closed = False
        self._transformers: list[ParallelTransformer] = []
        self._decoders: Decoders | None = None
        self._guard = CallGuard(self.grid)
        self._runner: PatchLoops | WholeCalls | None = None
        try:
            agree_on_pipeline(pipe, config, self.grid)
            self._wrap(denoisers)
        except BaseException:
            self.close()
            raise

    def _wrap(self, denoisers: Denoisers) -> None:
        """Spread tokens over ring and ulysses, blocks over stages; with all degrees 1 nothing is touched."""
        config, grid = self.config, self.grid
        if config.world_size == config.patches == 1:
            return
        self._decoders = Decoders(self.pipe, config.vae_parallel, grid.all_ranks, grid.is_main)
        groups = ShardGroups(grid.group(Axis.RING), grid.group(Axis.ULYSSES))
        forward, back = (_channel(g, config.patches) for g in (grid.pipefusion_forward, grid.pipefusion_back))
        index, stages = grid.coordinate(Axis.PIPEFUSION), config.pipefusion_degree
        for name, (module, plan) in denoisers.items():
            stage = _stage(module, plan, index, stages, forward)
            shares: dict[str, Any] = {"groups": groups, "patches": config.patches, "stage": stage}
            wrapped = ParallelTransformer(name, module, plan, **shares, backend=config.attention_backend)
            self._transformers.append(wrapped)
        sharing = BatchSharing(grid.group(Axis.CFG), grid.group(Axis.DP), grid.is_main)
        if config.patches == stages == 1:
            self._runner = WholeCalls(self.pipe, self._transformers, sharing)
        else:
            schedule: dict[str, Any] = {
                "patches": config.patches,
                "warmup": config.warmup_steps,
                "stages": stages,
                "back": back,
            }
            self._runner = PatchLoops(self.pipe, self._transformers, sharing=sharing, **schedule)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline with its own arguments; all ranks of the grid must call, with the same ones.

        Returns:
            The pipeline's output, on every rank.

        Raises:
            RankMismatchError: on every rank, if they were called with different arguments.
            PeerFailedError, CommTimeoutError: another rank failed, or does not answer; no more calls are possible.
            NonFiniteError, CallCancelledError: on every rank; calls may follow.
            XparError: the object is closed, in a call already, or a former call failed half-way.
        """
        self._check_open()
        with self._guard.call() as progress:
            facts = {"pipeline": type(self.pipe).__name__, "dtype": str(self.pipe.dtype)}
            progress.header = CallHeader(progress.call, facts, {})  # should the arguments be no call's
            arguments = bind_call(self.pipe, args, kwargs)
            progress.header = header = CallHeader(progress.call, facts, arguments)
            pictures = check_call(self.pipe, arguments, self.config)
            self._guard.agree(header)
            progress.phase = "preparation"
            if arguments.get("generator") is None:
                share_random_state(self.pipe._execution_device, self.grid.all_ranks)
            watch = StepWatch(self.grid, progress, self.config.check_finite, self._guard.cancellation)
            return self._run(watch.arguments(arguments), pictures, watch)

    def check_usable(self) -> None:
        """Check that calls are possible.

        Raises:
            XparError: the object is closed, a former call failed half-way, or this process was forked.
        """
        self._check_open()
        self._guard.check_usable()

    def _check_open(self) -> None:
        if self._closed:
            raise XparError("this Parallel object is closed; wrap the pipeline again")

    def _run(self, arguments: dict[str, Any], pictures: int | None, watch: StepWatch) -> Any:
        if self._runner is None or self._decoders is None:
            with watch.installed(self.pipe, ()):
                return self.pipe(**arguments)
        with self._decoders.opened():
            return self._runner(arguments, pictures, watch)

    def cancel(self) -> None:
        """End the call that is running, on all ranks at the same step; from any thread of any rank.

        The call then raises `CallCancelledError` on every rank, within a step and some tenths of a second. Without a
        call, or once the picture is being decoded, nothing happens.
        """
        self._guard.cancellation.request()

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.grid.rank

    @property
    def is_main(self) -> bool:
        """Whether this is the rank to print and to save."""
        return self.grid.is_main

    def vae_report(self, shape: Sequence[int], *, name: str = "decode", component: str = "vae") -> VaeReport:
        """Peak activation bytes of the autoencoder by rank, for one shape; nothing is computed or communicated.

        Args:
            shape: of the whole input: latents [B, C, (T,) H, W] for "decode", pictures or video for "encode".
            name: "decode" or "encode".
            component: the pipeline's name of the autoencoder.

        Raises:
            ConfigError: the autoencoder is not shared over ranks.
        """
        decoders = self._decoders or Decoders(self.pipe, "off", None, self.is_main)
        return decoders.report(shape, name, component)

    def to(self, *args: Any, **kwargs: Any) -> "Parallel":
        """Move the pipeline as its own `to` does; blocks that other stages hold are passed over."""
        self.pipe.to(*args, **kwargs)
        return self

    def close(self, *, restore_weights: bool = False) -> None:
        """Give the pipeline back as it was; closing again does nothing.

        Args:
            restore_weights: have the blocks that PipeFusion freed sent back by the stages that hold them (all ranks
                must ask for it). Otherwise they stay gone, with a message.
        """
        if self._closed:
            return
        self._closed = True
        self._guard.close()
        group = self.grid.group(Axis.PIPEFUSION) if restore_weights else None
        gone = sum(transformer.take_off(group) for transformer in self._transformers)
        if gone and self.is_main:
            logger.warning(
                "the weights of %d blocks were freed and are gone on this rank, and others on other ranks; "
                "close(restore_weights=True) has the stages send them back",
                gone,
            )
        self._transformers, self._runner, self._decoders = [], None, None
        self.grid.close()

    def __enter__(self) -> "Parallel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of this object if it has it or is being made, else one of the pipeline's.

        Raises:
            UnsupportedError: a wrapped transformer would be replaced by one that is not.
        """
        if "_runner" not in self.__dict__ or name in self.__dict__:
            object.__setattr__(self, name, value)
            return
        if any(name == transformer.name for transformer in self._transformers):
            raise UnsupportedError(f"{name} is wrapped; close() this object before it is replaced, then wrap again")
        setattr(self.pipe, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in ("pipe", "grid"):  # not set yet: the constructor has failed
            raise AttributeError(name)
        return getattr(self.pipe, name)


def _stage(module: nn.Module, plan: ModelPlan, index: int, stages: int, forward: Channel | None) -> Stage:
    """This rank's share of the blocks. Without a plan of its blocks a transformer has one stage of unknown length."""
    if not plan.blocks:
        return Stage(0, (0, 0))
    costs = [block_cost(block, plan) for _, block in plan.block_modules(module)]
    return Stage(index, balance(costs, stages), forward)


def _channel(group: ProcessGroup | None, patches: int) -> Channel | None:
    return None if group is None else Channel(group, keep=2 * patches)
