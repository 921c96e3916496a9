"""Whole models against the released code: logits, intermediates, routing, packing, decode, and the bytes on disk."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.model.cache import init_cache
from kimi_jax.model.kimi import INTERMEDIATES, Kimi
from kimi_jax.store.read import load_release
from tests.conftest import rel_to_rms

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = {"k3_tiny": 2e-3, "kimi_linear_tiny": 5e-4}
CASES = [(name, dtype) for name in TOLERANCE for dtype in ("float32", "float64")]


@jax.jit
def run(model: Kimi, tokens, segment_ids=None):
    return model.forward(tokens, segment_ids, collect=INTERMEDIATES)


@jax.jit
def extend(model: Kimi, cache, tokens, segment_ids):
    logits, aux = model.forward(tokens, segment_ids, cache=cache)
    return logits, aux["cache"]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def loaded(request):
    name, dtype = request.param
    with jax.enable_x64(dtype == "float64"):
        model, config = load_release(GOLDEN / name, dtype=dtype)
        yield name, model, config, 1e-6 if dtype == "float64" else TOLERANCE[name]


def sorted_by_expert(idx, weight):
    order = np.argsort(idx, axis=-1)
    return np.take_along_axis(np.asarray(idx), order, -1), np.take_along_axis(np.asarray(weight), order, -1)


@pytest.mark.parametrize("length", [1, 7, 33, 130])
def test_logits_and_intermediates(loaded, length):
    name, model, config, tolerance = loaded
    inputs, expected = np.load(GOLDEN / name / "inputs.npz"), np.load(GOLDEN / name / "outputs.npz")
    logits, aux = run(model, inputs[f"ids_T{length}"])
    for key in ("router_scores", "topk_idx", "topk_weight"):  # the fixture counts tokens of all rows through
        aux[key] = aux[key].reshape(len(aux[key]), -1, aux[key].shape[-1])
    prefix, worst, seen = f"T{length}.", {}, 0

    def compare(key, value, target):
        worst[key] = max(worst.get(key, 0.0), rel_to_rms(value, target))

    for key in (key.removeprefix(prefix) for key in expected if key.startswith(prefix)):
        value = expected[prefix + key]
        kind, _, layer = key.partition(".")
        seen += 1
        if kind in ("logits_f64",):
            compare("logits", logits, value)
        elif kind == "p":
            compare("p", aux["h"][int(layer)], value)
        elif kind in ("attn_in", "attn_out", "mlp_in", "mlp_out"):
            compare(kind, aux[kind][int(layer)], value)
        elif kind == "final_in":
            compare(kind, aux[kind], value)
        elif kind == "blocks":
            compare(kind, np.moveaxis(np.asarray(aux["blocks"]), 0, 2), value)
        elif kind == "nblocks":
            assert int(value) == 1 + int(layer) // config.attn_res_block_size
        elif kind == "router_scores":
            compare(kind, aux[kind][int(layer) - config.num_dense_layers], value)
        elif kind in ("topk_idx", "topk_weight"):
            at = int(layer) - config.num_dense_layers
            idx, weight = sorted_by_expert(aux["topk_idx"][at], aux["topk_weight"][at])
            if kind == "topk_idx":
                np.testing.assert_array_equal(idx, value)
            else:
                compare(kind, weight, value)
        else:
            raise AssertionError(f"an expected output that nothing compares: {key}")
    assert seen > 0
    print(f"{name} T={length} {logits.dtype}: " + ", ".join(f"{key} {error:.1e}" for key, error in worst.items()))
    assert max(worst.values()) < tolerance, worst
    assert logits.dtype == jnp.promote_types(config.dtype, jnp.float32)
    assert aux["load"].sum() == inputs[f"ids_T{length}"].size * config.moe.experts_per_token * len(config.moe_layers)


def test_left_padding(loaded):
    """Padding changes no real token."""
    name, model, config, tolerance = loaded
    inputs, expected = np.load(GOLDEN / name / "inputs.npz"), np.load(GOLDEN / name / "outputs.npz")
    mask = inputs["mask_leftpad"].astype(bool)
    logits, _ = run(model, inputs["ids_leftpad"], mask.astype(np.int32))
    error = rel_to_rms(np.asarray(logits)[mask], expected["leftpad.logits_f64"][mask])
    print(f"{name} leftpad {config.dtype}: {error:.1e}")
    assert error < tolerance


@pytest.mark.parametrize("padded", [False, True], ids=["", "leftpad"])
def test_decode(loaded, padded):
    """Prefill of 12 tokens and 10 single steps, with the released cache's contents at both moments."""
    name, model, config, tolerance = loaded
    fixture = GOLDEN / f"{name}_decode"
    inputs, expected = np.load(fixture / "inputs.npz"), np.load(fixture / "outputs.npz")
    ids, target = inputs["ids"], expected["logits_f64"]
    mask = np.ones(ids.shape, bool)
    if padded:
        ids, mask, target = inputs["ids_leftpad"], inputs["mask_leftpad"].astype(bool), expected["leftpad_logits_f64"]

    prefill = 12
    cache = init_cache(config, ids.shape[0], 32)
    logits, cache = extend(model, cache, ids[:, :prefill], mask[:, :prefill].astype(np.int32))
    parts = [logits]
    if not padded:
        check_cache(cache, config, model, expected, "after_prefill", tolerance)
    for t in range(prefill, ids.shape[1]):
        logits, cache = extend(model, cache, ids[:, t : t + 1], None)
        parts.append(logits)
    if not padded:
        check_cache(cache, config, model, expected, "end", tolerance)
    error = rel_to_rms(np.concatenate(parts, axis=1)[mask], target[mask])
    print(f"{name} decode {'leftpad ' if padded else ''}{config.dtype}: {error:.1e}")
    assert error < tolerance


def check_cache(cache, config, model, expected, moment, tolerance):
    from kimi_jax.model.stacks import segments

    place = {
        int(layer): (i, j, index)
        for i, segment in enumerate(segments(config))
        for j in range(len(segment.runs))
        for index, layer in np.ndenumerate(segment.layers(j))
    }
    keys = [key for key in expected if key.startswith(moment + ".")]
    assert keys
    for key in keys:
        _, kind, layer = key.split(".")
        i, j, index = place[int(layer)]
        run, value = cache.runs[i][j], expected[key]
        length = int(cache.length)
        if kind == "state":
            ours = np.swapaxes(np.asarray(run.state[index]), -1, -2)
        elif kind.startswith("conv_"):
            tail = np.asarray(getattr(run, kind.removeprefix("conv_") + "_tail")[index])
            ours, value = np.moveaxis(tail.reshape(*tail.shape[:2], -1), 1, 2), value[..., 1:]
        else:
            latent = np.asarray(run.latent[index])[:, :length]
            c, layer_module = config.mla, model.segments[i].runs[j].attention
            kv, rope = np.split(latent, [c.kv_lora_rank], axis=-1)
            if kind == "key":
                nope = np.einsum("bsr,rhk->bhsk", kv, np.asarray(layer_module.w_k_b.get_value()[index]))
                rope = np.broadcast_to(rope[:, None], (*nope.shape[:3], c.qk_rope_head_dim))
                ours = np.concatenate([nope, rope], axis=-1)
            else:
                ours = np.einsum("bsr,rhv->bhsv", kv, np.asarray(layer_module.w_v_b.get_value()[index]))
        assert rel_to_rms(ours, value) < tolerance, key
