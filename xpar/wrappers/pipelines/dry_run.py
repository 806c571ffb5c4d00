"""A pipeline's own check of its inputs, run ahead of the call.

A pipeline checks its arguments after it has filled in its defaults (height, width, resolution bins, ...), and each does
that in its own way. So its `__call__` itself is run, on a copy, up to the end of its `check_inputs`. Nothing is encoded
and nothing drawn before that.
"""

import copy
import dis
import inspect
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from xpar.errors import ConfigError
from xpar.wrappers.pipelines.random_state import clone_generators, copy_containers

_CHECK = "check_inputs"
_SIZES = ("height", "width", "num_frames")
# Where a pipeline that does not come to its check, against what its code says, is stopped before it computes.
_BEYOND = ("encode", "_encode", "prepare", "_prepare", "get_timesteps", "progress_bar")


class _Reached(BaseException):
    """Ends a dry run; no `except Exception` of a pipeline may keep it."""


def own_check(pipe: Any, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Run a pipeline's own check of its inputs, as a call with these arguments would.

    Returns:
        What the pipeline handed to its check by name, its defaults filled in; None if it has none.

    Raises:
        ConfigError: the pipeline refuses the arguments; its words are quoted.
    """
    if _CHECK not in _code(pipe).co_names:
        return None
    probe = copy.copy(pipe)
    checked: dict[str, Any] = {}
    probe.__dict__.update(_stops(pipe))
    probe.__dict__[_CHECK] = _checking(probe, checked)
    own = {name: clone_generators(copy_containers(value)) for name, value in arguments.items()}
    try:
        with _muted(logging.getLogger(type(pipe).__module__)):
            type(pipe).__call__(probe, **own)
    except _Reached:
        return checked or None
    except ValueError as error:
        text = _without_values(str(error), arguments)
        raise ConfigError(f"{type(pipe).__name__} refuses this call: {text}") from error
    return None


def changes_size_later(pipe: Any) -> bool:
    """Whether a pipeline may set height, width or number of frames anew after it has checked them."""
    instructions = list(dis.get_instructions(_code(pipe)))
    check = next((index for index, each in enumerate(instructions) if each.argval == _CHECK), 0)
    return any(each.opname.startswith("STORE") and each.argval in _SIZES for each in instructions[check:])


def strings_in_call(pipe: Any) -> set[str]:
    """The string literals in the code of a pipeline's `__call__`."""
    constants: list[Any] = []
    for each in _code(pipe).co_consts:
        constants += each if isinstance(each, (tuple, frozenset)) else [each]
    return {each for each in constants if isinstance(each, str)}


def _code(pipe: Any) -> Any:
    return inspect.unwrap(type(pipe).__call__).__code__


def _stops(pipe: Any) -> dict[str, Any]:
    def stop(*_: Any, **__: Any) -> NoReturn:
        raise _Reached

    cls = type(pipe)
    return {name: stop for name in dir(cls) if name.startswith(_BEYOND) and callable(getattr(cls, name))}


def _checking(probe: Any, checked: dict[str, Any]) -> Any:
    inner = getattr(probe, _CHECK)

    def check_inputs(*args: Any, **kwargs: Any) -> NoReturn:
        inner(*args, **kwargs)
        bound = inspect.signature(inner).bind(*args, **kwargs)
        bound.apply_defaults()
        checked.update(bound.arguments)
        raise _Reached

    return check_inputs


@contextmanager
def _muted(logger: logging.Logger) -> Iterator[None]:
    """Keep this thread's messages to a logger back: the call itself will say them."""
    here = threading.get_ident()

    def from_elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != here

    logger.addFilter(from_elsewhere)
    try:
        yield
    finally:
        logger.removeFilter(from_elsewhere)


def _without_values(text: str, arguments: Mapping[str, Any]) -> str:
    """An error's text with tensors by their shapes: pipelines print them whole."""
    for value in arguments.values():
        if isinstance(value, torch.Tensor):
            text = text.replace(str(value), f"a tensor of shape {tuple(value.shape)}")
    return text
