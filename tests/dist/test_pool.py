"""The pool itself: failures of ranks are failures of the test, inside a bound, and leave nothing behind."""

import os
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.dist.pool import PoolError, RankPool, RemoteError


@pytest.fixture(scope="module")
def own_pool() -> Iterator[RankPool]:
    """A pool that these tests may break."""
    pool = RankPool(2)
    yield pool
    pool.close()


def rank_and(x: Any) -> Any:
    return dist.get_rank(), x


def raise_everywhere() -> None:
    raise KeyError("everywhere")


def raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("only here")
    dist.barrier()


def sleep_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier()


def exit_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def pids() -> int:
    return os.getpid()


def test_results_come_back_by_rank(own_pool: RankPool) -> None:
    results = own_pool.run(rank_and, torch.ones(2))
    assert [rank for rank, _ in results] == [0, 1]
    assert all(torch.equal(x, torch.ones(2)) for _, x in results)


def test_an_error_of_every_rank_is_raised_and_the_pool_lives_on(own_pool: RankPool) -> None:
    before = own_pool.run(pids)
    with pytest.raises(KeyError, match="everywhere") as caught:
        own_pool.run(raise_everywhere)
    assert isinstance(caught.value.__cause__, RemoteError)
    assert "in raise_everywhere" in str(caught.value.__cause__)
    assert own_pool.run(pids) == before


@pytest.mark.parametrize(
    ("fn", "error", "text"),
    [
        (raise_on_one, ValueError, "only here"),
        (sleep_on_one, PoolError, r"(?s)did not return from sleep_on_one in time.*in sleep_on_one"),
        # the other rank may see the broken connection, and say so, before the end of this one is seen
        (exit_on_one, RuntimeError, r"rank 1 of 2 died in exit_on_one \(exit code 3\)|Connection"),
    ],
)
def test_a_rank_that_fails_alone_ends_all_in_time_and_the_pool_is_rebuilt(
    own_pool: RankPool, fn: Any, error: type[Exception], text: str
) -> None:
    before = own_pool.run(pids)
    start = time.monotonic()
    with pytest.raises(error, match=text):
        own_pool.run(fn, timeout=2)
    assert time.monotonic() - start < 10
    assert not any(psutil.pid_exists(pid) for pid in before)
    assert own_pool.run(rank_and, 5) == [(0, 5), (1, 5)]


def test_close_leaves_no_process(own_pool: RankPool) -> None:
    started = own_pool.run(pids)
    own_pool.close()
    assert not any(psutil.pid_exists(pid) for pid in started)
