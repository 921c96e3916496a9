"""A step with several layers of experts after a dense one, and a spike before the window of losses is full."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.model.kimi import Kimi, bias_layers
from kimi_jax.model.param import with_arrays
from kimi_jax.ops.routing import quantile_bias
from kimi_jax.train.step import init_state, make_optimizer, make_step
from tests import tiny

COMPILE_QUICKLY = True


def test_each_layers_bias_moves_by_its_own_counts_and_an_early_spike_is_skipped(tmp_path: Path):
    config = tiny.with_model(
        tiny.config(tmp_path, steps=20), num_layers=4, mla_layers=(0, 1, 2, 3), attn_res_block_size=None, kda=None
    )
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, 259, (2, 17)).astype(np.int32)
    ones = np.ones((2, 16), np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": ones, "num_bytes": ones}
    batch["loss_weights"] = ones.astype(np.float32)
    optimizer = make_optimizer(config)
    step, state = jax.jit(make_step(config, optimizer)), init_state(config, optimizer)
    after, _ = step(state, batch)

    model = with_arrays(Kimi(config.model), state.params)
    _, aux = jax.jit(lambda model: model.hidden(batch["tokens"], batch["segment_ids"]))(model)
    assert len({counts.tobytes() for counts in np.asarray(aux["histogram"])}) == 3
    for name, layers in bias_layers(config.model).items():
        for at, layer in np.ndenumerate(layers):
            expected = quantile_bias(aux["histogram"][layer - 1], state.params[name][at], k=2)
            np.testing.assert_allclose(after.params[name][at], expected, atol=1e-6, err_msg=f"layer {layer}")

    few = state.losses.at[-3:].set(jnp.array([0.9, 1.0, 1.1]))  # the others are NaN: there are none yet
    spiked, _ = step(replace(state, step=jnp.int32(10), losses=few), batch)
    assert int(spiked.skips) == 1
