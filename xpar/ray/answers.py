"""What the ranks of a group answered, and who is at fault when some of them failed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xpar.errors import CommError, CommTimeoutError, PeerFailedError


@dataclass(frozen=True, slots=True)
class Answer:
    """How one rank ended: with a value, with an error, dead, or not at all in time."""

    rank: str
    """Its number, process and node, for messages."""

    value: Any = None
    """What it returned."""

    error: Exception | None = None
    """What it raised; for a dead or silent rank what is known about that."""

    lost: bool = False
    """Whether it died or did not answer in time."""

    @property
    def text(self) -> str:
        """One line that tells what happened to the rank."""
        if self.error is None:
            return f"{self.rank} returned"
        about = " ".join(str(self.error).split())
        if self.lost:
            # Ray's text begins with ids of its own and ends with guesses.
            about = re.sub(r"^.*?(?=The actor is dead because)|\s*Some common causes include.*", "", about)
            return f"{self.rank} {'gave no answer' if isinstance(self.error, CommTimeoutError) else 'died'}: {about}"
        return f"{self.rank} raised {type(self.error).__name__}: {about}"


def result(name: str, answers: Sequence[Answer]) -> Any:
    """The value of the first rank if all ranks returned.

    Args:
        name: of the group, for messages.
        answers: one of each rank, in their order.

    Raises:
        PeerFailedError, CommTimeoutError: the group is at fault: a rank died, gave no answer, failed alone, or the
            ranks failed in communication. The text names the rank to blame first.
        Exception: the call is at fault: every rank raised this error of its own.
    """
    errors = [answer.error for answer in answers if answer.error is not None]
    if not errors:
        return answers[0].value
    alike = len(errors) == len(answers) and len({type(error) for error in errors}) == 1
    if alike and not any(answer.lost for answer in answers) and not isinstance(errors[0], CommError):
        raise errors[0]
    failed = sorted((answer for answer in answers if answer.error is not None), key=_blame)
    kind = CommTimeoutError if isinstance(failed[0].error, CommTimeoutError) else PeerFailedError
    raise kind(f"{name}: " + "; ".join(answer.text for answer in failed))


def _blame(answer: Answer) -> int:
    """Smaller is nearer to the cause: death, an error of its own, silence, an error about others."""
    silent = isinstance(answer.error, CommTimeoutError)
    if answer.lost:
        return 2 if silent else 0
    return 3 if isinstance(answer.error, CommError) else 1
