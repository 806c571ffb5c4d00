"""Methods replaced on one object for a while: classes, and other objects of them, stay as they are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["replaced"]

_NOTHING = object()


@contextmanager
def replaced(target: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Set an attribute on an instance and put back what was there, or nothing."""
    before = vars(target).get(name, _NOTHING)
    vars(target)[name] = function
    try:
        yield
    finally:
        if before is _NOTHING:
            vars(target).pop(name, None)
        else:
            vars(target)[name] = before
