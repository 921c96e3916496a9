"""Mixture of experts: sigmoid router with a correction bias, routed experts in a latent space, shared experts."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from kimi_jax.config import ModelConfig
from kimi_jax.model.init import normal, ones, zeros
from kimi_jax.model.kda import VECTOR
from kimi_jax.model.mlp import MATRIX, MLP, glu
from kimi_jax.model.param import einsum, exact_dtype, param
from kimi_jax.model.rules import Balanced
from kimi_jax.ops.experts import Stacked, expert_mlp
from kimi_jax.ops.norm import rms_norm
from kimi_jax.ops.quant.mx import mxfp4_round, mxfp8_round
from kimi_jax.ops.quant.qtensor import QTensor
from kimi_jax.ops.routing import best_experts, document_balance_loss, expert_load, quantile_histogram, route
from kimi_jax.parallel import context
from kimi_jax.parallel.dense import gather_weight
from kimi_jax.parallel.expert import expert_parallel_mlp
from kimi_jax.parallel.mesh import platform
from kimi_jax.parallel.spec import axes_of, axis_of, mesh_axes_of, per_device, spec_of, vary


class MoE(nnx.Module):
    """y = rms_norm(sum_i w_i E_i(x W_down)) W_up + shared(x); latent and norm are optional.

    The router reads x at full width, and its bias decides who is chosen but never how much they count. Weights of
    routed experts may be arrays or `QTensor`.
    """

    def __init__(self, config: ModelConfig, stack: tuple[int, ...]):
        self.config = config
        c, d = config.moe, config.hidden_size
        e, f, z = c.num_experts, c.hidden_size, c.latent_size or d
        dtype, init = jnp.dtype(config.param_dtype), normal(config.initializer_range)

        def weight(shape, axes):
            return param(shape, axes, init, MATRIX, stack=stack, dtype=dtype)

        self.w_router = weight((d, e), "embed router")
        self.router_bias = param((e,), "router", zeros, Balanced(), stack=stack, dtype=exact_dtype(dtype))
        if c.latent_size is not None:
            self.w_latent_down = weight((d, z), "embed latent")
            self.w_latent_up = weight((z, d), "latent embed")
        if c.latent_norm:
            self.latent_norm = param((z,), "latent", ones, VECTOR, stack=stack, dtype=dtype)
        self.w_gate = weight((e, z, f), "experts expert_latent expert_mlp")
        self.w_up = weight((e, z, f), "experts expert_latent expert_mlp")
        self.w_down = weight((e, f, z), "experts expert_mlp expert_latent")
        if c.num_shared_experts:
            self.shared = MLP(config, c.num_shared_experts * f, stack)

    def __call__(self, x: jax.Array, documents: jax.Array | None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """x `[b, t, d]` -> y `[b, t, d]` and what the router did.

        `load [e]` counts the tokens of each expert and `histogram [e, bins]` the margins that Quantile Balancing
        pools, both int32 and over the real tokens of all devices; `router_scores [b, t, e]`, `topk_idx` and
        `topk_weight [b, t, k]`. With `aux_loss_alpha`, `balance_loss` is its product with the sequence-wise balance
        loss, summed over the real tokens of all devices.
        """
        c = self.config.moe
        tokens, width = spec_of(x)[:2], axes_of(spec_of(self.w_router.get_value())[0])
        routed = {name: P(*tokens, None) for name in ("router_scores", "topk_idx", "topk_weight")}
        out = {**routed, "load": P(), "histogram": P()} | ({"balance_loss": P()} if c.aux_loss_alpha else {})
        weights = (self.w_router.get_value(), self.router_bias.get_value())
        aux = per_device(partial(self._route, tokens, width), out)(x, *weights, documents)
        z = x if c.latent_size is None else einsum("btd,dz->btz", x, self.w_latent_down)
        experts = [w.get_value() for w in (self.w_gate, self.w_up, self.w_down)]
        w = experts[0]
        if isinstance(w, Stacked):  # there is no mesh
            cut, rows = (None, None, None), ()
        elif isinstance(w, QTensor):  # stored [e, f, z]
            cut, rows = [spec_of(w.packed)[axis] for axis in (0, 2, 1)], mesh_axes_of(z, w.packed)
        else:
            cut, rows = spec_of(w), mesh_axes_of(z, w)
        run = per_device(partial(self._run_experts, *cut, rows), spec_of(z))
        y = run(z, aux["topk_idx"], aux["topk_weight"], *experts)
        if c.latent_norm:
            y = rms_norm(y, self.latent_norm.get_value(), eps=self.config.rms_norm_eps)
        if c.latent_size is not None:
            y = einsum("btz,zd->btd", y, self.w_latent_up)
        if c.num_shared_experts:
            y = y + self.shared(x)
        return y, aux

    def _route(self, tokens, width, x, w_router, bias, documents):
        """Routing of a device's tokens, and counts over those of all."""
        c, (b, t, d) = self.config.moe, x.shape
        rows = (*axes_of(tokens[0]), *axes_of(tokens[1]))
        bias = vary(jax.lax.stop_gradient(bias), rows)
        routing = route(
            x.reshape(b * t, d),
            gather_weight(w_router, (width, ()), rows, w_router.dtype),
            bias,
            k=c.experts_per_token,
            renormalize=c.renormalize,
            scaling_factor=c.routed_scaling_factor,
        )
        here = context.local_span(documents, t, axis_of(tokens[1]))
        real = jnp.ones(b * t, bool) if here is None else here.reshape(-1) > 0
        counts = {
            "load": expert_load(routing.indices, real, c.num_experts),
            "histogram": quantile_histogram(routing.scores, routing.threshold, bias, real),
        }
        if c.aux_loss_alpha:
            counts["balance_loss"] = self._balance_loss(routing.scores.reshape(b, t, -1), documents, axis_of(tokens[1]))
        values = (routing.scores, routing.indices, routing.weights)
        scores, indices, weights = (value.reshape(b, t, -1) for value in values)
        return {
            **(jax.lax.psum(counts, rows) if rows else counts),
            "router_scores": scores,
            "topk_idx": indices,
            "topk_weight": weights,
        }

    def _balance_loss(self, scores, documents, time_axis):
        """Of a device's tokens, whose documents reach over other devices of `time_axis`."""
        c, t = self.config.moe, scores.shape[1]
        rows = jnp.ones(scores.shape[:2], jnp.int32) if documents is None else documents
        chosen = best_experts(scores, k=c.experts_per_token)
        if time_axis is not None:
            chosen = jax.lax.all_gather(chosen, time_axis, axis=1, tiled=True)
        here = context.local_span(rows, t, time_axis)
        assert here is not None
        return c.aux_loss_alpha * document_balance_loss(scores, here, chosen, rows)

    def _run_experts(self, expert_axes, latent_axes, mlp_axes, axes, z, indices, weights, w_gate, w_up, w_down):
        """A device's tokens through the experts of all devices.

        Numbers are rounded to their format before anything travels: groups do not cross the bounds of a shard.
        """
        c = self.config.moe
        x, indices, weights = (vary(a.reshape(-1, a.shape[-1]), axes) for a in (z, indices, weights))
        activation = partial(glu, self.config)
        if c.weight_format == "mxfp4" and isinstance(w_gate, jax.Array):
            w_gate, w_up, w_down = (mxfp4_round(w, axis=-2) for w in (w_gate, w_up, w_down))
        if c.activation_format == "mxfp8":
            x = mxfp8_round(x)
            activation = lambda gate, up: mxfp8_round(glu(self.config, gate, up))  # noqa: E731
        if isinstance(w_gate, Stacked):
            return expert_mlp(x, indices, weights, w_gate, w_up, w_down, activation, backend="blocks").reshape(z.shape)
        y = expert_parallel_mlp(
            x,
            indices,
            weights,
            w_gate,
            w_up,
            w_down,
            activation,
            axis=axis_of(expert_axes),
            gather_axes=axes_of(latent_axes),
            balance=c.balance,
            transport=c.transport or ("ragged" if platform() in ("tpu", "gpu") else "gather"),
            backend="blocks" if platform() == "cpu" else "ragged",
        ).reshape(z.shape)
        return jax.lax.psum(y, axes_of(mlp_axes)) if axes_of(mlp_axes) else y
