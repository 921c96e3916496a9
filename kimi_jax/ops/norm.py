"""Normalisations over the last axis.

Both are cheap to compute and their intermediates as large as their input, so the backward pass keeps only the input.
"""

import jax
import jax.numpy as jnp


@jax.checkpoint
def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """Divides by the root mean square, then multiplies by a learned gain.

    y = cast(x / sqrt(mean(x^2) + eps)) * weight

    The quotient is computed in at least float32 and cast back before the gain is applied, as in the released
    `modeling_kimi_linear.py`; the gain is plain (not 1 + weight).

    Args:
      x: [..., d].
      weight: [d].
      eps: added to the mean square. The released models use 1e-5, and 1e-6 in MLA's low-rank norms.

    Returns:
      [..., d] in x.dtype.

    >>> rms_norm(jnp.array([3.0, -4.0, 0.0, 0.0]), jnp.ones(4), eps=0.0).tolist()
    [1.2000000476837158, -1.600000023841858, 0.0, 0.0]
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * weight.astype(x.dtype)


@jax.checkpoint
def l2_norm(x: jax.Array, *, eps: float = 1e-6) -> jax.Array:
    """Scales vectors to unit length: y = x / sqrt(sum(x^2) + eps).

    `eps` stands under the root, so a zero vector stays zero and has a finite gradient (1 / sqrt(eps)).

    Args:
      x: [..., k].
      eps: added to the sum of squares (not to the mean, and not to the norm).

    Returns:
      [..., k] in at least float32.
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)
