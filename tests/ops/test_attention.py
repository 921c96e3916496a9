"""Attention against a loop over queries, with rows, lengths and buffers that break masks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.attention import attention, latent_attention
from tests import oracles
from tests.conftest import rel_to_max, rel_to_rms

DOCUMENTS = np.array([[0, 1, 1, 1, 2, 2, 0, 3, 3, 3, 3], [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]])


def arrays(b=2, t=11, s=11, h=4, g=4, k=6, v=5, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in ((b, t, h, k), (b, s, g, k), (b, s, g, v))]


@partial(jax.jit, static_argnames=("blocks",))
def with_gradients(q, k, v, d_o, q_documents, kv_documents, q_start, *, blocks=(512, 512)):
    def run(q, k, v):
        return attention(
            q,
            k,
            v,
            scale=0.7,
            q_documents=q_documents,
            kv_documents=kv_documents,
            q_start=q_start,
            query_block=blocks[0],
            key_block=blocks[1],
        )

    (o, top), pull = jax.vjp(run, q, k, v)
    return o, top, pull((d_o, jnp.ones_like(top)))  # max_logits must carry no gradient


def run_wide(arrays, documents=(None, None), q_start=0, blocks=(512, 512)):
    q, _, v = arrays
    d_o = np.random.default_rng(5).normal(size=(*q.shape[:3], v.shape[-1]))
    with jax.enable_x64(True):
        given = [jnp.asarray(a) for a in (*arrays, d_o)]
        given += [None if a is None else jnp.asarray(a) for a in documents]
        return jax.tree.map(np.asarray, with_gradients(*given, q_start, blocks=blocks)), d_o


def oracle(arrays, documents):
    q, k, v = arrays
    return oracles.attention(q, k, v, 0.7, *documents)


@pytest.mark.parametrize("g", [4, 2, 1])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("blocks", [(512, 512), (4, 512), (512, 4), (4, 3)])
def test_forward_and_gradients(g, packed, blocks):
    given = arrays(g=g)
    documents = (DOCUMENTS, DOCUMENTS) if packed else (None, None)
    (o, top, gradients), d_o = run_wide(given, documents, blocks=blocks)
    expected, expected_top = oracle(given, documents)
    np.testing.assert_allclose(o, expected, atol=1e-12)
    np.testing.assert_allclose(top, expected_top, atol=1e-12)
    for i, gradient in enumerate(gradients):
        step = np.random.default_rng(i).normal(size=given[i].shape) * 1e-5
        values = []
        for sign in (1, -1):
            moved = [a + sign * step if j == i else a for j, a in enumerate(given)]
            values.append(np.sum(oracle(moved, documents)[0] * d_o))
        assert np.sum(gradient * step) == pytest.approx((values[0] - values[1]) / 2, rel=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_block_sizes_change_nothing(packed):
    documents = (DOCUMENTS, DOCUMENTS) if packed else (None, None)
    (o, top, gradients), _ = run_wide(arrays(), documents)
    for blocks in ((1, 1), (4, 11), (10, 4), (3, 7)):
        other, _ = run_wide(arrays(), documents, blocks=blocks)
        np.testing.assert_allclose(other[0], o, atol=1e-13)
        np.testing.assert_allclose(other[1], top, rtol=1e-14)
        for ours, theirs in zip(other[2], gradients, strict=True):
            assert rel_to_max(ours, theirs) < 1e-12


def test_poisoned_padding_reaches_nothing():
    clean, _ = run_wide(arrays(), (DOCUMENTS, DOCUMENTS), blocks=(4, 3))
    poisoned = [np.where(DOCUMENTS[..., None, None] > 0, a, np.nan) for a in arrays()]
    other, _ = run_wide(poisoned, (DOCUMENTS, DOCUMENTS), blocks=(4, 3))
    jax.tree.map(np.testing.assert_array_equal, other, clean)
    assert not np.any(other[0][DOCUMENTS == 0])
    assert not any(np.any(gradient[DOCUMENTS == 0]) for gradient in other[2])


@pytest.mark.parametrize("t", [1, 3])
def test_queries_at_the_end_of_a_cache_whose_rest_is_garbage(t):
    """Decoding: slots after the queries hold NaN; the document numbers come from the cache."""
    q, k, v = arrays()
    whole, _ = oracles.attention(q, k, v, 0.7, DOCUMENTS, DOCUMENTS)
    for start in (0, 7):
        end = start + t
        cache = [np.concatenate([a[:, :end], np.full_like(a, np.nan)], axis=1) for a in (k, v)]
        numbers = np.concatenate([DOCUMENTS[:, :end], np.zeros_like(DOCUMENTS)], axis=1)
        part = [q[:, start:end], *cache]
        (o, _, gradients), _ = run_wide(part, (DOCUMENTS[:, start:end], numbers), q_start=start)
        np.testing.assert_allclose(o, whole[:, start:end], atol=1e-12)
        assert all(np.isfinite(gradient).all() for gradient in gradients)
        (o, _, _), _ = run_wide(part, q_start=start)  # one document, the length known from q_start alone
        np.testing.assert_allclose(o, oracles.attention(q, k, v, 0.7)[0][:, start:end], atol=1e-12)


@pytest.mark.parametrize("blocks", [(512, 512), (3, 512), (512, 4), (2, 3)])
@pytest.mark.parametrize("starts", [(0, 6), (6, 1), (3, 3)])
def test_runs_of_queries_are_as_if_alone(starts, blocks):
    """Runs apart, in any order, and on each other; what no run sees may be NaN, and gradients of keys add up."""
    t = 5
    q, k, v = arrays()
    runs = [slice(start, start + t) for start in starts]
    end = max(starts) + t
    k, v = (np.where(np.arange(11)[:, None, None] < end, a, np.nan) for a in (k, v))
    joint = [np.concatenate([a[:, run] for run in runs], axis=1) for a in (q, DOCUMENTS)]
    (o, top, (d_q, *d_keys)), d_o = run_wide([joint[0], k, v], (joint[1], DOCUMENTS), np.array(starts), blocks)
    sums = [np.zeros_like(k), np.zeros_like(v)]
    tops = []
    for i, run in enumerate(runs):
        mine = slice(i * t, (i + 1) * t)
        with jax.enable_x64(True):
            given = [jnp.asarray(a) for a in (q[:, run], k, v, d_o[:, mine], DOCUMENTS[:, run], DOCUMENTS)]
            alone, alone_top, (alone_q, *alone_keys) = with_gradients(*given, starts[i])
        np.testing.assert_allclose(o[:, mine], alone, atol=1e-12)
        np.testing.assert_allclose(d_q[:, mine], alone_q, atol=1e-12)
        sums = [a + np.asarray(b) for a, b in zip(sums, alone_keys, strict=True)]
        tops.append(alone_top)
    for ours, theirs in zip(d_keys, sums, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)
    np.testing.assert_allclose(top, np.max(tops, axis=0), atol=1e-12)


def test_causality_by_gradient():
    q, k, v = (jnp.asarray(a, jnp.float32) for a in arrays(b=1, h=2, g=1))

    def output(k, v):
        return attention(q, k, v, scale=0.7, query_block=4, key_block=3)[0].sum(axis=(0, 2, 3))  # [t]

    for jacobian in jax.jit(jax.jacobian(output, argnums=(0, 1)))(k, v):  # [t, b, s, g, .]
        reach = np.abs(jacobian).sum(axis=(1, 3, 4))
        assert not np.any(np.triu(reach, 1))
        assert np.all(np.diag(reach)[1:] > 0)


def test_nothing_to_see_and_extreme_scores():
    q, k, v = (jnp.asarray(a, jnp.float32) for a in arrays())
    none = jnp.zeros((2, 11), jnp.int32)
    o, top, gradients = with_gradients(q, k, v, jnp.ones_like(v), none, none, 0)
    assert not np.any(o)
    assert np.all(top == -np.inf)
    assert all(not np.any(gradient) for gradient in gradients)
    o, top, gradients = with_gradients(1e4 * q, 1e3 * k, v, jnp.ones_like(v), None, None, 0, blocks=(4, 3))
    assert np.isfinite(o).all() and np.isfinite(top).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    o, top, _ = with_gradients(-jnp.abs(q), jnp.abs(k), v, jnp.ones_like(v), None, None, 0)
    assert np.all(top < 0)  # the masked scores are not in the maximum


def test_bfloat16_is_summed_in_float32():
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in arrays(t=40, s=40, k=32, v=24))
    o, top = attention(q, k, v, scale=0.3)
    assert o.dtype == top.dtype == jnp.float32
    expected = oracles.attention(q, k, v, 0.3)
    assert rel_to_rms(o, expected[0]) < 1e-4
    assert rel_to_rms(top, expected[1]) < 1e-5


def test_long_rows_do_not_hold_all_scores():
    """4096 queries and keys: all scores of 4 heads are 256 MiB."""
    shape = jax.ShapeDtypeStruct((1, 4096, 4, 16), jnp.float32)

    def loss(q, k, v):
        return jnp.sum(attention(q, k, v, scale=0.25, query_block=256)[0] ** 2)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape).compile()
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 100 * 2**20


RANK, ROPE = 7, 2


def latents(dtype="float64", seed=3, b=2, t=11, s=11, h=4, nope=4, v=5):
    rng = np.random.default_rng(seed)
    shapes = ((b, t, h, nope + ROPE), (b, s, RANK + ROPE), (RANK, h, nope), (RANK, h, v), (b, t, h, v))
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def over_expanded(q, latent, w_k_b, w_v_b, **where):
    """What `latent_attention` does, from keys and values of the whole row."""
    rank = w_k_b.shape[0]
    k_rope = jnp.broadcast_to(latent[:, :, None, rank:], (*latent.shape[:2], q.shape[2], latent.shape[2] - rank))
    k = jnp.concatenate([jnp.einsum("bsr,rhk->bshk", latent[..., :rank], w_k_b), k_rope], axis=-1)
    v = jnp.einsum("bsr,rhv->bshv", latent[..., :rank], w_v_b)
    return attention(q, k, v, **where)


@partial(jax.jit, static_argnums=0, static_argnames=("query_block", "key_block"))
def latent_gradients(f, q, latent, w_k_b, w_v_b, d_o, q_documents, kv_documents, q_start, **blocks):
    where = {"scale": 0.7, "q_documents": q_documents, "kv_documents": kv_documents, "q_start": q_start, **blocks}
    (o, top), pull = jax.vjp(lambda *given: f(*given, **where), q, latent, w_k_b, w_v_b)
    return o, top, pull((d_o, jnp.ones_like(top)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("blocks", [(512, 512), (4, 3)])
def test_keys_from_latents_are_the_same_keys(packed, blocks, x64):
    given = latents()
    documents = (DOCUMENTS, DOCUMENTS) if packed else (None, None)
    expected = latent_gradients(over_expanded, *given, *documents, 0)
    if packed:
        for x in (*given[:2], given[4]):
            x[DOCUMENTS == 0] = np.nan
    actual = latent_gradients(latent_attention, *given, *documents, 0, query_block=blocks[0], key_block=blocks[1])
    errors = jax.tree.map(rel_to_max, actual, expected)
    assert max(jax.tree.leaves(errors)) < 1e-12, errors
    if packed:
        assert not any(np.any(np.asarray(x)[DOCUMENTS == 0]) for x in (actual[0], *actual[2][:2]))


def test_latents_of_a_cache_whose_rest_is_garbage(x64):
    q, latent, *others, d_o = latents()
    whole = latent_gradients(over_expanded, q, latent, *others, d_o, DOCUMENTS, DOCUMENTS, 0)
    cache = np.concatenate([latent, np.full_like(latent, np.nan)], axis=1)
    numbers = np.concatenate([DOCUMENTS, np.zeros_like(DOCUMENTS)], axis=1)
    part = (q[:, 6:], cache, *others, d_o[:, 6:], DOCUMENTS[:, 6:], numbers, 6)
    o, _, gradients = latent_gradients(latent_attention, *part, query_block=2, key_block=4)
    np.testing.assert_allclose(o, whole[0][:, 6:], atol=1e-12)
    np.testing.assert_allclose(gradients[0], whole[2][0][:, 6:], atol=1e-12)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert not np.any(gradients[1][:, 11:])


def test_bfloat16_latents():
    """Blocks of bf16 keys: outputs and gradients stay near those of f32, the weights' sums over blocks too."""
    given = latents("float32", b=1, t=128, s=128)
    given = [x / np.sqrt(RANK) if x.ndim == 3 and x.shape[0] == RANK else x for x in given]
    expected = latent_gradients(over_expanded, *given, None, None, 0)
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in given[:4]]
    o, top, gradients = latent_gradients(latent_attention, *narrow, given[4], None, None, 0, key_block=8)
    assert o.dtype == top.dtype == jnp.float32
    assert all(gradient.dtype == jnp.bfloat16 for gradient in gradients)
    errors = jax.tree.map(rel_to_max, (o, top, gradients), expected)
    assert max(jax.tree.leaves(errors)) < 2**-5, errors  # four roundings of 2**-8 and their spread


def test_keys_of_a_long_row_never_exist_together():
    """256 queries, 16384 latents: keys and values of all heads are 144 MiB."""
    t, s, h, rank, rope, width = 256, 16384, 16, 32, 16, 64
    shapes = ((1, t, h, width + rope), (1, s, rank + rope), (rank, h, width), (rank, h, width))
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def temp(f):
        loss = lambda *given: jnp.sum(f(*given, scale=0.1, q_start=s - t)[0] ** 2)  # noqa: E731
        memory = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*given).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes / 2**20

    assert temp(latent_attention) < 50 < 144 < temp(over_expanded)


def test_wrong_shapes_are_refused():
    q, k, v = (jnp.asarray(a, jnp.float32) for a in arrays())
    with pytest.raises(ValueError, match="g dividing"):
        attention(q, k[:, :, :3], v[:, :, :3], scale=1.0)
    with pytest.raises(ValueError, match="g dividing"):
        attention(q, k, v[:, :-1], scale=1.0)
    with pytest.raises(ValueError, match="11 queries are not 2 equal runs"):
        attention(q, k, v, scale=1.0, q_start=jnp.array([0, 5]))
    q, latent, w_k_b, w_v_b, _ = (jnp.asarray(a) for a in latents("float32"))
    with pytest.raises(ValueError, match=r"nope \+ rope"):
        latent_attention(q, latent[..., 1:], w_k_b, w_v_b, scale=1.0)
    with pytest.raises(ValueError, match=r"nope \+ rope"):
        latent_attention(q, latent, w_k_b, w_v_b[:, :2], scale=1.0)
