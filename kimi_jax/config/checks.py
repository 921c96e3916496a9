"""Checks of settings: one line that names the value, what is allowed and what to do."""

from __future__ import annotations

import os
import re
import types
import typing
from collections.abc import Callable
from typing import Literal

LARGEST = 2**31 - 1
"""What an int32 holds: sizes and indices of arrays are of this type."""
LONGEST = 200
"""Characters of a value that a message shows."""
SURROGATE = re.compile("[\ud800-\udfff]")
FLOAT32 = (2.0**-126, (2 - 2**-23) * 2.0**127)
"""The smallest positive number with all its digits in float32, and the largest: settings meet arrays of that type."""


class ConfigError(Exception):
    """A setting that cannot work. The message is one line: what was given, what is allowed, what to do.

    Not a ValueError: the command line's parser would put those into a box of its own.
    """


def check(ok: bool, message: str | Callable[[], str]) -> None:
    """Raises ConfigError unless `ok`. A message that takes time to build is given as a function."""
    if not ok:
        raise ConfigError(message if isinstance(message, str) else message())


def check_positive(config: object, *names: str, most: int = LARGEST) -> None:
    for name in names:
        value = getattr(config, name)
        where = f"{type(config).__name__}.{name}={value}"
        check(value >= 1, f"{where} must be at least 1; set it to 1 or more")
        check(value <= most, f"{where} must be at most {most:,}; lower it")


def check_finite(config: object, *names: str, zero: bool = False) -> None:
    """Numbers that stay above zero (or are zero, where that is allowed) and finite in float32."""
    least, most = FLOAT32
    for name in names:
        value = getattr(config, name)
        check(
            least <= value <= most or (zero and value == 0),
            f"{type(config).__name__}.{name}={value} must be {'at least 0' if zero else 'above 0'} and finite in "
            "float32; set it to such a number",
        )


def check_path(config: object, *names: str) -> None:
    """Names that the operating system takes, in its encoding."""
    for name in names:
        value, where = getattr(config, name), f"{type(config).__name__}.{name}"
        if "\0" in value:
            raise ConfigError(f"{where}={shown(value)} holds a NUL; take it out")
        try:
            os.fsencode(value)
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{where}={shown(value)} has no spelling in this system's encoding, {error.encoding}; choose another "
                "name, or set LC_ALL=C.UTF-8"
            ) from error


def check_text(config: object, *names: str) -> None:
    """Text that has UTF-8: not half a surrogate pair, which is what a command line in another encoding becomes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and SURROGATE.search(value):
            raise ConfigError(
                f"{type(config).__name__}.{name}={shown(value)} is not UTF-8; write it in UTF-8, under a UTF-8 locale"
            )


def check_types(config: object) -> None:
    """Values out of a `.py` file pass no parser: reject what the annotations do not allow."""
    hints = typing.get_type_hints(type(config))
    for name, hint in hints.items():
        value = getattr(config, name)
        union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        allowed = typing.get_args(hint) if union else (hint,)
        if not any(_fits(value, kind) for kind in allowed):
            kinds = " or ".join(map(_kind_name, allowed))
            raise ConfigError(f"{type(config).__name__}.{name}={shown(value)} must be {kinds}; change it")


def shown(value: object) -> str:
    """A value as a message shows it: in one line, and not all of what is long.

    >>> shown("x" * 1000)[-30:], shown(10**5000)
    ('xxxxxxxx... (1,002 characters)', 'an integer of 16,610 bits')
    """
    if isinstance(value, int) and value.bit_length() > 1000:  # Python does not spell out integers of any length
        return f"an integer of {value.bit_length():,} bits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # such an integer, or no end, somewhere inside
        return f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text):,} characters)"


def printable(text: str) -> str:
    """Text with escapes for what no terminal and no UTF-8 file takes: a file's name may hold any bytes.

    >>> print(printable("caf\\udce9\\n.txt"))
    caf\\udce9\\n.txt
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _fits(value: object, kind: object) -> bool:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return any(value == each and type(value) is type(each) for each in typing.get_args(kind))
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, typing.get_args(kind)[0]) for item in value)
    if kind in (int, float):
        number = not isinstance(value, bool) and isinstance(value, int if kind is int else int | float)
        return number and (isinstance(value, float) or value.bit_length() < 64)  # type: ignore[union-attr]
    return isinstance(value, kind)  # type: ignore[arg-type]


def _kind_name(kind: object) -> str:
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    if kind is int:
        return "int of at most 63 bits"
    return kind.__name__ if isinstance(kind, type) and typing.get_origin(kind) is None else str(kind)
