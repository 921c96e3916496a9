"""Opens a model: of a run, of a conversion, or straight from a released directory."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

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
from kimi_jax.model.kimi import Kimi
from kimi_jax.model.param import arrays, place, with_arrays
from kimi_jax.ops.quant.qtensor import QTensor
from kimi_jax.parallel.spec import relay
from kimi_jax.store import checkpoint, released_config
from kimi_jax.store.read import PARTS, Release, load_release, packed_shape
from kimi_jax.text.load import check_tokenizer, load_tokenizer
from kimi_jax.text.tokenizer import RELEASED, Tokenizer


def is_release(path: str | Path) -> bool:
    """Whether a folder is a released directory, or what has been fetched of one: by its config.json."""
    try:
        return "model_type" in json.loads((Path(path) / released_config.CONFIG).read_text())
    except (OSError, ValueError):
        return any(Path(path).glob("*.safetensors*"))


def open_model(
    path: str | Path, step: int | None = None, *, dtype=None, packed: bool = False, rules: Rules | None = None
) -> tuple[Kimi, Config, Tokenizer | None]:
    """Opens a model on the current mesh: model, config, and tokenizer if there is one.

    The config is that of the checkpoint's step: with the experts' formats, where the run had reached them.

    Args:
        path: folder of a run, of its checkpoints, of a conversion, or a released directory.
        step: which checkpoint; the newest by default.
        dtype: of parameters and compute; as stored by default.
        packed: routed experts that are quantized stay so; else they are decoded.
        rules: how parameters are cut over the mesh; the config's by default.

    Raises:
        CheckpointError, ConfigError: there is none, or its arrays are not those of its config.
    """
    path = Path(path)
    if is_release(path):
        model, model_config = load_release(path, dtype=dtype, packed=packed, rules=rules)
        config = config_for(path.resolve().name, model_config)
        return model, config, release_tokenizer(path, config.model)
    folder = checkpoint.find(path)
    with checkpoint.opened(folder) as checkpoints:
        metadata = checkpoints.metadata(step)
        config = from_dict(Config, metadata["config"])
        config = at_step(config, (checkpoints.latest or 0) if step is None else step)
        held: dict[str, Any] = arrays(place(Kimi(config.model), rules or config.rules))
        for name, kind in metadata.get("packed", {}).items():
            stored = checkpoints.shapes(step)
            parts = {part: stored[f"params.{name}.{part}"] for part in PARTS}
            held[name] = packed_shape(name, held[name], kind, parts, decoded=not packed)
        params = checkpoints.restore({"params": held}, step)["params"]
    if dtype is not None:
        dtype = jnp.dtype(dtype).name
        config = replace(config, model=replace(config.model, dtype=dtype, param_dtype=dtype))
    template = place(Kimi(config.model), rules or config.rules)
    for name, like in arrays(template).items():
        value = params[name]
        if isinstance(value, QTensor) and not packed:
            params[name] = _decoder(jnp.dtype(like.dtype), like.sharding)(value)
        elif not isinstance(value, QTensor) and value.dtype != like.dtype:
            params[name] = value.astype(like.dtype)
    tokenizer = folder.parent / "tokenizer"
    return with_arrays(template, params), config, load_tokenizer(tokenizer) if tokenizer.is_dir() else None


@lru_cache
def _decoder(dtype: jnp.dtype, sharding):
    def decode(packed: QTensor) -> jax.Array:
        w = packed.decode(dtype)
        return w if sharding is None else relay(w, sharding.spec)

    return jax.jit(decode, out_shardings=sharding)


def check_initial(path: str | Path, config: Config) -> None:
    """Refuses parameters for a run of this config to begin with that are those of another model.

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
    """Parameters for a run of this config to begin with, on the current mesh; see `check`."""
    return arrays(open_model(path, dtype=config.model.param_dtype, rules=config.rules)[0])


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


def open_with_tokenizer(path: str | Path, step: int | None = None) -> tuple[Kimi, Config, Tokenizer]:
    """Opens the checkpoint of a run, whatever mesh wrote it, on the current one: model, config and tokenizer.

    The config is that of the checkpoint's step: with the experts' formats, where the run had reached them. Routed
    experts that are stored packed stay so.

    Args:
        path: folder of a run, of its checkpoints, of a converted model, or a released directory.
        step: which checkpoint; the newest by default.

    Raises:
        CheckpointError, ConfigError: there is none, or its arrays are not those of its config; it has no tokenizer.
    """
    model, config, tokenizer = open_model(path, step, packed=True)
    if tokenizer is None:
        raise ConfigError(f"{path} has no tokenizer; put the release's tiktoken.model or tokenizer.json there")
    return model, config, tokenizer
