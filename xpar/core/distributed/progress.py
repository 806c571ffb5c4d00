"""How far a rank's call is."""

from dataclasses import dataclass

from xpar.core.distributed.call_agreement import CallHeader

__all__ = ["Progress"]


@dataclass
class Progress:
    """Written by the call, read by whoever has to say where it was."""

    call: int = 0
    """Number of the call."""
    phase: str = "arguments"
    """What it is doing."""
    step: int = 0
    """Scheduler steps done."""
    header: CallHeader | None = None
    """What the call is, once it is known."""
