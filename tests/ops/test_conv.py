"""The short convolution against documents run one by one in NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.conv import short_conv
from tests import oracles
from tests.conftest import rel_to_max

TAPS = 4
IDS = np.array(
    [
        [1, 1, 1, 2, 2, 2, 2, 2, 2],
        [0, 0, 1, 1, 0, 1, 2, 0, 0],  # leading padding, a gap between equal ids, trailing padding
        [3, 0, 0, 0, 0, 0, 0, 0, 0],  # one token: its tail reaches into the old tail
        [0, 0, 0, 0, 0, 0, 0, 0, 5],
        [0, 0, 0, 0, 0, 0, 0, 0, 0],  # padding only: the tail passes
        [1, 2, 1, 2, 1, 2, 1, 1, 2],
        [7, 7, 7, 7, 7, 7, 7, 7, 7],
        [1, 1, 0, 2, 2, 0, 0, 0, 0],  # the last document is shorter than the tail and not the first
    ]
)


def arrays(b=8, t=9, c=5, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(b, t, c)), rng.normal(size=(c, TAPS)), rng.normal(size=(b, TAPS - 1, c))


@jax.jit
def with_gradients(x, weight, tail, segment_ids, d_y, d_new_tail):
    (y, new_tail), pull = jax.vjp(
        lambda x, w, tail: short_conv(x, w, segment_ids=segment_ids, tail=tail), x, weight, tail
    )
    return y, new_tail, pull((d_y, d_new_tail))


def run_wide(x, weight, tail, segment_ids, seed=1):
    rng = np.random.default_rng(seed)
    cotangents = rng.normal(size=x.shape), rng.normal(size=(len(x), TAPS - 1, x.shape[-1]))
    with jax.enable_x64(True):
        given = [None if a is None else jnp.asarray(a) for a in (x, weight, tail, segment_ids, *cotangents)]
        return jax.tree.map(np.asarray, with_gradients(*given)), cotangents


@pytest.mark.parametrize("ids", [None, IDS], ids=["whole rows", "packed"])
@pytest.mark.parametrize("with_tail", [True, False])
def test_forward_and_gradients(ids, with_tail):
    x, weight, tail = arrays()
    tail = tail if with_tail else None
    (y, new_tail, gradients), cotangents = run_wide(x, weight, tail, ids)
    expected = oracles.short_conv(x, weight, tail, ids)
    np.testing.assert_allclose(y, expected[0], atol=1e-12)
    np.testing.assert_allclose(new_tail, expected[1], atol=1e-12)
    # Each gradient along one random direction, against a central difference of the oracle.
    for i, gradient in enumerate(gradients):
        given = [x, weight, tail]
        if given[i] is None:
            continue
        step = np.random.default_rng(i).normal(size=given[i].shape) * 1e-5
        values = []
        for sign in (1, -1):
            moved = [a + sign * step if j == i else a for j, a in enumerate(given)]
            outputs = oracles.short_conv(*moved, segment_ids=ids)
            values.append(sum(np.sum(o * d) for o, d in zip(outputs, cotangents, strict=True)))
        assert np.sum(gradient * step) == pytest.approx((values[0] - values[1]) / 2, rel=1e-6)


def test_poisoned_padding_reaches_nothing():
    x, weight, tail = arrays()
    clean, _ = run_wide(x, weight, tail, IDS)
    poisoned, _ = run_wide(np.where(IDS[..., None] > 0, x, np.nan), weight, tail, IDS)
    jax.tree.map(np.testing.assert_array_equal, poisoned, clean)
    assert not np.any(poisoned[0][IDS == 0])
    assert not np.any(poisoned[2][0][IDS == 0])


@pytest.mark.parametrize("ids", [None, np.array([[0, 1, 1, 1, 2, 0, 2, 2, 3], [1, 1, 1, 1, 1, 1, 1, 0, 0]])])
def test_parts_of_a_row_handed_on_by_the_tail_equal_the_row(ids):
    """Cuts that lie inside documents: a part then begins with the document that the tail belongs to."""
    x, weight, tail = arrays(b=2)
    x, weight, tail = (jnp.asarray(a, jnp.float32) for a in (x, weight, tail))
    ids = None if ids is None else jnp.asarray(ids)
    conv = jax.jit(short_conv)
    whole, end = conv(x, weight, segment_ids=ids, tail=tail)
    for cuts in ([0, 2, 7, 9], [0, 1, 2, 3, 9]) if ids is not None else ([0, 2, 3, 9], [*range(10)]):
        carried, parts = tail, []
        for begin, stop in itertools.pairwise(cuts):
            part = None if ids is None else ids[:, begin:stop]
            y, carried = conv(x[:, begin:stop], weight, segment_ids=part, tail=carried)
            parts.append(y)
        np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=1e-6)
        np.testing.assert_array_equal(carried, end)


def test_decode_with_left_padding_equals_the_unpadded_row():
    x, weight, _ = arrays(b=1, t=6)
    conv = jax.jit(short_conv)
    expected = oracles.short_conv(x, weight)[0]
    padded = jnp.concatenate([jnp.full((1, 3, 5), jnp.nan), jnp.asarray(x, jnp.float32)], axis=1)
    y, tail = conv(padded[:, :5], jnp.asarray(weight), segment_ids=jnp.array([[0, 0, 0, 1, 1]]))
    steps = [y[:, 3:]]
    for t in range(5, 9):
        y, tail = conv(padded[:, t : t + 1], jnp.asarray(weight), tail=tail)
        steps.append(y)
    np.testing.assert_allclose(np.concatenate(steps, axis=1), expected, atol=1e-5)


def test_channels_of_any_rank_and_bfloat16():
    x, weight, _ = arrays(c=6)
    conv = jax.jit(short_conv)
    flat = conv(*(jnp.asarray(a, jnp.bfloat16) for a in (x, weight)), segment_ids=jnp.asarray(IDS))
    heads = conv(
        jnp.asarray(x, jnp.bfloat16).reshape(8, 9, 2, 3),
        jnp.asarray(weight, jnp.bfloat16).reshape(2, 3, TAPS),
        segment_ids=jnp.asarray(IDS),
    )
    for a, b in zip(flat, heads, strict=True):
        assert a.dtype == b.dtype == jnp.bfloat16
        np.testing.assert_array_equal(a, b.reshape(a.shape))
    rounded = [oracles.f64(jnp.asarray(a, jnp.bfloat16)) for a in (x, weight)]
    assert rel_to_max(flat[0], oracles.short_conv(*rounded, segment_ids=IDS)[0]) < 2**-8  # rounded once


def test_wrong_shapes_are_refused():
    x, weight, tail = (jnp.asarray(a, jnp.float32) for a in arrays())
    with pytest.raises(ValueError, match="channels"):
        short_conv(x, weight.T, tail=tail)
    with pytest.raises(ValueError, match="taps - 1"):
        short_conv(x, weight, tail=jnp.zeros((8, TAPS, 5)))
