"""The kernels behind `attend_with_lse`, one function each, and the choice between them.

A kernel takes `q_BHSD`, `k_BHSD`, `v_BHSD` (fewer k/v heads allowed), an additive bias or None, and the scale; it
returns the output and the natural-log log-sum-exp of the scores, (B, H, Sq). Only kernels whose log-sum-exp is right
are here. Rows whose bias is all -inf come back as the kernel leaves them (the CPU kernel says 0, others NaN or
garbage): `attend_with_lse` puts them right for all of them.
"""

import importlib.util
import inspect
import math
from collections.abc import Callable
from typing import get_args

import torch
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn import functional as F

from xpar.config.engine_config import AttentionBackend
from xpar.errors import ConfigError, UnsupportedError

__all__ = ["BACKENDS", "check_backend", "expand_kv_heads", "pick_kernel"]

BACKENDS: tuple[str, ...] = get_args(AttentionBackend)

_Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]

_MASKLESS = {"flash", "flash_attn2", "flash_attn3"}
_CUDA_ONLY = {"flash", "efficient", "cudnn", "flash_attn2", "flash_attn3"}
_PACKAGES = {"flash_attn2": "flash_attn", "flash_attn3": "flash_attn_interface"}


def check_backend(backend: str, device: torch.device, *, has_mask: bool) -> None:
    """Refuse a kernel that cannot give a right log-sum-exp here; to be called before any communication.

    Raises:
        ConfigError: `backend` is not a name in `BACKENDS`.
        UnsupportedError: the kernel does not run on `device`, takes no mask, or its package is not installed.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"attention_backend={backend!r} is unknown; choose one of {', '.join(BACKENDS)}")
    needed = "cuda" if backend in _CUDA_ONLY else "cpu" if backend == "cpu" else device.type
    if device.type != needed:
        raise UnsupportedError(
            f"attention_backend={backend!r} runs on {needed} only and the tensors are on {device.type}; use 'auto'"
        )
    if has_mask and backend in _MASKLESS:
        raise UnsupportedError(f"attention_backend={backend!r} takes no attention mask; use 'auto' or 'efficient'")
    package = _PACKAGES.get(backend)
    if package and importlib.util.find_spec(package) is None:
        raise UnsupportedError(f"attention_backend={backend!r} needs the package {package}; install it or use 'auto'")


def pick_kernel(backend: str, q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, bias: Tensor | None) -> _Kernel:
    """The kernel of that name, or for "auto" the fastest one whose limits these tensors keep.

    Raises:
        UnsupportedError: a kernel was named and does not take these shapes or dtypes.
    """
    fits = {
        "cpu": _fits_cpu,
        "flash": _fits_flash,
        "efficient": _fits_efficient,
        "cudnn": _fits_cudnn,
        "flash_attn2": _fits_flash_attn,
        "flash_attn3": _fits_flash_attn,
    }
    if backend == "auto":
        order = ("cpu",) if q_BHSD.device.type == "cpu" else ("flash", "efficient")
        backend = next((name for name in order if fits[name](q_BHSD, k_BHSD, v_BHSD, bias)), "math")
    elif backend in fits and not fits[backend](q_BHSD, k_BHSD, v_BHSD, bias):
        raise UnsupportedError(
            f"attention_backend={backend!r} does not take q {tuple(q_BHSD.shape)}, k {tuple(k_BHSD.shape)}, "
            f"v {tuple(v_BHSD.shape)} of {q_BHSD.dtype} on {q_BHSD.device}; use 'auto'"
        )
    kernels: dict[str, _Kernel] = {
        "cpu": _cpu,
        "math": _math,
        "flash": _flash,
        "efficient": _efficient,
        "cudnn": _cudnn,
        "flash_attn2": _flash_attn2,
        "flash_attn3": _flash_attn3,
    }
    return kernels[backend]


def expand_kv_heads(kv_BHSD: Tensor, num_heads: int) -> Tensor:
    """Repeat k/v heads so that there are `num_heads`; query head i uses head `i // (num_heads / own heads)`."""
    repeats = num_heads // max(kv_BHSD.shape[1], 1)
    return kv_BHSD if repeats == 1 else kv_BHSD.repeat_interleave(repeats, dim=1)


def _fits_cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    del k, bias
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and q.dtype.is_floating_point


def _cuda_params(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> SDPAParams:
    return SDPAParams(q, k, v, bias, 0.0, False, q.shape[1] != k.shape[1])


def _fits_flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    # scaled_dot_product_attention pads the head dim to a multiple of 8 first; the kernel itself does not.
    takes = q.device.type == "cuda" and bias is None and q.shape[-1] % 8 == 0
    return takes and can_use_flash_attention(_cuda_params(q, k, v, None))


def _fits_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    return q.device.type == "cuda" and can_use_efficient_attention(_cuda_params(*_ungrouped(q, k, v), bias))


def _fits_cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    return q.device.type == "cuda" and can_use_cudnn_attention(_cuda_params(*_ungrouped(q, k, v), bias))


def _ungrouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes as after `expand_kv_heads`, without the copy, for the question whether a kernel takes them."""
    if q.shape[1] == k.shape[1]:
        return q, k, v
    return q, k[:, :1].expand(-1, q.shape[1], -1, -1), v[:, :1].expand(-1, q.shape[1], -1, -1)


def _fits_flash_attn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    del k
    half = q.dtype in (torch.float16, torch.bfloat16)
    return q.device.type == "cuda" and bias is None and half and q.shape[-1] == v.shape[-1]


def _cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    # The kernel reads the head dim as if it were contiguous and is silently wrong otherwise.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, attn_mask=bias, scale=scale)
    return out, lse


def _flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    del bias
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
    return out, lse


def _efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    k, v = expand_kv_heads(k, q.shape[1]), expand_kv_heads(v, q.shape[1])
    if bias is not None:
        # Rows must start at 16-byte boundaries, and the bias must have its full shape (as a view).
        keys = k.shape[2]
        padded = F.pad(bias, (0, -keys % 16)) if keys % 16 else bias.contiguous()
        bias = padded[..., :keys].expand(q.shape[0], q.shape[1], q.shape[2], keys)
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, *_ = op(q, k, v, bias, True, scale=scale)
    return out, lse[:, :, : q.shape[2]]  # the kernel pads its rows to a multiple of 32


def _cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    # Called directly, the op gives wrong results for inputs that are not contiguous (diffusers notes the same).
    k, v = expand_kv_heads(k, q.shape[1]), expand_kv_heads(v, q.shape[1])
    if bias is not None:
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]).contiguous()
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = op(q.contiguous(), k.contiguous(), v.contiguous(), bias, True, scale=scale)
    return out, lse.squeeze(-1) if lse.dim() == 4 else lse  # torch >= 2.9 keeps a trailing dim of one


def _flash_attn2(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    del bias
    from flash_attn import flash_attn_func

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, _ = flash_attn_func(q, k, v, softmax_scale=scale, return_attn_probs=True)
    return out.transpose(1, 2), lse


def _flash_attn3(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    del bias
    from flash_attn_interface import flash_attn_func

    # Early releases always return the log-sum-exp, later ones only when asked.
    asks = "return_attn_probs" in inspect.signature(flash_attn_func).parameters
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = flash_attn_func(q, k, v, softmax_scale=scale, **({"return_attn_probs": True} if asks else {}))
    return out.transpose(1, 2), lse


def _math(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Plain fp32 (fp64 for fp64) attention: any device, any shape; memory grows with Sq * Sk."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = expand_kv_heads(k, q.shape[1]), expand_kv_heads(v, q.shape[1])
    scores = (q.to(dtype) * scale) @ k.to(dtype).transpose(-1, -2)
    if bias is not None:
        scores = scores + bias.to(dtype)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    return (weights @ v.to(dtype)).to(q.dtype), lse
