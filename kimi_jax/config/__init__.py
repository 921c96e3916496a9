"""Every setting of a run, as nested frozen dataclasses: the names that a config file needs, and what loads one.

A config file in `configs/` builds one `Config`; the command line overrides its fields. Checks that need only
the numbers themselves are made when a dataclass is built (`__post_init__`), so an impossible model cannot
exist; checks that need data or a disk are made by `kimi_jax.train` before the first step.
"""

from dataclasses import replace

from kimi_jax.config.checks import ConfigError
from kimi_jax.config.compute import Mesh, MeshAxis, Rules, Slice
from kimi_jax.config.load import from_dict, load_config, shipped_configs, to_dict
from kimi_jax.config.model import Dtype, KDAConfig, MLAConfig, ModelConfig, MoEConfig, RoPEConfig
from kimi_jax.config.run import (
    Config,
    DataConfig,
    OptimConfig,
    Source,
    TokenizerConfig,
    TrainConfig,
    at_step,
    on_slice,
)

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "Dtype",
    "KDAConfig",
    "MLAConfig",
    "Mesh",
    "MeshAxis",
    "MoEConfig",
    "ModelConfig",
    "OptimConfig",
    "RoPEConfig",
    "Rules",
    "Slice",
    "Source",
    "TokenizerConfig",
    "TrainConfig",
    "at_step",
    "from_dict",
    "load_config",
    "on_slice",
    "replace",
    "shipped_configs",
    "to_dict",
]
