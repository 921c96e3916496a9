"""Grouped experts against a loop over tokens, with routings that break capacity, padding and determinism."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.experts import choose_backend, expert_mlp
from kimi_jax.ops.quant.qtensor import QTensor
from kimi_jax.ops.situ import situ_glu, swiglu
from tests import oracles
from tests.conftest import rel_to_max, rel_to_rms

BACKENDS = ("blocks", "ragged")
situ = partial(situ_glu, beta=4.0, linear_beta=25.0)
situ_oracle = partial(oracles.situ_glu, beta=4.0, linear_beta=25.0)


def case(n=37, k=2, e=6, d=10, f=14, routing="random", seed=0):
    rng = np.random.default_rng(seed)
    indices = np.argsort(rng.random((n, e)), axis=1)[:, :k]
    if routing == "one":  # everyone's first choice; with k = 1 all rows go to one expert
        indices = np.stack([(np.full(n, e - 2) + j) % e for j in range(k)], axis=1)
    if routing == "ends":  # the experts between are empty
        indices = np.where(indices < e // 2, 0, e - 1)
    x, weights = rng.normal(size=(n, d)), rng.random((n, k))
    matrices = [rng.normal(size=shape) * 0.5 for shape in ((e, d, f), (e, d, f), (e, f, d))]
    return indices.astype(np.int32), [x, weights, *matrices]


@partial(jax.jit, static_argnames=("backend", "activation"))
def with_gradients(indices, d_out, arrays, *, backend, activation=situ):
    def run(x, weights, *matrices):
        return expert_mlp(x, indices, weights, *matrices, activation=activation, backend=backend)

    out, pull = jax.vjp(run, *arrays)
    return out, pull(d_out)


def dense(indices, d_out, arrays):
    """Every token through every expert, differentiated by JAX."""

    def run(x, weights, w_gate, w_up, w_down):
        shares = jnp.einsum("nk,nke->ne", weights, jax.nn.one_hot(indices, w_gate.shape[0], dtype=weights.dtype))
        hidden = situ(jnp.einsum("nd,edf->nef", x, w_gate), jnp.einsum("nd,edf->nef", x, w_up))
        return jnp.einsum("nef,efd,ne->nd", hidden, w_down, shares)

    out, pull = jax.vjp(run, *arrays)
    return out, pull(d_out)


CASES = {
    "random": {},
    "one token": dict(n=1),
    "one expert takes all": dict(k=1, routing="one"),
    "empty experts": dict(e=9, routing="ends", n=50),
    "more experts than rows": dict(n=5, k=3, e=40),
    "large groups": dict(n=400, k=2, e=3, d=8, f=8),
    "every expert": dict(n=9, k=6, e=6),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients(name, backend):
    indices, arrays = case(**CASES[name])
    d_out = np.random.default_rng(9).normal(size=arrays[0].shape)
    with jax.enable_x64(True):
        wide = [jnp.asarray(a) for a in arrays]
        out, gradients = with_gradients(indices, jnp.asarray(d_out), wide, backend=backend)
        _, expected = jax.jit(dense)(indices, jnp.asarray(d_out), wide)
        assert out.dtype == jnp.float64
        assert rel_to_rms(out, oracles.expert_mlp(arrays[0], indices, *arrays[1:], activation=situ_oracle)) < 1e-12
        for ours, theirs in zip(gradients, expected, strict=True):
            assert rel_to_max(ours, theirs) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32(backend):
    indices, arrays = case(n=200, e=5, d=24, f=40)
    d_out = np.random.default_rng(9).normal(size=arrays[0].shape)
    narrow, d_out = [jnp.asarray(a, jnp.float32) for a in arrays], jnp.asarray(d_out, jnp.float32)
    out, gradients = with_gradients(indices, d_out, narrow, backend=backend)
    assert out.dtype == jnp.float32
    assert rel_to_rms(out, oracles.expert_mlp(arrays[0], indices, *arrays[1:], activation=situ_oracle)) < 1e-5
    for ours, theirs in zip(gradients, jax.jit(dense)(indices, d_out, narrow)[1], strict=True):
        assert ours.dtype == jnp.float32
        assert rel_to_max(ours, theirs) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_sums_in_float32_and_the_weight_comes_after_w_down(backend):
    indices, arrays = case(n=64, k=4, d=32, f=48)
    x, *matrices = (jnp.asarray(a, jnp.bfloat16) for a in (arrays[0], *arrays[2:]))
    weights = jnp.asarray(arrays[1], jnp.float32)
    out, gradients = with_gradients(indices, x, [x, weights, *matrices], backend=backend, activation=swiglu)
    assert out.dtype == jnp.bfloat16
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32, *[jnp.bfloat16] * 3]

    # The reference's roundings, one choice at a time.
    total = np.zeros(x.shape, np.float32)
    for token in range(64):
        for choice, expert in enumerate(indices[token]):
            gate, up = (jnp.asarray(x[token] @ w[expert], jnp.bfloat16) for w in matrices[:2])
            y = swiglu(gate, up) @ matrices[2][expert]
            total[token] += np.asarray(y, np.float32) * float(weights[token, choice])
    assert rel_to_rms(out, total) < 2e-2
    exact = oracles.expert_mlp(x, indices, weights, *matrices, activation=lambda g, u: oracles.silu(g) * u)
    assert rel_to_rms(out, exact) < 5e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_poisoned_token_stays_alone(backend):
    """Rows of padding read no token: neither token 0 nor the last may leak through them."""
    indices, arrays = case(n=20, k=2, e=8)
    indices[[0, -1]] = [[0, 1], [1, 0]]
    indices[1:-1] = 2 + indices[1:-1] % 6
    arrays = [jnp.asarray(a, jnp.float32) for a in arrays]
    d_out = jnp.ones_like(arrays[0])
    clean, clean_gradients = with_gradients(indices, d_out, arrays, backend=backend)
    arrays[0] = arrays[0].at[jnp.array([0, -1])].set(jnp.nan)
    out, gradients = with_gradients(indices, d_out, arrays, backend=backend)
    np.testing.assert_array_equal(out[1:-1], clean[1:-1])
    for ours, theirs in zip(gradients[:2], clean_gradients[:2], strict=True):
        np.testing.assert_array_equal(ours[1:-1], theirs[1:-1])
    for ours, theirs in zip(gradients[2:], clean_gradients[2:], strict=True):
        np.testing.assert_array_equal(ours[2:], theirs[2:])
        assert np.isnan(ours[0]).any()


def test_two_runs_agree_bit_for_bit_and_order_of_choices_does_not_matter():
    indices, arrays = case(n=300, k=4, e=16, d=32, f=16)
    arrays = [jnp.asarray(a, jnp.float32) for a in arrays]
    first = with_gradients(indices, arrays[0], arrays, backend="blocks")
    second = with_gradients(indices, arrays[0], arrays, backend="blocks")
    jax.tree.map(np.testing.assert_array_equal, first, second)
    arrays[1] = arrays[1][:, ::-1]
    turned = with_gradients(indices[:, ::-1], arrays[0], arrays, backend="blocks")
    assert rel_to_rms(turned[0], first[0]) < 1e-6


def test_between_forward_and_backward_only_inputs_are_kept():
    """Three products an expert would keep 2 f + 2 d numbers a row; the loop keeps none, and computes them again."""
    indices, (x, weights, *matrices) = case(n=200, k=4, e=6, d=8, f=64)
    args = [jnp.asarray(a, jnp.float32) for a in (x, weights, *matrices)]
    run = lambda x, weights, *w: expert_mlp(x, jnp.asarray(indices), weights, *w, situ, backend="blocks")  # noqa: E731
    kept = jax.tree.leaves(jax.vjp(run, *args)[1])
    floats = sorted(a.shape for a in kept if jnp.issubdtype(a.dtype, jnp.floating))
    assert floats == sorted(a.shape for a in args)


@pytest.mark.parametrize(
    ("mean", "block"), [(0, 8), (4, 8), (15, 8), (16, 16), (63, 16), (64, 32), (255, 32), (256, 64), (9999, 64)]
)
def test_blocks_grow_with_the_root_of_the_group(mean, block):
    assert choose_backend("blocks", 7 * mean, 7) == ("blocks", block)
    assert choose_backend("ragged", 7 * mean, 7) == ("ragged", 0)


def test_wrong_shapes_and_backends_are_refused():
    indices, arrays = case()
    indices, (x, weights, w_gate, w_up, w_down) = jnp.asarray(indices), [jnp.asarray(a) for a in arrays]
    with pytest.raises(ValueError, match="w_down as"):
        expert_mlp(x, indices, weights, w_gate, w_up, w_down.swapaxes(1, 2), swiglu)
    with pytest.raises(ValueError, match="37 tokens"):
        expert_mlp(x, indices[:-1], weights, w_gate, w_up, w_down, swiglu)
    with pytest.raises(ValueError, match="unknown"):
        expert_mlp(x, indices, weights, w_gate, w_up, w_down, swiglu, backend="dense")  # pyright: ignore


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["random", "one expert takes all", "empty experts"])
def test_packed_experts_are_as_good_as_decoded_ones(name, backend):
    """The same bits, and the same gradient of the tokens; packed weights have none."""
    indices, (x, weights, *matrices) = case(**CASES[name] | dict(d=32, f=64))
    packed = [QTensor.encode(jnp.asarray(w, jnp.float32)) for w in matrices]
    decoded = [w.decode(jnp.float32) for w in packed]
    x, weights = (jnp.asarray(a, jnp.float32) for a in (x, weights))

    @jax.jit
    def run(x, weights, matrices):
        out, pull = jax.vjp(lambda *a: expert_mlp(a[0], indices, a[1], *matrices, situ, backend=backend), x, weights)
        return out, *pull(jnp.cos(out))

    for ours, plain in zip(run(x, weights, packed), run(x, weights, decoded), strict=True):
        np.testing.assert_array_equal(ours, plain)
