"""Command-line flags generated from a dataclass: name, type, choices, default and help come from the fields."""

from __future__ import annotations

import argparse
import ast
import inspect
from dataclasses import MISSING, fields
from itertools import pairwise
from textwrap import dedent
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints


def add_arguments(cls: type, parser: argparse.ArgumentParser) -> None:
    """Add a flag `--<field>` for each field of the dataclass `cls` to `parser`, in one titled group."""
    group = parser.add_argument_group(cls.__name__)
    hints = get_type_hints(cls)
    helps = field_docs(cls)
    for field in fields(cls):
        default = None if field.default is MISSING else field.default
        text = f"{helps.get(field.name, '')} (default: {default})".strip().replace("%", "%%")
        group.add_argument(f"--{field.name}", default=default, help=text, **_parsing(hints[field.name]))


def field_docs(cls: type) -> dict[str, str]:
    """The string literal under each field of the class body, by field name.

    Empty where the source is not at hand (a frozen executable): the flags then have no help text.
    """
    try:
        tree = ast.parse(dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs = {}
    for statement, following in pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = _string_literal(following)
            if text is not None:
                docs[statement.target.id] = inspect.cleandoc(text)
    return docs


def _string_literal(statement: ast.stmt) -> str | None:
    """The text of a statement that is nothing but a string, else None."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _parsing(hint: Any) -> dict[str, Any]:
    """The keyword arguments of `add_argument` that parse a value of the type `hint`."""
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if isinstance(hint, UnionType) and NoneType in get_args(hint):
        (inner,) = (option for option in get_args(hint) if option is not NoneType)
        return {"type": _or_none(inner), "metavar": f"{inner.__name__.upper()}|none"}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": hint, "metavar": hint.__name__.upper()}


def _or_none(inner: type) -> Any:
    def parse(text: str) -> Any:
        return None if text.lower() == "none" else inner(text)

    # argparse quotes this name: "invalid int or none value: 'x'".
    parse.__name__ = f"{inner.__name__} or none"
    return parse
