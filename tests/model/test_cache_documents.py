"""Which slots of a cache stay visible, decided without a model."""

import jax.numpy as jnp
import numpy as np

from kimi_jax.model.cache import Cache, advance


def test_only_the_rows_last_document_stays_visible():
    """Two slots are held. Document 1 is the one they belong to, 2 a new one, 0 padding."""
    documents = jnp.array([[1, 1, 1], [1, 2, 2], [0, 1, 2], [0, 0, 1], [0, 0, 0], [1, 2, 0]])
    held = jnp.zeros((len(documents), 6), bool).at[:, :2].set(True)
    after = advance(Cache((), held, jnp.int32(2)), (), documents)
    expected = [
        [1, 1, 1, 1, 1, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
    ]
    np.testing.assert_array_equal(after.visible, np.array(expected, bool))
    assert after.length == 5
