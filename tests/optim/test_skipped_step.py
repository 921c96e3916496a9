"""A step that is skipped leaves Muon's momentum as it was, in one batch of blocks and where layers are walked."""

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.model.rules import Muon
from kimi_jax.optim.muon import scale_by_muon


@pytest.mark.parametrize("step_bytes", [2**20, 4 * 3 * 4], ids=["batch", "walk"])
def test_a_skipped_step_leaves_no_trace(step_bytes):
    rng = np.random.default_rng(0)
    muon = scale_by_muon({"w": Muon(rows=(-2,), cols=(-1,))}, step_bytes=step_bytes)
    good, bad, last = ({"w": jnp.asarray(rng.standard_normal((2, 3, 4)), jnp.float32)} for _ in range(3))
    _, state = muon.update(good, muon.init(good), accept=jnp.asarray(True))
    _, skipped = muon.update(bad, state, accept=jnp.asarray(False))
    np.testing.assert_array_equal(skipped.momentum["w"], state.momentum["w"])
    np.testing.assert_array_equal(state.momentum["w"], good["w"])  # what was accepted is in it
    for before in (state, skipped):
        _, after = muon.update(last, before, accept=jnp.asarray(True))
        np.testing.assert_allclose(after.momentum["w"], 0.95 * good["w"] + last["w"], rtol=1e-6)
