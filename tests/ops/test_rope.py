"""Rotary positions against complex numbers, the released frequencies, and what relative positions promise."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.rope import rotate, yarn_frequencies, yarn_logit_scale
from tests.conftest import rel_to_max

GOLDEN = Path(__file__).parents[1] / "golden" / "k2_tiny"
K2 = dict(theta=50000.0, factor=32.0, original_length=4096, beta_fast=1.0, beta_slow=1.0)


def inputs(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def turned_in_the_plane(x, positions, frequencies):
    """The last channels as complex numbers times exp(i angle)."""
    n = len(frequencies)
    kept, pairs = x[..., : -2 * n], x[..., -2 * n :].reshape(*x.shape[:-1], n, 2)
    angle = np.asarray(positions, np.float64)[..., None] * frequencies
    angle = angle.reshape(*positions.shape, *[1] * (x.ndim - 3), n)
    z = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)
    return np.concatenate([kept, np.stack([z.real, z.imag], axis=-1).reshape(*x.shape[:-1], 2 * n)], axis=-1)


def test_released_frequencies_and_scale():
    np.testing.assert_allclose(yarn_frequencies(16, **K2), np.load(GOLDEN / "outputs.npz")["inv_freq_f64"], rtol=1e-15)
    scale = json.loads((GOLDEN / "meta.json").read_text())["softmax_scale"]
    assert 32**-0.5 * yarn_logit_scale(32.0, 1.0) == pytest.approx(scale, rel=1e-15)


def test_the_stretch_by_hand():
    """K2's 64 channels: the pair that turns once in 4,096 tokens lies between 19 and 20 of 32."""
    plain, stretched = yarn_frequencies(64, theta=50000.0), yarn_frequencies(64, **K2)
    np.testing.assert_allclose(plain, 50000.0 ** (-np.arange(32) / 32), rtol=1e-14)
    turns = 4096 * plain / (2 * np.pi)
    assert turns[19] > 1 > turns[20]
    np.testing.assert_array_equal(stretched[:20], plain[:20])
    np.testing.assert_allclose(stretched[20:], plain[20:] / 32, rtol=1e-14)
    ramp = yarn_frequencies(64, **K2 | {"beta_fast": 32.0}) / plain  # a ramp from 32 turns down to one
    assert np.all(np.diff(ramp) <= 0) and ramp[0] == 1 and ramp[-1] == pytest.approx(1 / 32)
    assert 5 < np.sum((ramp < 0.999) & (ramp > 1 / 31.9)) < 15


@pytest.mark.parametrize("dtype,tolerance", [("float32", 1e-4), ("float64", 1e-11), ("bfloat16", 8e-3)])
@pytest.mark.parametrize("shape", [(2, 9, 3, 22), (2, 9, 16)])
def test_against_complex_numbers(shape, dtype, tolerance):
    """Also far past the original context, and in bf16, where angles would be noise."""
    frequencies = yarn_frequencies(16, **K2)
    positions = np.array([[0, 1, 2, 3, 5, 8, 100, 127, 4097], [0, 0, 1, 0, 1, 2, 3, 511, 131071]])
    x = inputs(*shape)
    with jax.enable_x64(dtype == "float64"):
        got = rotate(jnp.asarray(x, dtype), jnp.asarray(positions, jnp.int32), frequencies)
        expected = turned_in_the_plane(np.asarray(jnp.asarray(x, dtype), np.float64), positions, frequencies)
        assert got.dtype == dtype
        assert rel_to_max(got.astype(jnp.promote_types(dtype, jnp.float32)), expected) < tolerance
        np.testing.assert_array_equal(got[..., :-16], jnp.asarray(x, dtype)[..., :-16])


@pytest.mark.usefixtures("x64")
def test_products_depend_on_the_distance_alone():
    frequencies = yarn_frequencies(16, **K2)
    q, k = inputs(1, 1, 16), inputs(1, 1, 16, seed=1)

    def score(i, j):
        at = lambda x, p: rotate(jnp.asarray(x), jnp.array([[p]]), frequencies)  # noqa: E731
        return float(jnp.sum(at(q, i) * at(k, j)))

    for distance in (0, 1, 37):
        scores = [score(start + distance, start) for start in (0, 5, 90_000)]
        np.testing.assert_allclose(scores, scores[0], rtol=1e-9)
    assert abs(score(37, 0) - score(0, 0)) > 0.1


@pytest.mark.usefixtures("x64")
def test_the_gradient_turns_back():
    frequencies, positions = yarn_frequencies(6, theta=100.0), jnp.array([[0, 1, 7, 30]])
    x, d_y = jnp.asarray(inputs(1, 4, 2, 8)), jnp.asarray(inputs(1, 4, 2, 8, seed=1))
    _, pull = jax.vjp(lambda x: rotate(x, positions, frequencies), x)
    np.testing.assert_allclose(pull(d_y)[0], rotate(d_y, -positions, frequencies), atol=1e-14)
