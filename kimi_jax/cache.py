"""What a model remembers of the tokens it has seen: one cache, passed in and out of `Kimi.forward`.

A KDA layer keeps a state of fixed size and the last inputs of its convolutions; an MLA layer keeps one latent row a
token. Leaves carry the leading axes `[repeats, run length]` of the layer stack they belong to (`layout`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from kimi_jax.config import ConfigError, ModelConfig
from kimi_jax.layout import segments


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KDACache:
    state: jax.Array
    """`[b, h, k, v]`, at least f32."""
    q_tail: jax.Array
    """`[b, conv_size - 1, h, k]`: the last inputs of the query convolution, newest last."""
    k_tail: jax.Array
    v_tail: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MLACache:
    latent: jax.Array
    """`[b, s, kv_lora_rank + qk_rope_head_dim]`: normalised key-value latent, then the shared key part."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    runs: tuple[tuple[KDACache | MLACache, ...], ...]
    """Per segment, per run."""
    visible: jax.Array
    """`[b, s]` bool: slots that hold a token of the row's current document."""
    length: jax.Array
    """int32: slots written so far, the same for every row; rows of shorter prompts have padding in front."""

    @property
    def capacity(self) -> int:
        return self.visible.shape[1]


def init_cache(config: ModelConfig, batch_size: int, capacity: int) -> Cache:
    """An empty cache for `capacity` tokens a row.

    Its size is fixed: KDA state `4 * num_heads * head_dim^2` bytes a layer and row, MLA latents
    `(kv_lora_rank + qk_rope_head_dim)` numbers a layer and token.
    """
    if batch_size < 1 or capacity < 1:
        raise ConfigError(f"a cache needs at least one row and one slot, got {batch_size} rows and {capacity} slots")
    dtype = jnp.dtype(config.dtype)
    kda, mla = config.kda, config.mla

    def run_cache(mixer: str, stack: tuple[int, int]) -> KDACache | MLACache:
        if mixer == "mla":
            return MLACache(jnp.zeros((*stack, batch_size, capacity, mla.kv_lora_rank + mla.qk_rope_head_dim), dtype))
        tail = (*stack, batch_size, kda.conv_size - 1, kda.num_heads, kda.head_dim)
        state = (*stack, batch_size, kda.num_heads, kda.head_dim, kda.head_dim)
        # Separate arrays, so that a cache can be donated.
        tails = (jnp.zeros(tail, dtype) for _ in range(3))
        return KDACache(jnp.zeros(state, jnp.promote_types(dtype, jnp.float32)), *tails)

    runs = tuple(
        tuple(run_cache(run.mixer, (segment.repeats, run.length)) for run in segment.runs)
        for segment in segments(config)
    )
    return Cache(runs, jnp.zeros((batch_size, capacity), bool), jnp.zeros((), jnp.int32))


def advance(cache: Cache, runs: tuple, documents: jax.Array) -> Cache:
    """The cache after a call whose tokens have `documents [b, t]` (0 padding, 1 the document the cache holds).

    Only slots of the row's last document stay visible.
    """
    last = jnp.max(documents, axis=1, keepdims=True)
    new = (documents == last) & (documents > 0)
    visible = cache.visible & (last <= 1)
    visible = jax.lax.dynamic_update_slice_in_dim(visible, new, cache.length, 1)
    return dataclasses.replace(cache, runs=runs, visible=visible, length=cache.length + documents.shape[1])
