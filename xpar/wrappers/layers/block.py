"""What happens at the edge of a transformer block."""

from collections.abc import Callable
from typing import Any

from torch import nn

from xpar.errors import UnsupportedError
from xpar.wrappers.layers.stage import Stage
from xpar.wrappers.layers.token_flow import TokenFlow
from xpar.wrappers.models.plan import ModelPlan, forward_signature


class ShardedBlock:
    """Stands in for the forward of one block: tokens are cut at the first block reached, received where this rank's
    stage begins, sent where it ends, and gathered after the last block unless the plan names a head that does it.

    A block of another stage returns its streams as they came.

    Args:
        inner: the block's forward.
        block: the block.
        index: its place among all blocks, in execution order.
        last: whether it is the last one.
        plan: the transformer's plan.
        stage: the blocks that this rank owns.
        flow: gives the state of the forward that is running, or None outside of one.
    """

    def __init__(
        self,
        inner: Callable[..., Any],
        block: nn.Module,
        *,
        index: int,
        last: bool,
        plan: ModelPlan,
        stage: Stage,
        flow: Callable[[], TokenFlow | None],
    ) -> None:
        self.inner, self.index, self.last = inner, index, last
        self.plan, self.stage, self.flow = plan, stage, flow
        self.signature = forward_signature(block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block, or let its streams pass.

        Raises:
            UnsupportedError: the block is called outside of its transformer's forward, or returns other streams.
        """
        flow = self.flow()
        if flow is None:
            raise UnsupportedError("a block of a wrapped transformer can only run inside the transformer's forward")
        bound = self.signature.bind(*args, **kwargs)
        arguments = bound.arguments
        if not flow.entered:
            flow.enter(arguments)
        if flow.view.probe is None:
            self._cross_boundary(flow, arguments)
        if flow.view.probe is None and self.stage.owns(self.index):
            flow.cut_per_token(arguments)
            streams = self._named(self.inner(*bound.args, **bound.kwargs))
        else:
            streams = {name: arguments.get(name) for name in self.plan.returns}
        if self.last and self.plan.head is None:
            streams = {name: None if x is None else flow.leave(x, name) for name, x in streams.items()}
            flow.left = True
        values = tuple(streams[name] for name in self.plan.returns)
        return values if len(values) > 1 else values[0]

    def _cross_boundary(self, flow: TokenFlow, arguments: dict[str, Any]) -> None:
        """Receive before the first own block that is reached, send before the first one after the own blocks.

        What `forward` adds between blocks (ControlNet residuals) is thus done by the stage before the boundary.
        """
        names = self.plan.streams
        what = "the sequence" if flow.view.patch is None else f"patch {flow.view.patch}"
        if self.stage.index > 0 and self.stage.owns(self.index) and not flow.received:
            arguments.update(self.stage.receive({name: arguments.get(name) for name in names}, what))
            flow.received = True
            flow.observe("received", [arguments.get(name) for name in names])
        elif self.index >= self.stage.stop and not flow.sent:
            flow.observe("sent", [arguments.get(name) for name in names])
            self.stage.send({name: arguments.get(name) for name in names}, what)
            flow.sent = True

    def _named(self, result: Any) -> dict[str, Any]:
        values = result if isinstance(result, (tuple, list)) else (result,)
        if len(values) != len(self.plan.returns):
            raise UnsupportedError(
                f"block {self.index} returned {len(values)} values, the plan says {self.plan.returns}"
            )
        return dict(zip(self.plan.returns, values, strict=True))
