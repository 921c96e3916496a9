"""Kimi K3 and Kimi Linear in JAX: the model, training, released checkpoints, generation.

from kimi_jax import hf, load_config, train
model, config = hf.load("path/to/release")       # or init(load_config("k3_tiny").model)
logits = model(tokens, segment_ids)
train.run(load_config("k3_tiny"))
"""

from kimi_jax.config import Config, ConfigError, ModelConfig, load_config
from kimi_jax.model.cache import Cache, init_cache
from kimi_jax.model.kimi import Kimi, init

__all__ = ["Cache", "Config", "ConfigError", "Kimi", "ModelConfig", "init", "init_cache", "load_config"]
