"""Number formats of released weights: MXFP4 and MXFP8 microscaling, FP8 in blocks, INT4 in groups.

A block of values shares one scale, a power of two for the MX formats. All of it is integer arithmetic on the bits of a
float: a logarithm is wrong at some powers of two, and processors flush subnormal floats to zero.

A block with NaN or infinity in it has no code. Encoding one is a ValueError, or, where values cannot be looked at
(under `jax.jit`) and where `nonfinite="nan"` says so, gives a block that decodes to NaN throughout.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from kimi_jax.ops.quant.bits import (
    E2M1,
    E4M3,
    GROUP,
    Element,
    NonFinite,
    Rule,
    bits_of,
    by_shard,
    check_nonfinite,
    check_scales,
    codes,
    exponents,
    float_of,
    in_groups,
    values_of,
)


def _encode(x: jax.Array, element: Element, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """[.., k] -> codes with the sign above them, uint8 [.., k], and E8M0 scales, uint8 [.., k / 32]."""
    f = float_of(x.dtype)
    x, axis = in_groups(x, -1)
    magnitude, negative = bits_of(x, f)
    k = exponents(magnitude, axis, f, element, rule)
    code = codes(magnitude, k, f, element)
    if element == E2M1 and rule == "even":  # compressed-tensors writes -0 as 0
        negative &= magnitude > 0
    code = (code | (negative.astype(f.bits) << element.top.bit_length())).astype(jnp.uint8)
    return code.reshape(*x.shape[:-2], -1), (k[..., 0] + 127).astype(jnp.uint8)


def _decode(code: jax.Array, scale: jax.Array, element: Element, dtype) -> jax.Array:
    code, _ = in_groups(code, -1)
    k = (scale.astype(jnp.int32) - 127)[..., None]
    negative = code >> element.top.bit_length() > 0
    values = values_of(code & ((1 << element.top.bit_length()) - 1), negative, k, element, dtype)
    return values.reshape(*code.shape[:-2], -1)


def mxfp4_encode(x: jax.Array, rule: Rule = "rceil", *, nonfinite: NonFinite = "error") -> tuple[jax.Array, jax.Array]:
    """Encodes blocks of 32 values as MXFP4: 4-bit floats (E2M1) and a power of two, 4.25 bits a value.

    x = +-{0, 0.5, 1, 1.5, 2, 3, 4, 6} 2^(scale - 127), to nearest, ties to even.

    Args:
      x: [.., k] floats; k divides by 32, on every shard where it is sharded.
      rule: see `Rule`.
      nonfinite: see the module.

    Returns:
      packed: uint8 [.., k / 2], element 2j in the low half of byte j, bit 3 the sign.
      scale: uint8 [.., k / 32], E8M0; 0 for a block of zeros, 255 for one that is not finite.

    Raises:
      ValueError: a width that does not divide, an unknown rule, or values that are not finite.

    Source: OCP Microscaling Formats 1.0; `mxfp4-pack-quantized` of the released K3 weights.

    >>> packed, scale = mxfp4_encode(jnp.array([6.0, -0.5, 1.0, 0.0] * 8))
    >>> [hex(byte) for byte in packed[:2].tolist()], scale.tolist()
    (['0x97', '0x2'], [127])
    """
    check_nonfinite(x, nonfinite)

    return by_shard(_mxfp4_encode, (x,), 2, (GROUP,), (rule,))


def _mxfp4_encode(x, rule):
    code, scale = _encode(x, E2M1, rule)
    pair = jax.lax.bitcast_convert_type(code.reshape(*code.shape[:-1], -1, 2), jnp.uint16)  # low byte first
    return (pair | pair >> 4).astype(jnp.uint8), scale


def mxfp4_decode(packed: jax.Array, scale: jax.Array, dtype=jnp.float32) -> jax.Array:
    """Inverse of `mxfp4_encode`: exact in bfloat16, float32 and float64, subnormal results included.

    Args:
      packed: uint8 [.., k / 2].
      scale: uint8 [.., k / 32].
      dtype: of the result.

    Returns:
      [.., k]; NaN where the scale is 255.

    Raises:
      ValueError: shapes that do not fit each other.
    """
    check_scales(packed, scale, 2)

    return by_shard(_mxfp4_decode, (packed, scale), 1, (GROUP // 2,), (jnp.dtype(dtype),))


def _mxfp4_decode(packed, scale, dtype):
    wide = packed.astype(jnp.uint16)
    pair = jax.lax.bitcast_convert_type((wide | wide << 4) & 0x0F0F, jnp.uint8)
    return _decode(pair.reshape(*packed.shape[:-1], -1), scale, E2M1, dtype)


def mxfp8_encode(x: jax.Array, rule: Rule = "rceil", *, nonfinite: NonFinite = "error") -> tuple[jax.Array, jax.Array]:
    """Encodes blocks of 32 values as MXFP8: 8-bit floats (E4M3) and a power of two.

    Args:
      x: [.., k] floats; k divides by 32, on every shard where it is sharded.
      rule, nonfinite: as in `mxfp4_encode`.

    Returns:
      float8_e4m3fn [.., k] and the E8M0 scales, uint8 [.., k / 32].

    Raises:
      ValueError: as in `mxfp4_encode`.

    Source: OCP Microscaling Formats 1.0.
    """
    check_nonfinite(x, nonfinite)

    return by_shard(_mxfp8_encode, (x,), 2, (GROUP,), (rule,))


def _mxfp8_encode(x, rule):
    code, scale = _encode(x, E4M3, rule)
    return jax.lax.bitcast_convert_type(code, jnp.float8_e4m3fn), scale


def mxfp8_decode(values: jax.Array, scale: jax.Array, dtype=jnp.float32) -> jax.Array:
    """Inverse of `mxfp8_encode`: float8_e4m3fn [.., k], uint8 [.., k / 32] -> [.., k] in a dtype."""
    check_scales(values, scale, 1)

    return by_shard(_mxfp8_decode, (values, scale), 1, (GROUP,), (jnp.dtype(dtype),))


def _mxfp8_decode(values, scale, dtype):
    return _decode(jax.lax.bitcast_convert_type(values, jnp.uint8), scale, E4M3, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
@partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _round(x: jax.Array, element: Element, axis: int, rule: Rule) -> jax.Array:
    magnitude, negative, k, f = _scaled(x, element, axis, rule)
    return values_of(codes(magnitude, k, f, element), negative, k, element, x.dtype).reshape(x.shape)


def _scaled(x, element, axis, rule):
    f = float_of(x.dtype)
    grouped, axis = in_groups(x, axis)
    magnitude, negative = bits_of(grouped, f)
    return magnitude, negative, exponents(magnitude, axis, f, element, rule), f


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _round_bwd(element, axis, rule, x, d_out):
    # Straight through; nothing to what saturates, since moving it would not move its code.
    magnitude, _, k, f = _scaled(x, element, axis, rule)
    top = values_of(jnp.full_like(k, element.top), jnp.zeros_like(k, bool), k, element, f.dtype)
    return (jnp.where((magnitude <= bits_of(top, f)[0]).reshape(x.shape), d_out, 0),)


_round.defvjp(lambda x, *static: (_round(x, *static), x), _round_bwd)


def mxfp4_round(x: jax.Array, axis: int = -1, rule: Rule = "rceil") -> jax.Array:
    """What x becomes in MXFP4, in its own dtype: `mxfp4_decode` of `mxfp4_encode`, with blocks along any axis.

    The gradient is straight through, and zero for values that saturate (with "rceil" there are none).

    Args:
      x: floats whose axis `axis` divides by 32; on a device, its part.
      axis: negative.
      rule: see `Rule`.

    Returns:
      Of x's shape and dtype; NaN in blocks that are not finite.
    """
    return _round(x, E2M1, axis, rule)


def mxfp8_round(x: jax.Array, axis: int = -1, rule: Rule = "rceil") -> jax.Array:
    """What x becomes in MXFP8 (E4M3), with a straight-through gradient; see `mxfp4_round`."""
    return _round(x, E4M3, axis, rule)
