"""What one document must not know of another, what a cache must, and what a layer's MLP reads."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.config import RoPEConfig
from kimi_jax.model.cache import Cache, advance, init_cache
from kimi_jax.model.kda import KDA
from kimi_jax.model.kimi import init
from kimi_jax.model.param import arrays, named_params, with_arrays
from tests import oracles, tiny
from tests.conftest import rel_to_rms

K3 = tiny.MODEL
ROTARY = replace(
    K3,
    mla_layers=(0, 1),
    kda=None,
    attn_res_block_size=None,
    mla=replace(K3.mla, output_gate=False, rope=RoPEConfig(theta=100.0)),
)


def telling(config, seed=0):
    """A model whose answers depend on everything: large weights, random vectors."""
    rng, values = np.random.default_rng(seed), {}
    for name, value in arrays(init(config, seed)).items():
        noise = rng.standard_normal(value.shape).astype(np.float32)
        values[name] = value + 0.3 * noise if value.ndim < 4 else value * 12
    return with_arrays(init(config, seed), values)


@partial(jax.jit, static_argnames="collect")
def forward(model, tokens, segment_ids=None, cache=None, positions=None, collect=()):
    return model.forward(tokens, segment_ids, positions=positions, cache=cache, collect=collect)


def tokens(seed, *shape):
    return np.random.default_rng(seed).integers(3, 259, shape).astype(np.int32)


@pytest.mark.parametrize("config", [K3, ROTARY], ids=["k3", "rotary"])
def test_a_document_that_begins_on_a_cache_in_use(config):
    """Row 0 ends its document inside a call and begins another, which then knows nothing of the first; row 1 goes on
    with the document that its cache holds, and row 2 begins anew on padding."""
    model, ids = telling(config), tokens(0, 3, 20)
    first = np.array([[1] * 8, [1] * 8, [0] * 8], np.int32)
    second = np.array([[1] * 3 + [2] * 5, [1] * 8, [0] * 3 + [1] * 5], np.int32)
    _, aux = forward(model, ids[:, :8], first, init_cache(config, 3, 32))
    parts = []
    logits, aux = forward(model, ids[:, 8:16], second, aux["cache"])
    parts.append(logits)
    for t in range(16, 20):
        logits, aux = forward(model, ids[:, t : t + 1], None, aux["cache"])
        parts.append(logits)
    found = np.concatenate(parts, axis=1)  # tokens 8 to 19
    alone, _ = forward(model, np.stack([np.roll(ids[0], -11), ids[1], np.roll(ids[2], -11)]))
    assert rel_to_rms(found[0, 3:], alone[0, :9]) < 1e-5
    assert rel_to_rms(found[1], alone[1, 8:]) < 1e-5
    assert rel_to_rms(found[2, 3:], alone[2, :9]) < 1e-5
    whole, _ = forward(model, ids)
    assert rel_to_rms(found[0, 3:], whole[0, 11:]) > 0.05  # it would tell


def test_only_slots_of_the_last_document_stay_visible():
    """Rows of two slots in use, two calls of three tokens: numbers of documents -> visible slots."""
    cases = [
        ([1, 1, 1], "11 111"),
        ([1, 1, 2], "00 001"),
        ([2, 2, 2], "00 111"),
        ([1, 2, 3], "00 001"),
        ([0, 2, 2], "00 011"),
        ([0, 0, 1], "11 001"),
        ([1, 0, 0], "11 100"),
        ([0, 0, 0], "11 000"),
    ]
    visible = jnp.tile(jnp.array([True, True, False, False, False, False]), (len(cases), 1))
    cache = Cache((), visible, jnp.int32(2))
    after = advance(cache, (), jnp.array([documents for documents, _ in cases]))
    expected = [[slot == "1" for slot in row.replace(" ", "") + "0"] for _, row in cases]
    np.testing.assert_array_equal(after.visible, expected)
    assert after.length == 5


def test_a_kda_layer_forgets_at_a_documents_end():
    """With so slow a decay that a state left over would show, also past a chunk."""
    layer, rng = KDA(K3, ()), np.random.default_rng(0)
    shapes = {name: variable.get_value().shape for name, variable in named_params(layer).items()}
    values = {name: jnp.asarray(rng.standard_normal(shape) * 0.4, jnp.float32) for name, shape in shapes.items()}
    values["dt_bias"] -= 6
    layer = with_arrays(layer, values)
    x = rng.standard_normal((1, 22, K3.hidden_size)).astype(np.float32)
    run = jax.jit(lambda layer, x, documents: layer(x, documents, None)[0])
    documents = np.array([[1] * 9 + [2] * 4 + [0] * 1 + [3] * 8], np.int32)
    packed, unaware = run(layer, x, documents), run(layer, x, np.ones_like(documents))
    for start, stop in ((0, 9), (9, 13), (14, 22)):
        first = (np.arange(22)[None] < stop - start).astype(np.int32)
        alone = run(layer, np.roll(x, -start, axis=1), first)[:, : stop - start]
        assert rel_to_rms(packed[:, start:stop], alone) < 1e-4
        assert start == 0 or rel_to_rms(unaware[:, start:stop], alone) > 0.1  # it would tell


def test_an_mlp_reads_its_own_layers_attention():
    """Its mix is over the blocks before and the block's running sum, which holds the attention's output from the
    block's first layer on."""
    config = replace(K3, num_layers=4, mla_layers=(1, 3), attn_res_block_size=2, num_dense_layers=0)
    model, ids = telling(config), tokens(1, 1, 8)
    _, aux = forward(model, ids, collect=("attn_in", "attn_out", "mlp_in", "mlp_out", "blocks"))
    values = arrays(model)

    def mixed(part, layer, *sources):
        run, group = layer % 2, layer // 2
        query, norm = (values[f"segments.0.runs.{run}.{part}.{leaf}"][group, 0] for leaf in ("query", "norm"))
        return oracles.attn_residual(np.stack(sources), query, norm, config.rms_norm_eps)[0]

    bank, total = [], 0
    for layer in range(4):
        out, y = (np.asarray(aux[name][layer], np.float64) for name in ("attn_out", "mlp_out"))
        if layer % 2 == 0:  # begins a block
            bank.append(np.asarray(aux["blocks"][len(bank)], np.float64))
            expected, total = mixed("attention_mix", layer, *bank), 0
        else:
            expected = mixed("attention_mix", layer, *bank, total)
        assert rel_to_rms(aux["attn_in"][layer], expected) < 1e-4, layer
        assert rel_to_rms(aux["mlp_in"][layer], mixed("mlp_mix", layer, *bank, total + out)) < 1e-4, layer
        without = mixed("mlp_mix", layer, *bank, total) if layer % 2 else mixed("mlp_mix", layer, *bank)
        assert rel_to_rms(aux["mlp_in"][layer], without) > 0.1, layer  # it would tell
        total = total + out + y


def test_positions_on_a_cache_count_the_documents_tokens():
    """Told by hand or found by the model, for prompts of different lengths and a call without segment ids."""
    model, ids = telling(ROTARY), tokens(2, 2, 12)
    segment_ids = np.array([[0] * 3 + [1] * 5, [1] * 8], np.int32)
    _, aux = forward(model, ids[:, :8], segment_ids, init_cache(ROTARY, 2, 16))
    at = np.array([[5], [8]]) + np.arange(2)
    found, _ = forward(model, ids[:, 8:10], None, aux["cache"])
    told, off = (forward(model, ids[:, 8:10], None, aux["cache"], at + shift)[0] for shift in (0, 1))
    np.testing.assert_allclose(found, told, rtol=1e-6, atol=1e-6)
    assert rel_to_rms(found, off) > 0.01  # it would tell
