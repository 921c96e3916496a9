"""Parameters to begin with: of a run, of a converted directory, or straight from a released one."""

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
from kimi_jax.ops.quant.mx import QTensor
from kimi_jax.parallel.mesh import relay
from kimi_jax.store import checkpoint
from kimi_jax.store import read as hf
from kimi_jax.store import released_config as hf_config
from kimi_jax.text import tokenizer as tokenizers
from kimi_jax.text.tokenizer import Tokenizer


def is_release(path: str | Path) -> bool:
    """Whether a folder is a released directory, or what has been fetched of one: by its config.json."""
    try:
        return "model_type" in json.loads((Path(path) / hf_config.CONFIG).read_text())
    except (OSError, ValueError):
        return any(Path(path).glob("*.safetensors*"))


def load(
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
        model, model_config = hf.load(path, dtype=dtype, packed=packed, rules=rules)
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
            parts = {part: stored[f"params.{name}.{part}"] for part in hf.PARTS}
            held[name] = hf.packed_shape(name, held[name], kind, parts, decoded=not packed)
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
    return with_arrays(template, params), config, tokenizers.load(tokenizer) if tokenizer.is_dir() else None


@lru_cache
def _decoder(dtype: jnp.dtype, sharding):
    def decode(packed: QTensor) -> jax.Array:
        w = packed.decode(dtype)
        return w if sharding is None else relay(w, sharding.spec)

    return jax.jit(decode, out_shardings=sharding)


def check(path: str | Path, config: Config) -> None:
    """Refuses parameters for a run of this config to begin with that are those of another model.

    Raises:
        CheckpointError, ConfigError: there are none, or they are; each difference is named.
    """
    if is_release(path):
        found = hf.Release(path).config
    else:
        with checkpoint.opened(checkpoint.find(path)) as checkpoints:
            found = from_dict(Config, checkpoints.metadata()["config"]).model
    theirs, ours = hf_config.released_config(found), hf_config.released_config(config.model)
    if theirs != ours:
        lines = hf_config.differences(theirs, ours)
        raise ConfigError(f"train.init_from={str(path)!r} is another model than the config's:\n  " + "\n  ".join(lines))


def parameters(path: str | Path, config: Config) -> dict[str, jax.Array]:
    """Parameters for a run of this config to begin with, on the current mesh; see `check`."""
    return arrays(load(path, dtype=config.model.param_dtype, rules=config.rules)[0])


def release_tokenizer(path: Path, model: ModelConfig) -> Tokenizer | None:
    """The tokenizer of a released directory, if it has one that is known here."""
    if not any((path / name).is_file() for name in tokenizers.RELEASED):
        return None
    found = tokenizers.load(path)
    tokenizers.check(found, model)
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
