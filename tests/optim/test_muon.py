"""Muon against the released numbers, a slow NumPy loop, optax, and the mathematics of its iteration."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax.model.rules import Muon
from kimi_jax.optim.muon import COEFFICIENTS, block_shape, newton_schulz, scale_by_muon
from tests.conftest import rel_to_rms

FOLDER = Path(__file__).parent.parent / "golden" / "muon"
GOLDEN = np.load(FOLDER / "muon.npz")
META = json.loads((FOLDER / "meta.json").read_text())
MATRIX = Muon(rows=(-2,), cols=(-1,))
PLAIN = [f"{case}.nesterov{n}" for case in ("32x32", "64x16", "16x64", "60x24", "8x80", "32x32_rank4") for n in (0, 1)]
PER_HEAD = ["perhead_4x16x40", "perhead_3x24x16"]
iterate = jax.jit(newton_schulz)
apply_updates: Any = optax.apply_updates


def quintic(s, steps=5):
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return s


def slow_newton_schulz(x):
    """One matrix, float64, through its singular values: the iteration moves these alone."""
    u, s, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    return (u * quintic(s / max(np.linalg.norm(s), 1e-7))) @ vt


def relative_rms(actual, expected) -> float:
    """Rms of the difference over the rms of `expected`: `update_rel_rms_diff` of the fixture's meta.json."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2)))


@functools.cache
def golden_run(nesterov: bool, dtype) -> tuple[dict[str, np.ndarray], dict[str, list[np.ndarray]]]:
    """Initial parameters, and those after each step: all cases in one tree, so that shapes share their iterations."""
    names = [case.split(".")[0] for case in PLAIN[::2] + PER_HEAD]
    start = {name: GOLDEN[f"{name}.p0"] for name in names}
    shapes = {name: start[name].shape for name in names}
    for name in PER_HEAD:
        shapes[name] = tuple(int(n) for n in name.removeprefix("perhead_").split("x"))
    chain = optax.chain(
        scale_by_muon(dict.fromkeys(names, MATRIX), momentum=META["momentum"], nesterov=nesterov),
        optax.add_decayed_weights(META["weight_decay"]),
        optax.scale(-META["lr"]),
    )
    params = {name: jnp.asarray(start[name].reshape(shapes[name]), dtype) for name in names}
    state, update = chain.init(params), jax.jit(chain.update)
    after = {name: [start[name]] for name in names}
    for step in range(3):
        grads = {name: jnp.asarray(GOLDEN[f"{name}.grads"][step].reshape(shapes[name]), dtype) for name in names}
        updates, state = update(grads, state, params)
        params = apply_updates(params, updates)
        for name in names:
            after[name].append(np.asarray(params[name]).reshape(start[name].shape))
    return start, after


def golden_case(case: str, dtype) -> tuple[np.ndarray, list[np.ndarray], str]:
    """(initial parameters, parameters after each step, prefix of the case's answers)."""
    name, _, nesterov = case.partition(".nesterov")
    start, after = golden_run(nesterov != "0", dtype)  # the per-head cases have Nesterov momentum
    return start[name], after[name], f"{case}.match_rms_adamw"


@pytest.mark.parametrize("case", PLAIN + PER_HEAD)
def test_golden_float32(case):
    start, after, prefix = golden_case(case, jnp.float32)
    start = start.astype(np.float64)
    for step in (1, 3):
        expected = GOLDEN[f"{prefix}.p_step{step}_f64"].astype(np.float64)
        assert relative_rms(after[step] - start, expected - start) < 1e-4
    if "rank4" not in case:  # torch iterates in bfloat16, where the empty directions are rounding noise
        assert relative_rms(after[3] - start, GOLDEN[f"{prefix}.p_step3_torch"] - start) < 3e-2


@pytest.mark.parametrize("case", PLAIN + PER_HEAD)
def test_golden_float64(case, x64):
    """To the last bit or so of the float32 numbers that are stored."""
    _, after, prefix = golden_case(case, jnp.float64)
    for step in (1, 3):
        expected = GOLDEN[f"{prefix}.p_step{step}_f64"]
        np.testing.assert_allclose(after[step].astype(np.float32), expected, rtol=1.2e-7, atol=0)


@pytest.mark.parametrize("case", PER_HEAD)
def test_whole_matrix_is_another_answer(case):
    """The per-head cases can tell a head's own iteration from one over all heads."""
    start, after, prefix = golden_case(case, jnp.float32)
    whole = GOLDEN[f"{prefix}.whole_matrix_p_step1_f64"]
    assert relative_rms(after[1] - start, whole - start) > 0.1


@given(
    shape=st.sampled_from([(1, 1), (1, 7), (8, 8), (12, 5), (5, 12), (11, 3)]),
    condition=st.floats(1, 40),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_orthogonality(shape, condition, scale, seed):
    m, n = shape
    rng = np.random.default_rng(seed)
    u, _ = np.linalg.qr(rng.standard_normal((m, m)))
    v, _ = np.linalg.qr(rng.standard_normal((n, n)))
    rank = min(m, n)
    s = np.geomspace(1, 1 / condition, rank)
    x = (u[:, :rank] * s) @ v[:, :rank].T * scale
    y = np.asarray(iterate(jnp.asarray(x, jnp.float32)), np.float64)
    values = np.linalg.svd(y, compute_uv=False)
    assert values.min() > 0.65 and values.max() < 1.25
    np.testing.assert_allclose(np.sort(values), np.sort(quintic(s / np.linalg.norm(s))), atol=2e-4)
    # Singular vectors stay: x^T y is symmetric and positive.
    cross = x.T @ y / scale
    np.testing.assert_allclose(cross, cross.T, atol=2e-4)
    assert np.trace(cross) > 0


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (6, 6), (3, 4, 2, 9), (1, 1), (4, 1), (1, 4), (0, 3, 4)])
def test_newton_schulz_is_the_slow_loop(shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    y = iterate(jnp.asarray(x))
    assert y.shape == shape and y.dtype == jnp.float32
    expected = np.array([slow_newton_schulz(m) for m in x.reshape(-1, *shape[-2:])]).reshape(shape)
    np.testing.assert_allclose(y, expected, atol=2e-5)
    np.testing.assert_allclose(iterate(jnp.asarray(x).mT), y.mT, atol=1e-5)


def test_bfloat16_gradients_are_iterated_in_float32():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 9)), jnp.bfloat16)
    y = iterate(x)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, slow_newton_schulz(x.astype(jnp.float32)), atol=2e-5)


def test_zero_and_tiny_gradients():
    x = jnp.zeros((3, 4, 5)).at[1].set(1e-30).at[2].set(jax.random.normal(jax.random.key(0), (4, 5)))
    y = iterate(x)
    assert np.all(np.asarray(y[0]) == 0) and np.all(np.isfinite(y))
    muon = scale_by_muon({"w": MATRIX})
    updates, state = jax.jit(muon.update)({"w": jnp.zeros((2, 3))}, muon.init({"w": jnp.ones((2, 3))}))
    assert np.all(np.asarray(updates["w"]) == 0) and np.all(np.asarray(state.momentum["w"]) == 0)


# A tree as a model has: layers stacked in front, heads in the middle, experts, two matrices of one shape up to
# transposition, and axes that are equal by chance.
RULES = {
    "q": Muon(rows=(-3,), cols=(-1,)),  # [l, d, h, k] per head
    "k_t": Muon(rows=(-1,), cols=(-3,)),  # the same blocks, transposed
    "out": Muon(rows=(-3, -2), cols=(-1,)),  # [l, h, k, d] one matrix a layer
    "experts": MATRIX,  # [l, e, d, f]
    "plain": MATRIX,
    "equal": Muon(rows=(-3,), cols=(-1,)),  # all four axes are 4 long
}
SHAPES = {
    "q": (3, 12, 2, 5),
    "k_t": (2, 12, 3, 5),
    "out": (2, 2, 3, 10),
    "experts": (2, 4, 5, 12),
    "plain": (12, 5),
    "equal": (4, 4, 4, 4),
}
BLOCKS = {"q": "ldhk->lhdk", "k_t": "ldhk->lhkd", "out": "lhkd->lhkd", "equal": "ldhk->lhdk"}


def first_update(grads, rules):
    """The first update: the momentum is the gradient."""
    muon = scale_by_muon(rules)
    return jax.jit(lambda g: muon.update(g, muon.init(g))[0])(grads)


def tree(seed: int, dtype=jnp.float32) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {path: jnp.asarray(rng.standard_normal(shape), dtype) for path, shape in SHAPES.items()}


def slow_muon(path: str, grad: np.ndarray) -> np.ndarray:
    """First step with Nesterov momentum, block by block."""
    order = BLOCKS.get(path)
    blocks = np.einsum(order, grad) if order else grad
    batch = blocks.shape[: 1 if path == "out" else blocks.ndim - 2]
    _, rows, cols = block_shape(grad.shape, RULES[path])
    flat = blocks.reshape(-1, rows, cols)
    done = np.array([0.2 * np.sqrt(max(rows, cols)) * slow_newton_schulz(m) for m in flat])
    assert len(flat) == np.prod(batch)
    done = done.reshape(blocks.shape)
    return np.einsum("->".join(reversed(order.split("->"))), done) if order else done


def test_every_layout_is_the_slow_loop():
    grads = tree(0)
    updates = first_update(grads, RULES)
    for path, grad in grads.items():
        assert rel_to_rms(updates[path], slow_muon(path, np.asarray(grad, np.float64))) < 1e-4, path


def test_blocks_know_nothing_of_each_other():
    """Whatever the other leaves and the other blocks of a leaf hold, NaN included, a block keeps its bits."""
    grads, other = tree(1), tree(7)
    update = jax.jit(lambda g: first_update(g, RULES))
    together = update(grads)
    for path in RULES:
        got = update({**other, path: grads[path]})
        np.testing.assert_array_equal(got[path], together[path], err_msg=path)
    broken = update(dict(grads, q=grads["q"].at[1, :, 0].set(jnp.nan)))
    assert np.isnan(broken["q"][1, :, 0]).all()
    np.testing.assert_array_equal(broken["q"].at[1, :, 0].set(0), together["q"].at[1, :, 0].set(0))
    for path in RULES.keys() - {"q"}:
        np.testing.assert_array_equal(broken[path], together[path], err_msg=path)


def test_a_block_alone_gives_the_same():
    """Another program, so another order of summation: equal to rounding, which the iteration enlarges."""
    grads = tree(1)
    together = first_update(grads, RULES)
    single = jax.jit(lambda g: first_update({"w": g}, {"w": MATRIX})["w"])
    for layer, head in np.ndindex(3, 2):
        assert rel_to_rms(single(grads["q"][layer, :, head]), together["q"][layer, :, head]) < 1e-5
    for layer, expert in np.ndindex(2, 4):
        assert rel_to_rms(single(grads["experts"][layer, expert]), together["experts"][layer, expert]) < 1e-5


def test_equal_axes_are_not_mixed_up():
    """Scaling one head's gradient changes nothing (its norm is its own); scaling a row of many heads does."""
    rules = {"w": RULES["equal"]}
    update = jax.jit(lambda g: first_update({"w": g}, rules)["w"])
    grad = tree(2)["equal"]
    before = update(grad)
    np.testing.assert_allclose(update(grad.at[2, :, 1].multiply(64.0)), before, atol=2e-6)
    assert np.abs(update(grad.at[2, 1].multiply(64.0)) - before).max() > 0.01


def test_one_iteration_per_shape():
    """Four leaves of blocks 5 x 12, whichever side is longer, and two other shapes: three loops."""
    muon = scale_by_muon(RULES)
    jaxpr = jax.make_jaxpr(muon.update)(tree(0), muon.init(tree(0)))
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("scan", "while")]
    shapes = [eqn.outvars[-1].aval.shape for eqn in loops]
    assert sorted(shapes) == [(2, 6, 10), (16, 4, 4), (3 * 2 + 2 * 3 + 2 * 4 + 1, 5, 12)]


def test_equals_optax_on_plain_matrices():
    """optax keeps an average of gradients where this keeps a sum: the same direction without Nesterov."""
    rng = np.random.default_rng(3)
    shapes = {"square": (16, 16), "tall": (24, 8), "wide": (8, 24)}
    params = {path: jnp.asarray(rng.standard_normal(shape), jnp.float32) for path, shape in shapes.items()}
    ours = optax.chain(
        scale_by_muon(dict.fromkeys(shapes, MATRIX), nesterov=False),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(0.02),
    )
    theirs = optax.contrib.muon(0.02, nesterov=False, consistent_rms=0.2, weight_decay=0.1)
    state, their_state, theirs_params = ours.init(params), theirs.init(params), params
    ours_update, theirs_update = jax.jit(ours.update), jax.jit(theirs.update)
    for _ in range(4):
        grads = {path: jnp.asarray(rng.standard_normal(shape), jnp.float32) for path, shape in shapes.items()}
        updates, state = ours_update(grads, state, params)
        expected, their_state = theirs_update(grads, their_state, theirs_params)
        for path in shapes:
            assert rel_to_rms(updates[path], expected[path]) < 1e-4
        params, theirs_params = apply_updates(params, updates), apply_updates(theirs_params, expected)


def test_momentum_is_a_float32_sum_in_the_parameters_shape():
    grads, muon = tree(4, jnp.bfloat16), scale_by_muon(RULES, momentum=0.5)
    update: Any = jax.jit(muon.update)
    state: Any = muon.init(grads)
    for _ in range(2):
        updates, state = update(grads, state)
    for path, grad in grads.items():
        assert updates[path].dtype == state.momentum[path].dtype == jnp.float32
        np.testing.assert_array_equal(state.momentum[path], 1.5 * grad.astype(jnp.float32))


def test_update_has_the_rms_of_an_adamw_update():
    rng = np.random.default_rng(5)
    for shape in [(64, 64), (256, 32), (16, 200)]:
        grad = {"w": jnp.asarray(rng.standard_normal(shape), jnp.float32)}
        assert 0.14 < np.sqrt(np.mean(np.square(first_update(grad, {"w": MATRIX})["w"]))) < 0.22


def test_sharded_parameters_give_the_same_update():
    """Rows, columns, heads or experts spread over 8 devices: shardings move numbers, they do not change them."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    shapes = {"q": (2, 16, 4, 8), "experts": (2, 4, 8, 16), "plain": (16, 8)}
    specs = {"q": P(None, "x", "y"), "experts": P(None, "y", None, "x"), "plain": P("y", "x")}
    rules = {path: RULES[path] for path in shapes}
    rng = np.random.default_rng(6)
    grads = {path: jnp.asarray(rng.standard_normal(shape), jnp.float32) for path, shape in shapes.items()}
    muon = scale_by_muon(rules)
    expected = first_update(grads, rules)
    placed = {path: jax.device_put(grad, NamedSharding(mesh, specs[path])) for path, grad in grads.items()}
    updates, state = jax.jit(muon.update)(placed, jax.jit(muon.init)(placed))
    for path in shapes:
        assert rel_to_rms(updates[path], expected[path]) < 1e-4, path
        np.testing.assert_array_equal(state.momentum[path], grads[path])


def test_rules_must_name_the_parameters():
    with pytest.raises(ValueError, match=r"no rule for \['b'\], no parameter for \['w'\]"):
        scale_by_muon({"w": MATRIX}).init({"b": jnp.zeros((2, 2))})
