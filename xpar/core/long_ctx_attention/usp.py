"""Unified sequence parallelism over plain tensors: ulysses inside, ring outside (USP, arXiv 2405.07719).

For research code and tests; the pipelines drive the same pieces (`scatter_heads`, then `attend` or `ring_attention`,
then `gather_heads`) themselves. Rank `ring_index * ulysses_degree + ulysses_index` of the sequence holds some tokens
with all heads, before and after. Names: B batch, H heads, S tokens, D head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xpar.core.distributed.collectives import group_rank, group_size
from xpar.core.long_ctx_attention.backends import check_backend
from xpar.core.long_ctx_attention.masks import heads_of, normalise_mask, slice_whole
from xpar.core.long_ctx_attention.ring import ring_attention
from xpar.core.long_ctx_attention.ulysses import gather_heads, head_share, scatter_heads
from xpar.core.partition import shares
from xpar.errors import ConfigError

__all__ = ["TokenLayout", "usp_attention"]


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Which tokens of the sequence each rank holds.

    Raises:
        ConfigError: the lengths do not fit the degrees, or the positions the lengths.
    """

    lengths: tuple[int, ...]
    """Tokens on each rank, in the order `ring_index * ulysses_degree + ulysses_index`."""
    ulysses_degree: int
    ring_degree: int
    positions: tuple[Tensor, ...] | None = None
    """For each rank the int64 places of its tokens in the whole sequence; None for contiguous runs in rank order."""

    def __post_init__(self) -> None:
        if len(self.lengths) != self.ulysses_degree * self.ring_degree:
            raise ConfigError(
                f"ulysses_degree({self.ulysses_degree}) * ring_degree({self.ring_degree}) does not equal the number "
                f"of lengths ({len(self.lengths)})"
            )
        if self.positions is not None and self.lengths != tuple(len(p) for p in self.positions):
            raise ConfigError(
                f"positions for {[len(p) for p in self.positions]} tokens do not fit lengths={list(self.lengths)}"
            )

    def check_groups(self, ulysses_group: ProcessGroup | None, ring_group: ProcessGroup | None) -> None:
        """Raise ConfigError unless the groups have the layout's degrees."""
        sizes = group_size(ulysses_group), group_size(ring_group)
        if sizes != (self.ulysses_degree, self.ring_degree):
            raise ConfigError(
                f"groups of {sizes[0]} (ulysses) and {sizes[1]} (ring) ranks do not fit a layout of "
                f"ulysses_degree={self.ulysses_degree} and ring_degree={self.ring_degree}"
            )

    @classmethod
    def even(cls, tokens: int, ulysses_degree: int, ring_degree: int) -> "TokenLayout":
        """Contiguous runs that differ by at most one token."""
        return cls(tuple(shares(tokens, ulysses_degree * ring_degree)), ulysses_degree, ring_degree)

    @property
    def tokens(self) -> int:
        """Length of the whole sequence."""
        return sum(self.lengths)

    @property
    def ring_lengths(self) -> tuple[int, ...]:
        """Tokens that each ring rank holds once its ulysses group has been brought together."""
        return tuple(sum(self.group_lengths(ring_index)) for ring_index in range(self.ring_degree))

    def group_lengths(self, ring_index: int) -> tuple[int, ...]:
        """Tokens on each rank of the ulysses group at `ring_index`."""
        start = ring_index * self.ulysses_degree
        return self.lengths[start : start + self.ulysses_degree]

    def ring_positions(self, ring_index: int, device: torch.device) -> Tensor:
        """Places in the whole sequence of the tokens of a ulysses group, in group-rank order, int64 (S,)."""
        start = ring_index * self.ulysses_degree
        if self.positions is not None:
            return torch.cat(self.positions[start : start + self.ulysses_degree]).to(device)
        first = sum(self.lengths[:start])
        return torch.arange(first, first + sum(self.group_lengths(ring_index)), device=device)


def usp_attention(
    q_BHSD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    layout: TokenLayout,
    *,
    ulysses_group: ProcessGroup | None,
    ring_group: ProcessGroup | None,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention over a sequence that is spread over ranks; equal to plain attention over the whole of it.

    Args:
        q_BHSD: (B, H, S of this rank, D).
        k_BHSD: (B, Hk, S of this rank, D); likewise `v_BHSD`, (B, Hk, S of this rank, Dv). Hk divides H.
        layout: who holds what.
        ulysses_group: ranks with the same ring index, in order; None for a degree of one.
        ring_group: ranks with the same ulysses index, in order; None for a degree of one.
        mask: mask of the *whole* sequence, the same on every rank, any form that `masks.normalise_mask` takes.
        is_causal: hide keys that come later in the whole sequence; may be combined with `mask`.
        scale: factor on the scores; None for 1/sqrt(D).
        backend: local kernel. With no ring, "auto" is `scaled_dot_product_attention`.

    Returns:
        (B, H, S of this rank, Dv).

    Raises:
        ConfigError: groups, layout, tensors or mask do not fit together.
        UnsupportedError: the backend cannot do this. Nothing has been sent in either case.
    """
    layout.check_groups(ulysses_group, ring_group)
    check_backend(backend, q_BHSD.device, has_mask=mask is not None or is_causal)
    B, H = q_BHSD.shape[:2]
    # Refuses head counts that do not divide.
    head_share(H, k_BHSD.shape[1], group_size(ulysses_group), group_rank(ulysses_group))
    if mask is not None:
        mask = heads_of(normalise_mask(mask, B, H, layout.tokens, layout.tokens), H, ulysses_group)
    device, ring_index = q_BHSD.device, group_rank(ring_group)
    rows = layout.ring_positions(ring_index, device)

    def mask_for(source: int) -> Tensor | None:
        return slice_whole(mask, is_causal, rows, layout.ring_positions(source, device))

    lengths = layout.group_lengths(ring_index)
    q_BHSD, k_BHSD, v_BHSD = scatter_heads(q_BHSD, k_BHSD, v_BHSD, lengths, ulysses_group)
    out_BHSD = ring_attention(
        q_BHSD,
        k_BHSD,
        v_BHSD,
        layout.ring_lengths,
        ring_group,
        mask_for=mask_for if mask is not None or is_causal else None,
        scale=scale,
        backend=backend,
    )
    return gather_heads(out_BHSD, lengths, H, ulysses_group)
