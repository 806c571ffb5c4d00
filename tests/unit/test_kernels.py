import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from xpar.core.long_ctx_attention.backends import BACKENDS, check_backend
from xpar.core.long_ctx_attention.kernels import attend, attend_with_lse, merge
from xpar.errors import ConfigError, UnsupportedError

B, H, SQ, SK, D = 2, 6, 5, 9, 16
CPU_BACKENDS = ["auto", "cpu", "math"]


def inputs(kv_heads: int = H, dtype: torch.dtype = torch.float32, v_dim: int = D) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((B, H, SQ, D), (B, kv_heads, SK, D), (B, kv_heads, SK, v_dim))
    return tuple(torch.randn(shape, dtype=torch.float32).to(dtype) for shape in shapes)  # type: ignore[return-value]


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp by their definitions, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(scores, dim=-1).nan_to_num(0.0) @ v, torch.logsumexp(scores, dim=-1)


def masks() -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    keep = torch.rand(B, H, SQ, SK, generator=generator) > 0.4
    hidden_row = keep.clone()
    hidden_row[1, :, 2] = False
    return {
        "none": None,
        "bool": keep,
        "keys": keep[:, :1, :1],
        "shared": keep[:1, :1],
        "two dims": keep[0, 0],
        "hidden row": hidden_row,
        "additive": torch.randn(B, 1, SQ, SK, generator=generator),
        "additive with hidden row": torch.zeros(B, H, SQ, SK).masked_fill(~hidden_row, -math.inf),
    }


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("name", masks())
def test_lse_kernels_match_the_definition(backend: str, kv_heads: int, name: str) -> None:
    q, k, v = inputs(kv_heads)
    mask = masks()[name]
    out, lse = attend_with_lse(q, k, v, mask, scale=0.3, backend=backend)
    expected_out, expected_lse = reference(q, k, v, mask, 0.3)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out, expected_out.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_attend_is_plain_attention_to_the_bit(name: str, kv_heads: int) -> None:
    q, k, v = inputs(kv_heads)
    plain = F.scaled_dot_product_attention(q, k, v, attn_mask=masks()[name], enable_gqa=kv_heads != H)
    assert torch.equal(attend(q, k, v, masks()[name]), plain)
    assert plain.isfinite().all()  # a hidden row is 0, not NaN


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_log_sum_exp_does_not_lose_precision_with_the_dtype(backend: str, dtype: torch.dtype) -> None:
    q, k, v = inputs(2, dtype)
    mask = torch.rand(B, 1, 1, SK) > 0.3
    out, lse = attend_with_lse(q, k, v, mask, backend=backend)
    _, expected = reference(q, k, v, mask, D**-0.5)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # With AVX2 torch takes a shorter exponential for half precision, 5e-5 off; rounding to float16 would cost 1e-3.
    is_short = dtype != torch.float64 and torch.backends.cpu.get_cpu_capability() == "AVX2"
    bound = 1e-4 if is_short else 1e-5
    torch.testing.assert_close(lse.double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_strides_do_not_matter(backend: str) -> None:
    q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in inputs())
    assert q.stride(-1) != 1
    out, _ = attend_with_lse(q, k, v, backend=backend)
    torch.testing.assert_close(out, attend(q.contiguous(), k.contiguous(), v.contiguous()))


@pytest.mark.parametrize("sizes", [(B, 0, SQ, SK), (B, H, 0, SK), (B, H, SQ, 0), (0, H, SQ, SK)])
@pytest.mark.parametrize("masked", [False, True])
def test_empty_sides_are_legal(sizes: tuple[int, int, int, int], masked: bool) -> None:
    b, h, sq, sk = sizes
    q, k, v = torch.randn(b, h, sq, D), torch.randn(b, h, sk, D), torch.randn(b, h, sk, D)
    mask = torch.ones(1, 1, sq, sk, dtype=torch.bool) if masked else None
    out, lse = attend_with_lse(q, k, v, mask)
    assert torch.equal(out, attend(q, k, v, mask))
    assert lse.shape == (b, h, sq)
    assert (lse == -math.inf).all() if sk == 0 else lse.isfinite().all()


def test_values_may_be_wider_than_keys() -> None:
    q, k, v = inputs(v_dim=24)
    out, lse = attend_with_lse(q, k, v)
    expected_out, expected_lse = reference(q, k, v, None, D**-0.5)
    torch.testing.assert_close((out, lse), (expected_out.float(), expected_lse.float()))
    with pytest.raises(UnsupportedError, match="'cpu' does not take"):
        attend_with_lse(q, k, v, backend="cpu")


@pytest.mark.parametrize("name", masks())
def test_pieces_of_the_keys_merge_to_the_whole(name: str) -> None:
    q, k, v = inputs()
    mask = masks()[name]
    bounds = [(0, 2), (2, 2), (2, 7), (7, SK)]
    result = None
    for start, stop in bounds:
        piece = None if mask is None else mask[..., start:stop]
        partial = attend_with_lse(q, k[:, :, start:stop], v[:, :, start:stop], piece)
        result = partial if result is None else merge(*result, *partial)
    assert result is not None
    expected_out, expected_lse = reference(q, k, v, mask, D**-0.5)
    torch.testing.assert_close(result, (expected_out.float(), expected_lse.float()), rtol=1e-5, atol=1e-6)


def test_merge_takes_nothing_from_a_side_that_saw_nothing() -> None:
    out, lse = torch.randn(1, 1, 2, 4), torch.tensor([[[3.0, -math.inf]]])
    nothing = torch.full_like(lse, -math.inf)
    for merged in (merge(out, lse, torch.zeros_like(out), nothing), merge(torch.zeros_like(out), nothing, out, lse)):
        assert torch.equal(merged[0][:, :, 0], out[:, :, 0])
        assert torch.equal(merged[1], lse)
    both = merge(torch.zeros_like(out), nothing, torch.zeros_like(out), nothing)
    assert torch.equal(both[0], torch.zeros_like(out))
    assert torch.equal(both[1], nothing)


def test_merge_accumulates_in_float32() -> None:
    out, lse = torch.randn(1, 1, 2, 4).bfloat16(), torch.zeros(1, 1, 2)
    assert merge(out, lse, out, lse)[0].dtype == torch.float32


def test_merge_does_not_hide_a_nan() -> None:
    out, lse = torch.randn(1, 1, 1, 4), torch.full((1, 1, 1), math.nan)
    assert merge(out, torch.zeros(1, 1, 1), out, lse)[0].isnan().all()


def test_an_unknown_backend_is_refused_with_the_choices() -> None:
    q, k, v = inputs()
    with pytest.raises(ConfigError, match="'flsh' is unknown; choose one of auto, cpu, math"):
        attend_with_lse(q, k, v, backend="flsh")


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - set(CPU_BACKENDS)))
def test_cuda_kernels_are_refused_on_the_cpu(backend: str) -> None:
    q, k, v = inputs()
    with pytest.raises(UnsupportedError, match=rf"{backend}' runs on cuda only"):
        attend_with_lse(q, k, v, backend=backend)


def test_a_backend_whose_package_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="'flash_attn2' needs the package flash_attn; install it or use 'auto'"):
        check_backend("flash_attn2", torch.device("cuda"), has_mask=False)


def test_a_backend_without_masks_is_refused_for_a_mask() -> None:
    with pytest.raises(UnsupportedError, match="takes no attention mask"):
        check_backend("flash", torch.device("cuda"), has_mask=True)


@pytest.mark.parametrize("kv_heads", [4, 0])
def test_head_counts_that_do_not_divide_are_refused(kv_heads: int) -> None:
    q, k, v = inputs(kv_heads)
    for call in (attend, attend_with_lse):
        with pytest.raises(ConfigError, match=f"6 query heads cannot share {kv_heads}"):
            call(q, k, v)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["auto", "flash", "efficient", "cudnn", "math"])
@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("name", masks())
def test_cuda_kernels_match_the_definition(backend: str, kv_heads: int, name: str) -> None:
    q, k, v = (x.cuda() for x in inputs(kv_heads, torch.float16))
    mask = masks()[name]
    mask = None if mask is None else mask.cuda()
    try:
        out, lse = attend_with_lse(q, k, v, mask, backend=backend)
    except UnsupportedError as error:
        pytest.skip(str(error))
    expected_out, expected_lse = reference(q, k, v, mask, D**-0.5)
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=4e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=4e-3)
