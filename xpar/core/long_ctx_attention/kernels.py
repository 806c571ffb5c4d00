"""Attention on one device: with plain semantics, with a log-sum-exp, and the merge of two partial results.

Names: B batch, H heads, S tokens, D head dim. Attention over keys in pieces gives, piece by piece, an output and the
log-sum-exp of the scores; two pieces merge exactly, in any order (Ring Attention, arXiv 2310.01889; the online
softmax of FlashAttention, arXiv 2205.14135). The log-sum-exp must be the true one, so kernels that return something
else are not offered (`xpar.core.long_ctx_attention.backends`).
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from xpar.core.long_ctx_attention.backends import check_backend, pick_kernel
from xpar.core.long_ctx_attention.masks import to_additive
from xpar.errors import ConfigError

__all__ = ["attend", "attend_with_lse", "merge"]


def attend(
    q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, mask: Tensor | None = None, *, scale: float | None = None
) -> Tensor:
    """`scaled_dot_product_attention` with the kernel that torch finds best for the device.

    Args:
        q_BHSD: queries, (B, H, Sq, D); zero heads or tokens are legal.
        k_BHSD: keys, (B, Hk, Sk, D), where Hk divides H (grouped queries).
        v_BHSD: values, (B, Hk, Sk, Dv).
        mask: bool (True = attend) or additive, broadcastable to (B, H, Sq, Sk), or None.
        scale: factor on the scores; None for 1/sqrt(D).

    Returns:
        (B, H, Sq, Dv), equal to the plain call in one process. A fully masked row is 0, as in plain torch.

    Raises:
        ConfigError: the head counts do not divide.
    """
    _check_heads(q_BHSD, k_BHSD)
    grouped = q_BHSD.shape[1] != k_BHSD.shape[1]
    return F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, attn_mask=mask, scale=scale, enable_gqa=grouped)


def attend_with_lse(
    q_BHSD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of its scores (after scale and mask), for merging with other keys.

    Args:
        q_BHSD: as in `attend`, and likewise for k, v, mask and scale; no keys at all is legal.
        backend: a name in `BACKENDS`; "auto" takes the fastest right one.

    Returns:
        `out_BHSD` (B, H, Sq, Dv) in the dtype of q, and `lse_BHS` in float32 (float64 for float64 inputs). A row that
        attends to nothing has output 0 and log-sum-exp -inf.

    Raises:
        ConfigError: unknown backend, or head counts that do not divide.
        UnsupportedError: the named backend does not take these tensors on this device.
    """
    check_backend(backend, q_BHSD.device, has_mask=mask is not None)
    _check_heads(q_BHSD, k_BHSD)
    lse_dtype = torch.promote_types(q_BHSD.dtype, torch.float32)
    B, H, Sq, D = q_BHSD.shape
    if min(B, H, Sq, k_BHSD.shape[2]) == 0:  # the CPU kernel dies of a division by zero
        out_BHSD = q_BHSD.new_zeros(B, H, Sq, v_BHSD.shape[-1])
        return out_BHSD, q_BHSD.new_full((B, H, Sq), -math.inf, dtype=lse_dtype)
    bias = None if mask is None else _as_bias(mask, q_BHSD.dtype)
    kernel = pick_kernel(backend, q_BHSD, k_BHSD, v_BHSD, bias)
    out_BHSD, lse_BHS = kernel(q_BHSD, k_BHSD, v_BHSD, bias, D**-0.5 if scale is None else scale)
    lse_BHS = lse_BHS.to(lse_dtype)
    if bias is not None:
        dead = (bias == -math.inf).all(dim=-1)  # (1 or B, 1 or H, 1 or Sq)
        out_BHSD = out_BHSD.masked_fill(dead.unsqueeze(-1), 0.0)
        lse_BHS = lse_BHS.masked_fill(dead, -math.inf)
    return out_BHSD, lse_BHS


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of a and b together, from attention over each of them.

    Args:
        out_a: (B, H, S, D) output over the keys of a; likewise `out_b`.
        lse_a: (B, H, S) log-sum-exp over the keys of a, -inf for none; likewise `lse_b`.

    Returns:
        Output and log-sum-exp over all keys, both in the dtype of the log-sum-exps (float32 at least), so that a chain
        of merges rounds once. Rows that are -inf on both sides keep the output of a (0) and -inf.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    # Both -inf: the difference is NaN, and there is no weight to give to b. A NaN that was there before stays.
    weight_b = torch.exp(lse_b - lse).masked_fill(lse == -math.inf, 0.0)
    return torch.lerp(out_a.to(lse.dtype), out_b.to(lse.dtype), weight_b.unsqueeze(-1)), lse


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask of `dtype` with four dims, as the kernels want it."""
    bias = to_additive(mask, dtype)
    return bias.reshape(*(1,) * (4 - bias.dim()), *bias.shape)


def _check_heads(q_BHSD: Tensor, k_BHSD: Tensor) -> None:
    heads, kv_heads = q_BHSD.shape[1], k_BHSD.shape[1]
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ConfigError(f"{heads} query heads cannot share {kv_heads} key/value heads; the counts must divide")
