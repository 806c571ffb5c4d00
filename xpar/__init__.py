"""xpar: one diffusers pipeline on many devices.

    parallel = Parallel(pipe, EngineConfig(ulysses_degree=4, pipefusion_degree=2))
    image = parallel(prompt="a red fox").images[0]

Names are loaded on first use, so that `import xpar` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from xpar.version import __version__

if TYPE_CHECKING:
    from xpar.config import EngineConfig
    from xpar.errors import (
        CommTimeoutError,
        ConfigError,
        NonFiniteError,
        PeerFailedError,
        RankMismatchError,
        UnsupportedError,
        XparError,
    )
    from xpar.loading import load_pipeline
    from xpar.parallel import Parallel
    from xpar.wrappers.vae import parallel_vae

__all__ = [
    "CommTimeoutError",
    "ConfigError",
    "EngineConfig",
    "NonFiniteError",
    "Parallel",
    "PeerFailedError",
    "RankMismatchError",
    "UnsupportedError",
    "XparError",
    "__version__",
    "load_pipeline",
    "parallel_vae",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'xpar' has no attribute {name!r}")
    homes = {
        "EngineConfig": "xpar.config",
        "Parallel": "xpar.parallel",
        "load_pipeline": "xpar.loading",
        "parallel_vae": "xpar.wrappers.vae",
    }
    home = homes.get(name, "xpar.errors")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
