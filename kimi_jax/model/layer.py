"""One layer of the model: a mixer and an MLP, each behind a norm, joined by plain or attention residuals."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from kimi_jax.config import ModelConfig
from kimi_jax.model.cache import KDACache, MLACache
from kimi_jax.model.init import ones, zeros
from kimi_jax.model.kda import KDA, VECTOR
from kimi_jax.model.mla import MLA, Slots
from kimi_jax.model.mlp import MLP
from kimi_jax.model.moe import MoE
from kimi_jax.model.param import param
from kimi_jax.model.stacks import Mixer
from kimi_jax.ops.attn_residual import attn_residual
from kimi_jax.ops.norm import rms_norm


class Places(NamedTuple):
    """Document ids and positions of the full (unsharded) sequences, for all layers."""

    documents: jax.Array | None
    """`[b, t]`, see `ops.segments.document_ids`; None: each row is one document."""
    positions: jax.Array | None
    """`[b, t]` integers, for rotary positions; None without."""


class RMSNorm(nnx.Module):
    def __init__(self, config: ModelConfig, stack: tuple[int, ...] = ()):
        self.eps = config.rms_norm_eps
        dtype = jnp.dtype(config.param_dtype)
        self.weight = param((config.hidden_size,), "width", ones, VECTOR, stack=stack, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight.get_value(), eps=self.eps)


class AttnResidual(nnx.Module):
    """A sublayer's learned mix of earlier block sums and the running sum (Attention Residuals, eqs. 8-10).

    The pseudo-query starts at zero, so that training starts from the plain average.
    """

    def __init__(self, config: ModelConfig, stack: tuple[int, ...] = ()):
        self.eps = config.rms_norm_eps
        d, dtype = config.hidden_size, jnp.dtype(config.param_dtype)
        self.query = param((d,), "width", zeros, VECTOR, stack=stack, dtype=dtype)
        self.norm = param((d,), "width", ones, VECTOR, stack=stack, dtype=dtype)

    def __call__(
        self,
        bank: jax.Array,
        partial: jax.Array,
        count: jax.Array | None = None,
        fresh: jax.Array | bool = False,
    ) -> jax.Array:
        query, gain = self.query.get_value(), self.norm.get_value()
        return attn_residual(bank, partial, query, gain, eps=self.eps, count=count, fresh=fresh)


class Layer(nnx.Module):
    """h <- h + mixer(norm(mix(h))); h <- h + mlp(norm(mix(h))), where h is the residual stream (plain residuals:
    mix(h) = h) or the running sum of the current block (attention residuals)."""

    def __init__(self, config: ModelConfig, mixer: Mixer, dense: bool, stack: tuple[int, ...]):
        self.attention_norm, self.mlp_norm = RMSNorm(config, stack), RMSNorm(config, stack)
        if config.attn_res_block_size is not None:
            self.attention_mix, self.mlp_mix = AttnResidual(config, stack), AttnResidual(config, stack)
        self.has_mix = config.attn_res_block_size is not None
        self.mixer = mixer
        self.attention = KDA(config, stack) if mixer == "kda" else MLA(config, stack)
        self.mlp = MLP(config, config.dense_hidden_size, stack) if dense else MoE(config, stack)

    def __call__(
        self,
        h: jax.Array,
        bank: jax.Array | None,
        count: jax.Array,
        fresh: jax.Array,
        places: Places,
        cache: KDACache | MLACache | None,
        slots: Slots | None,
    ) -> tuple[jax.Array, KDACache | MLACache | None, dict[str, jax.Array]]:
        """One layer.

        Args:
            h: `[b, t, d]`, the residual stream or the block's running sum.
            bank: `[n, b, t, d]`, embeddings and block sums; None without attention residuals.
            count: int32, how many of these there are when this layer's block begins.
            fresh: bool, this layer begins a block: `h` is empty and takes no part in the first mix.
            places: documents and positions.
            cache: what the mixer remembers, or None.
            slots: for MLA with a cache.

        Returns:
            h after the layer, the cache after these tokens, and intermediates by name.
        """
        aux: dict[str, jax.Array] = {}
        x = h
        if self.has_mix:
            assert bank is not None
            x = self.attention_mix(bank, h, count, fresh)
        aux["attn_in"] = x
        if isinstance(self.attention, KDA):
            assert cache is None or isinstance(cache, KDACache)
            y, cache = self.attention(self.attention_norm(x), places.documents, cache)
        else:
            assert cache is None or isinstance(cache, MLACache)
            x = self.attention_norm(x)
            y, cache, aux["max_logits"] = self.attention(x, places.documents, cache, slots, places.positions)
        aux["attn_out"] = y
        h = h + y
        x = self.mlp_mix(bank, h, count) if self.has_mix else h  # type: ignore[arg-type]
        aux["mlp_in"] = x
        if isinstance(self.mlp, MoE):
            y, routed = self.mlp(self.mlp_norm(x), places.documents)
            aux |= routed
        else:
            y = self.mlp(self.mlp_norm(x))
        aux["mlp_out"] = y
        aux["h"] = h + y
        return h + y, cache, aux
