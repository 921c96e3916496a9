"""Opens a model: of a run, of a conversion, or straight from a released directory."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp

from kimi_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimConfig,
    Rules,
    TrainConfig,
    at_step,
    from_dict,
)
from kimi_jax.config.model import Dtype
from kimi_jax.files import FileError, read_json
from kimi_jax.model.kimi import Kimi, declared
from kimi_jax.model.param import arrays, shapes, with_arrays
from kimi_jax.ops.quant.qtensor import QTensor
from kimi_jax.parallel.spec import relay
from kimi_jax.store import checkpoint, released_config
from kimi_jax.store.read import PARTS, Release, load_release, packed_shape
from kimi_jax.text.load import check_tokenizer, load_tokenizer
from kimi_jax.text.tokenizer import RELEASED, Tokenizer


class Opened(NamedTuple):
    """A model and what belongs to it."""

    model: Kimi
    config: Config
    """That of the checkpoint's step: with the experts' formats, where the run had reached them."""
    tokenizer: Tokenizer | None
    """None where the folder has none."""


def is_release(path: str | Path) -> bool:
    """Whether a folder is a released directory, or what has been fetched of one: by its config.json."""
    try:
        return "model_type" in read_json(Path(path) / released_config.CONFIG)
    except FileError:
        return any(Path(path).glob("*.safetensors*"))


def open_model(
    path: str | Path, *, step: int | None = None, dtype=None, packed: bool = False, rules: Rules | None = None
) -> Opened:
    """Opens a model on the current mesh, whatever mesh wrote it.

    Args:
        path: folder of a run, of its checkpoints, of a conversion, or a released directory.
        step: which checkpoint of a run; the newest by default.
        dtype: of parameters and compute; as stored by default.
        packed: routed experts that are quantized stay so; else they are decoded.
        rules: how parameters are sharded over the mesh; the config's by default.

    Returns:
        `model, config, tokenizer`; the tokenizer is None where there is none (see `needed_tokenizer`).

    Raises:
        CheckpointError, ConfigError, FileError: there is none, or its arrays are not those of its config.
    """
    path, dtype = Path(path), None if dtype is None else _dtype_name(dtype)
    if is_release(path):
        if step is not None:
            raise ConfigError(f"step={step}: {path} is a released directory, which has no steps; leave step out")
        model, model_config = load_release(path, dtype=dtype, packed=packed, rules=rules)
        config = config_for(path.resolve().name, model_config)
        return Opened(model, config, release_tokenizer(path, config.model))
    folder = checkpoint.find(path)
    with checkpoint.opened(folder) as checkpoints:
        metadata = checkpoints.metadata(step)
        config = from_dict(Config, metadata["config"])
        config = at_step(config, (checkpoints.latest or 0) if step is None else step)
        held: dict[str, Any] = shapes(declared(config.model), rules or config.rules)
        for name, kind in metadata.get("packed", {}).items():
            stored = checkpoints.shapes(step)
            parts = {part: stored[f"params.{name}.{part}"] for part in PARTS}
            held[name] = packed_shape(name, held[name], kind, parts, decoded=not packed)
        params = checkpoints.restore({"params": held}, step)["params"]
    if dtype is not None:
        config = replace(config, model=replace(config.model, dtype=dtype, param_dtype=dtype))
    for name, like in shapes(declared(config.model), rules or config.rules).items():
        value = params[name]
        if isinstance(value, QTensor) and not packed:
            params[name] = _decoder(jnp.dtype(like.dtype), like.sharding)(value)
        elif not isinstance(value, QTensor) and value.dtype != like.dtype:
            params[name] = value.astype(like.dtype)
    tokenizer = folder.parent / "tokenizer"
    model = with_arrays(Kimi(config.model), params)
    return Opened(model, config, load_tokenizer(tokenizer) if tokenizer.is_dir() else None)


def needed_tokenizer(path: str | Path, opened: Opened) -> Tokenizer:
    """The tokenizer of what was opened at `path`, for those who cannot do without.

    Raises:
        ConfigError: there is none.
    """
    if opened.tokenizer is None:
        raise ConfigError(f"{path} has no tokenizer; put the release's tiktoken.model or tokenizer.json there")
    return opened.tokenizer


def _dtype_name(dtype) -> str:
    names = get_args(Dtype)
    try:
        name = str(jnp.dtype(dtype).name)
    except TypeError:
        name = ""
    if name not in names:
        raise ConfigError(f"dtype={dtype!r} must be one of {', '.join(names)}")
    if name == "float64" and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ConfigError('dtype=float64 needs jax.config.update("jax_enable_x64", True)')
    return name


@lru_cache
def _decoder(dtype: jnp.dtype, sharding):
    def decode(packed: QTensor) -> jax.Array:
        w = packed.decode(dtype)
        return w if sharding is None else relay(w, sharding.spec)

    return jax.jit(decode, out_shardings=sharding)


def check_initial(path: str | Path, config: Config) -> None:
    """Rejects parameters for a run of this config to begin with that are those of another model.

    Raises:
        CheckpointError, ConfigError: there are none, or they are; each difference is named.
    """
    if is_release(path):
        found = Release(path).config
    else:
        with checkpoint.opened(checkpoint.find(path)) as checkpoints:
            found = from_dict(Config, checkpoints.metadata()["config"]).model
    theirs, ours = released_config.released_config(found), released_config.released_config(config.model)
    if theirs != ours:
        lines = released_config.differences(theirs, ours)
        raise ConfigError(f"train.init_from={str(path)!r} is another model than the config's:\n  " + "\n  ".join(lines))


def initial_parameters(path: str | Path, config: Config) -> dict[str, jax.Array]:
    """Parameters for a run of this config to begin with, on the current mesh; see `check_initial`."""
    return arrays(open_model(path, dtype=config.model.param_dtype, rules=config.rules).model)


def release_tokenizer(path: Path, model: ModelConfig) -> Tokenizer | None:
    """The tokenizer of a released directory, if it has one that is known here."""
    if not any((path / name).is_file() for name in RELEASED):
        return None
    found = load_tokenizer(path)
    check_tokenizer(found, model)
    return found


def config_for(name: str, model: ModelConfig) -> Config:
    """The config of a model that no run of ours has made. Only `model` says anything of it."""
    return Config(
        name=name,
        model=model,
        optim=OptimConfig(learning_rate=1e-4),
        data=DataConfig(sequence_length=min(4096, model.max_position_embeddings), batch_size=1),
        train=TrainConfig(steps=1),
    )
