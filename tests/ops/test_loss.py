"""Cross-entropy in one piece and in chunks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.loss import cross_entropy
from kimi_jax.parallel.vocab import linear_cross_entropy
from tests import oracles
from tests.conftest import rel_to_max


def arrays(n=23, d=8, vocab=40, seed=0):
    rng = np.random.default_rng(seed)
    weights = rng.random(n) * (rng.random(n) < 0.7)
    weights[3] = 0
    return rng.normal(size=(n, d)), rng.normal(size=(d, vocab)), rng.integers(0, vocab, n), weights


def plain(x, head, targets, weights):
    return cross_entropy(x @ head, targets, weights)


@partial(jax.jit, static_argnames=("loss", "chunk_size"))
def with_gradients(x, head, targets, weights, loss=linear_cross_entropy, **settings):
    sums, pull = jax.vjp(lambda x, head, w: loss(x, head, targets, w, **settings), x, head, weights)
    return sums, pull((jnp.asarray(1.5, sums[0].dtype), jnp.asarray(-0.25, sums[1].dtype)))


@pytest.mark.parametrize("chunk_size", [1, 5, 23, 1024])
def test_chunks_equal_one_piece(chunk_size, x64):
    given = [jnp.asarray(a) for a in arrays()]
    expected = oracles.cross_entropy(given[0] @ given[1], *given[2:])
    sums, gradients = with_gradients(*given, chunk_size=chunk_size)
    one_piece, one_piece_gradients = with_gradients(*given, loss=plain)
    np.testing.assert_allclose(sums, expected, rtol=1e-13)
    np.testing.assert_allclose(one_piece, expected, rtol=1e-13)
    np.testing.assert_allclose(linear_cross_entropy(*given, chunk_size=chunk_size), expected, rtol=1e-13)
    for ours, theirs in zip(gradients, one_piece_gradients, strict=True):
        assert rel_to_max(ours, theirs) < 1e-12


def test_gradient_of_the_logits_is_the_softmax_less_the_target(x64):
    x, head, targets, weights = arrays()
    logits = x @ head
    gradient = jax.grad(lambda l: cross_entropy(l, jnp.asarray(targets), jnp.asarray(weights))[0])(jnp.asarray(logits))
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    assert rel_to_max(gradient, weights[:, None] * (probs - np.eye(40)[targets])) < 1e-12


def identity(logits, head, targets, weights):
    return cross_entropy(logits, targets, weights)


@pytest.mark.parametrize("loss", [identity, linear_cross_entropy])
def test_padding_has_no_effect_even_when_it_is_nan(loss):
    x, head, targets, weights = arrays()
    if loss is identity:
        x = x @ head
    real = weights != 0
    x, head, weights = (jnp.asarray(a, jnp.float32) for a in (x, head, weights))
    sums, gradients = with_gradients(x[real], head, targets[real], weights[real], loss=loss)
    poisoned = jnp.where(real[:, None], x, jnp.nan)
    other, other_gradients = with_gradients(poisoned, head, np.where(real, targets, -100), weights, loss=loss)
    np.testing.assert_allclose(other, sums, rtol=1e-6)
    assert rel_to_max(other_gradients[0][real], gradients[0]) < 1e-6
    assert not np.any(other_gradients[0][~real])
    assert rel_to_max(other_gradients[1], gradients[1]) < 1e-6


def test_parts_of_a_batch_add_up():
    x, head, targets, weights = (jnp.asarray(a) for a in arrays())
    whole = with_gradients(x, head, targets, weights)
    parts = [with_gradients(x[s], head, targets[s], weights[s]) for s in (slice(0, 4), slice(4, 23))]
    np.testing.assert_allclose(np.sum([part[0] for part in parts], axis=0), whole[0], rtol=1e-6)
    assert rel_to_max(parts[0][1][1] + parts[1][1][1], whole[1][1]) < 1e-6


def test_rows_of_tokens_bfloat16_and_large_logits():
    x, head, targets, weights = arrays(n=24)
    x, head = jnp.asarray(x, jnp.bfloat16), jnp.asarray(head, jnp.float32)
    shape = 4, 6
    rows = [a.reshape(*shape, *a.shape[1:]) for a in (x, jnp.asarray(targets), jnp.asarray(weights, jnp.float32))]
    sums, gradients = with_gradients(rows[0], head, *rows[1:], chunk_size=7)
    expected = oracles.cross_entropy(oracles.f64(x) @ oracles.f64(head.astype(jnp.bfloat16)), targets, weights)
    assert sums[0].dtype == jnp.float32
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    assert [(g.dtype, g.shape) for g in gradients] == [
        (jnp.bfloat16, (4, 6, 8)),
        (jnp.float32, (8, 40)),
        (jnp.float32, shape),
    ]
    sums, gradients = with_gradients(rows[0], 1e4 * head, *rows[1:])
    assert np.isfinite(sums[0]) and all(np.isfinite(oracles.f64(g)).all() for g in gradients)


def test_the_logits_are_never_held():
    n, d, vocab = 8192, 16, 8192  # all logits: 256 MiB
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((n, d), jnp.float32), ((d, vocab), jnp.float32), ((n,), jnp.int32), ((n,), jnp.float32))
    ]
    memory = with_gradients.lower(*shapes, chunk_size=512).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 80 * 2**20
