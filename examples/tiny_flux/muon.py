"""Muon in fp32: torch.optim.Muon computes in bfloat16, which a CPU without such instructions does ten times slower."""

from collections import defaultdict
from collections.abc import Iterable

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, https://kellerjordan.github.io/posts/muon/
ITERATIONS = 5


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrices, roughly, of [N, rows, columns] by Newton-Schulz iterations."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix is orthogonalised, for hidden layers (Keller Jordan 2024), all of one shape at a time.

    The update is scaled to AdamW's usual size (https://arxiv.org/abs/2502.16982), so rates of AdamW fit.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        """One update of every matrix from its gradient."""
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for parameter in group["params"]:
                by_shape[parameter.shape].append(parameter)
            for (rows, columns), parameters in by_shape.items():
                momentum = torch.stack([self._momentum(p, group["momentum"]) for p in parameters])
                scale = group["lr"] * 0.2 * max(rows, columns) ** 0.5
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(parameters, list(orthogonalised(momentum)), alpha=-scale)

    def _momentum(self, parameter: torch.nn.Parameter, momentum: float) -> torch.Tensor:
        """Nesterov's momentum of one matrix, after its buffer has taken the gradient in."""
        state = self.state[parameter]
        if "buffer" not in state:
            state["buffer"] = torch.zeros_like(parameter)
        buffer = state["buffer"]
        buffer.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(buffer, momentum)
