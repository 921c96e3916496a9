"""Kimi Delta Attention as a layer: projections, short convolutions, gates, the recurrence, gated norm."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from kimi_jax.config import ModelConfig
from kimi_jax.model.cache import KDACache
from kimi_jax.model.init import inverse_softplus_dt, log_uniform, normal, ones, uniform, zeros
from kimi_jax.model.mlp import MATRIX
from kimi_jax.model.param import einsum, exact_dtype, param
from kimi_jax.model.rules import AdamW, Muon
from kimi_jax.ops.conv import short_conv
from kimi_jax.ops.kda import decay_gate, kda
from kimi_jax.ops.norm import l2_norm, rms_norm
from kimi_jax.parallel import context
from kimi_jax.parallel.spec import axis_of, per_device, spec_of

PER_HEAD = Muon(rows=(-3,), cols=(-1,))
"""`[.., in, heads, out]`: one matrix a head."""
TO_HEADS = Muon(rows=(-3,), cols=(-2, -1))
"""`[.., in, heads, out]`: one matrix over all heads."""
FROM_HEADS = Muon(rows=(-3, -2), cols=(-1,))
"""`[.., heads, in, out]`: one matrix over all heads."""
VECTOR = AdamW(decay=False)


class KDA(nnx.Module):
    """S <- (I - beta k k^T) Diag(exp g) S + beta k v^T, o = S^T q; then y = (rms_norm(o) sigmoid(gate)) W_o.

    q, k, v = silu(conv(x W)); q and k are L2-normalised; g is the decay gate of x W_fa W_fb, beta = sigmoid(x W_beta).
    """

    def __init__(self, config: ModelConfig, stack: tuple[int, ...]):
        c, d = config.kda, config.hidden_size
        assert c is not None
        self.config, self.eps = c, config.rms_norm_eps
        h, k = c.num_heads, c.head_dim
        dtype, init = jnp.dtype(config.param_dtype), normal(config.initializer_range)
        exact = exact_dtype(dtype)

        def weight(shape, axes, rule):
            return param(shape, axes, init, rule, stack=stack, dtype=dtype)

        def conv():
            # PyTorch's default for a depthwise convolution, which the released code keeps.
            bound = c.conv_size**-0.5
            return param((h, k, c.conv_size), "heads head_dim conv", uniform(bound), VECTOR, stack=stack, dtype=exact)

        self.w_q = weight((d, h, k), "embed heads head_dim", PER_HEAD)
        self.w_k = weight((d, h, k), "embed heads head_dim", PER_HEAD)
        self.w_v = weight((d, h, k), "embed heads head_dim", PER_HEAD)
        self.conv_q, self.conv_k, self.conv_v = conv(), conv(), conv()
        self.w_f_a = weight((d, k), "embed rank_out", MATRIX)
        self.w_f_b = weight((k, h, k), "gate_rank heads head_dim", TO_HEADS)
        self.w_beta = weight((d, h), "embed heads", MATRIX)
        # The bounded gate starts at decay exp(-5 sigmoid(dt_bias)), which needs no spread over heads.
        a_log = zeros if c.gate_lower_bound is not None else log_uniform(1, 16)
        self.A_log = param((h,), "heads", a_log, VECTOR, stack=stack, dtype=exact)
        self.dt_bias = param((h, k), "heads head_dim", inverse_softplus_dt, VECTOR, stack=stack, dtype=exact)
        if c.full_rank_gate:
            self.w_g = weight((d, h, k), "embed heads head_dim", TO_HEADS)
        else:
            self.w_g_a = weight((d, k), "embed rank_out", MATRIX)
            self.w_g_b = weight((k, h, k), "gate_rank heads head_dim", TO_HEADS)
        self.o_norm = param((k,), "head_dim", ones, VECTOR, stack=stack, dtype=exact)
        self.w_o = weight((h, k, d), "heads head_dim embed", FROM_HEADS)

    def __call__(
        self, x: jax.Array, documents: jax.Array | None, cache: KDACache | None
    ) -> tuple[jax.Array, KDACache | None]:
        """x `[b, t, d]` -> y `[b, t, d]` and, where a cache came in, the cache after these tokens.

        `documents` is that of the full rows, also where x is sharded over time.
        """
        c = self.config
        q, k, v = (einsum("btd,dhk->bthk", x, w) for w in (self.w_q, self.w_k, self.w_v))
        f = einsum("btr,rhk->bthk", einsum("btd,dr->btr", x, self.w_f_a), self.w_f_b)
        beta = einsum("btd,dh->bth", x, self.w_beta)
        if c.full_rank_gate:
            gate = einsum("btd,dhv->bthv", x, self.w_g)
        else:
            gate = einsum("btr,rhv->bthv", einsum("btd,dr->btr", x, self.w_g_a), self.w_g_b)
        weights = (self.conv_q, self.conv_k, self.conv_v, self.A_log, self.dt_bias, self.o_norm)
        args = (q, k, v, f, beta, gate, [w.get_value() for w in weights], documents, cache)
        out = (spec_of(q), None if cache is None else jax.tree.map(spec_of, cache))
        o, cache = per_device(partial(self._mix, axis_of(spec_of(x)[1])), out)(*args)
        return einsum("bthv,hvd->btd", o, self.w_o), cache

    def _mix(self, time_axis, q, k, v, f, beta, gate, weights, documents, cache):
        """Convolutions, recurrence and gated norm of a device's rows, heads and tokens."""
        c, dtype = self.config, q.dtype
        conv_q, conv_k, conv_v, A_log, dt_bias, o_norm = weights
        g = decay_gate(f, A_log, dt_bias, lower_bound=c.gate_lower_bound)
        beta = jax.nn.sigmoid(beta.astype(g.dtype))
        if time_axis is not None:
            conv = partial(context.short_conv, documents=documents, axis=time_axis)
            q, k, v = conv(q, conv_q), conv(k, conv_k), conv(v, conv_v)
            recurrence = partial(context.kda, documents=documents, axis=time_axis)
            tails = ()
        else:
            (q, *q_tail), (k, *k_tail), (v, *v_tail) = (
                short_conv(x, taps, segment_ids=documents, tail=tail)
                for x, taps, tail in (
                    (q, conv_q, cache and cache.q_tail),
                    (k, conv_k, cache and cache.k_tail),
                    (v, conv_v, cache and cache.v_tail),
                )
            )
            tails = (*q_tail, *k_tail, *v_tail)
            form = "recurrent" if q.shape[1] == 1 else "chunked"
            recurrence = partial(kda, initial_state=cache and cache.state, segment_ids=documents, form=form)
        o, state = recurrence(l2_norm(q), l2_norm(k), v, g, beta, chunk_size=c.chunk_size)
        o = rms_norm(o.astype(g.dtype), o_norm, eps=self.eps)
        o = (o * jax.nn.sigmoid(gate.astype(g.dtype))).astype(dtype)
        return o, None if cache is None else KDACache(state, *tails)
