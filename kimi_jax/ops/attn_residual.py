"""Attention Residuals: a layer's input is a learned mixture of the outputs of earlier blocks."""

import jax
import jax.numpy as jnp


def attn_residual(
    bank: jax.Array,
    partial: jax.Array,
    query: jax.Array,
    gain: jax.Array,
    *,
    eps: float,
    count: int | jax.Array | None = None,
    fresh: bool | jax.Array = False,
) -> jax.Array:
    """Mixes the stored blocks and the running partial sum, by softmax attention over the sources.

    V = [bank; partial],  score_i = <V_i / sqrt(mean(V_i^2) + eps), gain * query>
    out = sum_i softmax(score)_i V_i

    The values are mixed as they are; only the keys are normalised. There is no 1/sqrt(d). All of it runs in at
    least float32 on the raw sources: a norm rounded to bfloat16 before the dot product drifts.

    Args:
      bank: [n, b, t, d] outputs of the finished blocks, the embedding first; finite also past `count`.
      partial: [b, t, d] sum of the sublayer outputs of the block under way.
      query: [d] static pseudo-query (`*_res_proj`). Zero at initialisation: the plain average of the sources.
      gain: [d] gain of the key norm (`*_res_norm`).
      eps: added to the mean square.
      count: how many entries of the bank there are yet; the others have no influence. None for all. May be traced.
      fresh: the block has no output yet: `partial` is left out, whatever it holds. May be traced.

    Returns:
      [b, t, d] in partial.dtype.

    Source: Attention Residuals (arXiv 2603.15031); `_apply_attn_res` in the released `modeling_kimi_linear.py`.
    """
    wide = jnp.promote_types(partial.dtype, jnp.float32)
    direction = gain.astype(wide) * query.astype(wide)
    stored = bank.astype(wide)
    running = jnp.where(fresh, 0, partial.astype(wide))

    def score(v):  # products and sums, not a matmul: those have fewer bits on some devices
        return jnp.sum(v * direction, axis=-1) * jax.lax.rsqrt(jnp.mean(v * v, axis=-1) + eps)

    # Bank and partial sum are scored apart: joining them would copy the whole bank for every sublayer.
    stored_score = score(stored)
    if count is not None:
        finished = jnp.arange(bank.shape[0]) < count
        stored_score = jnp.where(finished[:, None, None], stored_score, -jnp.inf)
    running_score = jnp.where(fresh, -jnp.inf, score(running))
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(stored_score, axis=0), running_score))
    stored_part = jnp.exp(stored_score - top)
    running_part = jnp.exp(running_score - top)
    total = jnp.sum(stored_part, axis=0) + running_part
    mixed = jnp.sum((stored_part / total)[..., None] * stored, axis=0) + (running_part / total)[..., None] * running
    return mixed.astype(partial.dtype)
