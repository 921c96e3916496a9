"""What a model remembers of the tokens it has seen: one cache, passed in and out of `Kimi.forward`.

A KDA layer keeps a state of fixed size and the last inputs of its convolutions; an MLA layer keeps one latent row a
token. Leaves carry the leading axes `[repeats, run length]` of the layer stack they belong to (`layout`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kimi_jax.config import ConfigError, ModelConfig, Rules
from kimi_jax.model.stacks import segments
from kimi_jax.parallel.mesh import current_mesh
from kimi_jax.parallel.spec import placed


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


def cache_shapes(config: ModelConfig, batch_size: int, capacity: int, rules: Rules | None = None) -> Cache:
    """`init_cache` as shapes, with their shardings on the current mesh."""
    if batch_size < 1 or capacity < 1:
        raise ConfigError(f"a cache needs at least one row and one slot, got {batch_size} rows and {capacity} slots")
    dtype, mesh = jnp.dtype(config.dtype), current_mesh()
    kda, mla = config.kda, config.mla

    def shape(names: str, dtype, **sizes: int) -> Any:
        axes = names.split()
        shape = tuple((sizes | {"batch": batch_size})[name] for name in axes)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placed(mesh, rules or Rules(), axes))

    def run_cache(mixer: str, repeats: int, length: int) -> KDACache | MLACache:
        stack = {"repeats": repeats, "length": length}
        if mixer == "mla":
            width = mla.kv_lora_rank + mla.qk_rope_head_dim
            return MLACache(shape("repeats length batch slots latent", dtype, slots=capacity, latent=width, **stack))
        assert kda is not None
        stack |= {"heads": kda.num_heads, "head_dim": kda.head_dim}
        tail = shape("repeats length batch tail heads head_dim", dtype, tail=kda.conv_size - 1, **stack)
        exact = jnp.promote_types(dtype, jnp.float32)
        return KDACache(shape("repeats length batch heads head_dim head_dim", exact, **stack), tail, tail, tail)

    runs = tuple(
        tuple(run_cache(run.mixer, segment.repeats, run.length) for run in segment.runs) for segment in segments(config)
    )
    visible = shape("batch slots", jnp.dtype(bool), slots=capacity)
    return Cache(runs, visible, jax.ShapeDtypeStruct((), jnp.int32))  # type: ignore[arg-type]


def init_cache(config: ModelConfig, batch_size: int, capacity: int, rules: Rules | None = None) -> Cache:
    """An empty cache for `capacity` tokens a row, on the current mesh if there is one.

    Its size is fixed: KDA state `4 * num_heads * head_dim^2` bytes a layer and row, MLA latents
    `(kv_lora_rank + qk_rope_head_dim)` numbers a layer and token.
    """
    shapes = cache_shapes(config, batch_size, capacity, rules)
    # Separate arrays, so that a cache can be donated.
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)


def advance(cache: Cache, runs: tuple, documents: jax.Array) -> Cache:
    """The cache after a call whose tokens have `documents [b, t]` (0 padding, 1 the document the cache holds).

    Only slots of the row's last document stay visible.
    """
    last = jnp.max(documents, axis=1, keepdims=True)
    new = (documents == last) & (documents > 0)
    visible = cache.visible & (last <= 1)
    visible = jax.lax.dynamic_update_slice_in_dim(visible, new, cache.length, 1)
    return dataclasses.replace(cache, runs=runs, visible=visible, length=cache.length + documents.shape[1])
