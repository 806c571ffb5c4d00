"""One local Ray cluster for all tests of this folder."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Room for two groups of two actors and for two more, one CPU each; Ray counts CPUs, it need not find them."""
    ray = pytest.importorskip("ray")
    # The cluster's processes take these from here. A busy machine may need longer than Ray gives a new process.
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_worker_register_timeout_seconds": "120", "RAY_gcs_server_request_timeout_seconds": "120"}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    options = dict(include_dashboard=False, object_store_memory=100 * 1024**2, log_to_driver=False)
    for attempt in range(3):  # Ray gives up by itself where its own processes take long to start, as on a busy machine
        try:
            ray.init(address="local", num_cpus=6, **options)
            break
        except (RuntimeError, TimeoutError, ConnectionError, ray.exceptions.RayError):
            ray.shutdown()
            if attempt == 2:
                raise
    yield
    ray.shutdown()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
