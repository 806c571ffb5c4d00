"""Ulysses, ring and both give what one process gives, on every rank, for the four families."""

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

from tests.dist.pool import RankPool
from tests.dist.recorder import recorded
from tests.tiny_models import KINDS, bare_pipe, inputs, randomise, relative_error, transformer
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
    [
        ("flux", "hidden_states"),
        ("flux", "encoder_hidden_states"),
        ("sd3", "encoder_hidden_states"),
        ("wan", "hidden_states"),
    ],
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


def with_residuals(kind: str) -> dict[str, Any]:
    """Arguments with ControlNet residuals, of which the last is added after the last block."""
    arguments = inputs(kind, 25, batch=2)
    draw = torch.Generator().manual_seed(4)
    width = {"flux": 96, "sd3": 48, "qwen": 96}[kind]
    residuals = [torch.randn(2, 25, width, generator=draw) for _ in range(2)]
    if kind == "flux":
        more = {"controlnet_block_samples": residuals[:1], "controlnet_single_block_samples": residuals}
    elif kind == "sd3":
        more = {"block_controlnet_hidden_states": residuals}
    else:
        more = {"controlnet_block_samples": residuals}
    return {**arguments, **more}


def residuals_against_whole(kind: str, layout: tuple[int, int]) -> float:
    model, arguments = transformer(kind), with_residuals(kind)
    whole, without = run(model, arguments), run(model, inputs(kind, 25, batch=2))
    assert relative_error(without, whole) > 0.1
    with Parallel(bare_pipe(model), config(layout)):
        return relative_error(run(model, arguments), whole)


@pytest.mark.parametrize("layout", LAYOUTS[2])
@pytest.mark.parametrize("kind", ["flux", "sd3", "qwen"])
def test_controlnet_residuals_are_cut_like_the_tokens(pool2: RankPool, kind: str, layout: tuple[int, int]) -> None:
    assert max(pool2.run(residuals_against_whole, kind, layout)) < 1e-5


def ip_adapter_against_whole(layout: tuple[int, int], load_after: bool) -> tuple[float, bool]:
    model = transformer("flux")
    arguments = inputs("flux", 25, batch=2)
    arguments["joint_attention_kwargs"] = {"ip_hidden_states": [torch.ones(2, 4, 32)]}
    processors = {
        name: randomise(FluxIPAdapterAttnProcessor(96, 32, num_tokens=(4,), scale=1.0))
        if name.startswith("transformer_blocks")
        else processor
        for name, processor in model.attn_processors.items()
    }
    if not load_after:
        model.set_attn_processor(processors)
    parallel = Parallel(bare_pipe(model), config(layout))
    if load_after:
        model.set_attn_processor(dict(processors))
    keys = list(model.state_dict())
    shared = run(model, arguments)
    parallel.close()
    return relative_error(shared, run(model, arguments)), list(model.state_dict()) == keys


@pytest.mark.parametrize("load_after", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS[2])
def test_ip_adapter_processors_survive_loaded_before_or_after(
    pool2: RankPool, layout: tuple[int, int], load_after: bool
) -> None:
    for error, same_keys in pool2.run(ip_adapter_against_whole, layout, load_after):
        assert error < 1e-5 and same_keys


def refusals() -> list[str]:
    """What the ranks say of attention, blocks and configurations that cannot be split right."""

    class OwnAttention:
        def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return hidden_states

    def text_of(action: Any) -> str:
        try:
            action()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was refused"

    own = transformer("wan")
    own.blocks[0].attn1.set_processor(OwnAttention())
    other = transformer("sd3")
    texts = []
    with Parallel(bare_pipe(own), config((2, 1))):
        texts.append(text_of(lambda: run(own, inputs("wan"))))
    with Parallel(bare_pipe(other), config((2, 1))) as parallel:
        texts.append(text_of(lambda: Parallel(bare_pipe(other), config((1, 2)))))
        texts.append(text_of(lambda: other.transformer_blocks[0](1, 2, 3)))
        parallel.close()
        texts.append(text_of(lambda: parallel()))
    return texts


def test_what_cannot_be_split_right_is_refused_by_name(pool2: RankPool) -> None:
    expected = [
        "UnsupportedError: blocks.0.attn1 reached F.scaled_dot_product_attention 0 times",
        "UnsupportedError: transformer is wrapped already; close() the other Parallel object first",
        "UnsupportedError: a block of a wrapped transformer can only run inside the transformer's forward",
        "XparError: this Parallel object is closed",
    ]
    for texts in pool2.run(refusals):
        for text, start in zip(texts, expected, strict=True):
            assert text.startswith(start)


def skipped(layers: list[int]) -> float:
    model, arguments = transformer("sd3", layers=3), {**inputs("sd3"), "skip_layers": layers}
    whole = run(model, arguments)
    with Parallel(bare_pipe(model), config((2, 1))):
        return relative_error(run(model, arguments), whole)


@pytest.mark.parametrize("layers", [[0], [1], [3], [0, 3]])
def test_any_block_may_be_skipped(pool2: RankPool, layers: list[int]) -> None:
    assert max(pool2.run(skipped, layers)) < 1e-5
