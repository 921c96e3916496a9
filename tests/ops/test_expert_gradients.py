"""Gradients of bf16 experts over many blocks of rows."""

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.ops.experts import expert_mlp


def test_gradients_of_matrices_are_summed_over_blocks_in_float32():
    """One expert, one channel, gate left out: the gradient of w_down is the sum of all tokens. A large one comes first,
    to which no block of 64 ones would add anything in bf16."""
    n, one = 17 * 64, jnp.ones((1, 1, 1), jnp.bfloat16)
    x = jnp.ones((n, 1), jnp.bfloat16).at[0].set(16384)

    @jax.jit
    def gradient(w_down):
        def total(w):
            chosen, weights = jnp.zeros((n, 1), jnp.int32), jnp.ones((n, 1), jnp.float32)
            y = expert_mlp(x, chosen, weights, one, one, w, lambda gate, up: up, backend="blocks")
            return jnp.sum(y.astype(jnp.float32))

        return jax.grad(total)(w_down)

    np.testing.assert_allclose(gradient(one).astype(jnp.float32), 16384 + n - 1, rtol=2**-8)
