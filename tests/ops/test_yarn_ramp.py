"""YaRN's ramp begins and ends at whole channels."""

import numpy as np

from kimi_jax.ops.rope import yarn_frequencies


def test_the_ends_of_the_ramp_are_rounded_outwards():
    """Of 32 pairs, 8.9 turns 32 times in 4,096 tokens and 19.2 turns once: the ramp goes from 8 to 20."""
    settings = dict(theta=50000.0, factor=32.0, original_length=4096)
    slowed = yarn_frequencies(64, **settings, beta_fast=32.0, beta_slow=1.0) / yarn_frequencies(64, theta=50000.0)
    ramp = (1 - slowed) / (1 - 1 / 32)
    np.testing.assert_allclose(ramp, np.clip((np.arange(32) - 8) / 12, 0, 1), atol=1e-12)
