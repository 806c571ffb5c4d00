"""A pipeline's scheduler steps, taken over on the scheduler objects while a call runs."""

import copy
import functools
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from xpar.wrappers.pipelines.deferred import settle
from xpar.wrappers.replacing import replaced

__all__ = ["Around", "latents_of", "sample_of", "settling", "steps_through", "with_latents"]

Around = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def steps_through(pipe: Any, around: Around) -> Iterator[None]:
    """Replace `step` of the pipeline's schedulers on the instances, and put it back."""
    with ExitStack() as stack:
        for component in pipe.components.values():
            if hasattr(component, "step") and not isinstance(component, nn.Module):
                stack.enter_context(replaced(component, "step", _Step(component, component.step, around)))
        yield


class _Step:
    """A scheduler's step with something around it; in a deep copy of the scheduler it steps the copy.

    Pipelines copy schedulers while they run (one for the sound of a film, say).
    """

    def __init__(self, scheduler: Any, inner: Callable[..., Any], around: Around) -> None:
        self.scheduler, self.inner, self.around = scheduler, inner, around
        self._step = around(inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Step the scheduler."""
        return self._step(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Step":
        scheduler = memo.get(id(self.scheduler), self.scheduler)
        if isinstance(self.inner, _Step):
            inner: Any = copy.deepcopy(self.inner, memo)
        else:
            inner = types.MethodType(type(scheduler).step, scheduler)
        return _Step(scheduler, inner, self.around)


def settling(step: Callable[..., Any]) -> Callable[..., Any]:
    """A scheduler's step that waits for deferred values."""

    @functools.wraps(step)
    def settled(*args: Any, **kwargs: Any) -> Any:
        return step(*settle(args), **settle(kwargs))

    return settled


def sample_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The latents that a scheduler's step is given."""
    return kwargs["sample"] if "sample" in kwargs else args[2]


def latents_of(result: Any) -> Tensor:
    """The new latents that a scheduler's step has returned."""
    return result[0] if isinstance(result, tuple) else result.prev_sample


def with_latents(result: Any, latents: Tensor) -> Any:
    """What a scheduler's step has returned, with other latents."""
    if isinstance(result, tuple):
        return (latents, *result[1:])
    result.prev_sample = latents
    return result
