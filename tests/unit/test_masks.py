import math

import pytest
import torch
from torch.nn import functional as F

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
from xpar.errors import ConfigError

B, H, S = 2, 3, 5


@pytest.mark.parametrize(
    "shape", [(S,), (S, S), (1, S), (H, S, S), (1, S, S), (B, 1, 1, S), (B, 1, S, S), (B, H, S, S)]
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_in_normal_form_acts_like_the_mask(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(B, H, S, 8) for _ in range(3))
    mask = torch.rand(shape) > 0.4 if dtype == torch.bool else torch.randn(shape)
    normal = normalise_mask(mask, B, H, S, S)
    assert normal.dim() == 4
    assert normal.dtype == dtype
    # Torch's own kernels do not take one dim; the others are its own reading.
    plain = F.scaled_dot_product_attention(q, k, v, attn_mask=mask if mask.dim() > 1 else mask.expand(S, S))
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, attn_mask=normal), plain)


def test_masks_by_batch_are_read_as_diffusers_does() -> None:
    assert normalise_mask(torch.ones(B, S), B, H, S, S).shape == (B, 1, 1, S)
    assert normalise_mask(torch.ones(B, S, S), B, H, S, S).shape == (B, 1, S, S)


@pytest.mark.parametrize("shape", [(S + 1,), (4, S), (B, 2, S, S), (1, 1, 1, 1, S)])
def test_a_mask_that_does_not_broadcast_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="does not broadcast"):
        normalise_mask(torch.ones(shape), B, H, S, S)


def test_an_integer_mask_is_refused() -> None:
    with pytest.raises(ConfigError, match="int64"):
        normalise_mask(torch.ones(B, S, dtype=torch.int64), B, H, S, S)


def test_slices_follow_positions_and_heads() -> None:
    mask = torch.randn(B, H, S, S)
    rows, columns = torch.tensor([4, 0]), torch.tensor([2, 3, 1])
    assert torch.equal(slice_mask(mask, rows, columns, (1, 3)), mask[:, 1:3][:, :, rows][..., columns])
    assert torch.equal(slice_mask(mask[:, :1, :1], rows, columns, (1, 3)), mask[:, :1, :1, columns])
    assert torch.equal(heads_of(mask, H, None), mask)


def test_causality_follows_positions() -> None:
    rows, columns = torch.tensor([4, 0]), torch.tensor([2, 3, 0])
    causal = causal_mask(rows, columns)
    assert causal.tolist() == [[[[True, True, True], [False, False, True]]]]
    given = torch.randn(S, S)
    hidden = to_additive(causal, torch.float32)
    torch.testing.assert_close(slice_whole(given, True, rows, columns), given[rows][:, columns] + hidden)
    assert torch.equal(slice_whole(None, True, rows, columns), causal)
    assert slice_whole(None, False, rows, columns) is None


def test_combined_masks_hide_what_either_hides() -> None:
    a, b = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    bias = torch.tensor([0.5, 0.5, 0.5])
    assert combine_masks([None, None]) is None
    assert torch.equal(combine_masks([a, None, b]), a & b)
    assert combine_masks([a, bias]).tolist() == [0.5, 0.5, -math.inf]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_only_masks_without_effect_are_trivial(dtype: torch.dtype) -> None:
    mask = torch.ones(B, S, dtype=torch.bool) if dtype == torch.bool else torch.zeros(B, S)
    assert is_trivial(mask)
    mask[1, 2] = False if dtype == torch.bool else -1.0
    assert not is_trivial(mask)


@pytest.mark.parametrize("bias", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_settled_rows_attend_as_before(bias: float) -> None:
    q, k, v = (torch.randn(B, H, S, 8) for _ in range(3))
    mask = torch.randn(B, 1, S, S)
    mask[0, :, 1] = bias
    mask[1, :, 2, 3] = bias
    mask[1, :, 3] = -math.inf
    plain = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    settled_q, (left, right) = settle_hidden_rows(q, [mask[..., :2], mask[..., 2:]])
    settled = torch.cat((left, right), dim=-1)
    out = F.scaled_dot_product_attention(settled_q, k, v, attn_mask=settled)
    torch.testing.assert_close(out, plain, rtol=0, atol=2e-3 if bias == -1e4 else 1e-6)  # plain itself rounds to 1e-3
    assert settled.amax(-1)[0, 0, 1] == 0


def test_bool_and_missing_masks_need_no_settling() -> None:
    q = torch.randn(B, H, S, 8)
    for masks in ([None, torch.zeros(1, 1, 1, S)], [torch.ones(1, 1, 1, S, dtype=torch.bool)] * 2):
        same_q, same_masks = settle_hidden_rows(q, masks)
        assert same_q is q
        assert same_masks is masks
