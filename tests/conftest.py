"""Pools of gloo ranks, started when a test first uses one and ended with the session."""

import os
from collections.abc import Iterator

import pytest

from tests.dist.pool import RankPool

# Tiny models on two threads wait for each other longer than they compute; set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _pool(size: int) -> Iterator[RankPool]:
    pool = RankPool(size)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool2() -> Iterator[RankPool]:
    """Two ranks."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def pool3() -> Iterator[RankPool]:
    """Three ranks."""
    yield from _pool(3)


@pytest.fixture(scope="session")
def pool4() -> Iterator[RankPool]:
    """Four ranks."""
    yield from _pool(4)
