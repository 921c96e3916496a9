"""A bank of blocks that is only partly filled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.attn_residual import attn_residual


@pytest.mark.parametrize("count", [1, 2, 4])
def test_entries_past_the_count_have_no_influence(count):
    rng = np.random.default_rng(0)
    bank, partial = rng.standard_normal((4, 2, 3, 8)), rng.standard_normal((2, 3, 8))
    query, gain = rng.standard_normal((2, 8))
    bank, partial, query, gain = (jnp.asarray(a, jnp.float32) for a in (bank, partial, query, gain))
    filled = jnp.where((jnp.arange(4) < count)[:, None, None, None], bank, 0)

    def mixed(bank, count=None):
        return attn_residual(bank, partial, query, gain, eps=1e-5, count=count)

    expected = mixed(bank[:count])
    for given in (bank, filled):  # zeros, too, would take a share of the softmax
        np.testing.assert_allclose(mixed(given, jnp.int32(count)), expected, atol=1e-6)
        gradient = jax.grad(lambda bank: jnp.sum(mixed(bank, count) ** 2))(given)
        assert np.all(np.any(gradient[:count], axis=-1)) and not np.any(gradient[count:])
