"""What a user sets: `EngineConfig`, and the command-line flags generated from it."""

from xpar.config.engine_config import EngineConfig

__all__ = ["EngineConfig"]
