"""From a transformer to its plan."""

from collections.abc import Callable, Mapping

from torch import nn

from xpar.errors import UnsupportedError
from xpar.wrappers.models.flux import FLUX
from xpar.wrappers.models.plan import ModelPlan
from xpar.wrappers.models.qwenimage import QWEN_IMAGE
from xpar.wrappers.models.sd3 import SD3
from xpar.wrappers.models.wan import WAN

PLANS: Mapping[str, ModelPlan] = {
    "FluxTransformer2DModel": FLUX,
    "QwenImageTransformer2DModel": QWEN_IMAGE,
    "SD3Transformer2DModel": SD3,
    "WanTransformer3DModel": WAN,
}


def find_plan(
    transformer: nn.Module,
    plans: Mapping[type, ModelPlan] | None = None,
    otherwise: Callable[[nn.Module], ModelPlan] | None = None,
) -> ModelPlan:
    """The plan of a transformer: the user's own, else xpar's for its class, or for a base class whose forward it keeps.

    Args:
        transformer: the transformer.
        plans: the user's plans, by class.
        otherwise: makes the plan of a class that none is known for.

    Raises:
        UnsupportedError: no plan is known; the message says which are and how to pass one.
    """
    for cls in type(transformer).__mro__:
        keeps_forward = getattr(cls, "forward", None) is type(transformer).forward
        plan = (plans or {}).get(cls) or PLANS.get(cls.__name__)
        if plan is not None and keeps_forward:
            plan.check(transformer)
            return plan
    if otherwise is not None:
        return otherwise(transformer)
    name = type(transformer).__name__
    raise UnsupportedError(
        f"no plan is known for {name}; known are {', '.join(PLANS)}. "
        f"Pass one: Parallel(pipe, config, plans={{{name}: ModelPlan(...)}}) (see xpar/wrappers/models/plan.py)."
    )
