"""Attention of each frame to itself and the frames before it, over frames whose positions lie on several ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xpar.core.distributed.collectives import all_gather_uneven, group_rank
from xpar.core.long_ctx_attention.kernels import attend

__all__ = ["frame_causal_attention"]


def frame_causal_attention(
    q_BHSD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    frames: int,
    lengths: Sequence[int],
    group: ProcessGroup | None,
    *,
    scale: float | None = None,
) -> Tensor:
    """Every position attends to all positions of its own and of earlier frames.

    Keys and values of all ranks are gathered once (they have the latents' resolution); each frame is then one
    attention without a mask, so nothing grows with the square of the number of tokens.

    Args:
        q_BHSD: (B, H, S, D), S = frames x held positions, frames outermost; likewise k and v.
        frames: number of frames.
        lengths: positions of a frame by group rank; 0 for a rank that holds a stand-in.
        group: the ranks.
        scale: factor on the scores; None for 1/sqrt(D).

    Returns:
        (B, H, S, D).
    """
    positions = q_BHSD.shape[2] // frames
    packed = torch.cat((k_BHSD, v_BHSD), dim=-1).unflatten(2, (frames, positions))  # (B, H, F, P, 2D)
    whole = all_gather_uneven(packed[:, :, :, : lengths[group_rank(group)]], 3, lengths, group).flatten(2, 3)
    k_BHSD, v_BHSD = whole.split((k_BHSD.shape[-1], v_BHSD.shape[-1]), dim=-1)
    out = []
    for frame, q in enumerate(q_BHSD.split(positions, dim=2), start=1):
        seen = frame * sum(lengths)
        out.append(attend(q, k_BHSD[:, :, :seen], v_BHSD[:, :, :seen], scale=scale))
    return torch.cat(out, dim=2)
