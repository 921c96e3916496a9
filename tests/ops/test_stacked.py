"""Experts that a loop over layers reads in place."""

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.ops.experts import Stacked


def test_a_loop_reads_its_own_layers_experts():
    w = np.random.default_rng(0).standard_normal((2, 3, 4, 5, 6)).astype(np.float32)  # repeats, length, experts, d, f
    stacked = Stacked.of(jnp.asarray(w), 2)
    for layer in np.ndindex(2, 3):
        one = jax.tree.map(lambda first: first[layer], stacked)  # noqa: B023
        assert one.shape == w.shape[2:]
        for expert in range(4):
            np.testing.assert_array_equal(one[jnp.int32(expert)], w[(*layer, expert)])
