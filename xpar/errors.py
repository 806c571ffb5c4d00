"""The errors that xpar raises; every one of them is an `XparError`."""

__all__ = [
    "CommTimeoutError",
    "ConfigError",
    "NonFiniteError",
    "PeerFailedError",
    "RankMismatchError",
    "UnsupportedError",
    "XparError",
]


class XparError(Exception):
    """Base of all errors raised by xpar."""


class ConfigError(XparError, ValueError):
    """A field, an argument or the launch does not fit; the text names the value, the rule and the fix."""


class UnsupportedError(XparError, NotImplementedError):
    """What was asked for cannot be done right (a model, a mask, a backend), so it is refused by name."""


class RankMismatchError(XparError, RuntimeError):
    """The ranks were called with different arguments; the text names the field and the values by rank."""


class PeerFailedError(XparError, RuntimeError):
    """Another rank raised or died; the text quotes its error where it could leave one."""


class CommTimeoutError(XparError, RuntimeError):
    """A communication did not end within `EngineConfig.timeout`."""


class NonFiniteError(XparError, RuntimeError):
    """A result holds NaN or infinity."""
