"""Kimi K3, Kimi Linear and K2 in JAX: the model, training, released checkpoints, generation.

from kimi_jax import Sampling, generate, load_config, open_model, run_training
model, config, tokenizer = open_model("path/to/release")       # or a run, or a conversion
logits = model(tokens, segment_ids)
generate(model, [[11, 12, 13]], Sampling(temperature=0.8))
run_training(load_config("k3_tiny"))
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kimi_jax.config import Config, ConfigError, ModelConfig, load_config
    from kimi_jax.infer.generate import generate
    from kimi_jax.infer.sampling import Sampling
    from kimi_jax.model.cache import Cache, init_cache
    from kimi_jax.model.kimi import Kimi, init
    from kimi_jax.store.open import open_model
    from kimi_jax.train.loop import run_training

_MODULES = {
    "kimi_jax.config": ("Config", "ConfigError", "ModelConfig", "load_config"),
    "kimi_jax.infer.generate": ("generate",),
    "kimi_jax.infer.sampling": ("Sampling",),
    "kimi_jax.model.cache": ("Cache", "init_cache"),
    "kimi_jax.model.kimi": ("Kimi", "init"),
    "kimi_jax.store.open": ("open_model",),
    "kimi_jax.train.loop": ("run_training",),
}

__all__ = [
    "Cache",
    "Config",
    "ConfigError",
    "Kimi",
    "ModelConfig",
    "Sampling",
    "generate",
    "init",
    "init_cache",
    "load_config",
    "open_model",
    "run_training",
]


def __getattr__(name: str):
    """Imports a public name's module where the name is first used: a config needs no JAX."""
    for module, names in _MODULES.items():
        if name in names:
            globals()[name] = found = getattr(import_module(module), name)
            return found
    raise AttributeError(f"module 'kimi_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
