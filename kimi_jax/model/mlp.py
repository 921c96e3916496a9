"""The gated MLP: dense layers and shared experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from kimi_jax.config import ModelConfig
from kimi_jax.model.init import normal
from kimi_jax.model.param import einsum, param
from kimi_jax.model.rules import Muon
from kimi_jax.ops.situ import situ_glu, swiglu

MATRIX = Muon(rows=(-2,), cols=(-1,))
"""A plain matrix, `[.., in, out]`."""


def glu(config: ModelConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The model's gated activation: SiTU-GLU where `situ_beta` is set, else SwiGLU."""
    if config.situ_beta is None:
        return swiglu(gate, up)
    return situ_glu(gate, up, beta=config.situ_beta, linear_beta=config.situ_linear_beta)


class MLP(nnx.Module):
    """y = glu(x W_gate, x W_up) W_down."""

    def __init__(self, config: ModelConfig, hidden_size: int, stack: tuple[int, ...]):
        self.config = config
        d, dtype, init = config.hidden_size, jnp.dtype(config.param_dtype), normal(config.initializer_range)
        self.w_gate = param((d, hidden_size), "embed mlp", init, MATRIX, stack=stack, dtype=dtype)
        self.w_up = param((d, hidden_size), "embed mlp", init, MATRIX, stack=stack, dtype=dtype)
        self.w_down = param((hidden_size, d), "mlp embed", init, MATRIX, stack=stack, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = einsum("btd,df->btf", x, self.w_gate), einsum("btd,df->btf", x, self.w_up)
        return einsum("btf,fd->btd", glu(self.config, gate, up), self.w_down)
