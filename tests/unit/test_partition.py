import itertools

import pytest

from xpar.core.partition import share, shares
from xpar.errors import ConfigError

CASES = [(total, parts) for total in (0, 1, 3, 24, 25, 4097) for parts in (1, 2, 3, 4, 7, 64)]


@pytest.mark.parametrize(("total", "parts"), CASES)
def test_shares_cover_everything_and_differ_by_at_most_one(total: int, parts: int) -> None:
    sizes = shares(total, parts)
    assert len(sizes) == parts
    assert sum(sizes) == total
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(("total", "parts"), CASES)
def test_share_is_the_run_that_shares_describes(total: int, parts: int) -> None:
    bounds = [share(total, parts, index) for index in range(parts)]
    assert [stop - start for start, stop in bounds] == shares(total, parts)
    assert bounds[0][0] == 0
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(bounds))


@pytest.mark.parametrize(("total", "parts"), [(-1, 2), (4, 0), (4, -1)])
def test_impossible_shares_are_refused(total: int, parts: int) -> None:
    with pytest.raises(ConfigError, match=rf"total={total} over parts={parts}"):
        shares(total, parts)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_part_that_does_not_exist_is_refused(index: int) -> None:
    with pytest.raises(ConfigError, match=rf"index={index} is not one of 2 parts"):
        share(4, 2, index)
