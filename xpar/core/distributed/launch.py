"""The process group that a rank grid starts from: the caller's, one that torchrun has prepared, or none."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from xpar.config import EngineConfig
from xpar.core.distributed.operations import named
from xpar.errors import CommTimeoutError, ConfigError

_PR_SET_PDEATHSIG = 1  # of prctl(2)

# What torchrun sets for each process, and what init_process_group reads.
_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_initialized() -> bool:
    """Whether this process is in a torch.distributed world already."""
    return dist.is_available() and dist.is_initialized()


def is_launched() -> bool:
    """Whether a launcher such as torchrun has said how to join a world of more than one process."""
    return all(os.environ.get(name) for name in _LAUNCH_VARIABLES) and os.environ["WORLD_SIZE"] != "1"


def start(config: EngineConfig, device: torch.device | None) -> None:
    """Initialise the default process group from the launcher's environment.

    It stays until the process ends or the script calls `destroy_process_group`. To destroy it with the grid
    that needed it first would pull it from under later grids, and it could not be made again: a second
    initialisation finds the addresses of the first one in torchrun's store and hangs (seen with gloo).

    Args:
        config: gives the time-out; every communication of the default group obeys it.
        device: where the pipeline lives; picks nccl (cuda) or gloo (cpu). None: cuda where there is one.

    Raises:
        ConfigError: nothing has launched more than one process, or the address is in use.
        CommTimeoutError, PeerFailedError: not all processes came, or one left.
    """
    if not is_launched():
        raise ConfigError(
            f"the degrees ask for {config.world_size} processes but this is a single one with no process group; "
            f"launch with `torchrun --nproc_per_node={config.world_size} script.py`, or call "
            f"torch.distributed.init_process_group before Parallel"
        )
    _end_with_launcher()
    backend = _backend(device)
    timeout = timedelta(seconds=config.timeout)
    with named("the start of the default group"):
        _initialise(backend, config, timeout)


def _initialise(backend: str, config: EngineConfig, timeout: timedelta) -> None:
    try:
        dist.init_process_group(backend, timeout=timeout, **_store_of_attempt(timeout))
    except dist.DistNetworkError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise ConfigError(
            f"MASTER_ADDR:MASTER_PORT={address}: cannot be used ({error}); "
            f"choose a free port, or `torchrun --standalone` on one machine"
        ) from error
    except dist.DistStoreError as error:
        raise CommTimeoutError(
            f"timeout={config.timeout}: not all of WORLD_SIZE={os.environ['WORLD_SIZE']} processes joined ({error})"
        ) from error


def _store_of_attempt(timeout: timedelta) -> dict[str, Any]:
    """Arguments that keep the second attempt of `torchrun --max-restarts` from what the first has left in the store.

    torchrun keeps its store over the attempts (torch 2.13), so that a second initialisation connects to addresses of
    processes that have ended.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*address, world_size, is_master=False, timeout=timeout)
    return {"store": PrefixStore(f"xpar/attempt {attempt}", store), "rank": rank, "world_size": world_size}


def _end_with_launcher() -> None:
    """Have this process get SIGTERM when torchrun dies, which cannot tell its processes if it is killed itself.

    Only a process that torchrun has made (each leads a session) does so: the signal follows the end of the thread that
    made the process, and whoever else made one may have done it on a thread of short life.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ or os.getsid(0) != os.getpid():
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it has died meanwhile, so no signal will come
        os.kill(os.getpid(), signal.SIGTERM)


def _backend(device: torch.device | None) -> str:
    """The backend that moves tensors of `device`; binds this process to its GPU where that is still open."""
    if device is not None and device.type == "cpu":
        return "gloo"
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return "gloo"
    index = device.index if device is not None else None
    if index is None and os.environ.get("LOCAL_RANK"):
        index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    if index is not None:
        # nccl talks from the current device: left at 0, all processes of a node would share one GPU.
        torch.cuda.set_device(index)
    return "nccl"
