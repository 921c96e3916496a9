"""Configs by name or file, and to and from plain dicts."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import re
import sys
import traceback
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from kimi_jax import files
from kimi_jax.config.checks import LONGEST, ConfigError, check, shown
from kimi_jax.config.run import Config

T = TypeVar("T")


def to_dict(config) -> dict:
    """The config as plain nested dicts, lists and scalars: what `config.json` holds."""
    return dataclasses.asdict(config)


def from_dict(cls: type[T], values: Any) -> T:
    """The inverse of `to_dict`, also after a trip through JSON.

    Raises:
        ConfigError: a field is unknown, missing or of the wrong type, or its value cannot work.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{cls.__name__} is {shown(values)} where its settings by name are due; {RESTORE}")
    hints = typing.get_type_hints(cls)
    if unknown := sorted(map(str, values.keys() - hints.keys())):
        raise ConfigError(
            f"{cls.__name__} has no field {shown(', '.join(unknown))}, which another version of kimi_jax may have; "
            + RESTORE
        )
    needed = [f.name for f in dataclasses.fields(cls) if _needed(f) and f.name not in values]  # type: ignore[arg-type]
    if needed:
        raise ConfigError(f"{cls.__name__} lacks {', '.join(needed)}; {RESTORE}")
    return cls(**{name: _revived(hints[name], value) for name, value in values.items()})


RESTORE = "restore the file, or use the version that wrote it"


def _needed(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _revived(hint, value):
    """A value of JSON in the form that a field has it; what does not fit is left for the dataclass to reject."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union) and isinstance(value, dict):
        hint = next((kind for kind in typing.get_args(hint) if dataclasses.is_dataclass(kind)), hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return from_dict(hint, value)  # type: ignore[arg-type]
    if typing.get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(_revived(typing.get_args(hint)[0], item) for item in value)
    return value


def shipped_configs() -> dict[str, Path]:
    """Name -> file of the configs that come with the package, in a checkout and in an installed wheel alike."""
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "configs", here.parent / "configs"):
        if (folder / "k3_tiny.py").is_file():
            return {path.stem: path for path in sorted(folder.glob("*.py"))}
    raise ConfigError(f"no configs beside {here}; the installation is incomplete, install kimi_jax again")


def load_config(name: str) -> Config:
    """Returns the `config` of a shipped config's name or of a path to a `.py` file.

    Raises:
        ConfigError: the name is unknown (with the nearest ones), or the file cannot be run (with the line), or has no
            `config`.
        FileError: the file cannot be read.
    """
    if name.endswith(".py"):
        path = Path(name)
    else:
        known = shipped_configs()
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        fix = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
        check(
            name in known, lambda: f"no config named {shown(name)} ({fix}); use one of them or the path of a .py file"
        )
        path = known[name]
    config = _run(path).get("config")
    if not isinstance(config, Config):
        kind = type(config).__name__
        raise ConfigError(f"{path} must define `config`, a kimi_jax.config.Config; it has {kind}; add it")
    return config


def _run(path: Path) -> dict[str, Any]:
    """The names that a Python file defines. Nothing is written: no compiled copy beside it."""
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder where a config file is due; name the .py file in it")
        if not path.is_file():  # a pipe would wait for ever
            raise ConfigError(f"no config file {shown(str(path))[1:-1]}; check the path")
        source = path.read_bytes()
    except OSError as error:
        raise files.problem(error, path, "read") from error
    module = types.ModuleType(f"_kimi_jax_config_{path.stem}")
    module.__file__ = str(path)
    try:
        coded = re.match(rb"(?:.*\n)?#.*coding[:=]", source)  # else it is UTF-8, and the error can name the line
        text = importlib.util.decode_source(source) if coded else source.decode("utf-8-sig")
        exec(compile(text, str(path), "exec"), module.__dict__)
    except UnicodeDecodeError as error:
        line = source.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 ({error.reason}); write the file in UTF-8") from error
    except SyntaxError as error:
        line, fix = (f":{error.lineno}", "fix this line") if error.lineno else ("", "fix the file")
        raise ConfigError(f"{path}{line}: {_said(error.msg)}; {fix}") from error
    except (Exception, SystemExit) as error:  # whatever a user's program raises is the user's to fix
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where, fix = (f"{path}:{lines[-1]}", "fix this line") if lines else (str(path), "fix the file")
        said = _unknown_field(error) or (str(error) if isinstance(error, ConfigError) else None)
        if said is None:
            said = f"{type(error).__name__}: {_said(str(error))}".removesuffix(": ") + f"; {fix}"
        raise ConfigError(f"{where}: {said}") from error
    return module.__dict__


def _said(message: str) -> str:
    """An error's message in one line."""
    said = " ".join(message.split())
    return said if len(said) <= LONGEST else f"{said[:LONGEST]}..."


def _unknown_field(error: BaseException) -> str | None:
    """A plain message for a misspelt field in a config file; None for any other error."""
    found = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    kind = getattr(sys.modules["kimi_jax.config"], found[1], None) if found else None
    if found is None or not dataclasses.is_dataclass(kind):
        return None
    names = [field.name for field in dataclasses.fields(kind)]
    near = difflib.get_close_matches(found[2], names, n=1)
    fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(names)}"
    return f"{found[1]} has no field {found[2]!r}; {fix}"
