"""Multi-head latent attention, gated or not, without positions or with rotary ones."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from kimi_jax.config import ModelConfig
from kimi_jax.model.cache import MLACache
from kimi_jax.model.init import normal, ones
from kimi_jax.model.kda import FROM_HEADS, PER_HEAD, TO_HEADS, VECTOR
from kimi_jax.model.mlp import MATRIX
from kimi_jax.model.param import einsum, param
from kimi_jax.model.rules import QKClip
from kimi_jax.ops.attention import attention, latent_attention
from kimi_jax.ops.norm import rms_norm
from kimi_jax.ops.rope import rotate, yarn_frequencies, yarn_logit_scale
from kimi_jax.parallel import context
from kimi_jax.parallel.dense import gather_weight
from kimi_jax.parallel.spec import axes_of, axis_of, mesh_axes_of, per_device, spec_of, vary

LORA_NORM_EPS = 1e-6
"""The released code builds the norms of both low-rank projections with its class default, not `rms_norm_eps`."""


class Slots(NamedTuple):
    """Which cache slots a call's queries may see, shared by all MLA layers."""

    queries: jax.Array
    """`[b, t]`: document of each of the call's tokens, 1 for the one that the cache holds, 0 for padding."""
    keys: jax.Array
    """`[b, s]`: document of each slot, 0 for none."""
    start: jax.Array
    """Slot of the call's first token."""


class MLA(nnx.Module):
    """o = softmax(scale [q_nope, q_rope] [k_nope, k_rope]^T) v, y = (o sigmoid(x W_g)) W_o.

    k_nope and v come from a latent of `kv_lora_rank` numbers a token, k_rope is shared by all heads. With
    `config.mla.rope` q_rope and k_rope are turned by their positions (K2); else nothing is. scale is
    1 / sqrt(width), times YaRN's factor.
    """

    def __init__(self, config: ModelConfig, stack: tuple[int, ...]):
        self.config = config
        c, d, h = config.mla, config.hidden_size, config.mla.num_heads
        rope = c.rope
        self.scale = c.qk_head_dim**-0.5 * (1.0 if rope is None else yarn_logit_scale(rope.factor, rope.mscale))
        dtype, init = jnp.dtype(config.param_dtype), normal(config.initializer_range)

        def weight(shape, axes, rule, clip=None):
            return param(shape, axes, init, rule, stack=stack, dtype=dtype, clip=clip)

        def norm(size):
            return param((size,), "rank_out", ones, VECTOR, stack=stack, dtype=dtype)

        # gamma is shared between query and key; the key's second part belongs to no head, so the query takes all of it.
        clip_q = QKClip(((c.qk_nope_head_dim, 0.5), (c.qk_rope_head_dim, 1.0)))
        if c.q_lora_rank is None:
            self.w_q = weight((d, h, c.qk_head_dim), "embed heads head_dim", PER_HEAD, clip_q)
        else:
            self.w_q_a = weight((d, c.q_lora_rank), "embed rank_out", MATRIX)
            self.q_norm = norm(c.q_lora_rank)
            self.w_q_b = weight((c.q_lora_rank, h, c.qk_head_dim), "rank heads head_dim", PER_HEAD, clip_q)
        self.w_kv_a = weight((d, c.kv_lora_rank + c.qk_rope_head_dim), "embed rank_out", MATRIX)
        self.kv_norm = norm(c.kv_lora_rank)
        clip_k = QKClip(((c.qk_nope_head_dim, 0.5),))
        self.w_k_b = weight((c.kv_lora_rank, h, c.qk_nope_head_dim), "rank heads head_dim", PER_HEAD, clip_k)
        self.w_v_b = weight((c.kv_lora_rank, h, c.v_head_dim), "rank heads head_dim", PER_HEAD)
        if c.output_gate:
            self.w_g = weight((d, h, c.v_head_dim), "embed heads head_dim", TO_HEADS)
        self.w_o = weight((h, c.v_head_dim, d), "heads head_dim embed", FROM_HEADS)

    def __call__(
        self,
        x: jax.Array,
        documents: jax.Array | None,
        cache: MLACache | None,
        slots: Slots | None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, MLACache | None, jax.Array]:
        """x `[b, t, d]` -> y `[b, t, d]`, the cache after these tokens, and the largest logit of each head `[h]`.

        `positions [b, t]` count the tokens of each document; like `documents` they are of the full rows, also
        where x is sharded. They are needed with `rope` only.
        """
        c = self.config.mla
        if c.q_lora_rank is None:
            q = einsum("btd,dhk->bthk", x, self.w_q)
        else:
            q_latent = rms_norm(einsum("btd,dr->btr", x, self.w_q_a), self.q_norm.get_value(), eps=LORA_NORM_EPS)
            q = einsum("btr,rhk->bthk", q_latent, self.w_q_b)
        kv, k_rope = jnp.split(einsum("btd,dr->btr", x, self.w_kv_a), [c.kv_lora_rank], axis=-1)
        latent = jnp.concatenate([rms_norm(kv, self.kv_norm.get_value(), eps=LORA_NORM_EPS), k_rope], axis=-1)

        spec, rank_axes = spec_of(q), axes_of(spec_of(self.w_k_b.get_value())[0])
        out = (spec, None if cache is None else MLACache(spec_of(cache.latent)), P(spec[2]))  # type: ignore[arg-type]
        attend = partial(self._attend, axes_of(spec[0]), axis_of(spec[1]), rank_axes, mesh_axes_of(q))
        args = (q, latent, self.w_k_b.get_value(), self.w_v_b.get_value(), documents, positions, cache, slots)
        o, cache, max_logits = per_device(attend, out)(*args)
        if c.output_gate:
            o = o * jax.nn.sigmoid(einsum("btd,dhv->bthv", x, self.w_g).astype(o.dtype))
        return einsum("bthv,hvd->btd", o.astype(x.dtype), self.w_o), cache, max_logits

    def _attend(
        self, batch_axes, time_axis, rank_axes, axes, q, latent, w_k_b, w_v_b, documents, positions, cache, slots
    ):
        """Attention of a device's queries and heads to the latents of their full rows."""
        w_k_b, w_v_b = (gather_weight(w, (rank_axes, (), ()), axes, q.dtype) for w in (w_k_b, w_v_b))
        q, latent = self._rotated(q, latent, context.local_span(positions, q.shape[1], time_axis))
        form = self._absorbed if cache is not None and self._absorbs(q.shape[1]) else self._expanded

        def attend(q, latent, **where):
            return form(q, vary(latent, axes), w_k_b, w_v_b, where)

        if cache is None:
            o, max_logits = context.causal(attend, q, latent, documents=documents, axis=time_axis, axes=axes)
        else:
            assert slots is not None
            new = latent.astype(cache.latent.dtype)
            latent = jax.lax.dynamic_update_slice_in_dim(cache.latent, new, slots.start, axis=1)
            cache = MLACache(latent)
            where = {"q_documents": slots.queries, "kv_documents": slots.keys, "q_start": slots.start}
            o, max_logits = attend(q, latent, **where)
        tokens = batch_axes if time_axis is None else (*batch_axes, time_axis)
        return o, cache, jax.lax.pmax(jax.lax.stop_gradient(max_logits), tokens) if tokens else max_logits

    def _rotated(self, q, latent, positions):
        """Queries `[b, t, h, k]` and this call's latents `[b, t, r]`, their rotary ends turned by position."""
        c = self.config.mla
        if c.rope is None:
            return q, latent
        frequencies = yarn_frequencies(
            c.qk_rope_head_dim,
            theta=c.rope.theta,
            factor=c.rope.factor,
            original_length=c.rope.original_max_position_embeddings,
            beta_fast=c.rope.beta_fast,
            beta_slow=c.rope.beta_slow,
        )
        return rotate(q, positions, frequencies), rotate(latent, positions, frequencies)

    def _expanded(self, q, latent, w_k_b, w_v_b, where: dict) -> tuple[jax.Array, jax.Array]:
        """Attention over keys and values of every head, made from the latents `[b, s, r]`."""
        return latent_attention(q, latent, w_k_b, w_v_b, scale=self.scale, **where)

    def _absorbed(self, q, latent, w_k_b, w_v_b, where: dict) -> tuple[jax.Array, jax.Array]:
        """The same with W_k_b moved to the query and W_v_b to the output: latents serve all heads as key and value."""
        c = self.config.mla
        q_nope, q_rope = jnp.split(q, [c.qk_nope_head_dim], axis=-1)
        q = jnp.concatenate([jnp.einsum("bthk,rhk->bthr", q_nope, w_k_b), q_rope], axis=-1)
        latent = latent[:, :, None]
        o, max_logits = attention(q, latent, latent[..., : c.kv_lora_rank], scale=self.scale, **where)
        return jnp.einsum("bthr,rhv->bthv", o, w_v_b.astype(o.dtype)), max_logits

    def _absorbs(self, t: int) -> bool:
        """Whether t queries against many slots cost fewer FLOPs absorbed: no expansion, but wider dot products."""
        c = self.config.mla
        absorbed = 2 * c.kv_lora_rank + c.qk_rope_head_dim
        expanded = c.qk_head_dim + c.v_head_dim
        return t * (absorbed - expanded) < c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
