"""Attention Residuals against values of the released code."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.attn_residual import attn_residual
from tests import oracles
from tests.conftest import rel_to_max, rel_to_rms

GOLDEN = Path(__file__).parents[1] / "golden" / "attnres_op"
CASES = json.loads((GOLDEN / "meta.json").read_text())["cases"]


@jax.jit
def with_gradients(d_out, *args, eps, fresh=False):
    out, pull = jax.vjp(lambda *args: attn_residual(*args, eps=eps, fresh=fresh), *args)
    return out, pull(d_out)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_golden(name, dtype):
    data = np.load(GOLDEN / f"{name}.npz")
    with jax.enable_x64(dtype == "float64"):
        bank = jnp.asarray(data["in.blocks"], dtype).swapaxes(0, 1)[:, None]  # [T, n, d] -> [n, 1, T, d]
        args = (
            bank,
            jnp.asarray(data["in.p"], dtype)[None],
            jnp.asarray(data["in.proj_weight"], dtype)[0],
            jnp.asarray(data["in.norm_weight"], dtype),
        )
        d_out = jnp.asarray(data["in.d_out"], dtype)[None]
        out, (d_bank, d_partial, d_query, d_gain) = with_gradients(d_out, *args, eps=CASES[name]["eps"])
    assert out.dtype == dtype
    out_tolerance = 1e-6 if dtype == "float64" else 5e-5 if "peaked" in name else 1e-5
    tolerance = 1e-6 if dtype == "float64" else 2e-4
    assert rel_to_rms(out[0], data["out.out_f64"]) < out_tolerance
    assert rel_to_max(d_bank[:, 0].swapaxes(0, 1), data["out.d_blocks"]) < tolerance
    assert rel_to_max(d_partial[0], data["out.d_p"]) < tolerance
    assert rel_to_max(d_query, data["out.d_proj_weight"][0]) < tolerance
    # The gain's gradient is a sum with both signs, zero for a zero query.
    assert rel_to_max(d_gain, data["out.d_norm_weight"]) < tolerance


def random_case(n=3, dtype=jnp.float32):
    rng = np.random.default_rng(n)
    arrays = rng.normal(size=(n, 2, 5, 16)), rng.normal(size=(2, 5, 16)), rng.normal(size=16), rng.normal(size=16)
    return [jnp.asarray(a, dtype) for a in arrays]


def test_fresh_block_leaves_the_partial_sum_out():
    bank, partial, query, gain = random_case()
    expected = oracles.attn_residual(bank, query, gain, 1e-5)[0]
    poisoned = jnp.full_like(partial, jnp.nan)
    mix = jax.jit(lambda *args, fresh: attn_residual(*args, eps=1e-5, fresh=fresh))
    for held in (partial, poisoned, jnp.zeros_like(partial)):
        assert rel_to_rms(mix(bank, held, query, gain, fresh=jnp.array(True)), expected) < 1e-5
    gradients = with_gradients(partial, bank, poisoned, query, gain, eps=1e-5, fresh=jnp.array(True))[1]
    assert all(np.isfinite(g).all() for g in gradients)
    assert not np.any(gradients[1])
    both = oracles.attn_residual(np.concatenate([bank, partial[None]]), query, gain, 1e-5)[0]
    assert rel_to_rms(mix(bank, partial, query, gain, fresh=jnp.array(False)), both) < 1e-5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_stored_block_and_nothing_else_is_returned_as_it_is(dtype):
    bank, partial, query, gain = random_case(1, dtype)
    out = attn_residual(bank, partial, query, gain, eps=1e-5, fresh=True)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, bank[0])


def test_zero_query_averages_and_bfloat16_is_computed_in_float32():
    bank, partial, query, gain = random_case(3, jnp.bfloat16)
    sources = np.concatenate([oracles.f64(bank), oracles.f64(partial)[None]])
    average = attn_residual(bank, partial, 0 * query, gain, eps=1e-5)
    assert rel_to_max(average, sources.mean(axis=0)) < 2**-8
    peaked = attn_residual(bank, partial, 20 * query, gain, eps=1e-5)  # one rounding, at the end
    assert rel_to_max(peaked, oracles.attn_residual(sources, 20 * query, gain, 1e-5)[0]) < 2**-8


def test_sources_do_not_mix_tokens():
    bank, partial, query, gain = random_case()
    jacobian = jax.jacobian(lambda p: attn_residual(bank, p, query, gain, eps=1e-5)[0, :, 0])(partial)  # [t, b, t, d]
    for t in range(5):
        assert not np.any(np.delete(np.asarray(jacobian)[t, 0], t, axis=0))
        assert np.any(np.asarray(jacobian)[t, 0, t])
