"""Ulysses, ring and both give what one process gives, on every rank, for the four families."""

from typing import Any

import pytest
import torch

from tests.dist.pool import RankPool
from tests.dist.recorder import recorded
from tests.tiny_models import KINDS, bare_pipe, inputs, relative_error, transformer
from xpar import EngineConfig, Parallel

LAYOUTS = {2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 4: [(4, 1), (1, 4), (2, 2)]}
CASES = [(24, 1, 7), (25, 2, 7), (27, 1, 1), (45, 2, 7)]  # image tokens, batch, text tokens


def config(layout: tuple[int, int]) -> EngineConfig:
    return EngineConfig(ulysses_degree=layout[0], ring_degree=layout[1], timeout=30)


def run(model: torch.nn.Module, arguments: dict[str, Any]) -> torch.Tensor:
    return model(**arguments, return_dict=False)[0]


def sharded_against_whole(kind: str, heads: int, layout: tuple[int, int]) -> list[tuple[float, torch.Tensor]]:
    model = transformer(kind, heads)
    cases = [inputs(kind, tokens, text, batch) for tokens, batch, text in CASES]
    whole = [run(model, case) for case in cases]
    with Parallel(bare_pipe(model), config(layout)):
        shared = [run(model, case) for case in cases]
    again = run(model, cases[0])
    assert torch.equal(again, whole[0]), "close() did not give the transformer back"
    return [(relative_error(a, b), a) for a, b in zip(shared, whole, strict=True)]


def check(pool: RankPool, kind: str, heads: int, layout: tuple[int, int]) -> None:
    results = pool.run(sharded_against_whole, kind, heads, layout)
    for case, by_rank in zip(CASES, zip(*results, strict=True), strict=True):
        for error, value in by_rank:
            assert error < 1e-5, (case, error)
            assert torch.equal(value, by_rank[0][1]), f"ranks differ in case {case}"


@pytest.mark.parametrize("heads", [5, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_one_process(pool2: RankPool, kind: str, heads: int) -> None:
    for layout in LAYOUTS[2]:
        check(pool2, kind, heads, layout)


@pytest.mark.parametrize("kind", KINDS)
def test_three_ranks_equal_one_process(pool3: RankPool, kind: str) -> None:
    for layout in LAYOUTS[3]:
        check(pool3, kind, 5, layout)


@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks_equal_one_process(pool4: RankPool, kind: str) -> None:
    for layout in LAYOUTS[4]:
        check(pool4, kind, 6, layout)


def effect_of_a_token(kind: str, layout: tuple[int, int], stream: str) -> float:
    """Relative error of the change that the last token of a stream, owned by the last rank, makes everywhere."""
    model = transformer(kind)
    before = inputs(kind, 25)
    after = {**before, stream: before[stream].clone()}
    index = (..., -1) if after[stream].ndim > 3 else (slice(None), -1)
    after[stream][index] += 1.0
    expected = run(model, after) - run(model, before)
    with Parallel(bare_pipe(model), config(layout)):
        change = run(model, after) - run(model, before)
    return relative_error(change, expected)


@pytest.mark.parametrize("layout", LAYOUTS[2])
@pytest.mark.parametrize(
    ("kind", "stream"),
    [("flux", "hidden_states"), ("flux", "encoder_hidden_states"), ("sd3", "encoder_hidden_states"), ("wan", "hidden_states")],
)
def test_a_token_reaches_the_tokens_of_other_ranks(
    pool2: RankPool, kind: str, stream: str, layout: tuple[int, int]
) -> None:
    assert max(pool2.run(effect_of_a_token, kind, layout, stream)) < 1e-4


def effect_of_padding(layout: tuple[int, int]) -> float:
    """How much masked text tokens reach the output, over the output."""
    model = transformer("qwen")
    before = inputs("qwen", 25, batch=2)
    after = {**before, "encoder_hidden_states": before["encoder_hidden_states"].clone()}
    after["encoder_hidden_states"][-1, 3:] += 5.0
    with Parallel(bare_pipe(model), config(layout)):
        return relative_error(run(model, after), run(model, before))


@pytest.mark.parametrize("layout", LAYOUTS[2])
def test_masked_text_tokens_reach_nothing(pool2: RankPool, layout: tuple[int, int]) -> None:
    assert max(pool2.run(effect_of_padding, layout)) < 1e-6


def traffic(kind: str, layout: tuple[int, int], masked: bool = True) -> tuple[dict[str, int], dict[str, int]]:
    model = transformer(kind)
    arguments = inputs(kind, 24, text=8, batch=2)
    if not masked:
        arguments.pop("encoder_hidden_states_mask", None)
    with Parallel(bare_pipe(model), config(layout)), recorded() as recorder:
        run(model, arguments)
    return dict(recorder.calls), dict(recorder.elements)


SPANNING = {"flux": 4, "sd3": 4, "qwen": 2, "wan": 2, "wan_i2v": 2}


@pytest.mark.parametrize("kind", SPANNING)
def test_an_attention_takes_two_all_to_alls_and_cross_attention_none(pool2: RankPool, kind: str) -> None:
    for calls, _ in pool2.run(traffic, kind, (2, 1)):
        assert calls == {"all_to_all": 2 * SPANNING[kind], "all_gather": 1}


@pytest.mark.parametrize("kind", SPANNING)
def test_a_ring_of_r_sends_at_most_twice_r_minus_one(pool4: RankPool, kind: str) -> None:
    for calls, _ in pool4.run(traffic, kind, (1, 4)):
        assert set(calls) == {"ring", "all_gather"} and calls["all_gather"] == 1
        assert calls["ring"] <= 2 * (4 - 1) * SPANNING[kind]


@pytest.mark.parametrize("layout", LAYOUTS[2])
def test_a_mask_adds_no_collective(pool2: RankPool, layout: tuple[int, int]) -> None:
    masked = pool2.run(traffic, "qwen", layout, True)
    assert [calls for calls, _ in masked] == [calls for calls, _ in pool2.run(traffic, "qwen", layout, False)]


def test_bytes_sent_are_those_of_the_formulas(pool2: RankPool, pool4: RankPool) -> None:
    """DESIGN 12, per rank: ulysses L*4Sh/N*(N-1)/N, ring L*2Sh*(N-1)/N. Flux: S = 24 + 8, h = 96, L = 4, batch 2."""
    whole = 2 * (24 + 8) * 96
    for calls, elements in pool2.run(traffic, "flux", (2, 1)):
        assert elements["all_to_all"] == 4 * (4 * whole // 2) * 1 // 2, calls
    for _, elements in pool4.run(traffic, "flux", (1, 4)):
        assert elements["ring"] == 4 * (2 * whole) * 3 // 4
    for _, elements in pool4.run(traffic, "wan", (1, 4)):
        assert elements["ring"] == 2 * (2 * 2 * 24 * 72) * 3 // 4
