"""KDA beside a float64 loop, and what must hold for any gate, length and packing."""

import doctest
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from kimi_jax.ops import kda as kda_module
from kimi_jax.ops import segments
from kimi_jax.ops.kda import FORMS, compose, decay_gate, kda, mask_documents, span_transition
from tests.conftest import rel_to_max, rel_to_rms

# Compiling, not running, is what these small cases cost.
QUICK: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
B, H, K, V = 2, 2, 8, 6
quick = jax.jit(kda, static_argnames=("scale", "form", "chunk_size"), compiler_options=QUICK)
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def loop(q, k, v, g, beta, S, scale=None):
    """The recurrence as written, in float64 NumPy."""
    q, k, v, g, beta, S = [np.asarray(x, np.float64) for x in (q, k, v, g, beta, S)]
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    o = np.zeros_like(v)
    for t in range(q.shape[1]):
        S = np.exp(g[:, t])[..., None] * S
        u = beta[:, t][..., None] * (v[:, t] - np.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t][..., None] * u[..., None, :]
        o[:, t] = np.einsum("bhkv,bhk->bhv", S, q[:, t])
    return o, S


def draw(t, seed=0, k_dim=K, v_dim=V, b=B, dtype: type = np.float32):
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, b, t, H, k_dim))
    q, k = [x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6) for x in (q, k)]
    v = rng.normal(size=(b, t, H, v_dim))
    g = -5 / (1 + np.exp(-2 * rng.normal(size=(b, t, H, k_dim)) + 2))
    beta = 1 / (1 + np.exp(-rng.normal(size=(b, t, H))))
    return tuple(np.asarray(x, dtype) for x in (q, k, v, g, beta, rng.normal(size=(b, H, k_dim, v_dim))))


@functools.partial(jax.jit, static_argnames=("form", "chunk_size"), compiler_options=QUICK)
def run(inputs, d_o, d_state, segment_ids=None, form="chunked", chunk_size=64):
    """(o, final state), and the gradients of sum(o d_o) + sum(final state d_state)."""
    q, k, v, g, beta, S = inputs
    call = lambda q, k, v, g, beta, S: kda(  # noqa: E731
        q, k, v, g, beta, initial_state=S, segment_ids=segment_ids, form=form, chunk_size=chunk_size
    )
    out, pull = jax.vjp(call, q, k, v, g, beta, S)
    return out, pull((d_o, d_state))


def reference(inputs, d_o, d_state):
    """The same in float64: the recurrent form, its outputs held to the NumPy loop."""
    with jax.enable_x64(True):
        inputs, d_o, d_state = jax.tree.map(lambda x: np.asarray(x, np.float64), (inputs, d_o, d_state))
        out, gradients = jax.device_get(run(inputs, d_o, d_state, form="recurrent"))
    for actual, expected in zip(out, loop(*inputs), strict=True):
        assert rel_to_rms(actual, expected) < 1e-12
    return out, gradients


def cotangents(inputs, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=inputs[n].shape).astype(inputs[n].dtype) for n in (2, 5)]


def assert_close(actual, expected, tolerance=1e-5, gradient_tolerance=1e-4):
    """The golden tolerances by default: of the rms for o and state, of the largest magnitude for gradients."""
    for name, x, y in zip(("o", "state"), actual[0], expected[0], strict=True):
        error = rel_to_rms(x, y)
        assert error <= tolerance, f"{name}: {error:.1e}"
    for name, x, y in zip(NAMES, actual[1], expected[1], strict=True):
        error = rel_to_max(x, y)
        assert error <= gradient_tolerance, f"d_{name}: {error:.1e}"


@functools.cache
def case(t):
    inputs = draw(t)
    d = cotangents(inputs)
    return inputs, d, reference(inputs, *d)


@pytest.mark.parametrize(
    "t, chunk_size, form",
    [
        *((t, c, "chunked") for t, c in ((1, 64), (2, 1), (33, 16), (63, 64), (65, 64), (70, 32), (40, 200))),
        *((t, c, "associative") for t, c in ((1, 64), (7, 5), (33, 16), (65, 64))),
        # Any form, given (t, c), splits and pads alike: the slow run has the whole grid.
        *(
            pytest.param(t, c, form, marks=pytest.mark.slow)
            for t in (1, 2, 7, 16, 33, 63, 64, 65, 70, 130)
            for c in (1, 5, 16, 32, 64, 200)
            for form in ("chunked", "associative")
        ),
    ],
)
def test_any_length_and_chunk_is_one_answer(t, chunk_size, form):
    inputs, d, expected = case(t)
    assert_close(run(inputs, *d, form=form, chunk_size=chunk_size), expected)


def test_recurrent_is_the_loop():
    inputs, d, expected = case(65)
    assert_close(run(inputs, *d, form="recurrent"), expected)


def gates(kind, shape, rng):
    slow = -np.abs(rng.normal(size=shape)) * 1e-3
    fast = {
        "all -5": -5.0,
        "all -60": -60.0,
        "all 0": 0.0,
        "all -1e4": -1e4,
        "all -inf": -np.inf,
        "-60 beside 0": np.where(np.arange(shape[-1]) % 2, -60.0, 0.0),
        "-60 beside slow": np.where(np.arange(shape[-1]) % 2, -60.0, slow),
        # A sum that passes -60 must not cost the slow gates after it their digits.
        "-60, then slow": np.where(np.arange(shape[1])[:, None, None] < 20, -60.0, slow),
        "-1e30 and -inf at times": np.where(
            rng.random(shape) < 0.1, -np.inf, np.where(rng.random(shape) < 0.1, -1e30, slow)
        ),
        "-88 at times": np.where(rng.random(shape) < 0.2, -88.0, slow),
    }
    return np.broadcast_to(fast[kind], shape).astype(np.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "kind",
    [
        *("all -5", "all -60", "all 0", "all -1e4", "all -inf", "-60 beside 0", "-60 beside slow"),
        *("-60, then slow", "-1e30 and -inf at times", "-88 at times"),
    ],
)
def test_any_gate(kind, form):
    inputs = list(draw(70))
    inputs[3] = gates(kind, inputs[3].shape, np.random.default_rng(0))
    d = cotangents(inputs)
    assert_close(run(inputs, *d, form=form, chunk_size=16), reference(inputs, *d))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.1])
def test_repeated_keys(spread, form):
    """Nearly one key, hardly any decay and beta near 1: the worst conditioned chunk there is."""
    inputs = list(draw(128))
    k = inputs[1][:, :1] + spread * inputs[1]
    inputs[1] = k / np.linalg.norm(k, axis=-1, keepdims=True)
    inputs[3] = np.full_like(inputs[3], -1e-5)
    inputs[4] = np.full_like(inputs[4], 0.999)
    d = cotangents(inputs)
    assert_close(run(inputs, *d, form=form), reference(inputs, *d))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_the_future_changes_no_bit(form, dtype):
    t = 37
    first, second = [[jnp.asarray(x, dtype) for x in draw(t, seed)] for seed in (0, 1)]
    second[3] = jnp.where(jnp.arange(t)[:, None, None] % 3 == 0, -1e4, second[3])
    d = [jnp.ones_like(first[2]), jnp.zeros(first[5].shape)]
    (o, _), _ = run(first, *d, form=form, chunk_size=16)
    for p in (0, 9, 15, 16, 30, 35):
        mixed = [
            jnp.where((jnp.arange(t) <= p).reshape(1, t, *[1] * (x.ndim - 2)), x, y)
            for x, y in zip(first[:5], second[:5], strict=True)
        ]
        before = (jnp.arange(t) <= p)[None, :, None, None]
        (changed, _), gradients = run([*mixed, first[5]], d[0] * before, d[1], form=form, chunk_size=16)
        np.testing.assert_array_equal(np.asarray(changed[:, : p + 1]), np.asarray(o[:, : p + 1]))
        assert np.any(np.asarray(changed[:, p + 1 :]) != np.asarray(o[:, p + 1 :]))
        for x in gradients[:5]:
            assert not np.asarray(x[:, p + 1 :]).any() and np.asarray(x[:, : p + 1]).any()


IDS = {
    "documents": [1] * 20 + [2] * 3 + [1] * 1 + [4] * 20 + [5] * 3 + [6] * 20 + [7] * 3,
    "padding": [0] * 3 + [1] * 20 + [0] * 2 + [1] * 20 + [0] * 1 + [2] * 1 + [3] * 3 + [0] * 20,
    "padding only": [0] * 70,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [("documents", "padding"), ("padding", "padding only")])
def test_packed_is_the_documents_one_by_one(rows, form):
    """Forward and gradient; NaN stands in the padding; the first document owns the initial state."""
    ids = np.array([IDS[row] for row in rows], np.int32)
    clean = draw(70)
    d_o, d_state = cotangents(clean)
    expected = [np.zeros_like(clean[2]), np.array(clean[5])], [np.zeros_like(x) for x in clean]
    expected[1][5][:] = d_state
    for row in range(2):
        number = np.asarray(segments.document_ids(jnp.asarray(ids)))[row]
        for n in range(1, number.max() + 1):
            at = np.flatnonzero(number == n)
            last = float(n == number.max())
            start = clean[5][row : row + 1] * (n == 1)
            one = [x[row : row + 1, at] for x in clean[:5]]
            out, gradients = reference([*one, start], d_o[row : row + 1, at], d_state[row : row + 1] * last)
            expected[0][0][row, at], expected[0][1][row] = out[0][0], out[1][0]
            for x, y in zip(expected[1][:5], gradients[:5], strict=True):
                x[row, at] = y[0]
            if n == 1:
                expected[1][5][row] = gradients[5][0]
    poisoned = [np.array(x) for x in clean]
    for x in (*poisoned[:5], d_o):
        x[ids == 0] = np.nan
    out, gradients = run(poisoned, np.nan_to_num(d_o, nan=3.0), d_state, ids, form=form, chunk_size=16)
    # A reset forgets the gate of a document's first token too, which alone had nothing to decay.
    assert_close((out, gradients), expected)
    assert not np.asarray(out[0])[ids == 0].any()
    assert all(not np.asarray(x)[ids == 0].any() for x in gradients[:5])


@pytest.mark.parametrize("form", FORMS)
def test_state_carries_over_and_decoding_is_prefill(form):
    inputs = draw(30)
    call = functools.partial(quick, form=form, chunk_size=8)
    o, state = call(*inputs[:5], initial_state=inputs[5])
    o_split, S = call(*[x[:, :20] for x in inputs[:5]], initial_state=inputs[5])
    o_split = [o_split]
    for t in range(20, 30):
        one, S = call(*[x[:, t : t + 1] for x in inputs[:5]], initial_state=S)
        o_split.append(one)
    assert rel_to_rms(jnp.concatenate(o_split, 1), o) < 1e-5
    assert rel_to_rms(S, state) < 1e-5


def test_spans_compose():
    """Three spans, a boundary in the second: (transition, state) pairs give every span's first state."""
    ids = jnp.array([[1] * 33 + [2] * 27, [0] * 2 + [1] * 58])
    q, k, v, g, beta, S = map(jnp.asarray, draw(60))
    _, end = quick(q, k, v, g, beta, initial_state=S, segment_ids=ids, chunk_size=16)
    masked = mask_documents(q, k, v, g, beta, ids)
    cuts = [(0, 20), (20, 40), (40, 60)]
    transit = jax.jit(functools.partial(span_transition, chunk_size=8), compiler_options=QUICK)
    spans = [transit(*(x[:, i:j] for x in masked[1:])) for i, j in cuts]
    joined = [compose(compose(spans[0], spans[1]), spans[2]), compose(spans[0], compose(spans[1], spans[2]))]
    for transition, state in joined:
        assert transition.shape == (B, H, K, K) and state.shape == (B, H, K, V)
        assert rel_to_rms(transition @ S + state, end) < 1e-5
    assert not np.asarray(joined[0][0][0]).any()  # row 0 forgets its initial state
    assert rel_to_rms(compose((jnp.zeros_like(joined[0][0]), S), joined[0])[1], end) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_sharded_over_batch_and_heads(form):
    """Explicit axes, and shard_map with the initial state left out: as on one device."""
    inputs = draw(7, b=4)
    loss = lambda v, q, k, g, beta: jnp.sum(kda(q, k, v, g, beta, form=form, chunk_size=4)[0] ** 2)  # noqa: E731
    slope = jax.jit(jax.grad(loss), compiler_options=QUICK)
    expected = quick(*inputs[:5], form=form, chunk_size=4)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    spec = PartitionSpec("data", None, "tensor")
    call = functools.partial(kda, form=form, chunk_size=4)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, spec) for x in inputs[:5]]
        explicit = jax.jit(call, compiler_options=QUICK)(*placed)
        assert explicit[0].sharding.spec[:3] == tuple(spec) and explicit[1].sharding.spec[:2] == ("data", "tensor")
        mapped = jax.jit(jax.shard_map(call, in_specs=spec, out_specs=(spec, PartitionSpec("data", "tensor"))))(*placed)
        gradient = slope(placed[2], *placed[:2], *placed[3:])
    alone = slope(inputs[2], *inputs[:2], *inputs[3:5])
    assert rel_to_rms(gradient, alone) < 1e-5
    for actual in (explicit, mapped):
        for x, y in zip(actual, expected, strict=True):
            assert rel_to_rms(x, y) < 1e-5


def test_dtypes():
    inputs = [jnp.asarray(x, jnp.bfloat16) for x in draw(3)]
    for form in FORMS:
        o, state = quick(*inputs[:5], initial_state=inputs[5], form=form)
        assert o.dtype == jnp.bfloat16 and state.dtype == jnp.float32
        exact = loop(*inputs)
        assert rel_to_rms(o, exact[0]) < 0.02 and rel_to_rms(state, exact[1]) < 1e-5
    with jax.enable_x64(True):
        inputs = draw(3, dtype=np.float64)
        for form in FORMS:
            o, state = quick(*inputs[:5], initial_state=inputs[5], form=form, scale=0.3)
            assert o.dtype == state.dtype == jnp.float64
            exact = loop(*inputs, scale=0.3)
            assert rel_to_rms(o, exact[0]) < 1e-13 and rel_to_rms(state, exact[1]) < 1e-13


def test_memory_is_a_state_a_chunk():
    """Backward keeps no state a token: 2048 tokens in chunks of 64 against the recurrence."""

    def temp(form, t):
        shapes = [jax.ShapeDtypeStruct((1, t, 2, d), jnp.float32) for d in (32, 32, 32, 32)]
        shapes.append(jax.ShapeDtypeStruct((1, t, 2), jnp.float32))
        loss = lambda *x: jnp.sum(kda(*x, form=form)[0])  # noqa: E731
        memory = jax.jit(jax.grad(loss, range(5))).lower(*shapes).compile(QUICK).memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temp("chunked", 2048) < temp("recurrent", 2048) / 5


def test_bounded_gate_gradient_is_exact_at_the_bound():
    x = np.concatenate([np.linspace(-80, 80, 33), [1e-3, -1e-3]])[:, None, None]
    gate = lambda f: decay_gate(f, jnp.zeros(1), jnp.zeros((1, 1)), lower_bound=-5.0)  # noqa: E731
    _, pull = jax.vjp(gate, jnp.asarray(x, jnp.float32))
    exact = -5 / (4 * np.cosh(x / 2) ** 2)
    np.testing.assert_allclose(np.asarray(pull(jnp.ones(x.shape))[0]), exact, rtol=2e-6)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gate_at_extremes_is_finite(lower_bound):
    """exp(A_log) must not overflow to inf, which meets a softplus or a slope of 0."""
    A_log = jnp.array([100.0, -100.0, 0.0])
    f = jnp.broadcast_to(jnp.array([-1e4, -200.0, -1.0, 0.0, 1.0, 200.0, 1e4])[:, None, None], (7, 3, 2))
    g, pull = jax.vjp(lambda *x: decay_gate(*x, lower_bound=lower_bound), f, A_log, jnp.zeros((3, 2)))
    assert np.isfinite(np.asarray(g)).all() and (np.asarray(g) <= 0).all()
    assert all(np.isfinite(np.asarray(x)).all() for x in pull(jnp.ones_like(g)))
    if lower_bound is None:
        assert not np.asarray(g[:2, 0]).any()  # softplus underflows: no decay, whatever the rate
        np.testing.assert_allclose(np.asarray(g[:, 2, 0]), -np.logaddexp(f[:, 2, 0], 0), rtol=1e-6)
    # Through the recurrence too, where such a gate underflows.
    q, k, v, _, beta, _ = [jnp.concatenate([x, x[:, :, :1]], 2)[:1] for x in draw(7, k_dim=2)]
    gate = lambda f, A: decay_gate(f, A, jnp.zeros((3, 2)), lower_bound=lower_bound)[None]  # noqa: E731
    loss = lambda f, A: jnp.sum(kda(q, k, v, gate(f, A), beta)[0])  # noqa: E731
    slope = jax.jit(jax.grad(loss, (0, 1)), compiler_options=QUICK)
    assert all(np.isfinite(np.asarray(x)).all() for x in slope(f, A_log))


def test_gate_keeps_its_dtype():
    assert decay_gate(jnp.zeros((2, 3), jnp.bfloat16), jnp.zeros(2), jnp.zeros((2, 3))).dtype == jnp.float32
    with jax.enable_x64(True):
        assert decay_gate(jnp.zeros((2, 3)), jnp.zeros(2), jnp.zeros((2, 3))).dtype == jnp.float64


@pytest.mark.parametrize(
    "f, A_log, dt_bias, bound, message",
    [
        ((4, 96), (8,), (8, 12), None, r"f \[4, 96\] and dt_bias \[8, 12\]"),
        ((4, 96), (8,), (96,), None, r"dt_bias \[96\]"),
        ((4, 8, 16), (16,), (8, 16), None, r"A_log \[16\] .* A_log\[:8\]"),
        ((4, 8, 16), (1, 1, 8, 1), (8, 16), None, r"A_log \[1, 1, 8, 1\]"),
        ((4, 8, 16), (8,), (8, 16), 5.0, r"lower_bound=5.0 is not negative"),
    ],
)
def test_gate_refuses(f, A_log, dt_bias, bound, message):
    with pytest.raises(ValueError, match=message):
        decay_gate(jnp.zeros(f), jnp.zeros(A_log), jnp.zeros(dt_bias), lower_bound=bound)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": jnp.zeros((B, 5, H, K + 1))}, r"q has shape \[2, 5, 2, 9\] but .* \[2, 5, 2, 8\]"),
        ({"g": jnp.zeros((B, 5, H, 1))}, r"g has shape \[2, 5, 2, 1\] .* one log decay a channel"),
        ({"g": jnp.zeros((B, 5, H * K))}, r"g has shape \[2, 5, 16\]"),
        ({"v": jnp.zeros((B, 4, H, V))}, r"v \[2, 4, 2, 6\]"),
        ({"beta": jnp.zeros((B, 5, H, 1))}, r"beta has shape \[2, 5, 2, 1\] but .* \[2, 5, 2\]"),
        ({"initial_state": jnp.zeros((B, H, V, K))}, r"\[2, 2, 6, 8\] but .* \[2, 2, 8, 6\].*keys before values"),
        ({"segment_ids": jnp.zeros((B, 6), int)}, r"segment_ids has shape \[2, 6\] but .* \[2, 5\]"),
        ({"segment_ids": jnp.zeros((B, 5))}, r"segment_ids is float32\[2, 5\]"),
        ({"k": jnp.zeros((B, 5, H, K), int)}, r"k is int32"),
        ({"form": "parallel"}, r"form='parallel' is unknown; choose one of chunked, recurrent, associative"),
        ({"chunk_size": 0}, r"chunk_size=0"),
        ({n: jnp.zeros((B, 0, H, d)) for n, d in (("q", K), ("k", K), ("v", V), ("g", K))}, r"t=0"),
    ],
)
def test_kda_refuses(change, message):
    q, k, v, g, beta, _ = draw(5)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, **change}
    with pytest.raises(ValueError, match=message):
        kda(**given)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=12, max_size=12))
def test_segments(ids):
    number, place, before, count = [], [], 0, 0
    for x in ids:
        new = x > 0 and x != before
        count += new
        number.append(count if x else 0)
        place.append(0 if new or not x else place[-1] + 1)
        before = x
    given = jnp.array([ids])
    assert segments.document_ids(given)[0].tolist() == number
    assert segments.positions(given)[0].tolist() == place
    first = [n > 0 and (i == 0 or number[i - 1] != n) for i, n in enumerate(number)]
    assert segments.starts(given)[0].tolist() == first
    assert segments.resets(given)[0].tolist() == [x and n > 1 for x, n in zip(first, number, strict=True)]


@pytest.mark.parametrize("module", [kda_module, segments])
def test_examples(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
