"""The errors that xpar raises; every one of them is an `XparError`."""

__all__ = [
    "AgreedError",
    "CallCancelledError",
    "CommError",
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


class AgreedError(XparError, RuntimeError):
    """Base of errors that all ranks raise together, at the same place: nothing is under way, so calls may follow."""


class RankMismatchError(AgreedError):
    """The ranks were called with different arguments; the text names the field and the values by rank."""


class NonFiniteError(AgreedError):
    """Latents hold NaN or infinity; the text names the step, the stage and the ranks where they began."""


class CallCancelledError(AgreedError):
    """`Parallel.cancel` was called, on this rank or another; the text names the step at which all ranks stopped."""


class CommError(XparError, RuntimeError):
    """Base of errors after which the ranks are no longer in step: the object that raised one cannot be called again."""

    operation = ""
    """What was being communicated, and with whom."""
    place = ""
    """The layer that it was for, where there was one."""


class PeerFailedError(CommError):
    """Another rank raised or died; the text quotes its error where it could leave one."""


class CommTimeoutError(CommError):
    """A communication did not end within `EngineConfig.timeout`."""
