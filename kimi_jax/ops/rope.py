"""Rotary positions (RoPE), with YaRN's stretch of the context."""

import math

import jax
import jax.numpy as jnp
import numpy as np

STRIDE = 512


def yarn_frequencies(
    width: int,
    *,
    theta: float,
    factor: float = 1.0,
    original_length: int = 4096,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> np.ndarray:
    """How far each pair of channels turns from one position to the next.

    f_j = theta^(-2j / width);  stretched: f_j ((1 - r_j) + r_j / factor),  r_j = clip((j - low) / (high - low), 0, 1)

    low and high are the pairs, rounded outwards, that turn `beta_fast` and `beta_slow` times in the original context:
    faster pairs keep their frequency, slower ones are slowed down by `factor`.

    Args:
      width: channels that turn, an even number.
      theta: base.
      factor: new context over old; 1 changes nothing.
      original_length: the old context, in tokens.
      beta_fast, beta_slow: turns in the old context.

    Returns:
      [width / 2] float64, in radians.

    Source: YaRN (arXiv 2309.00071), section 3.2, with the rounding of DeepSeek-V3's released code.

    >>> yarn_frequencies(4, theta=100.0).tolist()
    [1.0, 0.1]
    """
    pairs = np.arange(width // 2)
    plain = theta ** (-2 * pairs / width)

    def pair(turns: float) -> float:
        return width * math.log(original_length / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(beta_fast)), 0), min(math.ceil(pair(beta_slow)), width - 1)
    ramp = np.clip((pairs - low) / (high - low or 0.001), 0, 1)
    return plain * ((1 - ramp) + ramp / factor)


def yarn_logit_scale(factor: float, mscale: float) -> float:
    """What attention logits are multiplied by in a stretched context: (0.1 mscale ln(factor) + 1)^2.

    Source: YaRN (arXiv 2309.00071), section 3.4, as DeepSeek-V3's released code applies it: to the softmax scale.

    >>> yarn_logit_scale(1.0, 1.0), round(yarn_logit_scale(32.0, 1.0), 4)
    (1.0, 1.8133)
    """
    return (0.1 * mscale * math.log(factor) + 1) ** 2


def rotate(x: jax.Array, positions: jax.Array, frequencies: np.ndarray) -> jax.Array:
    """Turns neighbouring channels (2j, 2j + 1) of the last ones by position * f_j; those before them pass unchanged.

    (a, b) -> (a cos - b sin, a sin + b cos)

    The dot product of two rotated vectors depends on the difference of their positions alone. Angles, sines and
    products are in at least float32.

    Args:
      x: [b, t, .., k].
      positions: [b, t] integers.
      frequencies: [n] with 2n <= k.

    Returns:
      As x.

    Source: RoFormer (arXiv 2104.09864), section 3.2; pairs are laid out as in DeepSeek-V3's and K2's checkpoints.
    """
    n, wide = len(frequencies), jnp.promote_types(x.dtype, jnp.float32)
    kept, turned = jnp.split(x, [x.shape[-1] - 2 * n], axis=-1)
    # Position by position, float32 angles would be a hundredth off at 100,000: strides of whole turns less are small.
    step = np.repeat(frequencies, 2)
    stride = np.remainder(STRIDE * step + np.pi, 2 * np.pi) - np.pi
    strides, steps = (part[..., None].astype(wide) for part in jnp.divmod(positions, STRIDE))
    angles = strides * jnp.asarray(stride, wide) + steps * jnp.asarray(step, wide)
    angles = jnp.expand_dims(angles, range(2, x.ndim - 1))  # [b, t, .., 2n]
    turned = turned.astype(wide)
    # The other channel of each pair, with its sign: no axis of size 2, for which tiles have no room.
    first = np.arange(2 * n) % 2 == 0
    other = jnp.where(first, -jnp.roll(turned, -1, axis=-1), jnp.roll(turned, 1, axis=-1))
    turned = turned * jnp.cos(angles) + other * jnp.sin(angles)
    return jnp.concatenate([kept, turned.astype(x.dtype)], axis=-1)
