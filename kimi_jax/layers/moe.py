"""Mixture of experts: sigmoid router with a correction bias, routed experts in a latent space, shared experts."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from kimi_jax.config import ModelConfig
from kimi_jax.layers.kda import VECTOR
from kimi_jax.layers.mlp import MATRIX, MLP, glu
from kimi_jax.layers.param import Balanced, einsum, exact_dtype, normal, ones, param, zeros
from kimi_jax.ops.experts import expert_mlp
from kimi_jax.ops.norm import rms_norm
from kimi_jax.ops.routing import expert_load, quantile_histogram, route


class MoE(nnx.Module):
    """y = rms_norm(sum_i w_i E_i(x W_down)) W_up + shared(x); latent and norm are optional.

    The router reads x at full width, and its bias decides who is chosen but never how much they count.
    """

    def __init__(self, config: ModelConfig, stack: tuple[int, ...]):
        self.config = config
        c, d = config.moe, config.hidden_size
        e, f, z = c.num_experts, c.hidden_size, c.latent_size or d
        dtype, init = jnp.dtype(config.param_dtype), normal(config.initializer_range)

        def weight(shape, axes):
            return param(shape, axes, init, MATRIX, stack=stack, dtype=dtype)

        self.w_router = weight((d, e), "embed experts")
        self.router_bias = param((e,), "experts", zeros, Balanced(), stack=stack, dtype=exact_dtype(dtype))
        if c.latent_size is not None:
            self.w_latent_down = weight((d, z), "embed latent")
            self.w_latent_up = weight((z, d), "latent embed")
        if c.latent_norm:
            self.latent_norm = param((z,), "latent", ones, VECTOR, stack=stack, dtype=dtype)
        self.w_gate = weight((e, z, f), "experts latent expert_mlp")
        self.w_up = weight((e, z, f), "experts latent expert_mlp")
        self.w_down = weight((e, f, z), "experts expert_mlp latent")
        if c.num_shared_experts:
            self.shared = MLP(config, c.num_shared_experts * f, stack)

    def __call__(self, x: jax.Array, documents: jax.Array | None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """x `[b, t, d]` -> y `[b, t, d]` and what the router did.

        `load [e]` counts the tokens of each expert and `histogram [e, bins]` the margins that Quantile Balancing
        pools, both int32 and over real tokens; `router_scores [b t, e]`, `topk_idx` and `topk_weight [b t, k]`.
        """
        c = self.config.moe
        b, t, d = x.shape
        flat = x.reshape(b * t, d)
        bias = jax.lax.stop_gradient(self.router_bias.get_value())
        routing = route(
            flat,
            self.w_router.get_value(),
            bias,
            k=c.experts_per_token,
            renormalize=c.renormalize,
            scaling_factor=c.routed_scaling_factor,
        )
        z = flat if c.latent_size is None else einsum("nd,dz->nz", flat, self.w_latent_down)
        w_gate, w_up, w_down = (w.get_value().astype(x.dtype) for w in (self.w_gate, self.w_up, self.w_down))
        y = expert_mlp(z, routing.indices, routing.weights, w_gate, w_up, w_down, partial(glu, self.config))
        if c.latent_norm:
            y = rms_norm(y, self.latent_norm.get_value(), eps=self.config.rms_norm_eps)
        if c.latent_size is not None:
            y = einsum("nz,zd->nd", y, self.w_latent_up)
        y = y.reshape(b, t, d)
        if c.num_shared_experts:
            y = y + self.shared(x)
        real = jnp.ones(b * t, bool) if documents is None else documents.reshape(-1) > 0
        return y, {
            "load": expert_load(routing.indices, real, c.num_experts),
            "histogram": quantile_histogram(routing.scores, routing.threshold, bias, real),
            "router_scores": routing.scores,
            "topk_idx": routing.indices,
            "topk_weight": routing.weights,
        }
