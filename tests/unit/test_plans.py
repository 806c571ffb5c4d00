"""Plans fit their transformers, or are refused by name."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.tiny_models import KINDS, bare_pipe, inputs, pipeline, relative_error, transformer
from xpar import EngineConfig, Parallel
from xpar.errors import ConfigError, UnsupportedError
from xpar.wrappers.models import ModelPlan, Tokens, find_plan

PATCHED = EngineConfig(num_patches=3, warmup_steps=0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_plan_that_fits(kind: str) -> None:
    model = transformer(kind)
    plan = find_plan(model)
    assert len(plan.block_modules(model)) >= 2
    assert all(list(plan.attention_modules(block)) for _, block in plan.block_modules(model))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"blocks": ("no_blocks",)}, "has no module 'no_blocks'"),
        ({"blocks": ("norm_out.norm",)}, "hold no block"),
        ({"streams": ("hidden", "encoder_hidden_states")}, r"streams \['hidden'\] of the plan are no arguments"),
        ({"attention": {}}, "names no attention"),
        ({"attention": {"attention": ("hidden_states",)}}, r"attention patterns \['attention'\]"),
        ({"per_token": {"rope": Tokens(dim=0, streams=("hidden_states",))}}, r"per_token \['rope'\]"),
        ({"masks": {"mask": "hidden_states"}}, r"masks \['mask'\]"),
        ({"inputs": {"residual": Tokens(dim=1, streams=("hidden_states",))}}, r"inputs \['residual'\]"),
        ({"head": "no_head"}, "has no module 'no_head'"),
    ],
)
def test_a_plan_key_that_matches_nothing_is_refused(change: dict[str, Any], text: str) -> None:
    model = transformer("flux")
    plan = replace(find_plan(model), **change)
    with pytest.raises(UnsupportedError, match=text):
        Parallel(bare_pipe(model), PATCHED, plans={type(model): plan})


def test_an_unknown_transformer_is_refused_by_name_with_the_way_to_pass_a_plan() -> None:
    class MyTransformer(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states

    with pytest.raises(UnsupportedError, match=r"no plan is known for MyTransformer.*plans=\{MyTransformer: ModelPlan"):
        Parallel(bare_pipe(MyTransformer()), PATCHED)


def test_a_subclass_keeps_the_plan_only_with_the_forward() -> None:
    model = transformer("wan")
    plan = find_plan(model)

    class Renamed(type(model)):  # type: ignore[misc]
        pass

    class Rewritten(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model.__class__ = Renamed
    assert find_plan(model) is plan
    model.__class__ = Rewritten
    with pytest.raises(UnsupportedError, match="no plan is known for Rewritten"):
        find_plan(model)
    assert find_plan(model, {Rewritten: plan}) is plan


@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [
        ("wan", {"per_token": {"rotary_emb": Tokens(dim=3, streams=("hidden_states",))}}, "rotary_emb of shape"),
        ("qwen", {"per_token": {"image_rotary_emb": (Tokens(dim=0, streams=("hidden_states",)),)}}, "a tuple of 1"),
        ("wan", {"streams": ("temb",), "returns": ("temb",)}, r"stream temb must be a \[B, S, C\] tensor"),
        ("wan", {"returns": ("hidden_states", "encoder_hidden_states")}, "returned 1 values"),
    ],
)
def test_a_tensor_that_does_not_fit_the_plan_raises(kind: str, change: dict[str, Any], text: str) -> None:
    model = transformer(kind)
    plan: ModelPlan = replace(find_plan(model), **change)
    arguments = inputs("wan_ti2v" if "streams" in change else kind)
    with (
        Parallel(bare_pipe(model), EngineConfig(num_patches=2), plans={type(model): plan}),
        pytest.raises(UnsupportedError, match=text),
    ):
        model(**arguments)


def test_more_patches_than_tokens_are_refused() -> None:
    model = transformer("flux")
    with (
        Parallel(bare_pipe(model), EngineConfig(num_patches=25)),
        pytest.raises(UnsupportedError, match=r"num_patches\(25\) is more than the 24 tokens"),
    ):
        model(**inputs("flux"))


def test_a_wrapped_transformer_called_alone_runs_whole() -> None:
    for kind in KINDS:
        model, arguments = transformer(kind), inputs(kind, 25, batch=2)
        expected = model(**arguments, return_dict=False)[0]
        with Parallel(bare_pipe(model), PATCHED):
            assert relative_error(model(**arguments).sample, expected) < 1e-6


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Parallel(pipeline("flux"), {"ulysses_degree": 2}), "config must be an EngineConfig, got dict"),
        (lambda: Parallel(object(), EngineConfig()), "object is no diffusers pipeline"),
        (lambda: Parallel(pipeline("flux"), EngineConfig(cfg_degree=2)), "2 processes but this is a single one"),
        (lambda: Parallel(pipeline("flux"), EngineConfig(ulysses_degree=2)), "2 processes but this is a single one"),
    ],
)
def test_what_cannot_be_wrapped_is_refused_at_once(make: Any, text: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=text):
        make()


def test_pipelines_that_would_go_wrong_are_refused() -> None:
    pipe = pipeline("flux")
    pipe.hf_device_map = {"transformer": 0}
    with pytest.raises(UnsupportedError, match="device_map"):
        Parallel(pipe, PATCHED)
    pipe = bare_pipe(transformer("flux"))
    pipe.controlnet = object()
    with pytest.raises(UnsupportedError, match="ControlNet"):
        Parallel(pipe, PATCHED)
    pipe = bare_pipe(transformer("flux"))
    pipe.components = {"unet": pipe.transformer}
    with pytest.raises(UnsupportedError, match="has no transformer component"):
        Parallel(pipe, PATCHED)
    pipe = bare_pipe(transformer("flux").to("meta"))
    with pytest.raises(UnsupportedError, match="meta device"):
        Parallel(pipe, PATCHED)


class Stack(torch.nn.Module):
    """A transformer of the user's own: two linear blocks, of which either may be skipped."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = torch.nn.Identity()
            self.mix = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return x + self.mix(x) * scale

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Stack.Block(), Stack.Block()])

    def forward(self, x: torch.Tensor, scale: torch.Tensor, skip: tuple[int, ...] = ()) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index not in skip:
                x = block(x, scale)
        return x


STACK = ModelPlan(
    blocks=("blocks",),
    streams=("x",),
    returns=("x",),
    attention={"attn": ("x",)},
    per_token={"scale": Tokens(dim=1, streams=("x",))},
)


def test_a_plan_of_ones_own_runs_patch_by_patch() -> None:
    model = Stack().requires_grad_(False)
    x, scale = torch.randn(2, 7, 4), torch.randn(2, 7, 4)
    expected = model(x, scale)
    with Parallel(bare_pipe(model), PATCHED, plans={Stack: STACK}):
        assert torch.equal(model(x, scale), expected)


@pytest.mark.parametrize(("skip", "which"), [((1,), "last"), ((0, 1), "first")])
def test_a_forward_that_skips_the_block_at_an_end_is_refused(skip: tuple[int, ...], which: str) -> None:
    model = Stack()
    with (
        Parallel(bare_pipe(model), PATCHED, plans={Stack: STACK}),
        pytest.raises(UnsupportedError, match=f"did not run its {which} block"),
    ):
        model(torch.randn(2, 7, 4), torch.randn(2, 7, 4), skip)


def test_without_a_plan_only_a_forward_that_names_its_inputs_can_share_branches() -> None:
    class Opaque(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return args

    with pytest.raises(UnsupportedError, match="Opaque does not name its inputs"):
        ModelPlan.of_branches(Opaque())
    assert ModelPlan.of_branches(Stack()).batch == ("x",)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"batch": ()}, "missing"),
        ({"batch": ("hidden_states",)}, "missing:.*timestep"),
        ({"unbatched": ("no_such",)}, "not there: \\['no_such'\\]"),
    ],
)
def test_a_plan_must_say_which_arguments_have_rows(change: dict[str, Any], text: str) -> None:
    model = transformer("wan")
    with pytest.raises(UnsupportedError, match=text):
        replace(find_plan(model), **change).check_batch(model)
    for kind in KINDS:
        find_plan(transformer(kind)).check_batch(transformer(kind))
