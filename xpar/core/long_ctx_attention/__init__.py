"""Attention over sequences that are spread over ranks.

- `usp_attention`, `TokenLayout`: ulysses x ring over plain tensors, any mask, one call.
- `scatter_heads`, `gather_heads`, `head_share`: ulysses, the all-to-all before and after local attention.
- `ring_attention`, `ring_gather`: ring attention; the whole k and v of a ring.
- `attend`, `attend_with_lse`, `merge`: attention on one device, with its log-sum-exp, and the merge of two parts.
- `check_backend`, `BACKENDS`: the local kernels that are right here.
- `normalise_mask`, `slice_mask`, `slice_whole`, `heads_of`, `causal_mask`, `combine_masks`, `settle_hidden_rows`,
  `to_additive`, `is_trivial`: masks of the whole sequence and the part that a rank needs.
"""

from xpar.core.long_ctx_attention.backends import BACKENDS, check_backend
from xpar.core.long_ctx_attention.kernels import attend, attend_with_lse, merge
from xpar.core.long_ctx_attention.masks import (
    causal_mask,
    combine_masks,
    heads_of,
    is_trivial,
    normalise_mask,
    settle_hidden_rows,
    slice_mask,
    slice_whole,
    to_additive,
)
from xpar.core.long_ctx_attention.ring import ring_attention, ring_gather
from xpar.core.long_ctx_attention.ulysses import HeadShare, gather_heads, head_share, scatter_heads
from xpar.core.long_ctx_attention.usp import TokenLayout, usp_attention

__all__ = [
    "BACKENDS",
    "HeadShare",
    "TokenLayout",
    "attend",
    "attend_with_lse",
    "causal_mask",
    "check_backend",
    "combine_masks",
    "gather_heads",
    "head_share",
    "heads_of",
    "is_trivial",
    "merge",
    "normalise_mask",
    "ring_attention",
    "ring_gather",
    "scatter_heads",
    "settle_hidden_rows",
    "slice_mask",
    "slice_whole",
    "to_additive",
    "usp_attention",
]
