"""The whole optimizer on a small tree with every rule."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kimi_jax.config import OptimConfig
from kimi_jax.model.init import zeros
from kimi_jax.model.param import Declaration
from kimi_jax.model.rules import AdamW, Balanced, Muon, QKClip
from kimi_jax.optim.build import build, rule_label, table, update_rms
from kimi_jax.optim.muon import scale_by_muon
from kimi_jax.optim.schedule import cosine_with_warmup

apply_updates: Any = optax.apply_updates
QUERY = QKClip(((4, 0.5), (2, 1.0)))
LEAVES = {  # path: (shape, axes of one layer, rule, clip)
    "embed": ((11, 8), 2, AdamW(decay=True), None),
    "head": ((8, 11), 2, AdamW(decay=True), None),
    "layers.norm": ((2, 8), 1, AdamW(decay=False), None),
    "layers.conv": ((2, 6, 4), 2, AdamW(decay=False), None),
    "layers.w_q": ((2, 8, 3, 6), 3, Muon(rows=(-3,), cols=(-1,)), QUERY),
    "layers.experts": ((2, 4, 8, 6), 3, Muon(rows=(-2,), cols=(-1,)), None),
    "layers.bias": ((2, 4), 1, Balanced(), None),
}
DECLARED = {
    path: Declaration(shape, np.dtype("float32"), ("x",) * n, zeros, rule, clip)
    for path, (shape, n, rule, clip) in LEAVES.items()
}
SHAPES = {path: leaf[0] for path, leaf in LEAVES.items()}
CONFIG = OptimConfig(learning_rate=3e-3, warmup_fraction=0.2)
STEPS = 10
ROWS = {"layers.w_q": np.array([1, 0])}
QUIET = jnp.full((2, 3), -jnp.inf)


def tree(seed: int, dtype=jnp.float32, scale=1.0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {path: jnp.asarray(rng.standard_normal(shape) * scale, dtype) for path, shape in SHAPES.items()}


def make(**changes):
    return build(dataclasses.replace(CONFIG, **changes), DECLARED, steps=STEPS, mla_rows=ROWS)


def run(optimizer, params, steps=3, max_logits=QUIET):
    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params, max_logits=max_logits)
        return apply_updates(params, updates), state, updates

    state, updates = optimizer.init(params), {}
    for i in range(steps):
        params, state, updates = step(params, state, tree(100 + i, params["embed"].dtype))
    return params, state, updates


def update_once(optimizer, grads, params):
    return jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p, max_logits=QUIET))(grads, params)


def names(state) -> dict[str, jax.Array]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def test_each_group_equals_its_own_optimizer():
    """AdamW leaves follow optax.adamw, Muon leaves the transformation alone, the balanced bias stands still."""
    start, rate = tree(0), cosine_with_warmup(3e-3, STEPS, 0.2)
    got, _, _ = run(make(), start)
    muon = {path: d.rule for path, d in DECLARED.items() if isinstance(d.rule, Muon)}
    references = {
        ("embed", "head"): optax.adamw(rate, 0.9, 0.95, eps=1e-8, weight_decay=0.1),
        ("layers.norm", "layers.conv"): optax.adamw(rate, 0.9, 0.95, eps=1e-8, weight_decay=0.0),
        tuple(muon): optax.chain(
            scale_by_muon(muon), optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(rate)
        ),
        ("layers.bias",): optax.set_to_zero(),
    }
    for paths, reference in references.items():
        params = {path: start[path] for path in paths}
        state = reference.init(params)
        update = jax.jit(reference.update)
        for i in range(3):
            grads = {path: tree(100 + i)[path] for path in paths}
            updates, state = update(grads, state, params)
            params = apply_updates(params, updates)
        for path in paths:
            np.testing.assert_allclose(got[path], params[path], rtol=1e-6, atol=1e-7, err_msg=path)
    np.testing.assert_array_equal(got["layers.bias"], start["layers.bias"])
    assert sorted(sum(references, ())) == sorted(LEAVES)


def test_decay_only_where_declared():
    """With zero gradients only decay moves a weight: by 1 - rate * decay."""
    optimizer, params = make(), tree(1)
    updates, _ = update_once(optimizer, jax.tree.map(jnp.zeros_like, params), params)
    rate: Any = cosine_with_warmup(3e-3, STEPS, 0.2)(0)
    for path, declared in DECLARED.items():
        decays = rule_label(declared.rule) in ("muon", "adamw")
        expected = -rate * 0.1 * params[path] if decays else jnp.zeros_like(params[path])
        np.testing.assert_allclose(updates[path], expected, rtol=1e-6, err_msg=path)


def test_a_broken_gradient_of_the_bias_moves_nothing():
    optimizer, params = make(), tree(1)
    grads = dict(tree(2), **{"layers.bias": jnp.full((2, 4), jnp.nan)})
    updates, state = update_once(optimizer, grads, params)
    np.testing.assert_array_equal(updates["layers.bias"], np.zeros((2, 4)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((updates, state)))


def test_clip_comes_after_the_update():
    loud = jnp.array([[400.0, -3.0, 1.0], [1.0, 1.0, 1.0]])
    start = tree(3)
    quiet, _, _ = run(make(), start, steps=1)
    got, _, _ = run(make(), start, steps=1, max_logits=loud)
    expected = np.array(quiet["layers.w_q"])
    expected[1, :, 0, :4] *= 0.5  # row 0 of max_logits is layer 1
    expected[1, :, 0, 4:] *= 0.25
    np.testing.assert_allclose(got["layers.w_q"], expected, rtol=1e-6, atol=3e-7)
    for path in LEAVES.keys() - {"layers.w_q"}:
        np.testing.assert_array_equal(got[path], quiet[path])
    far, _, _ = run(make(qk_clip=400.0), start, steps=1, max_logits=loud)
    np.testing.assert_array_equal(far["layers.w_q"], quiet["layers.w_q"])


def test_settings_reach_their_place():
    base = run(make(), tree(4), steps=2)[0]

    def moved(**change):
        other = run(make(**change), tree(4), steps=2)[0]
        return {rule_label(DECLARED[p].rule) for p in LEAVES if not np.array_equal(base[p], other[p])}

    assert moved(momentum=0.5) == {"muon"}
    assert moved(adam_b1=0.5) == moved(adam_b2=0.5) == {"adamw", "adamw_no_decay"}
    assert moved(weight_decay=0.5) == {"muon", "adamw"}
    assert moved(learning_rate=1e-3) == moved(warmup_fraction=0.5) == {"muon", "adamw", "adamw_no_decay"}


def test_state_is_plain_float32_arrays_under_the_parameters_paths():
    state = names(make().init(tree(0, jnp.bfloat16)))
    expected = {"0.adamw.0.count": (), "0.adamw_no_decay.count": (), "1.count": ()}
    expected |= {f"0.muon.0.momentum.{p}": SHAPES[p] for p in ("layers.w_q", "layers.experts")}
    expected |= {f"0.adamw.0.{m}.{p}": SHAPES[p] for m in ("mu", "nu") for p in ("embed", "head")}
    expected |= {f"0.adamw_no_decay.{m}.{p}": SHAPES[p] for m in ("mu", "nu") for p in ("layers.norm", "layers.conv")}
    assert {path: leaf.shape for path, leaf in state.items()} == expected
    assert {leaf.dtype for leaf in state.values()} == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}


def test_bfloat16_parameters():
    """State and arithmetic stay float32: the first step is the float32 one, rounded once."""
    params = tree(5, jnp.bfloat16)
    got, state, updates = run(make(), params, steps=1)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    optimizer = make()
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), tree(100, jnp.bfloat16))
    expected, _ = update_once(optimizer, grads, wide)
    assert {p.dtype for p in got.values()} == {jnp.dtype(jnp.bfloat16)}
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(state))
    for path in LEAVES:
        assert updates[path].dtype == jnp.float32
        np.testing.assert_allclose(updates[path], expected[path], rtol=1e-4, atol=1e-7)


def test_float64_throughout(x64):
    params, state, updates = run(make(), tree(5, jnp.float64))
    assert all(leaf.dtype in (jnp.float64, jnp.int32) for leaf in jax.tree.leaves((params, state, updates)))


def test_jit_with_donation_keeps_the_structure_and_the_bits():
    optimizer, traces = make(), []

    def step(params, state, grads):
        traces.append(1)
        updates, state = optimizer.update(grads, state, params, max_logits=QUIET)
        return apply_updates(params, updates), state

    def train(step):
        params = tree(6)
        state = jax.jit(optimizer.init)(params)
        shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (params, state))
        for i in range(3):
            old = params
            params, state = step(params, state, tree(100 + i))
            assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (params, state)) == shapes
        return params, state, old

    donating = jax.jit(step, donate_argnums=(0, 1))
    first, second = train(donating), train(donating)
    assert len(traces) == 1
    assert all(leaf.is_deleted() for leaf in first[2].values())
    kept = train(jax.jit(step))
    for one, two, three in zip(*(jax.tree.leaves(result[:2]) for result in (first, second, kept)), strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(one, three)


def test_resumes_bit_for_bit_from_named_arrays():
    """A state flattened to {path: array} and filled back into a fresh one goes on as if nothing had happened."""
    optimizer, start = make(), tree(7)
    step = jax.jit(lambda g, s, p: optimizer.update(g, s, p, max_logits=QUIET))
    params, state = start, optimizer.init(start)
    for i in range(2):
        updates, state = step(tree(100 + i), state, params)
        params = apply_updates(params, updates)
    saved = {path: np.asarray(leaf) for path, leaf in names(state).items()}
    fresh = optimizer.init(tree(8))
    restored = jax.tree.unflatten(jax.tree.structure(fresh), [jnp.asarray(saved[path]) for path in names(fresh)])
    expected, actual = step(tree(102), state, params), step(tree(102), restored, params)
    assert jax.tree.structure(expected) == jax.tree.structure(actual)
    for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_tree_without_matrices_or_mla():
    declared = {"layers.norm": DECLARED["layers.norm"]}
    optimizer = build(CONFIG, declared, steps=3, mla_rows={})
    params = {"layers.norm": jnp.ones((2, 8))}
    update = jax.jit(optimizer.update)
    updates, _ = update(params, optimizer.init(params), params, max_logits=jnp.zeros((0, 3)))
    np.testing.assert_allclose(updates["layers.norm"], -3e-3, rtol=1e-5)


def test_update_rms():
    updates = tree(9)
    rms = update_rms(updates, DECLARED)
    assert rms.keys() == {"muon", "adamw", "adamw_no_decay"}
    for label, value in rms.items():
        parts = [np.ravel(updates[p]) for p in LEAVES if rule_label(DECLARED[p].rule) == label]
        assert float(value) == pytest.approx(np.sqrt(np.mean(np.concatenate(parts) ** 2)), rel=1e-5)


def test_table():
    rows = {row.path: row for row in table(DECLARED)}
    assert list(rows) == list(LEAVES)
    assert rows["layers.w_q"][1:] == ((2, 8, 3, 6), "muon", (8, 6), 6, QUERY)
    assert rows["layers.experts"][1:] == ((2, 4, 8, 6), "muon", (8, 6), 8, None)
    assert rows["embed"][1:] == ((11, 8), "adamw", None, 0, None)
    assert rows["layers.conv"].rule == "adamw_no_decay" and rows["layers.bias"].rule == "balanced"


def test_errors_name_the_parameters():
    with pytest.raises(ValueError, match=r"missing \['head'\], undeclared \['haed'\]"):
        make().init({**{p: v for p, v in tree(0).items() if p != "head"}, "haed": jnp.zeros((8, 11))})
    with pytest.raises(ValueError, match=r"needs the layers of \['layers.w_q'\], got those of \[\]"):
        build(CONFIG, DECLARED, steps=3, mla_rows={})
    optimizer, params = make(), tree(0)
    with pytest.raises(ValueError, match="max_logits"):
        optimizer.update(params, optimizer.init(params), params)
    with pytest.raises(ValueError, match="params"):
        optimizer.update(params, optimizer.init(params), max_logits=QUIET)
