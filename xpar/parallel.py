"""`Parallel`: one diffusers pipeline on many devices. The whole story, in order."""

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from xpar.config import EngineConfig
from xpar.core.distributed.channel import Channel
from xpar.core.distributed.grid import Axis, RankGrid
from xpar.core.shard_groups import ShardGroups
from xpar.errors import ConfigError, UnsupportedError, XparError
from xpar.wrappers.layers.stage import Stage, balance, block_cost
from xpar.wrappers.models import ModelPlan, find_plan
from xpar.wrappers.pipelines.patch_loops import PatchLoops
from xpar.wrappers.pipelines.pictures import check_pictures
from xpar.wrappers.pipelines.random_state import share_random_state
from xpar.wrappers.pipelines.sharing import BatchSharing
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
        planned = _check(pipe, config, plans)
        self.pipe, self.config = pipe, config
        self.grid = RankGrid.build(config, mesh=mesh, group=group, device=pipe._execution_device)
        self._closed = False
        self._failure: BaseException | None = None
        self._transformers: list[ParallelTransformer] = []
        self._runner: PatchLoops | WholeCalls | None = None
        try:
            self._wrap(planned)
        except BaseException:
            self.close()
            raise

    def _wrap(self, planned: Mapping[str, tuple[nn.Module, ModelPlan]]) -> None:
        """Spread tokens over ring and ulysses, blocks over stages; with all degrees 1 nothing is touched."""
        config, grid = self.config, self.grid
        if config.world_size == config.patches == 1:
            return
        sharing = BatchSharing(grid.group(Axis.CFG), grid.group(Axis.DP), grid.is_main)
        groups = ShardGroups(grid.group(Axis.RING), grid.group(Axis.ULYSSES))
        patched = config.patches > 1 or config.pipefusion_degree > 1
        forward, back = (_channel(g, config.patches) for g in (grid.pipefusion_forward, grid.pipefusion_back))
        for name, (module, plan) in planned.items():
            bounds: tuple[int, ...] = (
                0,
                0,
            )  # of no stages: blocks are only told apart where tokens or blocks are spread
            if plan.blocks:
                costs = [block_cost(block, plan) for _, block in plan.block_modules(module)]
                bounds = balance(costs, config.pipefusion_degree)
            stage = Stage(grid.coordinate(Axis.PIPEFUSION), bounds, forward)
            self._transformers.append(
                ParallelTransformer(
                    name,
                    module,
                    plan,
                    groups=groups,
                    patches=config.patches,
                    stage=stage,
                    backend=config.attention_backend,
                )
            )
        if not patched:
            self._runner = WholeCalls(self.pipe, self._transformers, sharing)
        else:
            self._runner = PatchLoops(
                self.pipe,
                self._transformers,
                patches=config.patches,
                warmup=config.warmup_steps,
                stages=config.pipefusion_degree,
                back=back,
                sharing=sharing,
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline with its own arguments; all ranks of the grid must call, with the same ones.

        Returns:
            The pipeline's output, on every rank.

        Raises:
            XparError: the object is closed, or a former call failed half-way through its communication.
        """
        self._check_usable()
        arguments = _bind(self.pipe, args, kwargs)
        pictures = check_pictures(arguments, self.config.dp_degree)
        if arguments.get("generator") is None:
            share_random_state(self.pipe._execution_device, self.grid.all_ranks)
        try:
            return self.pipe(**arguments) if self._runner is None else self._runner(arguments, pictures)
        except BaseException as error:
            if self.config.pipefusion_degree > 1:  # messages of this call may still be under way
                self._failure = error
            raise

    def _check_usable(self) -> None:
        if self._closed:
            raise XparError("this Parallel object is closed; wrap the pipeline again")
        if self._failure is not None:
            raise XparError(
                f"a former call failed with {type(self._failure).__name__}: {self._failure}; its messages may still be "
                "under way, so close() this object and wrap the pipeline again"
            ) from self._failure

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.grid.rank

    @property
    def is_main(self) -> bool:
        """Whether this is the rank to print and to save."""
        return self.grid.is_main

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
        group = self.grid.group(Axis.PIPEFUSION) if restore_weights else None
        gone = sum(transformer.take_off(group) for transformer in self._transformers)
        if gone and self.is_main:
            logger.warning(
                "the weights of %d blocks were freed and are gone on this rank, and others on other ranks; "
                "close(restore_weights=True) has the stages send them back",
                gone,
            )
        self._transformers, self._runner = [], None
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


def _check(
    pipe: Any, config: EngineConfig, plans: Mapping[type, ModelPlan] | None
) -> dict[str, tuple[nn.Module, ModelPlan]]:
    """Refuse what cannot be spread, before any communication; return the denoisers and their plans."""
    if not isinstance(config, EngineConfig):
        raise ConfigError(f"config must be an EngineConfig, got {type(config).__name__}")
    if not hasattr(pipe, "components"):
        raise UnsupportedError(f"{type(pipe).__name__} is no diffusers pipeline: it has no components")
    if config.world_size == config.patches == 1:
        return {}
    if getattr(pipe, "hf_device_map", None):
        raise UnsupportedError("the pipeline is spread by device_map; load it without one, every rank holds it whole")
    denoisers = {
        name: module
        for name, module in pipe.components.items()
        if isinstance(module, nn.Module) and "transformer" in name
    }
    if not denoisers:
        raise UnsupportedError(
            f"{type(pipe).__name__} has no transformer component (it has {', '.join(pipe.components)}); "
            "only transformer pipelines can be spread"
        )
    if config.patches > 1 and getattr(pipe, "controlnet", None) is not None:
        raise UnsupportedError(
            "num_patches > 1 with a ControlNet, which would see latents of mixed noise levels; use num_patches=1, "
            "ulysses_degree or ring_degree"
        )
    for name, module in denoisers.items():
        if hasattr(module.forward, "xpar_owner"):
            raise UnsupportedError(f"{name} is wrapped already; close() the other Parallel object first")
        if any(parameter.is_meta for parameter in module.parameters()):
            raise UnsupportedError(f"{name} has weights on the meta device (sequential offload?); load them first")
    # Guidance branches that are calls of their own need no plan; what a pipeline does shows only when it is called.
    only_branches = config.cfg_degree == config.world_size and config.patches == 1
    otherwise = ModelPlan.of_branches if only_branches else None
    planned = {name: (module, find_plan(module, plans, otherwise)) for name, module in denoisers.items()}
    for module, plan in planned.values():
        if plan.blocks and config.cfg_degree * config.dp_degree > 1:
            plan.check_batch(module)
    return planned


def _bind(pipe: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, bound to the pipeline's own signature."""
    signature = inspect.signature(type(pipe).__call__)
    bound = signature.bind(pipe, *args, **kwargs)
    arguments = dict(bound.arguments)
    arguments.pop(next(iter(signature.parameters)))
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
    return arguments


def _channel(group: ProcessGroup | None, patches: int) -> Channel | None:
    return None if group is None else Channel(group, keep=2 * patches)
