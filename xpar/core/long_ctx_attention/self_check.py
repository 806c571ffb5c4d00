"""Which attention kernels run on this machine, and whether the log-sum-exp that they return is right.

A wrong log-sum-exp does not show in a kernel's output, only in results that were merged by it. So attention over two
parts of the keys is merged, and compared with attention over all of them in fp64.
"""

from dataclasses import dataclass

import torch

from xpar.core.long_ctx_attention.backends import BACKENDS
from xpar.core.long_ctx_attention.kernels import attend, attend_with_lse, merge
from xpar.errors import UnsupportedError

__all__ = ["KernelCheck", "check_kernels"]

# Largest error, relative to the largest value, of a right kernel: a few roundings of its dtype.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """What one kernel does on one device."""

    backend: str
    device: str
    error: float = 0.0
    """Largest difference of a merge of two parts from attention in fp64, relative to the largest value."""
    wrong: bool = False
    """Whether that is more than rounding."""
    reason: str = ""
    """Why it cannot be used here; then nothing was computed."""


def check_kernels() -> list[KernelCheck]:
    """Try each kernel on the CPU and, where there is one, on the first CUDA device; those for neither say why."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    found = []
    for backend in BACKENDS:
        if backend == "auto":
            continue
        checks = [_check(backend, device) for device in devices]
        able = [check for check in checks if not check.reason]
        found += able or checks[-1:]
    return found


def _check(backend: str, device: str) -> KernelCheck:
    # The kernels for GPUs take half precision; some of them nothing else.
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 64, generator=generator).to(device, dtype) for _ in range(3))
    try:
        left = attend_with_lse(q, k[:, :, :24], v[:, :, :24], backend=backend)
        right = attend_with_lse(q, k[:, :, 24:], v[:, :, 24:], backend=backend)
    except UnsupportedError as refusal:
        return KernelCheck(backend=backend, device=device, reason=str(refusal))
    merged = merge(*left, *right)[0].double()
    exact = attend(q.double(), k.double(), v.double())
    error = float((merged - exact).abs().max() / exact.abs().max())
    # `not <=`, so that NaN counts as wrong
    return KernelCheck(backend=backend, device=device, error=error, wrong=not error <= _TOLERANCE[dtype])
