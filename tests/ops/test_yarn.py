"""YaRN's ramp between beta_fast and beta_slow, against the formulas of the released code and by hand."""

import math

import numpy as np
import pytest

from kimi_jax.ops.rope import yarn_frequencies


def released(width, theta, factor, original_length, beta_fast, beta_slow):
    """`DeepseekV3YarnRotaryEmbedding` of the released code, in NumPy f64: corrections rounded outwards to pairs."""

    def correction(turns):
        return (width * math.log(original_length / (turns * 2 * math.pi))) / (2 * math.log(theta))

    low, high = max(math.floor(correction(beta_fast)), 0), min(math.ceil(correction(beta_slow)), width - 1)
    if low == high:
        high += 0.001
    mask = 1 - np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
    exponent = np.arange(0, width, 2) / width
    extrapolated, interpolated = 1 / theta**exponent, 1 / (factor * theta**exponent)
    return interpolated * (1 - mask) + extrapolated * mask


@pytest.mark.parametrize("beta_fast,beta_slow", [(32.0, 1.0), (1.0, 1.0), (16.0, 2.0), (1000.0, 1e-3)])
@pytest.mark.parametrize(
    "width,theta,factor,length", [(64, 50000.0, 32.0, 4096), (64, 10000.0, 40.0, 4096), (8, 100.0, 4.0, 8)]
)
def test_against_the_released_formulas(width, theta, factor, length, beta_fast, beta_slow):
    found = yarn_frequencies(
        width, theta=theta, factor=factor, original_length=length, beta_fast=beta_fast, beta_slow=beta_slow
    )
    np.testing.assert_allclose(found, released(width, theta, factor, length, beta_fast, beta_slow), rtol=1e-13)


def test_the_ramp_by_hand():
    """K2's 64 channels: 32 turns fall on pair 8.9 and one on 19.2, so the ramp goes from pair 8 to 20 in twelfths."""
    settings = {"theta": 50000.0, "factor": 32.0, "original_length": 4096}
    stretch = yarn_frequencies(64, beta_fast=32.0, beta_slow=1.0, **settings) / yarn_frequencies(64, theta=50000.0)
    ramp = np.clip((np.arange(32) - 8) / 12, 0, 1)
    np.testing.assert_allclose(stretch, 1 - ramp + ramp / 32, rtol=1e-13)
