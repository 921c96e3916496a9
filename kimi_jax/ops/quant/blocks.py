"""FP8 in blocks of 128 x 128 and INT4 in groups of 32, as K2 and K2-Thinking are released."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.ops.quant.bits import (
    E4M3,
    GROUP,
    NonFinite,
    bits_of,
    by_shard,
    check_nonfinite,
    check_scales,
    codes,
    float_of,
    in_groups,
)

BLOCK = 128
"""Side of the squares that share a scale in block-FP8."""


def fp8_block_encode(w: jax.Array, *, nonfinite: NonFinite = "error") -> tuple[jax.Array, jax.Array]:
    """Encodes a weight as 8-bit floats (E4M3) with one scale for each square of 128 x 128.

    w = q scale_inv, scale_inv = amax / 448, or 1 for a square of zeros.

    Args:
      w: [.., o, i] floats. Squares at the edges may be smaller; where an axis is sharded, shards divide by 128.
      nonfinite: see the module.

    Returns:
      float8_e4m3fn [.., o, i] and the scales, float32 [.., ceil(o / 128), ceil(i / 128)].

    Raises:
      ValueError: values that are not finite, or shards that do not divide.

    Source: `weight_scale_inv` of the released K2 weights.
    """
    check_nonfinite(w, nonfinite)

    return by_shard(_fp8_block_encode, (w,), 2, (BLOCK, BLOCK), ())


def _fp8_block_encode(w):
    w = w.astype(jnp.float32)
    amax = _amax(_squares(w), (-3, -1))
    scale = jnp.where(amax == 0, 1, _quotient(amax, 448))
    f = float_of(jnp.float32)
    magnitude, negative = bits_of(_quotient(w, _spread(scale, w.shape)), f)
    code = codes(magnitude, jnp.zeros((), jnp.int32), f, E4M3) | (negative.astype(f.bits) << 7)
    return jax.lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e4m3fn), scale


def fp8_block_decode(q: jax.Array, scale_inv: jax.Array, dtype=jnp.float32) -> jax.Array:
    """Inverse of `fp8_block_encode`: q scale_inv in float32, rounded once to a dtype.

    Args:
      q: float8_e4m3fn [.., o, i].
      scale_inv: float32 [.., ceil(o / 128), ceil(i / 128)].
      dtype: of the result.

    Returns:
      [.., o, i].

    Raises:
      ValueError: shapes that do not fit each other.
    """
    blocks = (*q.shape[:-2], *(-(-size // BLOCK) for size in q.shape[-2:]))
    if scale_inv.shape != blocks:
        raise ValueError(
            f"scales {list(scale_inv.shape)} do not fit a weight {list(q.shape)}, which has {list(blocks)} squares of "
            f"{BLOCK} x {BLOCK}"
        )

    return by_shard(_fp8_block_decode, (q, scale_inv), 1, (BLOCK, BLOCK), (jnp.dtype(dtype),))


def _fp8_block_decode(q, scale_inv, dtype):
    return (q.astype(jnp.float32) * _spread(scale_inv.astype(jnp.float32), q.shape)).astype(dtype)


def _amax(w: jax.Array, axis, *, keepdims: bool = False) -> jax.Array:
    """Largest magnitude of float32; NaN if one is not finite, which XLA's own maximum may pass over."""
    largest = jnp.max(bits_of(w, float_of(w.dtype))[0], axis=axis, keepdims=keepdims)
    amax = jax.lax.bitcast_convert_type(largest, jnp.float32)
    return jnp.where(jnp.isfinite(amax), amax, jnp.nan)


def _quotient(x: jax.Array, divisor) -> jax.Array:
    """x / divisor, correctly rounded: XLA multiplies by the inverse of what it sees repeated."""
    return x / jax.lax.optimization_barrier(jnp.broadcast_to(jnp.asarray(divisor, x.dtype), x.shape))


def _squares(w: jax.Array) -> jax.Array:
    """[.., o, i] -> [.., rows of squares, 128, columns of squares, 128], zeros at the edges."""
    *lead, o, i = w.shape
    rows, cols = -(-o // BLOCK), -(-i // BLOCK)
    w = jnp.pad(w, [(0, 0)] * len(lead) + [(0, rows * BLOCK - o), (0, cols * BLOCK - i)])
    return w.reshape(*lead, rows, BLOCK, cols, BLOCK)


def _spread(scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A square's scale for each value in it."""
    return jnp.repeat(jnp.repeat(scale, BLOCK, -2), BLOCK, -1)[..., : shape[-2], : shape[-1]]


_NIBBLES = np.arange(0, 32, 4, dtype=np.int32)


def int4_encode(
    w: jax.Array, scale_dtype=jnp.bfloat16, *, nonfinite: NonFinite = "error"
) -> tuple[jax.Array, jax.Array]:
    """Encodes groups of 32 values as integers from -7 to 7, eight to an int32.

    w = (nibble - 8) scale, scale = amax / 7 in its dtype, or 1 for a group of zeros.

    Args:
      w: [.., o, i] floats; i divides by 32, on every shard where it is sharded.
      scale_dtype: bfloat16 or float16.
      nonfinite: see the module.

    Returns:
      int32 [.., o, i / 8], the first value in the lowest bits, and the scales [.., o, i / 32].

    Raises:
      ValueError: a width that does not divide, or values that are not finite.

    Source: `pack-quantized` of the released K2-Thinking weights.
    """
    check_nonfinite(w, nonfinite)

    return by_shard(_int4_encode, (w,), 2, (GROUP,), (jnp.dtype(scale_dtype),))


def _int4_encode(w, scale_dtype):
    w, axis = in_groups(w.astype(jnp.float32), -1)
    scale = _quotient(_amax(w, axis, keepdims=True), 7).astype(scale_dtype)
    scale = jnp.where(scale == 0, 1, scale)
    nibble = jnp.clip(jnp.round(_quotient(w, scale)), -7, 7).astype(jnp.int32) + 8
    eights = nibble.reshape(*w.shape[:-2], -1, 8) << _NIBBLES
    return jnp.sum(eights, axis=-1, dtype=jnp.int32), scale[..., 0]


def int4_decode(packed: jax.Array, scale: jax.Array, dtype=jnp.float32) -> jax.Array:
    """Inverse of `int4_encode`: (nibble - 8) scale in float32, rounded once to a dtype.

    Args:
      packed: int32 [.., o, i / 8].
      scale: [.., o, i / 32].
      dtype: of the result.

    Returns:
      [.., o, i].

    Raises:
      ValueError: shapes that do not fit each other.
    """
    check_scales(packed, scale, 8)

    return by_shard(_int4_decode, (packed, scale), 1, (GROUP // 8,), (jnp.dtype(dtype),))


def _int4_decode(packed, scale, dtype):
    nibble = (packed[..., None] >> _NIBBLES) & 15
    q, _ = in_groups((nibble - 8).reshape(*packed.shape[:-1], -1), -1)
    return (q * scale.astype(jnp.float32)[..., None]).reshape(*packed.shape[:-1], -1).astype(dtype)
