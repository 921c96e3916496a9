"""Where inside its bin the quantile lies."""

import jax.numpy as jnp
import numpy as np

from kimi_jax.ops.routing import quantile_bias


def test_the_quantile_of_half_a_token_is_interpolated():
    """Three tokens and k / e = 1 / 2: one and a half tokens. The bins are half as wide as 1, from -1 on."""
    counts = jnp.array([[0, 1, 1, 1], [0, 3, 0, 0]])
    # Half into the third bin, -1 + 2.5 / 2, and half (one and a half of three) into the second, -1 + 1.5 / 2.
    np.testing.assert_allclose(quantile_bias(counts, jnp.zeros(2), k=1), [0.25, -0.25], rtol=1e-6)
