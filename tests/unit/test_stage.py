"""Stages: balance of their cost, and weights that can be freed."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.tiny_models import transformer
from xpar.errors import ConfigError, UnsupportedError
from xpar.wrappers.layers.stage import FreedBlock, Stage, balance, block_cost, check_freeable
from xpar.wrappers.models import find_plan


@given(st.lists(st.floats(0.5, 4.0), min_size=1, max_size=24), st.data())
def test_no_cut_has_a_smaller_greatest_cost(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, min(4, len(costs))))
    bounds = balance(costs, stages)
    assert bounds[0] == 0 and bounds[-1] == len(costs) and all(a < b for a, b in itertools.pairwise(bounds))

    def worst(candidate: tuple[int, ...]) -> float:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(candidate))

    for index in range(1, stages):  # moving any one boundary does not help
        for step in (-1, 1):
            other = (*bounds[:index], bounds[index] + step, *bounds[index + 1 :])
            if all(a < b for a, b in itertools.pairwise(other)):
                assert worst(other) >= worst(bounds) - 1e-9


def test_equal_blocks_leave_no_stage_with_one_block_of_many() -> None:
    assert balance([1.0] * 57, 8)[-1] == 57
    sizes = [b - a for a, b in zip(balance([1.0] * 57, 8), balance([1.0] * 57, 8)[1:], strict=False)]
    assert max(sizes) == 8 and min(sizes) >= 1 and sum(sizes) == 57
    assert balance([1.0] * 12, 2) == (0, 6, 12)


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pipefusion_degree\(5\) is more than the 4 blocks"):
        balance([1.0] * 4, 5)


def test_a_token_costs_the_same_in_flux_double_and_single_blocks() -> None:
    model = transformer("flux")
    plan = find_plan(model)
    double = block_cost(model.transformer_blocks[0], plan)
    single = block_cost(model.single_transformer_blocks[0], plan)
    assert double == single == 12 * 96 * 96


def test_dual_attention_makes_an_sd3_block_dearer() -> None:
    model = transformer("sd3")
    plan = find_plan(model)
    dual, plain, last = (block_cost(block, plan) for block in model.transformer_blocks)
    assert dual > plain > last


def test_a_stage_knows_its_blocks() -> None:
    stage = Stage(1, (0, 3, 5, 9))
    assert [stage.owns(index) for index in range(6)] == [False, False, False, True, True, False]
    assert [stage.owner(index) for index in (0, 2, 3, 8)] == [0, 0, 1, 2]
    assert not stage.is_last and Stage(2, (0, 3, 5, 9)).is_last
    with pytest.raises(ConfigError, match="no neighbour"):
        stage.send({"x": torch.zeros(1)}, "the sequence")


def test_a_freed_block_keeps_its_keys_and_survives_a_move() -> None:
    root = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    keys = list(root.state_dict())
    freed = FreedBlock(root[1])
    root.to(torch.float64)
    assert list(root.state_dict()) == keys and root[0].weight.dtype == torch.float64
    assert all(tensor.is_meta for tensor in root[1].state_dict().values())
    freed.allocate()
    assert not any(tensor.is_meta for tensor in root[1].state_dict().values())
    assert "_apply" not in vars(root[1])


def test_weights_that_are_no_plain_parameters_are_not_freed() -> None:
    class Quantised(nn.Parameter):
        def __new__(cls, data: torch.Tensor) -> Any:
            return torch.Tensor._make_subclass(cls, data, False)

    block = nn.Linear(2, 2)
    block.weight = Quantised(torch.zeros(2, 2))
    with pytest.raises(UnsupportedError, match=r"transformer\.blocks\.0\.weight is a Quantised"):
        check_freeable("transformer.blocks.0", block)
