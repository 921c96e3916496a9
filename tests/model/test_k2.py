"""Kimi K2 against the released code, step by step through a cache, and MuonClip at work."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax import cli
from kimi_jax.config import Config, DataConfig, OptimConfig, TrainConfig
from kimi_jax.model.cache import init_cache
from kimi_jax.model.kimi import Kimi, bias_layers, clip_rows
from kimi_jax.model.param import with_arrays
from kimi_jax.store.read import load_release
from kimi_jax.train.step import init_state, make_optimizer, make_step
from tests import tiny
from tests.conftest import rel_to_rms

GOLDEN = Path(__file__).parents[1] / "golden" / "k2_tiny"
LENGTHS = (1, 7, 33, 100)
TOLERANCE = {"float32": 2e-4, "float64": 1e-6}

SHAPE = tiny.K2


@jax.jit
def run(model: Kimi, tokens, segment_ids=None, positions=None, cache=None):
    collect = ("h", "router_scores", "topk_idx", "topk_weight")
    return model.forward(tokens, segment_ids, positions=positions, cache=cache, collect=collect)


@pytest.fixture(scope="module", params=TOLERANCE)
def loaded(request):
    with jax.enable_x64(request.param == "float64"):
        model, config = load_release(GOLDEN, dtype=request.param)
        yield model, config, TOLERANCE[request.param]


def errors(expected, case: str, rows: slice, logits, aux) -> dict[str, float]:
    """Largest error over rms of each kind of a fixture's outputs; chosen experts must be the same."""
    worst: dict[str, float] = {}
    for key in (key.removeprefix(case + ".") for key in expected if key.startswith(case + ".")):
        value, (kind, _, layer) = expected[f"{case}.{key}"], key.partition(".")
        if kind == "logits_f64":
            kind, ours = "logits", np.asarray(logits)[rows, : value.shape[1]]
        elif kind == "h":
            ours = np.asarray(aux["h"][int(layer)])[rows, : value.shape[1]]
        else:
            at, t = int(layer) - 1, len(value) // 2
            ours = np.asarray(aux[kind][at])[rows, :t].reshape(2 * t, -1)
            if kind != "router_scores":
                order = np.argsort(np.asarray(aux["topk_idx"][at])[rows, :t].reshape(2 * t, -1), axis=-1)
                ours = np.take_along_axis(ours, order, axis=-1)
        if kind == "topk_idx":
            np.testing.assert_array_equal(ours, value)
        else:
            worst[kind] = max(worst.get(kind, 0.0), rel_to_rms(ours, value))
    assert {"logits", "h", "topk_weight"} <= worst.keys()
    print(f"{case} {np.asarray(logits).dtype}: " + ", ".join(f"{kind} {error:.1e}" for kind, error in worst.items()))
    return worst


def test_logits_and_intermediates(loaded):
    """All lengths in one batch, filled up with padding."""
    model, _, tolerance = loaded
    inputs, expected = np.load(GOLDEN / "inputs.npz"), np.load(GOLDEN / "outputs.npz")
    tokens, segment_ids = np.zeros((2, 2 * len(LENGTHS), max(LENGTHS)), np.int32)
    for number, length in enumerate(LENGTHS):
        tokens[2 * number : 2 * number + 2, :length] = inputs[f"ids_T{length}"]
        segment_ids[2 * number : 2 * number + 2, :length] = 1
    logits, aux = run(model, tokens, segment_ids)
    for number, length in enumerate(LENGTHS):
        worst = errors(expected, f"T{length}", slice(2 * number, 2 * number + 2), logits, aux)
        assert max(worst.values()) < tolerance, worst


def test_positions_far_beyond_the_original_context(loaded):
    """The released code takes a jump of positions for the start of another document, as `T24_stretch` shows; a second
    fixture has the same tokens as one document."""
    model, _, tolerance = loaded
    inputs, expected = np.load(GOLDEN / "inputs.npz"), np.load(GOLDEN / "outputs.npz")
    whole = np.load(GOLDEN.with_name("k2_stretch") / "case.npz")
    tokens, positions = (whole[name].astype(np.int32) for name in ("ids", "position_ids"))
    np.testing.assert_array_equal(positions, inputs["position_ids_T24_stretch"])
    np.testing.assert_array_equal(tokens, inputs["ids_T24_stretch"])
    assert positions.max() > 4096
    cut = np.cumsum(np.diff(positions, axis=1, prepend=-1) != 1, axis=1) + 1
    tokens, positions = np.concatenate([tokens, tokens]), np.concatenate([positions, positions])
    logits, aux = run(model, tokens, np.concatenate([cut, np.ones_like(cut)]).astype(np.int32), positions)
    worst = errors(expected, "T24_stretch", slice(0, 2), logits, aux)
    worst["whole"] = rel_to_rms(logits[2:], whole["logits_f64"])
    print(f"one document {logits.dtype}: {worst['whole']:.1e}")
    assert max(worst.values()) < tolerance, worst


def test_cache_in_parts_and_steps(loaded):
    """Two parts of 40 tokens, which read the cache expanded, and single steps, which read it absorbed; the second row
    begins with padding, which takes no positions."""
    model, config, tolerance = loaded
    attention = model.segments[1].runs[0].attention
    assert attention._absorbs(1) and not attention._absorbs(40)
    ids, pad = np.load(GOLDEN / "inputs.npz")["ids_T100"].astype(np.int32), 7
    ids[1, pad:] = ids[1, : 100 - pad].copy()
    segment_ids = np.ones_like(ids)
    segment_ids[1, :pad] = 0
    cache, parts, at = init_cache(config, 2, 100), [], 0
    for size in (40, 40, *[1] * 20):
        logits, aux = run(model, ids[:, at : at + size], segment_ids[:, at : at + size], cache=cache)
        cache, at = aux["cache"], at + size
        parts.append(logits)
    logits = np.concatenate(parts, axis=1)
    expected = np.load(GOLDEN / "outputs.npz")["T100.logits_f64"]
    found = [rel_to_rms(logits[0], expected[0]), rel_to_rms(logits[1, pad:], expected[1, : 100 - pad])]
    print(f"cache {logits.dtype}: {found}")
    assert max(found) < tolerance


def test_positions_are_checked():
    model = Kimi(SHAPE)
    tokens = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match=r"positions must be integers of the shape of tokens \[1, 4\], got float32"):
        model.hidden(tokens, positions=jnp.zeros((1, 4), jnp.float32))
    with pytest.raises(ValueError, match=r"got int32\[1, 3\]"):
        model.hidden(tokens, positions=jnp.zeros((1, 3), jnp.int32))
    with pytest.raises(ValueError, match="positions were given to a model without them"):
        Kimi(tiny.MODEL).hidden(tokens, positions=tokens)


def test_settings_of_optional_parts_are_plain_options(capsys):
    cli.main(
        [
            "inspect",
            "k2_tiny",
            "--model.mla.rope.factor",
            "2",
            "--model.num-layers",
            "2",
            "--model.mla-layers",
            "0",
            "1",
        ]
    )
    assert "2 = 0 KDA + 2 MLA" in capsys.readouterr().out
    cli.main(["inspect", "k3_tiny", "--model.kda.head-dim", "32"])
    assert "KDA state: 24,576 bytes" in capsys.readouterr().out


# --- training


def training(**optim) -> Config:
    return Config(
        name="k2",
        model=SHAPE,
        optim=OptimConfig(learning_rate=1e-3, warmup_fraction=0.0, balance="sign", **optim),
        data=DataConfig(sequence_length=24, batch_size=2),
        train=TrainConfig(steps=100),
    )


def batch(seed=0):
    tokens = np.random.default_rng(seed).integers(3, 259, (2, 25)).astype(np.int32)
    segment_ids = np.array([[1] * 9 + [2] * 12 + [0] * 3, [1] * 24], np.int32)
    weights = (segment_ids > 0).astype(np.float32)
    weights[1, :12] = 0  # a prompt
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": segment_ids,
        "loss_weights": weights,
        "num_bytes": np.ones((2, 24), np.int32),
    }


def test_qk_clip_brings_down_a_head_whose_logits_explode():
    """Queries and keys of one head grown until its logits pass 100: one step brings it to 100, as gamma^(1/2) on both
    parts without positions and gamma on the rotary query; the other heads and the shared rotary key train on alike."""
    config, free = training(), training(qk_clip=1e9)
    optimizer = make_optimizer(config)
    state = init_state(config, optimizer)
    (path, rows), head = next(item for item in clip_rows(SHAPE).items() if item[0].endswith("w_q_b")), 1
    key, shared = path.replace("w_q_b", "w_k_b"), path.replace("w_q_b", "w_kv_a")
    layer = int(rows.reshape(-1)[0])
    params = dict(state.params)
    for name in (path, key):
        params[name] = params[name].at[..., head, :].multiply(300.0)
    state = replace(state, params=params)
    step, free_step = (jax.jit(make_step(each, make_optimizer(each))) for each in (config, free))
    seen = jax.jit(lambda params: largest(params, batch()))

    before = seen(state.params)
    assert before[layer, head] > 200 and np.all(np.delete(before[layer], head) < 100)
    clipped, metrics = step(state, batch())
    unclipped, _ = free_step(state, batch())
    assert metrics["max_logit"] == before.max()
    gamma, nope = 100 / before[layer, head], SHAPE.mla.qk_nope_head_dim
    for name, powers in ((path, [0.5] * nope + [1.0] * SHAPE.mla.qk_rope_head_dim), (key, [0.5] * nope)):
        wide, narrow = (np.asarray(each.params[name]) for each in (unclipped, clipped))
        # Rounded as a number of the size that the weight had.
        expected, last = wide[..., head, :] * gamma ** np.array(powers), 1e-6 * np.max(np.abs(wide))
        np.testing.assert_allclose(narrow[..., head, :], expected, atol=last)
        others = [h for h in range(SHAPE.mla.num_heads) if h != head]
        np.testing.assert_array_equal(narrow[..., others, :], wide[..., others, :])
    np.testing.assert_array_equal(clipped.params[shared], unclipped.params[shared])

    history, state = [float(before[layer, head])], clipped
    for _ in range(4):
        history.append(float(seen(state.params)[layer, head]))
        state, metrics = step(state, batch())
    print("largest logit:", history)
    assert max(history[1:]) < 110 and np.isfinite(metrics["loss"])
    assert float(seen(unclipped.params)[layer, head]) > 200


def largest(params, batch):
    _, aux = with_arrays(Kimi(SHAPE), params).hidden(batch["tokens"], batch["segment_ids"])
    return aux["max_logits"]


def test_the_balance_loss_is_a_mean_over_tokens_beside_that_over_weights():
    """The step's gradient in two micro-batches against that of the two means by hand, and the sign rule beside it."""
    config = training()
    optimizer = make_optimizer(config)
    state, data = init_state(config, optimizer), batch()

    def mean_loss(params):
        model = with_arrays(Kimi(SHAPE), params)
        x, aux = model.hidden(data["tokens"], data["segment_ids"])
        loss, weight = model.loss(x, data["targets"], data["loss_weights"])
        balance = jnp.sum(aux["balance_loss"]) / np.sum(data["segment_ids"] > 0)
        return loss / weight + balance, balance

    (_, balance), expected = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))(state.params)
    assert 0.1 < balance < 0.2  # alpha times 1 where even, and more here
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in expected.values()))
    halves = replace(config, train=replace(config.train, accumulation=2))
    new, metrics = jax.jit(make_step(halves, optimizer))(state, data)
    assert metrics["balance_loss"] == pytest.approx(float(balance), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    (name,) = bias_layers(SHAPE)
    assert set(np.abs(np.asarray(new.params[name])).ravel()) == {np.float32(1e-3)}
