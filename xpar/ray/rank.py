"""`Rank`: what one Ray actor does. Everything here runs inside the actor."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any

import ray
import ray.cloudpickle

from xpar.config import EngineConfig
from xpar.errors import ConfigError, XparError

if TYPE_CHECKING:
    from xpar.parallel import Parallel


def _portable(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have `method` raise only errors that survive the way to the driver.

    Errors whose constructor takes other arguments than their text (several of huggingface_hub's) can be pickled but
    not built again; Ray then reports a broken system in place of the error.
    """

    @wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # noqa: BLE001 - whatever the error's own constructor raises
                raise XparError(f"{type(error).__name__}: {error}") from error
            raise

    return guarded


class Rank:
    """One rank of one process group: builds the pipeline, joins the group, serves calls.

    Building comes before joining, so that a rank that loads slowly, or not at all, keeps no other rank waiting in a
    collective.
    """

    def __init__(self, rank: int, config: EngineConfig) -> None:
        self._rank, self._config = rank, config
        self._pipe: Any = None
        self._plans: Any = None
        self._store: Any = None  # a TCPStore
        self._parallel: Parallel | None = None

    def where(self) -> tuple[str, int]:
        """Address of this node and id of this process."""
        return ray.util.get_node_ip_address(), os.getpid()

    @_portable
    def build(self, recipe: bytes) -> None:
        """Build the stock pipeline.

        Args:
            recipe: pickled pair of the user's `build` and `plans`.
        """
        import torch

        build, self._plans = ray.cloudpickle.loads(recipe)
        if ray.get_gpu_ids():
            torch.cuda.set_device(0)  # Ray shows an actor its own GPU only
        self._pipe = build()
        device = torch.device(self._pipe._execution_device)
        if ray.get_gpu_ids() and device.type == "cpu":
            raise ConfigError(
                "build: returned a pipeline on the CPU, but num_gpus=1 gives each rank a GPU that would stand idle; "
                'end it with .to("cuda"), or pass num_gpus=0'
            )

    @_portable
    def open_store(self) -> tuple[str, int]:
        """Open the store at which the ranks of the group meet, on a free port of this node.

        The store itself finds the port: one that was looked up before could be taken by the time it is used.
        """
        host = ray.util.get_node_ip_address()
        self._store = self._connect(host, 0)
        return host, self._store.port

    @_portable
    def join(self, address: tuple[str, int] | None) -> None:
        """Join the process group and wrap the pipeline.

        Args:
            address: of the store of rank 0; None for a group of one, which needs no torch.distributed.
        """
        from xpar.parallel import Parallel

        if address is not None:
            import torch.distributed as dist

            store = self._store or self._connect(*address)
            dist.init_process_group(
                "nccl" if self._pipe._execution_device.type == "cuda" else "gloo",
                store=store,
                rank=self._rank,
                world_size=self._config.world_size,
                timeout=timedelta(seconds=self._config.timeout),
            )
        self._parallel = Parallel(self._pipe, self._config, plans=self._plans)

    @_portable
    def call(self, arguments: bytes) -> bytes | None:
        """Call the pipeline with pickled keyword arguments.

        Returns:
            The pickled output on rank 0, with tensors on the CPU; None on the others: they hold the same.
        """
        output = self._wrapped()(**ray.cloudpickle.loads(arguments))
        if self._rank:
            return None
        import torch
        from torch.utils._pytree import tree_map_only

        # The driver may have no GPU.
        return bytes(ray.cloudpickle.dumps(tree_map_only(torch.Tensor, torch.Tensor.cpu, output)))

    @_portable
    def check_usable(self) -> None:
        """Raise `XparError` unless the wrapped pipeline can serve another call."""
        self._wrapped().check_usable()

    def _wrapped(self) -> Parallel:
        if self._parallel is None:
            raise XparError("this rank has not joined its group")
        return self._parallel

    def _connect(self, host: str, port: int) -> Any:
        import torch.distributed as dist

        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            self._config.world_size,
            is_master=self._rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._config.timeout),
        )
