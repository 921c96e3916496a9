"""SiTU-GLU against values of the released code, and gradients where everything saturates."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.situ import sigmoid, silu, situ_glu, soft_cap, swiglu
from tests import oracles
from tests.conftest import rel_to_max

GOLDEN = Path(__file__).parents[1] / "golden" / "situ_op"
CASES = json.loads((GOLDEN / "meta.json").read_text())["cases"]


def load(name):
    settings = CASES[name]
    return np.load(GOLDEN / f"{name}.npz"), {k: settings[k] for k in ("beta", "linear_beta")}


@partial(jax.jit, static_argnames=("beta", "linear_beta"))
def with_gradients(gate, up, d_out, **settings):
    out, pull = jax.vjp(lambda g, u: situ_glu(g, u, **settings), gate, up)
    return out, *pull(d_out)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("float64", 1e-12)])
def test_golden(name, dtype, tolerance):
    data, settings = load(name)
    with jax.enable_x64(dtype == "float64"):
        gate, up, d_out = (jnp.asarray(data[f"in.{x}"], dtype) for x in ("gate", "up", "d_out"))
        out, d_gate, d_up = with_gradients(gate, up, d_out, **settings)
    assert out.dtype == dtype
    assert rel_to_max(out, data["out.out_f64"]) < tolerance
    assert rel_to_max(d_gate, data["out.d_gate"]) < tolerance
    assert rel_to_max(d_up, data["out.d_up"]) < tolerance


@pytest.mark.parametrize("name", CASES)
def test_golden_bfloat16(name):
    data, settings = load(name)
    out = situ_glu(jnp.asarray(data["in.gate"], jnp.bfloat16), jnp.asarray(data["in.up"], jnp.bfloat16), **settings)
    assert out.dtype == jnp.bfloat16
    expected = data["out.out_bf16_from_bf16_inputs"]
    # One rounding in bfloat16: the float32 before it may fall on either side of a tie.
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=2**-7, atol=1e-30)
    assert np.mean(np.asarray(out, np.float32) == expected) > 0.99


def test_derivatives_keep_their_digits_where_the_function_is_flat():
    x = np.concatenate([np.linspace(-80, 80, 641), [0.0, 1e-8, -1e-8]]).astype(np.float32)
    wide = x.astype(np.float64)
    decay = np.exp(-np.abs(wide))
    np.testing.assert_allclose(jax.vmap(jax.grad(sigmoid))(x), decay / (1 + decay) ** 2, rtol=1e-6)
    flat = np.exp(-2 * np.abs(wide) / 4)
    slope = jax.vmap(jax.grad(lambda x: soft_cap(x, 4.0)))(x)
    np.testing.assert_allclose(slope, 4 * flat / (1 + flat) ** 2, rtol=1e-5)
    assert jax.vmap(jax.grad(silu))(jnp.array([-3e38, -1e4, 0.0, 1e4, 3e38])).tolist() == [0, 0, 0.5, 1, 1]


def test_caps_hold_and_large_inputs_stay_finite():
    big = jnp.array([1e4, 1e30, -1e4, -1e30, 0.0])
    gate, up = (a.reshape(-1) for a in jnp.meshgrid(big, big))
    out, pull = jax.vjp(lambda g, u: situ_glu(g, u, beta=4.0, linear_beta=25.0), gate, up)
    assert np.max(np.abs(out)) <= 100
    assert all(np.isfinite(gradient).all() for gradient in pull(jnp.ones_like(out)))


def test_swiglu():
    rng = np.random.default_rng(1)
    gate, up = rng.normal(size=(2, 7, 9)) * 5
    out = swiglu(jnp.asarray(gate, jnp.float32), jnp.asarray(up, jnp.float32))
    assert rel_to_max(out, oracles.silu(gate) * up) < 1e-6
    d_gate = jax.grad(lambda g: swiglu(g, jnp.asarray(up, jnp.float32)).sum())(jnp.asarray(gate, jnp.float32))
    s = oracles.sigmoid(gate)
    assert rel_to_max(d_gate, up * (s + gate * s * (1 - s))) < 1e-6
    assert swiglu(jnp.ones(3, jnp.bfloat16), jnp.ones(3, jnp.float32)).dtype == jnp.bfloat16
