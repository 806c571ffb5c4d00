"""The user's callback in a call that runs patch by patch: once per step, with complete latents."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from xpar.wrappers.models.plan import map_tensors
from xpar.wrappers.pipelines.turns import Turns

CALLBACK = "callback_on_step_end"
StepCallback = Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]


class SharedCallback:
    """Runs `callback_on_step_end` in the last patch loop and gives its effects to the others.

    The other loops wait at the end of the step until it has run, then return what it returned and take over the
    attributes that it changed on the pipeline (guidance scale, interrupt, ...), so every loop goes on alike. The wait
    costs the overlap between one step and the next.
    """

    def __init__(self, user: StepCallback, pipe: Any, turns: Turns) -> None:
        self._user, self._pipe, self._turns = user, pipe, turns
        self._effects: list[tuple[dict[str, Any] | None, dict[str, Any]]] = []
        self._met: Counter[int] = Counter()

    def lead(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> Any:
        """The callback of the last loop, which runs the user's."""
        before = dict(vars(pipe))
        returned = self._user(pipe, step, timestep, tensors)
        changed = {
            name: value
            for name, value in vars(pipe).items()
            if before.get(name, self) is not value and not isinstance(value, nn.Module)
        }
        self._effects.append((returned, changed))
        self._turns.pass_on()  # so that the loops start the next step in their order
        return returned

    def follow(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> Any:
        """The callback of any other loop, which waits for the user's to have run."""
        loop = self._turns.current
        number = self._met[loop]
        self._met[loop] += 1
        while len(self._effects) <= number:
            self._turns.pass_on()
        returned, changed = self._effects[number]
        vars(pipe).update(changed)
        return map_tensors(torch.Tensor.clone, returned)


def with_callback(arguments: dict[str, Any], function: StepCallback) -> dict[str, Any]:
    """A call's arguments with another function in place of the user's callback."""
    user = arguments[CALLBACK]
    arguments = {**arguments, CALLBACK: function}
    if hasattr(user, "tensor_inputs"):  # a PipelineCallback says itself which tensors it wants
        arguments["callback_on_step_end_tensor_inputs"] = user.tensor_inputs
    return arguments
