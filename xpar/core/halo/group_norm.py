"""Group norm of a split picture: every rank normalises with the mean and variance of the whole."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xpar.core.distributed.collectives import all_gather_uneven, group_size

__all__ = ["combine_moments", "split_group_norm"]

# Elements of a half-precision tensor that are held in fp32 at a time.
_CHUNK = 1 << 24


def combine_moments(means: Tensor, variances: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of a whole from those of its parts (Chan, Golub and LeVeque's pairwise formula).

    Args:
        means: (R, N), mean of each of N groups on each of R parts.
        variances: (R, N), variance (over the count) likewise.
        weights: (R,), share of the elements that each part has; they sum to 1.

    Returns:
        Mean and variance, (N,) each. Nothing is subtracted from a sum of squares, so nothing cancels.
    """
    weights = weights.unsqueeze(-1)
    mean = (weights * means).sum(0)
    return mean, (weights * (variances + (means - mean).square())).sum(0)


def split_group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    shares: Tensor,
    is_idle: bool,
    group: ProcessGroup | None,
) -> Tensor:
    """`torch.nn.functional.group_norm` of the whole picture, for this rank's rows.

    One small all-gather (2 numbers per rank, picture and group).

    Args:
        x: (B, C, ...), this rank's rows.
        groups: number of groups G.
        weight: (C,) or None; likewise `bias`.
        eps: added to the variance.
        shares: (R,) share of the rows that each rank owns, in fp32 or fp64, on the device of x.
        is_idle: whether this rank holds a stand-in, whose statistics must not count.
        group: the ranks.

    Returns:
        x normalised, in the dtype of x.
    """
    B, C = x.shape[:2]
    flat = x.reshape(B, C, -1).contiguous()
    is_half = x.dtype not in (torch.float32, torch.float64)
    if is_half:
        out, mean, variance = torch.empty_like(flat), *_moments(flat.view(B * groups, -1))
        rstd = torch.ones_like(mean)
    else:  # normalised with this rank's moments, of which an affine map of each channel makes those of the whole
        out, mean, rstd = torch.native_group_norm(flat, None, None, B, C, flat.shape[2], groups, eps)
        mean, rstd = mean.flatten().to(shares.dtype), rstd.flatten().to(shares.dtype)
        variance = rstd.pow(-2) - eps
    whole_mean, whole_rstd = _whole(mean, variance, eps, shares, is_idle, group)
    scale, shift = whole_rstd / rstd, ((0 if is_half else mean) - whole_mean) * whole_rstd
    scale, shift = (part.view(B, groups, 1).expand(B, groups, C // groups).reshape(B, C) for part in (scale, shift))
    if weight is not None:
        scale, shift = scale * weight, shift * weight
    if bias is not None:
        shift = shift + bias
    scale, shift = scale.unsqueeze(-1), shift.unsqueeze(-1)
    if is_half:
        _affine(flat, scale.float(), shift.float(), out)
    else:
        out.mul_(scale.to(x.dtype)).add_(shift.to(x.dtype))
    return out.view(x.shape)


def _whole(
    mean: Tensor, variance: Tensor, eps: float, shares: Tensor, is_idle: bool, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Mean and 1 / standard deviation over all ranks, flat."""
    moments = torch.stack((mean.flatten().to(shares.dtype), variance.flatten().to(shares.dtype))).unsqueeze(0)
    if is_idle:  # a NaN there would survive a weight of zero
        moments = torch.zeros_like(moments)
    every = all_gather_uneven(moments, 0, [1] * group_size(group), group)
    whole_mean, whole_variance = combine_moments(every[:, 0], every[:, 1], shares)
    return whole_mean, torch.rsqrt(whole_variance.clamp_min(0.0) + eps)


def _moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each row of a half-precision matrix, in fp32, some rows at a time."""
    parts = [
        torch.var_mean(chunk.float(), dim=-1, correction=0)
        for chunk in rows.split(max(1, _CHUNK // max(1, rows.shape[1])))
    ]
    return torch.cat([mean for _, mean in parts]), torch.cat([variance for variance, _ in parts])


def _affine(x: Tensor, scale: Tensor, shift: Tensor, out: Tensor) -> None:
    """`x * scale + shift` into `out`, computed in fp32 and rounded once, some channels at a time."""
    step = max(1, _CHUNK // max(1, x[:, 0].numel()))
    for start in range(0, x.shape[1], step):
        part = slice(start, start + step)
        out[:, part] = torch.addcmul(shift[:, part], x[:, part].float(), scale[:, part])
