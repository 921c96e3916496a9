"""Router and balancing, against a NumPy router and the golden runs of Quantile Balancing."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.routing import (
    balance_metrics,
    best_experts,
    choose,
    document_balance_loss,
    expert_load,
    quantile_bias,
    quantile_histogram,
    route,
    sign_bias,
)
from tests import oracles
from tests.conftest import rel_to_max, rel_to_rms

GOLDEN = Path(__file__).parents[1] / "golden" / "qb"
CASES = json.loads((GOLDEN / "meta.json").read_text())["cases"]


def inputs(n=50, d=24, e=12, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, d)), rng.normal(size=(d, e)) * 0.4, rng.normal(size=e) * 0.15


# --- the router


@pytest.mark.parametrize("k, renormalize", [(3, True), (3, False), (1, True), (1, False), (11, True)])
def test_route(k, renormalize):
    arrays = inputs()
    settings = dict(k=k, renormalize=renormalize, scaling_factor=2.446)
    ours = jax.jit(partial(route, **settings))(*(jnp.asarray(a, jnp.float32) for a in arrays))
    indices, weights, scores, threshold = oracles.route(*arrays, **settings)
    np.testing.assert_array_equal(ours.indices, indices)
    assert ours.indices.dtype == jnp.int32
    assert rel_to_rms(ours.weights, weights) < 1e-5
    assert rel_to_rms(ours.scores, scores) < 1e-5
    assert rel_to_rms(ours.threshold, threshold) < 1e-5


@pytest.mark.parametrize("k, renormalize", [(3, True), (3, False), (1, True)])
def test_gradient_flows_through_the_weights_alone(k, renormalize, x64):
    x, w, bias = (jnp.asarray(a) for a in inputs())
    settings: dict = dict(k=k, renormalize=renormalize, scaling_factor=1.7)
    indices = oracles.route(x, w, bias, **settings)[0]
    d_weights = jnp.asarray(np.random.default_rng(1).normal(size=indices.shape))
    d_threshold = jnp.ones(len(x))  # must have no effect

    def chosen_weights(x, w):  # the choice is a constant
        scores = jnp.take_along_axis(jax.nn.sigmoid(x @ w), jnp.asarray(indices), axis=1)
        return 1.7 * (scores / scores.sum(axis=1, keepdims=True) if renormalize and k > 1 else scores)

    def ours(x, w, bias):
        routing = route(x, w, bias, **settings)
        return routing.weights, routing.threshold

    d_x, d_w, d_bias = jax.vjp(ours, x, w, bias)[1]((d_weights, d_threshold))
    expected = jax.vjp(chosen_weights, x, w)[1](d_weights)
    assert rel_to_max(d_x, expected[0]) < 1e-10
    assert rel_to_max(d_w, expected[1]) < 1e-10
    assert not np.any(d_bias)


def test_equal_scores_go_to_the_lower_index():
    for e in (5, 300):
        indices, threshold = jax.jit(partial(choose, k=3))(jnp.full((4, e), 0.5), jnp.zeros(e))
        np.testing.assert_array_equal(indices, np.tile(np.arange(3), (4, 1)))
        np.testing.assert_array_equal(threshold, 0.5)
        indices, _ = jax.jit(partial(choose, k=3))(jnp.full((4, e), 0.5).at[:, 4].set(0.7), jnp.zeros(e))
        np.testing.assert_array_equal(indices, np.tile([4, 0, 1], (4, 1)))


def test_bfloat16_tokens_are_scored_in_float32():
    x, w, bias = inputs(n=200)
    x, w, bias = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), jnp.asarray(bias, jnp.float32)
    routing = route(x, w, bias, k=3, renormalize=True, scaling_factor=1.0)
    assert routing.scores.dtype == routing.weights.dtype == jnp.float32
    expected = oracles.route(x, w, bias, 3, True, 1.0)
    assert rel_to_rms(routing.scores, expected[2]) < 1e-5
    np.testing.assert_array_equal(routing.indices, expected[0])


def test_every_expert_at_once_is_refused():
    x, w, bias = (jnp.asarray(a, jnp.float32) for a in inputs())
    with pytest.raises(ValueError, match=r"k=12.*num_experts=12"):
        route(x, w, bias, k=12, renormalize=True, scaling_factor=1.0)


# --- Quantile Balancing


def golden_scores(case, c, step):
    m, n = case["m"], case["n"]
    u = np.random.RandomState(case["seed"] + 100 * step).randint(0, 2**20, (m, n))
    if case["hot"]:
        u[: m // 2] = (u[: m // 2] + 3 * u[0]) >> 2
    scores = ((u * c) >> 20) / 2**20
    assert scores.sum() == pytest.approx(case["steps"][step]["sum_scores"], rel=1e-12)
    return scores


@partial(jax.jit, static_argnames=("k", "bins"))
def balance(scores, bias, mask, *, k, bins=1000):
    indices, threshold = choose(scores, bias, k=k)
    counts = quantile_histogram(scores, threshold, bias, mask, bins=bins)
    return expert_load(indices, mask, scores.shape[1]), threshold, counts, quantile_bias(counts, bias, k=k)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_golden(name, dtype):
    case, data = CASES[name], np.load(GOLDEN / f"{name}.npz")
    k, bins = case["k"], case["bins"]
    with jax.enable_x64(dtype == "float64"):
        chained = jnp.zeros(case["n"], dtype)  # our own bias, carried from step to step
        for step, facts in enumerate(case["steps"]):
            scores = golden_scores(case, data["c"], step)
            mask = jnp.ones(case["m"], bool)
            chained = balance(jnp.asarray(scores, dtype), chained, mask, k=k, bins=bins)[3]
            stored = {key.split(".")[1]: data[key] for key in data.files if key.startswith(f"step{step}.")}
            if not stored:
                continue
            if "scores" in stored:
                np.testing.assert_array_equal(stored["scores"], scores)
            bias_in = jnp.asarray(stored["b_in"], dtype)
            load, threshold, counts, bias = balance(jnp.asarray(scores, dtype), bias_in, mask, k=k, bins=bins)
            np.testing.assert_array_equal(load, stored["load"])
            if "alpha" in stored:
                assert rel_to_max(threshold, stored["alpha"]) < 2e-7
            assert bias.dtype == dtype
            assert abs(np.mean(np.asarray(bias, np.float64))) < 1e-7
            assert np.max(np.abs(bias - stored["b_hist"])) < facts["width"]
            # The carried bias started the step up to a bin apart already.
            assert np.max(np.abs(chained - stored["b_hist"])) < 2 * facts["width"]
            assert np.all(np.sum(counts, axis=1) == case["m"])
            # A margin on the edge of two bins may fall into either.
            shown = counts if case["n"] < 100 else counts[::64]
            moved = np.abs(np.cumsum(shown, axis=1) - np.cumsum(stored["counts"].astype(int), axis=1)).sum()
            assert moved <= facts["values_within_1e4_bins_of_an_edge"]
            # And the histogram is near the exact quantile, which the oracle computes.
            exact = oracles.exact_quantile_bias(scores, stored.get("alpha", np.asarray(threshold, np.float64)), k)
            np.testing.assert_allclose(exact, stored["b_exact"], atol=1e-7)
            assert np.max(np.abs(bias - exact)) < 2 * facts["width"]


def test_an_overloaded_expert_gets_a_lower_bias_and_loads_even_out():
    rng = np.random.default_rng(0)
    scores = jnp.asarray(1 / (1 + np.exp(-rng.normal(size=(4096, 16)) - np.linspace(-2, 2, 16))), jnp.float32)
    mask, bias = jnp.ones(4096, bool), jnp.zeros(16)
    violation = []
    for _ in range(6):
        load, _, _, new = balance(scores, bias, mask, k=2)
        if not violation:
            assert load[15] > load.mean() > load[0]
            assert new[15] < 0 < new[0]
        violation.append(float(balance_metrics(load)["max_violation"]))
        bias = new
    assert violation[0] > 3
    assert violation[-1] < 0.1


def test_micro_batches_add_up_to_the_batch_bit_for_bit():
    rng = np.random.default_rng(2)
    scores = jnp.asarray(rng.random((240, 8)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=8) * 0.1, jnp.float32)
    mask = jnp.asarray(rng.random(240) < 0.8)
    whole_load, _, whole, expected = balance(scores, bias, mask, k=2)
    parts = [balance(scores[i : i + 60], bias, mask[i : i + 60], k=2) for i in range(0, 240, 60)]
    counts = sum((part[2] for part in parts), jnp.zeros_like(whole))
    np.testing.assert_array_equal(counts, whole)
    np.testing.assert_array_equal(sum(part[0] for part in parts), whole_load)
    np.testing.assert_array_equal(jax.jit(partial(quantile_bias, k=2))(counts, bias), expected)
    averaged = np.mean([part[3] for part in parts], axis=0)  # what one must not do
    assert np.max(np.abs(averaged - expected)) > 1e-3


def test_padding_is_not_counted_even_when_it_is_nan():
    rng = np.random.default_rng(3)
    scores = jnp.asarray(rng.random((40, 6)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=6) * 0.1, jnp.float32)
    real = np.arange(40) % 3 != 0
    expected = balance(scores[real], bias, jnp.ones(real.sum(), bool), k=2)
    poisoned = jnp.where(real[:, None], scores, jnp.nan)
    ours = balance(poisoned, bias, jnp.asarray(real), k=2)
    for i in (0, 2, 3):
        np.testing.assert_array_equal(ours[i], expected[i])
    nothing = balance(poisoned, bias, jnp.zeros(40, bool), k=2)
    assert not np.any(nothing[0]) and not np.any(nothing[2])
    np.testing.assert_array_equal(nothing[3], bias)


def test_histogram_against_numpy_and_its_end_bins():
    rng = np.random.default_rng(4)
    scores, bias = rng.random((100, 5)), rng.normal(size=5) * 0.2
    threshold = rng.uniform(-2, 3, 100)  # also outside the range
    with jax.enable_x64(True):
        ours = quantile_histogram(*(jnp.asarray(a) for a in (scores, threshold, bias, np.ones(100, bool))), bins=50)
    np.testing.assert_array_equal(ours, oracles.quantile_histogram(scores, threshold, bias, 50))
    gradient = jax.grad(lambda s: quantile_histogram(s, s[:, 0], s[0], s[:, 0] > 0).astype(float).sum())
    assert not np.any(gradient(jnp.asarray(scores, jnp.float32)))


def test_quantile_of_a_very_large_batch_neither_overflows_nor_rounds():
    """100 M tokens times 16 choices is over 2^31, and over what float32 counts exactly."""
    e, m, k = 896, 100_000_003, 16
    q = m * k / e
    counts = np.zeros((e, 1000), np.int64)
    counts[:, 500] = int(q) + 1  # the quantile is at the very end of bin 500
    counts[:, 700] = m - counts[:, 500]
    counts[0, 500] -= 2  # and for expert 0 just inside bin 700
    counts[0, 700] += 2
    bias = quantile_bias(jnp.asarray(counts, jnp.int32), jnp.zeros(e), k=k)
    assert float(bias[0] - bias[1]) == pytest.approx((700 - 501) * 0.002, abs=1e-5)


# --- the sign rule and the measures of balance


def test_sign_bias():
    bias = sign_bias(jnp.array([10, 0, 5, 5]), jnp.array([0.5, 0.0, -0.25, 1.0]), rate=0.125)
    assert bias.tolist() == [0.375, 0.125, -0.25, 1.0]


# --- the balance loss of each document


def sequence_loss(scores, k):
    """T sum_j f_j P_j of one sequence [t, e], in NumPy."""
    t, e = scores.shape
    chosen = np.argsort(-scores, axis=-1, kind="stable")[:, :k]
    f = np.array([np.sum(chosen == expert) for expert in range(e)]) * e / (k * t)
    p = np.mean(scores / scores.sum(-1, keepdims=True), axis=0)
    return t * np.sum(f * p)


ROWS = np.array([[0, 1, 1, 1, 1, 0, 2, 3, 3, 3, 4, 4], [1] * 7 + [2] * 5, [0] * 12])


@jax.jit
def balance_loss(scores, documents):
    return document_balance_loss(scores, documents, best_experts(scores, k=2), documents)


@pytest.mark.usefixtures("x64")
def test_balance_loss_of_packed_rows_is_the_sum_over_documents():
    """With padding that holds NaN, documents of one token, and a row without any."""
    scores = np.random.default_rng(6).random((3, 12, 5))
    expected = sum(
        sequence_loss(scores[row][ROWS[row] == number], 2)
        for row in range(3)
        for number in range(1, ROWS[row].max() + 1)
    )
    poisoned = jnp.asarray(np.where(ROWS[..., None] > 0, scores, np.nan))
    loss, gradient = jax.value_and_grad(balance_loss)(poisoned, jnp.asarray(ROWS))
    np.testing.assert_allclose(loss, expected, rtol=1e-14)
    assert expected > np.sum(ROWS > 0)  # a token's part is 1 where all is even, and more here
    assert np.isfinite(gradient).all() and not np.any(gradient[ROWS == 0])
    step = 1e-6 * np.random.default_rng(7).standard_normal(scores.shape)
    ahead, behind = (balance_loss(poisoned + sign * step, jnp.asarray(ROWS)) for sign in (1, -1))
    np.testing.assert_allclose((ahead - behind) / 2, np.sum(gradient * step), rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_balance_loss_of_spans_adds_up():
    """Of rows cut in three, wherever documents begin and end."""
    scores, documents = jnp.asarray(np.random.default_rng(8).random((3, 12, 5))), jnp.asarray(ROWS)
    chosen = best_experts(scores, k=2)
    parts = [document_balance_loss(scores[:, i : i + 4], documents[:, i : i + 4], chosen, documents) for i in (0, 4, 8)]
    np.testing.assert_allclose(sum(parts), balance_loss(scores, documents), rtol=1e-14)


def test_descent_on_the_balance_loss_evens_out_a_documents_load():
    logits = jnp.asarray(np.random.default_rng(9).normal(size=(1, 64, 8)) + np.linspace(-2, 2, 8), jnp.float32)
    shift, documents = jnp.zeros(8), jnp.ones((1, 64), jnp.int32)
    step = jax.jit(jax.value_and_grad(lambda s: balance_loss(jax.nn.sigmoid(logits + s), documents) / 64))
    losses = []
    for _ in range(100):
        loss, gradient = step(shift)
        losses.append(float(loss))
        shift -= 2.0 * gradient
    assert losses[0] > 1.15 and losses[-1] < 1.03


def test_balance_metrics():
    even, one, none = (balance_metrics(jnp.array(load)) for load in ([3, 3, 3, 3], [0, 12, 0, 0], [0, 0, 0, 0]))
    assert {k: float(v) for k, v in even.items()} == pytest.approx(dict(max_violation=0, entropy=1, dead_experts=0))
    assert {k: float(v) for k, v in one.items()} == pytest.approx(dict(max_violation=3, entropy=0, dead_experts=3))
    assert {k: float(v) for k, v in none.items()} == pytest.approx(dict(max_violation=0, entropy=0, dead_experts=4))
