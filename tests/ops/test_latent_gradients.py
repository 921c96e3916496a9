"""Gradients of bf16 up-projections over many blocks of keys."""

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.ops.attention import latent_attention


def test_gradients_of_weights_are_summed_over_blocks_in_float32():
    """One query sees 1,024 equal keys, a block each: a sum in bf16 would stop growing at a quarter of the gradient."""
    s, one = 1024, jnp.ones((1, 1, 1), jnp.bfloat16)
    latent = jnp.ones((1, s, 2), jnp.bfloat16)
    q = jnp.ones((1, 1, 1, 2), jnp.bfloat16)

    @jax.jit
    def gradient(w_v_b):
        run = lambda w: jnp.sum(latent_attention(q, latent, one, w, scale=1.0, q_start=s - 1, key_block=1)[0])  # noqa: E731
        return jax.grad(run)(w_v_b)

    np.testing.assert_allclose(gradient(one).astype(jnp.float32), 1.0, rtol=2**-8)
