"""Pools of gloo ranks, started when a test first uses one and ended with the session."""

from collections.abc import Iterator

import pytest

from tests.dist.pool import RankPool


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
