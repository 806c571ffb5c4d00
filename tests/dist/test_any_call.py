"""Whatever is asked for, within the law or not quite: the ranks give what one process gives, or refuse alike."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.dist.pool import RankPool
from tests.random_calls import Case, answer, draw_case
from tests.tiny_models import relative_error

# Drawn by seed, so that a failing example can be run again by its number.
seeds = st.integers(0, 10**6)
quick = settings(max_examples=24, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def ranks_answer(case: Case) -> torch.Tensor | str:
    return answer(case, case.fields)


def check(pool: RankPool, case: Case) -> bool:
    """Whether the call was computed (else it was refused, by all ranks)."""
    answers = pool.run(ranks_answer, case, timeout=60)
    if any(isinstance(value, str) for value in answers):
        assert all(isinstance(value, str) for value in answers), (case, answers)
        return False
    expected = answer(case, case.reference_fields)
    assert not isinstance(expected, str), (case, expected)
    for value in answers:
        assert torch.equal(value, answers[0]), case
        assert value.shape == expected.shape, case
        assert relative_error(value.float(), expected.float()) < 2e-5, case
    return True


@pytest.mark.timeout(600)
def test_two_ranks_are_right_or_refuse(pool2: RankPool) -> None:
    computed = []

    @quick
    @given(seeds)
    def example(seed: int) -> None:
        computed.append(check(pool2, draw_case(random.Random(seed), 2)))

    example()
    assert sum(computed) > len(computed) / 2, "most of what is drawn is legal"


@pytest.mark.timeout(600)
def test_four_ranks_are_right_or_refuse(pool4: RankPool) -> None:
    computed = []

    @settings(quick, max_examples=10)
    @given(seeds)
    def example(seed: int) -> None:
        computed.append(check(pool4, draw_case(random.Random(seed), 4)))

    example()
    assert any(computed)
