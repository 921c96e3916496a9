"""Attention Residuals: a layer's input is a learned mixture of the outputs of earlier blocks."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def attn_residual(
    bank: Sequence[jax.Array] | jax.Array,
    partial: jax.Array,
    query: jax.Array,
    gain: jax.Array,
    *,
    eps: float,
    fresh: bool | jax.Array = False,
) -> jax.Array:
    """Mixes the stored blocks and the running partial sum, by softmax attention over the sources.

    V = [bank; partial],  score_i = <V_i / sqrt(mean(V_i^2) + eps), gain * query>
    out = sum_i softmax(score)_i V_i

    The values are mixed as they are; only the keys are normalised. There is no 1/sqrt(d). All of it runs in at
    least float32 on the raw sources: a norm rounded to bfloat16 before the dot product drifts.

    Args:
      bank: n outputs [b, t, d] of the finished blocks, the embedding first. Better a tuple than one array
        [n, b, t, d]: a bank that grows by joining copies all of it for each new block.
      partial: [b, t, d] sum of the sublayer outputs of the block under way.
      query: [d] static pseudo-query (`*_res_proj`). Zero at initialisation: the plain average of the sources.
      gain: [d] gain of the key norm (`*_res_norm`).
      eps: added to the mean square.
      fresh: the block has no output yet: `partial` is left out, whatever it holds. May be traced.

    Returns:
      [b, t, d] in partial.dtype.

    Source: Attention Residuals (arXiv 2603.15031); `_apply_attn_res` in the released `modeling_kimi_linear.py`.
    """
    wide = jnp.promote_types(partial.dtype, jnp.float32)
    direction = gain.astype(wide) * query.astype(wide)
    stored = [block.astype(wide) for block in bank]
    running = jnp.where(fresh, 0, partial.astype(wide))

    def score(v):  # products and sums, not a matmul: those have fewer bits on some devices
        return jnp.sum(v * direction, axis=-1) * jax.lax.rsqrt(jnp.mean(v * v, axis=-1) + eps)

    scores = jnp.stack([*map(score, stored), jnp.where(fresh, -jnp.inf, score(running))])
    parts = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=0)))
    shares = parts / jnp.sum(parts, axis=0)
    return sum(
        (share[..., None] * v for share, v in zip(shares, [*stored, running], strict=True)), start=jnp.zeros((), wide)
    ).astype(partial.dtype)
