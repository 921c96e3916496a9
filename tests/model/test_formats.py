"""Experts that are rounded to MXFP4 in training, in blocks along their inputs, as they are stored."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.model.moe import MoE
from kimi_jax.model.param import arrays, with_arrays
from kimi_jax.ops.quant.qtensor import QTensor
from tests import tiny

COMPILE_QUICKLY = True


def test_rounding_is_along_the_inputs_of_each_matrix():
    moe = replace(tiny.MODEL.moe, num_experts=2, experts_per_token=1, hidden_size=32, latent_size=32)
    plain = replace(tiny.MODEL, moe=moe)
    rounding = replace(plain, moe=replace(moe, weight_format="mxfp4"))
    rng = np.random.default_rng(0)
    values = {
        name: jnp.asarray(rng.standard_normal(a.shape), jnp.float32) for name, a in arrays(MoE(plain, ())).items()
    }
    stored = {
        name: QTensor.encode(a).decode(jnp.float32) if name in ("w_gate", "w_up", "w_down") else a
        for name, a in values.items()
    }
    x = jnp.asarray(rng.standard_normal((1, 6, plain.hidden_size)), jnp.float32)

    @jax.jit
    def run(layer):
        return layer(x, None)[0]

    expected = run(with_arrays(MoE(plain, ()), stored))
    np.testing.assert_array_equal(run(with_arrays(MoE(rounding, ()), values)), expected)
    assert np.any(run(with_arrays(MoE(plain, ()), values)) != expected)
