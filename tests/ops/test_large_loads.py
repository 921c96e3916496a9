"""The sign rule where loads exceed what float32 counts and their sum what int32 holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.routing import sign_bias


def directions(load):
    step = jax.jit(lambda load: sign_bias(load, jnp.zeros(load.shape, jnp.float32), rate=1.0))
    return step(jnp.asarray(load, jnp.int32)).tolist()


@pytest.mark.parametrize(
    "load,expected",
    [
        ([50000003, 50000001, 50000000, 50000000], [-1, 0, 1, 1]),
        ([2**24 + 1, 2**24, 2**24, 2**24 - 1], [-1, 0, 0, 1]),
        ([2**31 - 1, 2**31 - 1, 2**31 - 2, 2**31 - 2], [-1, -1, 1, 1]),
        ([2**31 - 1] * 3, [0, 0, 0]),
        ([2**31 - 1, 0], [-1, 1]),
        ([0, 0, 0], [0, 0, 0]),
        ([1, 0, 0], [-1, 1, 1]),
        ([7], [0]),
    ],
)
def test_every_load_is_compared_exactly(load, expected):
    assert directions(load) == expected


@pytest.mark.parametrize("scale", [3, 10**5, 2**31 - 1])
def test_against_whole_numbers_of_any_size(scale):
    rng = np.random.default_rng(scale)
    for experts in (2, 7, 896):
        load = rng.integers(0, scale, experts, endpoint=True)
        load[: experts // 2] = load.sum() // experts  # many at the mean, or one off
        total = int(load.sum())
        assert directions(load) == [int(np.sign(total - experts * int(n))) for n in load.tolist()]


def test_the_step_is_the_rate():
    bias = sign_bias(jnp.array([9, 1, 5]), jnp.array([0.5, 0.5, 0.5]), rate=0.25)
    assert bias.tolist() == [0.25, 0.75, 0.5]
    assert sign_bias(jnp.array([9, 1]), jnp.zeros(2, jnp.bfloat16), rate=0.25).dtype == jnp.bfloat16
