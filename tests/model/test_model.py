"""The whole model: packing, causality, caches, layout, and what every call reports."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.config import load_config
from kimi_jax.model.cache import init_cache
from kimi_jax.model.kimi import Kimi, init
from kimi_jax.model.param import arrays, with_arrays
from kimi_jax.model.stacks import segments
from tests import tiny
from tests.conftest import rel_to_max, rel_to_rms
from tests.jax_private import default_fusions

K3, KIMI_LINEAR, CONFIGS = tiny.MODEL, tiny.KIMI_LINEAR, tiny.FAMILIES


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    """A model with telling values: larger weights than at the start, random queries, gains and biases."""
    model = init(CONFIGS[request.param], 0)
    rng = np.random.default_rng(1)
    values = {}
    for name, value in arrays(model).items():
        scale = 0.3 if "router_bias" not in name else 0.1
        noise = rng.standard_normal(value.shape).astype(np.float32) * scale
        values[name] = value + noise if value.ndim < 3 or "norm" in name else value * 10
    return with_arrays(model, values)


@partial(jax.jit, static_argnames="collect")
def forward(model, tokens, segment_ids=None, cache=None, collect=()):
    return model.forward(tokens, segment_ids, cache=cache, collect=collect)


def tokens(seed, *shape):
    return np.random.default_rng(seed).integers(3, 259, shape).astype(np.int32)


def test_a_packed_row_equals_its_documents_alone(model):
    ids = tokens(0, 1, 40)
    segment_ids = np.array([[0] * 3 + [5] * 9 + [1] * 1 + [0] * 2 + [1] * 14 + [2] * 8 + [0] * 3], np.int32)
    packed, aux = forward(model, ids, segment_ids)
    loads, balance = 0, 0
    for start, stop in ((3, 12), (12, 13), (15, 29), (29, 37)):
        alone, alone_aux = forward(
            model,
            np.pad(ids[:, start:stop], ((0, 0), (0, 40 - stop + start))),
            (np.arange(40)[None] < stop - start).astype(np.int32),
        )
        assert rel_to_rms(packed[:, start:stop], alone[:, : stop - start]) < 1e-5
        loads, balance = loads + alone_aux["load"], balance + alone_aux.get("balance_loss", 0)
    np.testing.assert_allclose(aux.get("balance_loss", 0), balance, rtol=1e-5)
    np.testing.assert_array_equal(aux["load"], loads)


def test_gradients_of_a_packed_row_are_the_sum_over_documents(model):
    ids, probe = tokens(1, 1, 24), np.random.default_rng(0).standard_normal((1, 24, 260)).astype(np.float32)

    @jax.jit
    def grad(segment_ids, weight):
        def loss(model):
            return jnp.sum(model(ids, segment_ids) * probe * weight[..., None])

        return arrays(jax.grad(loss)(model))

    segment_ids = np.array([[1] * 10 + [2] * 11 + [0] * 3], np.int32)
    together = grad(segment_ids, (segment_ids > 0).astype(np.float32))
    parts = [grad((segment_ids == n).astype(np.int32), (segment_ids == n).astype(np.float32)) for n in (1, 2)]
    for name, value in together.items():
        if not name.endswith("router_bias"):
            assert rel_to_max(parts[0][name] + parts[1][name], value) < 1e-4, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_later_tokens_change_nothing_before_them(model, dtype):
    """Bit for bit, at places inside a chunk and at its edge."""
    config = replace(model.config, dtype=dtype)
    model = with_arrays(Kimi(config), arrays(model))
    ids = tokens(2, 1, 24)
    for p in (1, 7, 8, 13):
        other = ids.copy()
        other[:, p:] = tokens(3, 1, 24 - p)
        a, b = forward(model, ids)[0], forward(model, other)[0]
        np.testing.assert_array_equal(a[:, :p], b[:, :p])
        assert np.any(a[:, p:] != b[:, p:])


def test_prefill_equals_prefill_and_steps(model):
    """Logits and the cache's contents, for k = 9 steps, and for a prefill in two parts.

    15 queries read the cached latents expanded, one or nine absorbed.
    """
    attention = model.segments[-1].runs[-1].attention
    assert attention._absorbs(1) and not attention._absorbs(15)
    ids = tokens(4, 2, 24)
    whole, _ = forward(model, ids)
    logits, aux = forward(model, ids[:, :15], cache=init_cache(model.config, 2, 32))
    parts = [logits]
    for t in range(15, 24):
        logits, aux = forward(model, ids[:, t : t + 1], cache=aux["cache"])
        parts.append(logits)
    assert rel_to_rms(np.concatenate(parts, axis=1), whole) < 1e-5
    stepped = aux["cache"]
    first, aux = forward(model, ids[:, :15], cache=init_cache(model.config, 2, 32))
    second, aux = forward(model, ids[:, 15:], cache=aux["cache"])
    assert rel_to_rms(np.concatenate([first, second], axis=1), whole) < 1e-5
    for a, b in zip(jax.tree.leaves(stepped), jax.tree.leaves(aux["cache"]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_a_cache_holds_the_rows_last_document(model):
    """After a packed call only the last document continues; rows of padding keep what they had."""
    ids = tokens(5, 2, 20)
    segment_ids = np.array([[1] * 8 + [2] * 12, [0] * 20], np.int32)
    _, aux = forward(model, ids, segment_ids, cache=init_cache(model.config, 2, 32))
    continued, _ = forward(model, ids[:, :4], cache=aux["cache"])
    alone, _ = forward(model, np.concatenate([ids[:1, 8:], ids[:1, :4]], axis=1))
    assert rel_to_rms(continued[:1], alone[:, 12:]) < 1e-5
    fresh, _ = forward(model, ids[1:, :4])
    assert rel_to_rms(continued[1:], fresh) < 1e-5


def test_a_full_cache_gives_no_answer(model):
    ids = tokens(10, 1, 4)
    _, aux = forward(model, ids, cache=init_cache(model.config, 1, 6))
    logits, aux = forward(model, ids[:, :2], cache=aux["cache"])
    assert np.isfinite(logits).all()
    logits, _ = forward(model, ids[:, :2], cache=aux["cache"])
    assert np.isnan(logits).all()


def test_bf16_compute_keeps_the_gradient_of_a_frequent_token():
    """4096 occurrences of one token: a sum in bf16 would stop growing at 256 times its addend."""
    ids = np.full((1, 512), 7, np.int32)

    def grad(dtype):
        model = with_arrays(Kimi(replace(K3, dtype=dtype)), arrays(init(K3, 0)))
        x = jax.jit(jax.grad(lambda m: jnp.sum(m.hidden(ids, collect=())[0].astype(jnp.float32) ** 2 * 0.01)))(model)
        return np.asarray(arrays(x)["embed"][7], np.float32)

    exact, half = grad("float32"), grad("bfloat16")
    assert np.linalg.norm(half - exact) < 0.1 * np.linalg.norm(exact)


def test_padding_tokens_never_matter(model):
    ids = tokens(6, 1, 24)
    segment_ids = np.array([[0] * 5 + [1] * 7 + [0] * 4 + [1] * 8], np.int32)
    other = np.where(segment_ids == 0, tokens(7, 1, 24), ids)
    (a, aux), (b, other_aux) = forward(model, ids, segment_ids), forward(model, other, segment_ids)
    real = segment_ids[0] > 0
    np.testing.assert_array_equal(a[:, real], b[:, real])
    for name in ("load", "histogram", "max_logits"):
        np.testing.assert_array_equal(aux[name], other_aux[name])


def test_every_call_reports_in_layer_order(model):
    logits, aux = forward(model, tokens(8, 2, 8))
    assert logits.dtype == jnp.float32 and logits.shape == (2, 8, 260)
    config = model.config
    assert aux["max_logits"].shape == (len(config.mla_layers), config.mla.num_heads)
    assert aux["load"].shape == (len(config.moe_layers), config.moe.num_experts)
    assert aux["histogram"].shape[:2] == aux["load"].shape and aux["histogram"].dtype == jnp.int32
    np.testing.assert_array_equal(aux["histogram"].sum(-1), 16)
    _, aux = forward(model, tokens(8, 2, 8), collect=("h", "attn_in"))
    assert aux["h"].shape == aux["attn_in"].shape == (config.num_layers, 2, 8, config.hidden_size)


def test_recomputation_and_stacking_change_no_gradient(model):
    remat = with_arrays(Kimi(replace(model.config, remat="full")), arrays(model))
    ids = tokens(9, 1, 16)

    @jax.jit
    def grad(model):
        return jax.grad(lambda m: jnp.mean(jax.nn.logsumexp(m(ids), axis=-1)))(model)

    a, b = arrays(grad(model)), arrays(grad(remat))
    for name in a:
        np.testing.assert_allclose(b[name], a[name], atol=1e-6, err_msg=name)


def test_recomputation_reads_a_bank_that_has_grown_since():
    """Blocks that begin inside a segment; gradients through what layers report, too."""
    config = replace(K3, num_layers=9, mla_layers=(1, 3, 5, 7, 8), attn_res_block_size=4)
    assert max(segment.repeats for segment in segments(config)) == 3
    rng = np.random.default_rng(0)
    model = init(config, 0)
    values = {n: v + 0.3 * rng.standard_normal(v.shape).astype(np.float32) for n, v in arrays(model).items()}
    ids = tokens(11, 2, 12)

    @partial(jax.jit, static_argnames="remat", compiler_options=default_fusions())
    def grad(values, remat):
        model = with_arrays(Kimi(replace(config, remat=remat)), values)

        def loss(model):
            logits, aux = model.forward(ids, collect=("router_scores", "h"))
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1)) + jnp.mean(
                aux["router_scores"] ** 2 + aux["h"][1:, ..., :4]
            )

        return jax.value_and_grad(loss)(model)

    (a, d_a), (b, d_b) = grad(values, "none"), grad(values, "full")
    assert a == b
    for name, d in arrays(d_a).items():
        assert rel_to_max(arrays(d_b)[name], d) < 2e-5, name


def test_initial_values():
    """Zero pseudo-queries and A_log, dt = softplus(dt_bias) within [1e-3, 1e-1], the same on every call."""
    values, again, other = (arrays(init(K3, seed)) for seed in (0, 0, 1))
    for name, value in values.items():
        np.testing.assert_array_equal(value, again[name])
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("query", "A_log", "router_bias"):
            assert not np.any(value), name
        elif leaf == "dt_bias":
            dt = np.log1p(np.exp(value))
            assert dt.min() > 9e-4 and dt.max() < 0.11
        elif "norm" in leaf or leaf == "weight":
            assert np.all(np.asarray(value) == 1), name
        else:
            assert np.any(value != other[name]), name
    a_log = arrays(init(KIMI_LINEAR, 0))["segments.0.runs.0.attention.A_log"]
    assert np.all((a_log >= 0) & (a_log <= np.log(16)))


def test_inputs_are_checked():
    model = init(K3, 0)
    with pytest.raises(ValueError, match=r"tokens must be integers .* float32\[1, 4\]"):
        model(jnp.zeros((1, 4)))
    with pytest.raises(ValueError, match=r"segment_ids \[1, 3\] must have the shape of tokens \[1, 4\]"):
        model(jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 3), jnp.int32))
    with pytest.raises(ValueError, match="cannot collect"):
        model.forward(jnp.zeros((1, 4), jnp.int32), collect=("nothing",))
    with pytest.raises(ValueError, match=r"do not fit a cache of 1 rows and 3 slots"):
        model.forward(jnp.zeros((1, 4), jnp.int32), cache=init_cache(K3, 1, 3))
    with pytest.raises(ValueError, match="parameters differ"):
        with_arrays(model, {"embed": jnp.zeros(1)})


@pytest.mark.parametrize("name,expected", [("k3", 4), ("kimi_linear_48b", 4), ("k3_tiny", 3)])
def test_layers_fall_into_few_segments(name, expected):
    config = load_config(name).model
    parts = segments(config)
    assert len(parts) == expected
    seen = [(int(n), run.mixer, s.dense) for s in parts for j, run in enumerate(s.runs) for n in s.layers(j).flat]
    assert sorted(n for n, *_ in seen) == list(range(config.num_layers))
    for layer, mixer, dense in seen:
        assert (mixer == "mla") == (layer in config.mla_layers)
        assert dense == (layer < config.num_dense_layers)
    size = config.attn_res_block_size
    for part in parts:
        if size is not None:  # each group lies in one block
            np.testing.assert_array_equal(part.starts // size, (part.starts + part.group_size - 1) // size)


@pytest.mark.parametrize(
    "layers,mla,dense,block", [(1, (0,), 0, None), (1, (), 1, 3), (5, (0, 1, 2, 3, 4), 1, 2), (4, (), 0, None)]
)
def test_unusual_patterns_run(layers, mla, dense, block):
    """One kind of layer only, no dense or no expert layer, a ragged block."""
    config = replace(K3, num_layers=layers, mla_layers=mla, num_dense_layers=dense, attn_res_block_size=block)
    model = init(config, 0)
    logits, aux = jax.eval_shape(lambda m: m.forward(jnp.zeros((1, 8), jnp.int32)), model)
    assert logits.shape == (1, 8, 260)
    assert aux["max_logits"].shape == (len(mla), 2)


def test_the_real_model_traces_without_allocating():
    """2.78 T parameters: shapes of the forward pass from shapes of the weights."""
    model = Kimi(load_config("k3").model)
    tokens = jax.ShapeDtypeStruct((1, 256), jnp.int32)
    logits = jax.eval_shape(lambda m, t: m(t), model, tokens)
    assert logits.shape == (1, 256, 163840) and logits.dtype == jnp.float32
