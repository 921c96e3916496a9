"""Rows split over a mesh axis against the same rows whole: outputs, states and every gradient."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax.analysis import hlo
from kimi_jax.ops import conv, segments
from kimi_jax.ops import kda as kda_op
from kimi_jax.ops.attention import latent_attention
from kimi_jax.parallel import context
from tests.conftest import rel_to_max

H, K, V, R, NOPE, ROPE, T = 2, 6, 5, 8, 4, 2, 40
CHUNK = 4  # divides neither 5 nor 10, the spans of 40 tokens over 8 and 4 devices
MESHES = {
    "seq 8": {"seq": 8},
    "data 2 x seq 4": {"data": 2, "seq": 4},
    "data 2 x seq 2 x tensor 2": {"data": 2, "seq": 2, "tensor": 2},
}


def runs(*lengths):
    """Segment ids of runs of (id, length), filled up with padding."""
    ids = np.concatenate([np.full(length, name) for name, length in lengths])
    return np.pad(ids, (0, T - len(ids)))


SEGMENT_IDS = np.stack(
    [
        runs((1, 40)),
        runs((1, 5), (2, 5), (3, 10), (4, 10), (5, 10)),  # documents begin exactly where spans do
        runs((1, 3), (2, 1), (3, 2), (4, 6), (5, 1), (6, 20), (7, 7)),  # and inside spans, many in one
        runs((1, 2), (2, 32), (3, 6)),  # one goes on over six spans
        runs((0, 7), (1, 20), (2, 13)),  # padding on the left
        runs((1, 10), (0, 10), (1, 14)),  # spans of padding alone in the middle, the id coming back
        runs((0, 40)),
        runs((1, 4), (0, 1), (1, 5), (0, 2), (2, 7), (0, 1), (3, 11), (0, 3), (3, 6)),
    ]
)


def arrays(dtype):
    """Inputs of all operations; padding holds NaN."""
    rng = np.random.default_rng(0)
    b = len(SEGMENT_IDS)

    def unit(*shape):
        x = rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    gates = -np.exp(rng.normal(size=(b, T, H, K)) - 1)
    gates[[0, 3]] = -5  # throughout
    gates[1, ::7] = -np.inf
    tokens = {
        "q": unit(b, T, H, K),
        "k": unit(b, T, H, K),
        "v": rng.normal(size=(b, T, H, V)),
        "g": gates,
        "beta": rng.uniform(size=(b, T, H)),
        "x": rng.normal(size=(b, T, H, K)),
        "query": rng.normal(size=(b, T, H, NOPE + ROPE)),
        "latent": rng.normal(size=(b, T, R + ROPE)),
    }
    for x in tokens.values():
        x[SEGMENT_IDS == 0] = np.nan
    weights = {
        "taps": rng.normal(size=(H, K, 4)),
        "w_k_b": rng.normal(size=(R, H, NOPE)),
        "w_v_b": rng.normal(size=(R, H, V)),
    }
    cotangents = {
        "o": rng.normal(size=(b, T, H, V)),
        "state": rng.normal(size=(b, H, K, V)),
        "y": rng.normal(size=(b, T, H, K)),
        "attended": rng.normal(size=(b, T, H, V)),
    }
    return jax.tree.map(lambda x: np.asarray(x, dtype), (tokens, weights, cotangents))


def whole(tokens, weights, documents):
    """Every operation by the plain ops."""
    a = tokens
    ids = {"segment_ids": documents}
    o, state = kda_op.kda(a["q"], a["k"], a["v"], a["g"], a["beta"], chunk_size=CHUNK, **ids)
    y, _ = conv.short_conv(a["x"], weights["taps"], **ids)
    where = {"q_documents": documents, "kv_documents": documents}
    attended, top = latent_attention(
        a["query"], a["latent"], weights["w_k_b"], weights["w_v_b"], scale=0.4, query_block=64, **where
    )
    return {"o": o, "state": state, "y": y, "attended": attended}, top


def split(tokens, weights, documents, axis, axes=()):
    """The same on one device of a split row, in a mesh of `axes`."""
    a = tokens
    o, state = context.kda(a["q"], a["k"], a["v"], a["g"], a["beta"], documents=documents, axis=axis, chunk_size=CHUNK)
    y = context.short_conv(a["x"], weights["taps"], documents=documents, axis=axis)

    def attend(q, latent, **where):
        w = weights["w_k_b"], weights["w_v_b"]
        return latent_attention(q, latent, *w, scale=0.4, query_block=3, key_block=7, **where)

    attended, top = context.causal(attend, a["query"], a["latent"], documents=documents, axis=axis, axes=axes)
    return {"o": o, "state": state, "y": y, "attended": attended}, top


def with_gradients(f, tokens, weights, cotangents, documents):
    outputs, pull, top = jax.vjp(lambda *given: f(*given, documents), tokens, weights, has_aux=True)
    d_tokens, d_weights = pull(cotangents)
    return outputs, top, d_tokens, d_weights


@functools.cache
def oracle(dtype):
    documents = segments.document_ids(jnp.asarray(SEGMENT_IDS, jnp.int32))
    return jax.tree.map(np.asarray, jax.jit(functools.partial(with_gradients, whole))(*arrays(dtype), documents))


def make_mesh(sizes):
    devices = jax.devices()[: math.prod(sizes.values())]
    kinds = (AxisType.Explicit,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


def run_over(mesh, dtype):
    """Outputs and gradients of `split` over a mesh."""
    data, heads = (axis if axis in mesh.shape else None for axis in ("data", "tensor"))
    token, state = P(data, "seq", heads), P(data, heads)
    out_specs = {"o": token, "state": state, "y": token, "attended": token}
    tokens, weights, cotangents = arrays(dtype)
    in_specs = (
        {name: P(data, "seq") if name == "latent" else token for name in tokens},
        {"taps": P(heads), "w_k_b": P(None, heads), "w_v_b": P(None, heads)},
    )

    def local(tokens, weights, documents):
        outputs, top = split(tokens, weights, documents, "seq", mesh.axis_names)
        same = tuple(axis for axis in mesh.axis_names if axis != heads)
        return outputs, jax.lax.pmax(jax.lax.stop_gradient(top), same)

    run = jax.shard_map(local, in_specs=(*in_specs, P(data)), out_specs=(out_specs, P(heads)))
    documents = segments.document_ids(jnp.asarray(SEGMENT_IDS, jnp.int32))
    given = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
        (tokens, weights, cotangents, documents),
        (*in_specs, out_specs, P(data)),
    )
    return jax.jit(functools.partial(with_gradients, run))(*given)


# In f32: sums over 40 tokens and up to 8 spans in another order, over the largest of each array.
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [("seq 8", "float32", 1e-5), *[(name, "float64", 1e-10) for name in MESHES]],
)
def test_split_rows_are_whole_rows(name, dtype, tolerance):
    with jax.enable_x64(dtype == "float64"):
        expected = oracle(dtype)
        mesh = make_mesh(MESHES[name])
        with jax.set_mesh(mesh):
            actual = run_over(mesh, dtype)
        errors = jax.tree.map(rel_to_max, actual, expected)
    assert all(x.dtype == dtype for x in jax.tree.leaves(actual))
    assert max(jax.tree.leaves(errors)) < tolerance, errors
    outputs, _, d_tokens, _ = actual
    for x in (*d_tokens.values(), outputs["o"], outputs["y"], outputs["attended"]):
        assert not np.any(np.asarray(x)[SEGMENT_IDS == 0])


@pytest.mark.parametrize("packed", [True, False])
def test_spans_shorter_than_the_halo(packed):
    """16 tokens over 8 devices, four taps: the inputs before a span come from two devices."""
    rng = np.random.default_rng(1)
    x, taps, d_y = (rng.normal(size=shape).astype("float32") for shape in ((2, 16, 3), (3, 4), (2, 16, 3)))
    ids = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2, 0, 2, 2, 2, 2, 3, 3], [1] * 9 + [2] * 7], np.int32)
    documents = segments.document_ids(jnp.asarray(ids)) if packed else None

    def outcome(f, *given):
        y, pull = jax.vjp(f, *given[:2])
        return y, *pull(given[2])

    expected = outcome(lambda x, taps: conv.short_conv(x, taps, segment_ids=documents)[0], x, taps, d_y)
    with jax.set_mesh(make_mesh({"seq": 8})):
        row = P(None, "seq")
        local = functools.partial(context.short_conv, axis="seq")
        run = jax.shard_map(
            lambda x, taps, documents: local(x, taps, documents=documents), in_specs=(row, P(), P()), out_specs=row
        )
        given = (jax.reshard(x, row), jax.reshard(taps, P()), jax.reshard(d_y, row))
        actual = jax.jit(functools.partial(outcome, lambda x, taps: run(x, taps, documents)))(*given)
    assert max(rel_to_max(a, e) for a, e in zip(actual, expected, strict=True)) < 1e-6


def test_rows_without_documents():
    """None: the row is one document, of the whole length."""
    tokens = {name: np.nan_to_num(x) for name, x in arrays("float32")[0].items()}
    given = [tokens[name][:2] for name in ("q", "k", "v", "g", "beta")]
    given[3] = np.maximum(given[3], -5)
    expected = kda_op.kda(*given)
    with jax.set_mesh(make_mesh({"seq": 8})):
        row = P(None, "seq")
        run = jax.shard_map(
            functools.partial(context.kda, documents=None, axis="seq"), in_specs=row, out_specs=(row, P())
        )
        actual = jax.jit(run)(*[jax.reshard(x, row) for x in given])
    assert max(rel_to_max(a, e) for a, e in zip(actual, expected, strict=True)) < 1e-5


def test_documents_of_a_span_are_refused():
    with jax.set_mesh(make_mesh({"seq": 8})):
        run = jax.shard_map(
            lambda x, taps, documents: context.short_conv(x, taps, documents=documents, axis="seq"),
            in_specs=(P(None, "seq"), P(), P()),
            out_specs=P(None, "seq"),
        )
        shapes = [jnp.zeros((1, 40, 3)), jnp.zeros((3, 4)), jnp.ones((1, 5), jnp.int32)]
        with pytest.raises(ValueError, match=r"of 5 tokens, but 8 spans of 5 make 40"):
            jax.eval_shape(run, jax.reshard(shapes[0], P(None, "seq")), *shapes[1:])


def traffic(f, arguments, specs):
    """(operation, bytes that a device receives) of f's output and gradients by all its arguments, over seq 8."""
    mesh = make_mesh({"seq": 8})
    with jax.set_mesh(mesh):
        run = jax.shard_map(f, in_specs=specs, out_specs=P(None, "seq"))
        given = [
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
            for shape, spec in zip(arguments, specs, strict=True)
        ]
        gradient = jax.value_and_grad(lambda *a: jnp.sum(run(*a) ** 2), argnums=tuple(range(len(given))))
        text = jax.jit(gradient).lower(*given).compile().as_text() or ""
    return sorted((each.kind, each.total) for each in hlo.collectives(text, {"seq": 8}))


def test_kda_traffic_does_not_depend_on_length():
    def output(*given):
        return context.kda(*given, documents=None, axis="seq", chunk_size=8)[0]

    def count(t):
        keys = (1, t, H, K)
        return traffic(output, (keys, keys, (1, t, H, V), keys, (1, t, H)), (P(None, "seq"),) * 5)

    others = 4 * 7 * H * K * (K + V)  # the spans of seven other devices
    loss = ("all-reduce", 2 * 7 / 8 * 4)
    assert count(128) == count(512) == [("all-gather", others), loss, ("reduce-scatter", others)]


def test_attention_moves_latents_and_half_of_the_queries():
    t, h = 64, 24  # heads whose keys and values are 24 * (6 + 5) numbers a token, latents 10

    def output(q, latent, w_k_b, w_v_b):
        attend = functools.partial(latent_attention, w_k_b=w_k_b, w_v_b=w_v_b, scale=0.4)
        return context.causal(attend, q, latent, documents=None, axis="seq")[0]

    shapes = ((1, t, h, NOPE + ROPE), (1, t, R + ROPE), (R, h, NOPE), (R, h, V))
    found = traffic(output, shapes, (P(None, "seq"), P(None, "seq"), P(), P()))
    latents, weights = 4 * t * (R + ROPE) * 7 // 8, 4 * R * h * (NOPE + V)
    half = 4 * t // 8 // 2 * h  # of a span, a number a head: queries go out, outputs come back, and their gradients
    swaps = [("collective-permute", half * width) for width in 2 * (NOPE + ROPE, V)]
    assert sorted(x for x in found if x[0] != "all-reduce") == sorted(
        [("all-gather", latents), *swaps, ("reduce-scatter", latents)]
    )
    reduced = sum(size for operation, size in found if operation == "all-reduce")
    assert reduced == 2 * 7 * (weights + 4) // 8  # of the weights' gradients and the loss


@pytest.mark.parametrize("t", [2, 6, 8, 7, 1])
def test_each_device_sees_as_many_keys(t):
    """All devices compute the same number of pairs of a query and a key, together each pair once; odd spans do not."""
    mesh = make_mesh({"seq": 4})

    def attend(q, latent, *, q_documents, kv_documents, q_start):
        del latent, q_documents, kv_documents
        return q, (q_start[:, None] + jnp.arange(t // q_start.size)).reshape(-1)

    def slots(q):
        return context.causal(attend, q, q[..., 0], documents=None, axis="seq")

    q = jnp.arange(4 * t, dtype=jnp.float32).reshape(1, 4 * t, 1, 1)
    run = jax.jit(jax.shard_map(slots, mesh=mesh, in_specs=P(None, "seq"), out_specs=(P(None, "seq"), P("seq"))))
    back, places = run(jax.device_put(q, jax.NamedSharding(mesh, P(None, "seq"))))
    np.testing.assert_array_equal(back, q)
    np.testing.assert_array_equal(np.sort(places), np.arange(4 * t))
    pairs = (np.asarray(places).reshape(4, t) + 1).sum(1)
    assert (len(set(pairs)) == 1) == (t % 2 == 0)
