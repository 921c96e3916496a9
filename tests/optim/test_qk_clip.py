from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kimi_jax.model.rules import QKClip
from kimi_jax.optim.qk_clip import clip_factor, qk_clip

apply_updates: Any = optax.apply_updates
NOPE, ROPE, HEADS, WIDTH = 4, 2, 3, 8
QUERY = QKClip(((NOPE, 0.5), (ROPE, 1.0)))
KEY = QKClip(((NOPE, 0.5),))


def weights(stack=(), seed=0, scale=1.0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    shapes = {"w_q": (*stack, WIDTH, HEADS, NOPE + ROPE), "w_k": (*stack, WIDTH, HEADS, NOPE), "other": (WIDTH, ROPE)}
    return {path: jnp.asarray(rng.standard_normal(shape) * scale, dtype) for path, shape in shapes.items()}


def transform(rows, tau=100.0):
    rows = np.asarray(rows)
    return qk_clip(tau, {"w_q": QUERY, "w_k": KEY}, {"w_q": rows, "w_k": rows})


def test_factor():
    logits = jnp.array([[200.0, 100.0, np.nextafter(np.float32(100), np.float32(101))], [-5.0, 0.0, 400.0]])
    gamma = clip_factor(logits, 100.0)
    np.testing.assert_allclose(gamma, [[0.5, 1, 1], [1, 1, 0.25]], rtol=1e-6)
    assert gamma[0, 1] == 1 and gamma[1, 0] == 1 and gamma[1, 1] == 1
    broken = clip_factor(jnp.array([-jnp.inf, jnp.nan, jnp.inf]), 100.0)
    np.testing.assert_array_equal(broken, [1, 1, 1])


@pytest.mark.parametrize("stack", [(), (2,), (2, 3)])
def test_scales_weights_after_the_update(stack):
    """Heads and layers by NumPy loops; the stack lists its rows of max_logits in an order of its own."""
    params, updates = weights(stack), weights(stack, seed=1, scale=0.1)
    count = int(np.prod(stack))
    rows = np.random.default_rng(0).permutation(count).reshape(stack)
    logits = np.random.default_rng(1).uniform(-50, 900, (count, HEADS)).astype(np.float32)
    logits[0, 0], logits[-1, 1] = 50.0, -np.inf
    clip = transform(rows)
    new, state = jax.jit(clip.update)(updates, clip.init(params), params, max_logits=jnp.asarray(logits))
    assert jax.tree.leaves(state) == []
    got = apply_updates(params, new)
    np.testing.assert_array_equal(new["other"], updates["other"])
    for path, parts in {"w_q": QUERY.parts, "w_k": KEY.parts}.items():
        expected = np.asarray(params[path], np.float64) + np.asarray(updates[path], np.float64)
        for place in np.ndindex(*stack):
            for head in range(HEADS):
                largest = logits[rows[place], head]
                gamma = 100.0 / largest if largest > 100 else 1.0
                start = 0
                for width, exponent in parts:
                    expected[(*place, slice(None), head, slice(start, start + width))] *= gamma**exponent
                    start += width
                if gamma == 1:
                    index = (*place, slice(None), head)
                    np.testing.assert_array_equal(new[path][index], updates[path][index])
        # Both (p + u) f - p and its sum with p round once to p's last bit.
        np.testing.assert_allclose(got[path], expected, rtol=1e-6, atol=6e-7)


def test_equal_axes_are_not_mixed_up():
    """Layers, width, heads and head dim all 3 long: only head 2 of the layer with row 0 shrinks."""
    params = {"w": jnp.ones((3, 3, 3, 3))}
    clip = qk_clip(1.0, {"w": QKClip(((3, 1.0),))}, {"w": np.array([2, 0, 1])})
    logits = jnp.zeros((3, 3)).at[0, 2].set(4.0)
    new, _ = jax.jit(clip.update)({"w": jnp.zeros((3, 3, 3, 3))}, clip.init(params), params, max_logits=logits)
    expected = np.zeros((3, 3, 3, 3))
    expected[1, :, 2] = -0.75
    np.testing.assert_array_equal(new["w"], expected)


def test_nothing_to_clip_returns_the_updates_bit_for_bit():
    params, updates = weights((2,), scale=1e3), weights((2,), seed=1, scale=1e-5)
    clip = transform([0, 1])
    logits = jnp.array([[100.0, -1.0, 0.0], [-jnp.inf, jnp.nan, 99.0]])
    new, _ = jax.jit(clip.update)(updates, clip.init(params), params, max_logits=logits)
    for path in updates:
        np.testing.assert_array_equal(new[path], updates[path])


def test_no_mla_layer():
    clip = qk_clip(100.0, {}, {})
    updates = {"w": jnp.ones((2, 2))}
    new, _ = jax.jit(clip.update)(updates, clip.init(updates), updates, max_logits=jnp.zeros((0, HEADS)))
    np.testing.assert_array_equal(new["w"], updates["w"])


@jax.jit
def max_logits(params, x):
    """A head's largest logit; the last `ROPE` channels of a query meet one key shared by all heads."""
    q = jnp.einsum("td,dhk->thk", x, params["w_q"])
    nope = jnp.einsum("thk,shk->hts", q[..., :NOPE], jnp.einsum("sd,dhk->shk", x, params["w_k"]))
    rope = jnp.einsum("thk,sk->hts", q[..., NOPE:], x @ params["other"])
    return (nope + rope).max((-1, -2))


def test_one_step_brings_logits_to_tau_exactly():
    params, x = weights(scale=4.0), jnp.asarray(np.random.default_rng(2).standard_normal((5, WIDTH)), jnp.float32)
    before = max_logits(params, x)
    assert (before > 100).all()
    clip = transform(0)
    zero = jax.tree.map(jnp.zeros_like, params)
    new, _ = clip.update(zero, clip.init(params), params, max_logits=before[None])
    np.testing.assert_allclose(max_logits(apply_updates(params, new), x), 100.0, rtol=1e-5)


def test_holds_logits_that_training_pushes_up():
    """Ascent on the logits themselves: without the clip they explode, with it they stay within one step of tau."""
    x = jnp.asarray(np.random.default_rng(3).standard_normal((6, WIDTH)), jnp.float32)

    def run(tau):
        chain = optax.chain(optax.scale(0.02), transform(0, tau))

        @jax.jit
        def step(params, state):
            logits, grads = max_logits(params, x), jax.grad(lambda p: max_logits(p, x).sum())(params)
            grads["other"] = jnp.zeros_like(grads["other"])  # the shared key is never clipped: hold it
            updates, state = chain.update(grads, state, params, max_logits=logits[None])
            return apply_updates(params, updates), state, logits

        params, history = weights(scale=0.5), []
        state = chain.init(params)
        for _ in range(30):
            params, state, logits = step(params, state)
            history.append(np.asarray(logits))
        return np.array(history)

    free, held = run(1e30), run(20.0)
    assert free[-1].min() > 1e3
    assert (held[10:] > 19).all() and held[10:].max() < 80


def test_float32_weights_are_rescaled_under_bfloat16_updates():
    params, updates = weights(), weights(seed=1, scale=0.0, dtype=jnp.bfloat16)
    clip = transform(0)
    new, _ = clip.update(
        jax.tree.map(lambda u: u.astype(jnp.float32), updates),
        clip.init(params),
        params,
        max_logits=jnp.full((1, 3), 4e2),
    )
    got = apply_updates(params, new)
    np.testing.assert_allclose(got["w_k"], 0.5 * params["w_k"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("rows", "logits", "message"),
    [
        ([0, 1, 2], (3, HEADS), r"w_q: shape \(2, 8, 3, 6\) must be the layers' \(3,\)"),
        ([0, 2], (2, HEADS), r"layers \[0, 2\] lie outside the 2 of max_logits"),
        ([0, 1], (2, 5), r"3 heads in shape \(2, 8, 3, 6\), but 5 in max_logits"),
    ],
)
def test_refuses_shapes_that_do_not_fit(rows, logits, message):
    params, clip = weights((2,)), transform(rows)
    with pytest.raises(ValueError, match=message):
        clip.update(params, clip.init(params), params, max_logits=jnp.zeros(logits))


def test_refuses_parts_that_do_not_add_up_and_missing_arguments():
    params = weights()
    clip = qk_clip(1.0, {"w_q": KEY}, {"w_q": np.array(0)})
    with pytest.raises(ValueError, match=r"parts \[4\] must add up to the last axis of shape \(8, 3, 6\)"):
        clip.update(params, clip.init(params), params, max_logits=jnp.zeros((1, HEADS)))
    with pytest.raises(ValueError, match="max_logits"):
        clip.update(params, clip.init(params), params)
    with pytest.raises(ValueError, match=r"needs the layers of \['w_q'\], got those of \[\]"):
        qk_clip(1.0, {"w_q": KEY}, {})
