"""Attention spread over ranks against plain attention over the whole sequence, in fp32, on gloo."""

import datetime
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from tests.dist.recorder import recorded
from tests.dist.pool import RankPool
from xpar.core.distributed.collectives import all_gather_uneven
from xpar.core.long_ctx_attention import (
    TokenLayout,
    attend,
    gather_heads,
    head_share,
    ring_attention,
    ring_gather,
    scatter_heads,
    usp_attention,
)
from xpar.core.partition import shares
from xpar.errors import ConfigError, UnsupportedError

SPLITS = [(2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (1, 4)]
D = 8
Case = tuple[int, int, int, int, str]  # batch, tokens, heads, key/value heads, mask


@pytest.fixture
def pool(request: pytest.FixtureRequest, split: tuple[int, int]) -> RankPool:
    """The pool with as many ranks as the split needs."""
    return request.getfixturevalue(f"pool{split[0] * split[1]}")


@contextmanager
def groups_of(split: tuple[int, int]) -> Iterator[tuple[ProcessGroup | None, ProcessGroup | None]]:
    """This rank's ulysses and ring group; every rank makes every group, in one order."""
    grid = torch.arange(split[0] * split[1]).view(split[1], split[0])
    mine: list[ProcessGroup | None] = []
    made = []
    for rows in (grid, grid.T):
        groups = [dist.new_group(row.tolist(), timeout=datetime.timedelta(seconds=30)) for row in rows]
        made += groups
        mine.append(next(g for g, row in zip(groups, rows, strict=True) if dist.get_rank() in row.tolist()))
    yield tuple(group if size > 1 else None for group, size in zip(mine, split, strict=True))  # type: ignore[misc]
    for group in made:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def qkv(batch: int, tokens: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens * 100 + heads)
    # In the memory order that models give: tokens outside heads.
    return tuple(  # type: ignore[return-value]
        torch.randn(batch, tokens, h, D, generator=generator).transpose(1, 2) for h in (heads, kv_heads, kv_heads)
    )


def make_mask(name: str, batch: int, heads: int, tokens: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(7)
    full = torch.rand(batch, heads, tokens, tokens, generator=generator) > 0.4
    hidden = full.clone()
    hidden[-1, :, tokens // 2] = False
    lengths = torch.tensor([tokens - 2, max(1, tokens // 3)])[:batch]
    forms: dict[str, Callable[[], Tensor | None]] = {
        "none": lambda: None,
        "causal": lambda: None,
        "causal and additive": lambda: torch.randn(batch, 1, 1, tokens, generator=generator),
        "[B,S] of unequal lengths": lambda: torch.arange(tokens) < lengths[:, None],
        "[B,1,1,S]": lambda: full[:, :1, :1],
        "[B,1,S,S]": lambda: full[:, :1],
        "[S,S]": lambda: full[0, 0],
        "per head": lambda: full,
        "per head, additive": lambda: torch.randn(batch, heads, tokens, tokens, generator=generator),
        "[1,H,1,S]": lambda: full[:1, :, :1],
        "hidden row": lambda: hidden,
        "hidden row, additive": lambda: torch.zeros(hidden.shape).masked_fill(~hidden, -math.inf),
        "hidden row by the minimum": lambda: torch.zeros(hidden.shape).masked_fill(
            ~hidden, torch.finfo(torch.float32).min
        ),
        "everything hidden by the minimum": lambda: torch.full((batch, 1, 1, tokens), torch.finfo(torch.float32).min),
    }
    return forms[name]()


MASKS = [
    "causal",
    "causal and additive",
    "[B,S] of unequal lengths",
    "[B,1,1,S]",
    "[B,1,S,S]",
    "[S,S]",
    "per head",
    "per head, additive",
    "[1,H,1,S]",
    "hidden row",
    "hidden row, additive",
    "hidden row by the minimum",
    "everything hidden by the minimum",
]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    if mask is not None and mask.dim() == 2 and mask.shape[0] != q.shape[2]:
        mask = mask[:, None, None]
    if causal:
        order = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        mask = order if mask is None else mask.expand(-1, -1, len(order), -1).masked_fill(~order, -math.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def error_of(actual: Tensor, expected: Tensor) -> float:
    """Norm-wise relative error; 0 for a rank without tokens."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    return float((actual.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-6))


def errors_on_rank(split: tuple[int, int], cases: list[Case], dtype: torch.dtype, order: str, backend: str) -> Any:
    """Errors of `usp_attention` by case, on this rank."""
    errors = {}
    with groups_of(split) as (ulysses, ring), torch.no_grad():
        for case in cases:
            batch, tokens, heads, kv_heads, mask_name = case
            full = [x.to(dtype) for x in qkv(batch, tokens, heads, kv_heads)]
            mask = make_mask(mask_name, batch, heads, tokens)
            causal = mask_name.startswith("causal")
            sizes = tuple(shares(tokens, split[0] * split[1]))
            scattered = torch.randperm(tokens, generator=torch.Generator().manual_seed(3))
            by_rank = (torch.arange(tokens) if order == "contiguous" else scattered).split(sizes)
            positions = None if order == "contiguous" else by_rank
            own = by_rank[dist.get_rank()]
            out = usp_attention(
                *(x[:, :, own] for x in full),
                TokenLayout(sizes, *split, positions),
                ulysses_group=ulysses,
                ring_group=ring,
                mask=mask,
                is_causal=causal,
                backend=backend,
            )
            assert out.dtype == dtype
            errors[case] = error_of(out, plain_attention(*full, mask, causal)[:, :, own])
    return errors


def assert_equal_to_plain(
    pool: RankPool,
    split: tuple[int, int],
    cases: list[Case],
    bound: float = 1e-5,
    dtype: torch.dtype = torch.float32,
    order: str = "contiguous",
    backend: str = "auto",
) -> None:
    by_rank = pool.run(errors_on_rank, split, cases, dtype, order, backend)
    wrong = {(rank, case): e for rank, errors in enumerate(by_rank) for case, e in errors.items() if not e < bound}
    assert not wrong
    assert all(set(errors) == set(cases) for errors in by_rank)


@pytest.mark.parametrize("split", SPLITS)
def test_any_number_of_tokens_and_heads_equals_plain_attention(pool: RankPool, split: tuple[int, int]) -> None:
    heads = [(5, 5), (6, 6), (1, 1), (6, 2), (6, 3), (5, 1)]
    cases = [(b, s, *h, "none") for b, s, h in itertools.product((1, 2), (24, 25, 27, 45, 3, 25 + 7), heads)]
    assert_equal_to_plain(pool, split, cases)


@pytest.mark.parametrize("split", SPLITS)
def test_every_form_of_mask_equals_plain_attention(pool: RankPool, split: tuple[int, int]) -> None:
    heads = [(5, 5), (6, 2)]
    cases = [(2, s, *h, m) for s, h, m in itertools.product((27, 3), heads, MASKS)]
    assert_equal_to_plain(pool, split, cases)


@pytest.mark.parametrize("split", SPLITS)
def test_masks_follow_tokens_that_travel_in_another_order(pool: RankPool, split: tuple[int, int]) -> None:
    cases = [(2, 27, 6, 3, m) for m in MASKS]
    assert_equal_to_plain(pool, split, cases, order="scattered")


@pytest.mark.parametrize("split", [(2, 1), (1, 2), (2, 2)])
def test_bfloat16_stays_within_its_precision(pool: RankPool, split: tuple[int, int]) -> None:
    cases = [(2, 45, 6, 2, "none"), (1, 25, 5, 5, "causal"), (2, 27, 6, 6, "hidden row")]
    assert_equal_to_plain(pool, split, cases, bound=1e-2, dtype=torch.bfloat16)


@pytest.mark.parametrize("split", [(2, 1), (1, 2), (2, 2)])
def test_the_named_fallback_kernel_is_as_right(pool: RankPool, split: tuple[int, int]) -> None:
    cases = [(2, 27, 6, 2, m) for m in ("none", "hidden row", "causal and additive")]
    assert_equal_to_plain(pool, split, cases, backend="math")


def traffic_on_rank(split: tuple[int, int], tokens: int, heads: int, mask_name: str) -> tuple[dict[str, int], int]:
    with groups_of(split) as (ulysses, ring):
        layout = TokenLayout.even(tokens, *split)
        local = [torch.randn(1, heads, layout.lengths[dist.get_rank()], D) for _ in range(3)]
        with recorded() as recorder:
            usp_attention(
                *local,
                layout,
                ulysses_group=ulysses,
                ring_group=ring,
                mask=make_mask(mask_name, 1, heads, tokens),
                is_causal=mask_name == "causal",
            )
        return dict(recorder.calls), sum(recorder.elements.values())


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("mask_name", ["none", "causal", "per head, additive"])
def test_number_of_messages_is_the_least_and_masks_add_none(
    pool: RankPool, split: tuple[int, int], mask_name: str
) -> None:
    expected = {}
    if split[0] > 1:
        expected["all_to_all"] = 2
    if split[1] > 1:
        expected["ring"] = split[1] - 1
    assert [calls for calls, _ in pool.run(traffic_on_rank, split, 24, 12, mask_name)] == [expected] * pool.size


@pytest.mark.parametrize("split", SPLITS)
def test_bytes_on_the_wire_are_those_of_the_papers(pool: RankPool, split: tuple[int, int]) -> None:
    tokens, heads = 24, 12
    U, R = split
    width = heads * D
    ulysses = 4 * tokens // R * width // U * (U - 1) // U
    ring = 2 * tokens * width // U * (R - 1) // R
    assert [elements for _, elements in pool.run(traffic_on_rank, split, tokens, heads, "none")] == [
        ulysses + ring
    ] * pool.size


def change_on_rank(split: tuple[int, int]) -> tuple[float, float]:
    """Error of the change that a change of the last rank's last token makes in this rank's output; and its size."""
    with groups_of(split) as (ulysses, ring):
        full = qkv(1, 25, 6, 6)
        changed = [x.clone() for x in full]
        for x in changed:
            x[:, :, -1] += 1.0
        layout = TokenLayout.even(25, *split)
        rank = dist.get_rank()
        own = layout_slice(layout, rank)
        outs = [
            usp_attention(*(x[:, :, own] for x in xs), layout, ulysses_group=ulysses, ring_group=ring)
            for xs in (full, changed)
        ]
        plain = [plain_attention(*xs, None, False)[:, :, own] for xs in (full, changed)]
        change = plain[1] - plain[0]
        return error_of(outs[1] - outs[0], change), float(change.norm())


def layout_slice(layout: TokenLayout, rank: int) -> slice:
    start = sum(layout.lengths[:rank])
    return slice(start, start + layout.lengths[rank])


@pytest.mark.parametrize("split", SPLITS)
def test_a_token_of_another_rank_has_the_effect_it_has_in_one_process(pool: RankPool, split: tuple[int, int]) -> None:
    for error, size in pool.run(change_on_rank, split):
        assert error < 1e-5
        assert size > 1e-2


def bits_on_rank(split: tuple[int, int]) -> bool:
    with groups_of(split) as (ulysses, ring):
        layout = TokenLayout.even(27, *split)
        local = [x[:, :, layout_slice(layout, dist.get_rank())] for x in qkv(2, 27, 5, 5)]
        runs = [usp_attention(*local, layout, ulysses_group=ulysses, ring_group=ring) for _ in range(5)]
        return all(torch.equal(runs[0], run) for run in runs)


@pytest.mark.parametrize("split", [(3, 1), (1, 3), (2, 2), (1, 4)])
def test_results_do_not_depend_on_timing(pool: RankPool, split: tuple[int, int]) -> None:
    assert all(pool.run(bits_on_rank, split))


def cached_on_rank(split: tuple[int, int]) -> float:
    """Fresh tokens attend to a longer cache, as PipeFusion does, between the two halves of ulysses."""
    with groups_of(split) as (ulysses, ring):
        layout = TokenLayout.even(13, *split)
        ring_index = dist.get_rank() // split[0]
        q, k, v = qkv(2, 13, 6, 3)
        _, old_k, old_v = qkv(2, 9, 6, 3)
        own = layout_slice(layout, dist.get_rank())
        lengths = layout.group_lengths(ring_index)
        heads = head_share(6, 3, split[0], dist.get_rank() % split[0])
        local_q, local_k, local_v = scatter_heads(q[:, :, own], k[:, :, own], v[:, :, own], lengths, ulysses)
        local_k, local_v = ring_gather(local_k, local_v, layout.ring_lengths, ring)
        fits = [x.repeat_interleave(2, dim=1)[:, heads.start : heads.stop] for x in (old_k, old_v)]
        spread = [
            x.repeat_interleave((heads.stop - heads.start) // max(x.shape[1], 1), dim=1) for x in (local_k, local_v)
        ]
        cache = [torch.cat((old, new), dim=2) for old, new in zip(fits, spread, strict=True)]
        out = gather_heads(attend(local_q, *cache), lengths, 6, ulysses)
        whole = [torch.cat((old, new), dim=2) for old, new in ((old_k, k), (old_v, v))]
        return error_of(out, plain_attention(q, *whole, None, False)[:, :, own])


@pytest.mark.parametrize("split", SPLITS)
def test_pieces_work_with_a_cache_between_them(pool: RankPool, split: tuple[int, int]) -> None:
    assert max(pool.run(cached_on_rank, split)) < 1e-5


def gathers_on_rank(lengths: list[int], dim: int, shape: list[int]) -> bool:
    shape[dim] = sum(lengths)
    whole = torch.arange(math.prod(shape)).view(shape)
    own = whole.split(lengths, dim)[dist.get_rank()]
    return torch.equal(all_gather_uneven(own, dim, lengths, dist.group.WORLD), whole)


@pytest.mark.parametrize("lengths", [[2, 2, 2], [3, 2, 2], [0, 4, 0], [1, 0, 0], [0, 0, 0]])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_takes_shards_of_any_length(pool3: RankPool, lengths: list[int], dim: int) -> None:
    assert all(pool3.run(gathers_on_rank, lengths, dim, [2, 3, 4]))


def refusals_on_rank() -> dict[str, str]:
    """Text of the error by what is wrong; nothing may be sent."""
    world = dist.group.WORLD
    q, k, v = qkv(1, 4, 6, 6)
    layout = TokenLayout((4, 4), 2, 1)
    calls: dict[str, Callable[[], Any]] = {
        "gather lengths": lambda: all_gather_uneven(q, 2, [4, 5, 6], world),
        "scatter lengths": lambda: scatter_heads(q, k, v, [5, 5], world),
        "gather heads": lambda: gather_heads(q, [4, 4], 6, world),
        "ring lengths": lambda: ring_attention(q, k, v, [5, 5], world),
        "ring gather lengths": lambda: ring_gather(k, v, [5, 5], world),
        "backend": lambda: ring_attention(q, k, v, [4, 4], world, backend="fast"),
        "backend without lse here": lambda: ring_attention(q, k, v, [4, 4], world, backend="flash"),
        "grouped heads": lambda: scatter_heads(q, k[:, :4], v[:, :4], [4, 4], world),
        "degrees": lambda: usp_attention(q, k, v, layout, ulysses_group=None, ring_group=world),
        "mask": lambda: usp_attention(
            q, k, v, layout, ulysses_group=world, ring_group=None, mask=torch.ones(5, 5, dtype=torch.bool)
        ),
        "layout": lambda: TokenLayout((4, 4), 2, 2),
        "positions": lambda: TokenLayout((4, 4), 2, 1, (torch.arange(4), torch.arange(5))),
    }
    texts = {}
    with recorded() as recorder:
        for name, call in calls.items():
            try:
                call()
            except (ConfigError, UnsupportedError) as error:
                texts[name] = str(error)
            else:
                texts[name] = ""
    assert not recorder.calls
    return texts


def test_what_does_not_fit_is_refused_on_every_rank_before_anything_is_sent(pool2: RankPool) -> None:
    expected = {
        "gather lengths": "lengths=[4, 5, 6] do not fit",
        "scatter lengths": "lengths=[5, 5] do not fit",
        "gather heads": "6 heads and 4 tokens does not fit lengths=[4, 4]",
        "ring lengths": "lengths=[5, 5] do not fit",
        "ring gather lengths": "lengths=[5, 5] do not fit",
        "backend": "'fast' is unknown; choose one of auto",
        "backend without lse here": "'flash' runs on cuda only",
        "grouped heads": "6 query heads cannot share 4 key/value heads",
        "degrees": "groups of 1 (ulysses) and 2 (ring) ranks do not fit",
        "mask": "does not broadcast to (B, H, Sq, Sk) = (1, 6, 8, 8)",
        "layout": "ulysses_degree(2) * ring_degree(2) does not equal the number of lengths (2)",
        "positions": "positions for [4, 5] tokens do not fit lengths=[4, 4]",
    }
    for texts in pool2.run(refusals_on_rank):
        assert {name: expected[name] in text for name, text in texts.items()} == dict.fromkeys(expected, True)


def test_without_groups_nothing_changes() -> None:
    q, k, v = qkv(1, 5, 6, 2)
    assert scatter_heads(q, k, v, [5], None) == (q, k, v)
    assert gather_heads(q, [5], 6, None) is q
    assert ring_gather(k, v, [5], None) == (k, v)
    assert all_gather_uneven(q, 2, [5], None) is q
    plain = plain_attention(q, k, v, None, True)
    layout = TokenLayout.even(5, 1, 1)
    assert torch.equal(usp_attention(q, k, v, layout, ulysses_group=None, ring_group=None, is_causal=True), plain)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (6, 3), (5, 1), (12, 4), (1, 1)])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_each_query_head_finds_its_key_head(heads: int, kv_heads: int, parts: int) -> None:
    found = []
    for index in range(parts):
        mine = head_share(heads, kv_heads, parts, index)
        count = mine.stop - mine.start
        for local in range(count):
            kv_count = mine.kv_stop - mine.kv_start
            own = mine.kv_map[local] if mine.kv_map else local // (count // kv_count)
            found.append((mine.start + local, mine.kv_start + own))
    assert found == [(head, head // (heads // kv_heads)) for head in range(heads)]
