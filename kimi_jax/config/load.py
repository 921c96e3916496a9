"""Configs by name or file, and to and from plain dicts."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import re
import sys
import types
import typing
from pathlib import Path
from typing import TypeVar

from kimi_jax.config.checks import ConfigError, check
from kimi_jax.config.run import Config

T = TypeVar("T")


def to_dict(config) -> dict:
    """The config as plain nested dicts, lists and scalars: what `config.json` holds."""
    return dataclasses.asdict(config)


def from_dict(cls: type[T], values: dict) -> T:
    """The inverse of `to_dict`, also after a trip through JSON."""
    hints = typing.get_type_hints(cls)
    unknown = sorted(values.keys() - hints.keys())
    check(not unknown, f"{cls.__name__} has no field {', '.join(unknown)}: written by another version of kimi_jax?")
    return cls(**{name: _revived(hints[name], value) for name, value in values.items()})


def _revived(hint, value):
    if typing.get_origin(hint) in (types.UnionType, typing.Union) and isinstance(value, dict):
        hint = next(kind for kind in typing.get_args(hint) if dataclasses.is_dataclass(kind))
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return from_dict(hint, value)  # type: ignore[arg-type]
    if typing.get_origin(hint) is tuple:
        return tuple(_revived(typing.get_args(hint)[0], item) for item in value)
    return value


def shipped_configs() -> dict[str, Path]:
    """Name -> file of the configs that come with the package, in a checkout and in an installed wheel alike."""
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "configs", here.parent / "configs"):
        if (folder / "k3_tiny.py").is_file():
            return {path.stem: path for path in sorted(folder.glob("*.py"))}
    raise ConfigError(f"no configs beside {here}; the installation is incomplete, install kimi_jax again")


def _unknown_field(path: Path, error: TypeError) -> Exception:
    """A plain message for a misspelt field in a config file; the error itself for anything else."""
    found = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    kind = getattr(sys.modules["kimi_jax.config"], found[1], None) if found else None
    if found is None or not dataclasses.is_dataclass(kind):
        return error
    near = difflib.get_close_matches(found[2], [f.name for f in dataclasses.fields(kind)], n=1)
    mend = f"did you mean {near[0]}?" if near else f"it has {', '.join(f.name for f in dataclasses.fields(kind))}"
    return ConfigError(f"{path}: {found[1]} has no field {found[2]!r}; {mend}")


def load_config(name: str) -> Config:
    """Returns the `config` of a shipped config's name or of a path to a `.py` file.

    Raises:
        ConfigError: the name is unknown (with the nearest ones), or the file has no `config`.
    """
    if name.endswith(".py"):
        path = Path(name)
        check(path.is_file(), f"no config file {name}")
    else:
        known = shipped_configs()
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        mend = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
        check(name in known, f"no config named {name!r} ({mend}); a path to a .py file works too")
        path = known[name]
    spec = importlib.util.spec_from_file_location(f"_kimi_jax_config_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except TypeError as error:
        raise _unknown_field(path, error) from error
    config = getattr(module, "config", None)
    check(
        isinstance(config, Config),
        f"{path} must define `config`, a kimi_jax.config.Config; it has {type(config).__name__}",
    )
    assert isinstance(config, Config)
    return config
