"""Norms against NumPy, and their gradients where the input vanishes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.norm import l2_norm, rms_norm
from tests import oracles
from tests.conftest import rel_to_max, rel_to_rms

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 24)) * 10.0 ** np.arange(-4, 1)[:, None]  # the first rows are small enough for eps to show
WEIGHT = RNG.normal(size=24)


def directional_derivative(f, x, dx, step=1e-6):
    return (f(x + step * dx) - f(x - step * dx)) / (2 * step)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm(eps):
    x, weight = jnp.asarray(X, jnp.float32), jnp.asarray(WEIGHT, jnp.float32)
    assert rel_to_rms(rms_norm(x, weight, eps=eps), oracles.rms_norm(X, WEIGHT, eps)) < 2e-6


def test_gradients_in_float64(x64):
    dx, dout = RNG.normal(size=X.shape), RNG.normal(size=X.shape)
    for ours, theirs in (
        (lambda x: rms_norm(x, jnp.asarray(WEIGHT), eps=1e-5), lambda x: oracles.rms_norm(x, WEIGHT, 1e-5)),
        (l2_norm, oracles.l2_norm),
    ):
        y, pull = jax.vjp(ours, jnp.asarray(X))
        assert y.dtype == jnp.float64
        assert rel_to_rms(y, theirs(X)) < 1e-12
        for row in range(len(X)):
            step = 1e-5 * np.abs(X[row]).max()
            expected = np.sum(dout[row] * directional_derivative(theirs, X[row], dx[row], step))
            assert np.sum(np.asarray(pull(jnp.asarray(dout))[0])[row] * dx[row]) == pytest.approx(expected, rel=1e-5)


def test_bfloat16_is_normalised_in_float32_and_rounded_before_the_gain():
    x = jnp.asarray(X, jnp.bfloat16)
    weight = jnp.asarray(WEIGHT, jnp.float32)
    y = rms_norm(x, weight, eps=1e-5)
    assert y.dtype == jnp.bfloat16
    rounded = jnp.asarray(oracles.rms_norm(x, 1.0, 1e-5), jnp.bfloat16) * weight.astype(jnp.bfloat16)
    assert rel_to_max(y, rounded) < 2**-8
    assert l2_norm(x).dtype == jnp.float32
    assert rel_to_rms(l2_norm(x), oracles.l2_norm(x)) < 2e-6


def test_zero_rows_have_finite_gradients():
    zero = jnp.zeros((2, 8))
    y, pull = jax.vjp(l2_norm, zero)
    assert not np.any(y)
    np.testing.assert_allclose(pull(jnp.ones_like(zero))[0], 1e3, rtol=1e-6)  # 1 / sqrt(eps)
    gradient = jax.grad(lambda x: rms_norm(x, jnp.ones(8), eps=1e-5).sum())(zero)
    np.testing.assert_allclose(gradient, 1e-5**-0.5, rtol=1e-6)
