"""Ring attention: keys and values travel round the ring while each rank computes on those it has.

Ring Attention (arXiv 2310.01889), combined with Ulysses as in USP (arXiv 2405.07719). Names: B batch, H heads,
S tokens, D head dim. Each of the R ranks keeps its queries and sees the keys of every rank once, in R-1 exchanges that
overlap with the local kernel; partial results merge by log-sum-exp in fp32, so the result equals plain attention to
rounding and does not depend on timing.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xpar.core.distributed.collectives import all_gather_uneven, group_rank, group_size, start_ring_exchange
from xpar.core.long_ctx_attention.backends import check_backend
from xpar.core.long_ctx_attention.kernels import attend, attend_with_lse, merge
from xpar.core.long_ctx_attention.masks import settle_hidden_rows
from xpar.errors import ConfigError

__all__ = ["ring_attention", "ring_gather"]


def ring_attention(
    q_BHSD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    lengths: Sequence[int],
    group: ProcessGroup | None,
    *,
    mask_for: Callable[[int], Tensor | None] | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of this rank's queries over the keys of every rank of the ring.

    Args:
        q_BHSD: (B, H, Sq, D), queries of this rank; any number, zero included.
        k_BHSD: (B, Hk, Sk, D), keys of this rank; likewise `v_BHSD`, (B, Hk, Sk, Dv). Hk divides H.
        lengths: number of keys on each rank of the ring.
        group: the ring, or None for one rank.
        mask_for: gives for a ring rank the mask of this rank's queries against the keys of that rank, broadcastable
            to (B, H, Sq, lengths[that rank]), or None for no mask. It is called once for each rank.
        scale: factor on the scores; None for 1/sqrt(D).
        backend: local kernel, one of `backends.BACKENDS`. On one rank, "auto" is `scaled_dot_product_attention`.

    Returns:
        (B, H, Sq, Dv) in the dtype of q; rows that attend to nothing are 0.

    Raises:
        ConfigError: `lengths` does not fit the ring or k, or the backend is unknown.
        UnsupportedError: the backend has no right log-sum-exp here, or takes no mask. Nothing has been sent then.
    """
    rank, size = group_rank(group), group_size(group)
    _check_lengths(k_BHSD, lengths, rank, size)
    check_backend(backend, q_BHSD.device, has_mask=mask_for is not None)
    if size == 1 and backend == "auto":
        return attend(q_BHSD, k_BHSD, v_BHSD, None if mask_for is None else mask_for(0), scale=scale)
    if k_BHSD.shape[1] == 0:  # more ulysses ranks than heads; the whole ring has none
        return q_BHSD.new_empty(*q_BHSD.shape[:3], v_BHSD.shape[-1])
    masks: Sequence[Tensor | None] = [None] * size
    if mask_for is not None:
        q_BHSD, masks = settle_hidden_rows(q_BHSD, [mask_for(source) for source in range(size)])
    packet = _pack(k_BHSD, v_BHSD)
    result: tuple[Tensor, Tensor] | None = None
    for step in range(size):
        source = (rank - step) % size
        exchange = None
        if step < size - 1:
            exchange = start_ring_exchange(packet, _packet_size(k_BHSD, v_BHSD, lengths[source - 1]), group)
        k_BHSD, v_BHSD = _unpack(packet, k_BHSD, v_BHSD, lengths[source])
        partial = attend_with_lse(q_BHSD, k_BHSD, v_BHSD, masks[source], scale=scale, backend=backend)
        result = partial if result is None else merge(*result, *partial)
        if exchange is not None:
            packet = exchange.wait()
    return cast(tuple[Tensor, Tensor], result)[0].to(q_BHSD.dtype)  # a ring has at least one rank


def ring_gather(
    k_BHSD: Tensor, v_BHSD: Tensor, lengths: Sequence[int], group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Keys and values of every rank of the ring, concatenated in ring order, by one packed all-gather.

    Args:
        k_BHSD: (B, Hk, Sk, D), keys of this rank; likewise `v_BHSD`, (B, Hk, Sk, Dv).
        lengths: number of keys on each rank of the ring.
        group: the ring, or None to get the inputs back.

    Returns:
        k and v with sum(lengths) tokens, as strided views.

    Raises:
        ConfigError: `lengths` does not fit the ring or k.
    """
    if group is None:
        return k_BHSD, v_BHSD
    _check_lengths(k_BHSD, lengths, group_rank(group), group_size(group))
    D, Dv = k_BHSD.shape[-1], v_BHSD.shape[-1]
    # Tokens outermost: the gathered buffer then is the result, without a copy.
    rows_SBHW = torch.cat((k_BHSD, v_BHSD), dim=-1).permute(2, 0, 1, 3)
    whole_BHSW = all_gather_uneven(rows_SBHW, 0, lengths, group).permute(1, 2, 0, 3)
    k_BHSD, v_BHSD = whole_BHSW.split((D, Dv), dim=-1)
    return k_BHSD, v_BHSD


def _packet_size(k_BHSD: Tensor, v_BHSD: Tensor, tokens: int) -> int:
    B, Hk, _, D = k_BHSD.shape
    return max(1, B * Hk * tokens * (D + v_BHSD.shape[-1]))  # an exchange must not be empty


def _pack(k_BHSD: Tensor, v_BHSD: Tensor) -> Tensor:
    """k and v one after the other in a flat buffer."""
    packet = k_BHSD.new_empty(_packet_size(k_BHSD, v_BHSD, k_BHSD.shape[2]))
    for x, target in zip((k_BHSD, v_BHSD), _unpack(packet, k_BHSD, v_BHSD, k_BHSD.shape[2]), strict=True):
        target.copy_(x)
    return packet


def _unpack(packet: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Views of the k and v of `tokens` tokens that a packet holds; `k_BHSD` and `v_BHSD` give the other sizes."""
    B, Hk, _, D = k_BHSD.shape
    Dv = v_BHSD.shape[-1]
    rows = B * Hk * tokens
    k, v = packet[: rows * (D + Dv)].split((rows * D, rows * Dv))
    return k.view(B, Hk, tokens, D), v.view(B, Hk, tokens, Dv)


def _check_lengths(k_BHSD: Tensor, lengths: Sequence[int], rank: int, size: int) -> None:
    if len(lengths) != size or lengths[rank] != k_BHSD.shape[2]:
        raise ConfigError(f"lengths={list(lengths)} do not fit: rank {rank} of {size} holds {k_BHSD.shape[2]} keys")
