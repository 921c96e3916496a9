"""KDA beside the released arithmetic: outputs, states and gradients of the raw inputs, every form.

`pytest -s` prints the worst error of each form and dtype. Tolerances are the fixture's: in float32 o and
state 1e-5 of rms and gradients 1e-4 of the largest magnitude; in float64 1e-6 of either.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.kda import FORMS, decay_gate, kda
from tests.conftest import rel_to_max, rel_to_rms

FOLDER = pathlib.Path(__file__).parents[1] / "golden" / "kda_op"
CASES = json.loads((FOLDER / "meta.json").read_text())["cases"]
RAW = ("q", "k", "v", "g_raw", "beta_raw", "A_log", "dt_bias", "initial_state")


def chunk_size(form, dtype):
    """64 as in training where it matters most; else 16, which compiles in half the time."""
    return 64 if (form, dtype) == ("chunked", "float32") else 16


# Compiling, not running, is what these small cases cost.
QUICK: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
worst: dict[tuple, tuple[float, str]] = {}


@pytest.fixture(params=["float32", "float64"])
def dtype(request, monkeypatch):
    """Runs a test in either precision.

    The fixture's float64 gradient of the bounded gate is sigma (1 - sigma), whose rounding leaves 2.8e-18 in
    lb_mixed, above 1e-6 of the 1e-12 floor. In float64 the gate is differentiated that way here too;
    test_kda.py holds the gate's own derivative to the exact one, and in float32 it meets the fixture as it is.
    """
    with jax.enable_x64(request.param == "float64"):
        if request.param == "float64":
            monkeypatch.setattr("kimi_jax.ops.kda.sigmoid", jax.nn.sigmoid)
        yield request.param


@pytest.fixture(scope="module", autouse=True)
def table():
    yield
    for (form, dtype, kind), (error, case) in sorted(worst.items()):
        print(f"\n{form:12} {dtype:8} {kind:9} worst {error:.1e} ({case})", end="")


def l2_normalise(x):
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def forward(raw, bounded, form):
    """The raw inputs' o, final state and g. Both gates are computed and one taken: one compilation a shape."""
    q, k, v, g_raw, beta_raw, A_log, dt_bias, state = raw
    dt_bias = dt_bias.reshape(g_raw.shape[-2:])
    gates = decay_gate(g_raw, A_log, dt_bias, lower_bound=-5.0), decay_gate(g_raw, A_log, dt_bias)
    g = jnp.where(bounded, *gates)
    o, state = kda(
        l2_normalise(q), l2_normalise(k), v, g, jax.nn.sigmoid(beta_raw),
        initial_state=state, form=form, chunk_size=chunk_size(form, v.dtype.name),
    )  # fmt: skip
    return o, state, g


@functools.partial(jax.jit, static_argnames="form", compiler_options=QUICK)
def forward_and_gradients(raw, bounded, d_o, d_state, form):
    (o, state, g), pull = jax.vjp(lambda raw: forward(raw, bounded, form), raw)
    return o, state, g, pull((d_o, d_state, jnp.zeros_like(g)))[0]


def load(name, dtype):
    with np.load(FOLDER / f"{name}.npz") as z:
        arrays = {k: z[k].astype(dtype) if z[k].dtype.kind == "f" else z[k] for k in z.files}
    case = CASES[name]
    sequences = len(case["varlen"]) if case["varlen"] else case["B"]
    arrays.setdefault("in.initial_state", np.zeros((sequences, case["H"], case["K"], case["V"]), dtype))
    arrays.setdefault("in.d_final_state", np.zeros_like(arrays["in.initial_state"]))
    return arrays, jnp.asarray(case["lower_bound"] is not None)


def compare(case, form, dtype, kind, actual, expected):
    error = (rel_to_max if kind == "gradient" else rel_to_rms)(actual, expected)
    worst[form, dtype, kind] = max(worst.get((form, dtype, kind), (0.0, "")), (error, case))
    tolerance = 1e-6 if dtype == "float64" else 1e-4 if kind == "gradient" else 1e-5
    assert error <= tolerance, f"{case} {form} {dtype} {kind}: {error:.1e} > {tolerance:.0e}"


def check(name, dtype, form, arrays, o, state, g, gradients):
    compare(name, form, dtype, "o", o, arrays["out.o"])
    compare(name, form, dtype, "state", state, arrays["out.final_state"])
    compare(name, form, dtype, "g", g, arrays["out.g"])
    for key, actual in zip(RAW, gradients, strict=True):
        if f"out.d_{key}" in arrays:
            compare(f"{name} d_{key}", form, dtype, "gradient", actual, arrays[f"out.d_{key}"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [n for n in CASES if not CASES[n]["varlen"]])
def test_golden(name, dtype, form):
    arrays, bounded = load(name, dtype)
    raw = tuple(arrays[f"in.{key}"] for key in RAW)
    outputs = forward_and_gradients(raw, bounded, arrays["in.d_o"], arrays["in.d_final_state"], form)
    check(name, dtype, form, arrays, *outputs)


def packed_forward(raw, bounded, ids, write, read, form):
    """As `forward` for one packed row; at `write` and `read` no decay, and beta 1 and 0."""
    q, k, v, g_raw, beta_raw, A_log, dt_bias = raw
    dt_bias = dt_bias.reshape(g_raw.shape[-2:])
    gates = decay_gate(g_raw, A_log, dt_bias, lower_bound=-5.0), decay_gate(g_raw, A_log, dt_bias)
    g = jnp.where(bounded, *gates).at[:, write].set(0).at[:, read].set(0)
    beta = jax.nn.sigmoid(beta_raw).at[:, write].set(1).at[:, read].set(0)
    q = l2_normalise(q).at[:, read].set(q[:, read])
    k = l2_normalise(k).at[:, write].set(k[:, write])
    inputs = [jnp.where((ids == 0).reshape(1, -1, *[1] * (x.ndim - 2)), jnp.nan, x) for x in (q, k, v, g, beta)]
    o, _ = kda(*inputs, segment_ids=ids, form=form, chunk_size=chunk_size(form, v.dtype.name))
    # Every query is scaled by k ** -0.5; the reading tokens want 1.
    return o.at[:, read].multiply(k.shape[-1] ** 0.5), g


@functools.partial(jax.jit, static_argnames="form", compiler_options=QUICK)
def packed_forward_and_gradients(raw, bounded, ids, write, read, d_o, form):
    (o, g), pull = jax.vjp(lambda raw: packed_forward(raw, bounded, ids, write, read, form), raw)
    return o, g, pull((d_o, jnp.zeros_like(g)))[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [n for n in CASES if CASES[n]["varlen"]])
def test_golden_packed(name, dtype, form):
    """One row holds all documents, each between tokens that write its initial state and read its last.

    k tokens with the unit keys and beta = 1 write the initial state; k tokens with the unit queries and
    beta = 0 read the state. So every document's states, and their gradients, go through one packed row.
    Some documents have padding behind them, whose NaN must not show.
    """
    arrays, bounded = load(name, dtype)
    heads, size = CASES[name]["H"], CASES[name]["K"]
    kind = []  # what stands at each place of the row
    ids = []
    for n, length in enumerate(np.diff(arrays["in.cu_seqlens"])):
        kind += ["write"] * size + ["token"] * length + ["read"] * size + ["padding"] * (n % 2)
        ids += [1 + n % 3] * (2 * size + length) + [0] * (n % 2)
    write, token, read = [np.flatnonzero(np.array(kind) == x) for x in ("write", "token", "read")]
    documents = len(write) // size

    def row(key):
        x = np.ones((1, len(kind), *arrays[f"in.{key}"].shape[2:]), dtype)
        x[:, token] = arrays[f"in.{key}"]
        x[:, write] = x[:, read] = 0
        return x

    q, k, v, g_raw, beta_raw, d_o = [row(key) for key in (*RAW[:5], "d_o")]
    k[0, write] = q[0, read] = np.tile(np.eye(size)[:, None], (documents, heads, 1))
    by_row = lambda x: np.moveaxis(x, 1, 2).reshape(documents * size, heads, size)  # noqa: E731
    by_document = lambda x: np.moveaxis(x.reshape(documents, size, heads, size), 1, 2)  # noqa: E731
    v[0, write], d_o[0, read] = by_row(arrays["in.initial_state"]), by_row(arrays["in.d_final_state"])

    raw = (q, k, v, g_raw, beta_raw, arrays["in.A_log"], arrays["in.dt_bias"])
    ids = np.array([ids], np.int32)
    o, g, gradients = jax.device_get(packed_forward_and_gradients(raw, bounded, ids, write, read, d_o, form))
    assert not o[ids == 0].any()
    for x in gradients[:5]:
        assert not x[ids == 0].any()
    gradients = [*(x[:, token] for x in gradients[:5]), *gradients[5:], by_document(gradients[2][0, write])]
    check(name, dtype, form, arrays, o[:, token], by_document(o[0, read]), g[:, token], gradients)
