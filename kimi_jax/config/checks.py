"""Checks of settings: one line that names the value, what is allowed and what to do."""

from __future__ import annotations

import math
import types
import typing
from typing import Literal


class ConfigError(Exception):
    """A setting that cannot work. The message carries the numbers and the mend.

    Not a ValueError: the command line's parser would put those into a box of its own.
    """


def check(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def check_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        check(value >= 1, f"{type(config).__name__}.{name}={value} must be at least 1; set it to 1 or more")


def check_finite(config: object, *names: str, zero: bool = False) -> None:
    for name in names:
        value = getattr(config, name)
        ok = math.isfinite(value) and (value >= 0 if zero else value > 0)
        check(ok, f"{type(config).__name__}.{name}={value} must be {'at least 0' if zero else 'above 0'} and finite")


def check_types(config: object) -> None:
    """Values out of a `.py` file pass no parser: refuse what the annotations do not allow."""
    hints = typing.get_type_hints(type(config))
    for name, hint in hints.items():
        value = getattr(config, name)
        union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        allowed = typing.get_args(hint) if union else (hint,)
        check(
            any(_fits(value, kind) for kind in allowed),
            f"{type(config).__name__}.{name}={value!r} must be {' or '.join(map(_kind_name, allowed))}",
        )


def _fits(value: object, kind: object) -> bool:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return value in typing.get_args(kind)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, typing.get_args(kind)[0]) for item in value)
    if kind in (int, float):
        return not isinstance(value, bool) and isinstance(value, int if kind is int else int | float)
    return isinstance(value, kind)  # type: ignore[arg-type]


def _kind_name(kind: object) -> str:
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    return kind.__name__ if isinstance(kind, type) and typing.get_origin(kind) is None else str(kind)
