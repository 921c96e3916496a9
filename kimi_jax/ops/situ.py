"""Gated activations, and the saturating functions they are made of.

`jax.grad` of tanh and sigmoid goes through 1 - y, which has no correct digit left where y rounds to 1. The
derivatives here come from one exponential of a number <= 0 and are accurate relative to themselves everywhere.
"""

from functools import partial

import jax
import jax.numpy as jnp


@jax.custom_jvp
def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x)), differentiated as exp(-|x|) / (1 + exp(-|x|))^2."""
    return jax.lax.logistic(x)


@sigmoid.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    tail = jnp.exp(-jnp.abs(x))
    return sigmoid(x), dx * (tail / (1 + tail) ** 2)


def silu(x: jax.Array) -> jax.Array:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def soft_cap(x: jax.Array, limit: float) -> jax.Array:
    """limit * tanh(x / limit): about x when small, never beyond +-limit; differentiated as sech^2(x / limit)."""
    return limit * jnp.tanh(x / limit)


@soft_cap.defjvp
def _(limit, primals, tangents):
    (x,), (dx,) = primals, tangents
    tail = jnp.exp(jnp.abs(x) * (-2 / limit))
    return soft_cap(x, limit), dx * (4 * tail / (1 + tail) ** 2)


def situ_glu(gate: jax.Array, up: jax.Array, *, beta: float, linear_beta: float | None) -> jax.Array:
    """SiTU-GLU: a gated unit with both branches capped.

    y = beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)

    The sigmoid takes the gate before the cap. With linear_beta None the second branch is `up` itself.

    Args:
      gate, up: [..., f].
      beta: cap of the gate branch (K3: 4).
      linear_beta: cap of the linear branch (K3: 25), or None.

    Returns:
      [..., f] in gate.dtype; computed in at least float32. |y| <= beta * linear_beta.

    Source: K3 report, section 2 (Stable LatentMoE); `SituAndMul` in the released `modeling_kimi_linear.py`.
    """
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    g, u = gate.astype(wide), up.astype(wide)
    if linear_beta is not None:
        u = soft_cap(u, linear_beta)
    return (soft_cap(g, beta) * sigmoid(g) * u).astype(gate.dtype)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """SwiGLU: y = gate sigmoid(gate) * up, computed in at least float32.

    Args:
      gate, up: [..., f].

    Returns:
      [..., f] in gate.dtype.
    """
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    return (silu(gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)
