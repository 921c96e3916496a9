"""Number formats of released weights: MXFP4 and MXFP8 microscaling, FP8 in blocks, INT4 in groups.

A block of values shares one scale, a power of two for the MX formats. All of it is integer arithmetic on the bits of a
float: a logarithm is wrong at some powers of two, and processors flush subnormal floats to zero.

A block with NaN or infinity in it has no code. Encoding one is a ValueError, or, where values cannot be looked at
(under `jax.jit`) and where `nonfinite="nan"` says so, gives a block that decodes to NaN throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental.layout import Layout, with_layout_constraint

Rule = Literal["rceil", "even", "floor"]
"""How the largest magnitude of a block picks the scale 2^k.

rceil: the smallest at which it fits, so nothing saturates. The released weights have it: encoding what one of their
blocks decodes to gives its bytes again. even: the magnitude's exponent, after rounding to the element's precision, less
the element's largest, as compressed-tensors does. floor: the same without rounding (OCP MX 1.0). With these two, the
largest magnitudes of a block may be above the largest code, and saturate.
"""
NonFinite = Literal["error", "nan"]
Kind = Literal["mxfp4", "int4", "fp8_block"]

GROUP = 32
"""Values that share a scale in MXFP4, MXFP8 and INT4."""
BLOCK = 128
"""Side of the squares that share a scale in block-FP8."""


class _Element(NamedTuple):
    """A small float: sign, exponent, mantissa, with subnormals. A code is all but the sign."""

    mantissa: int
    """Bits."""
    low: int
    """Exponent of the smallest normal number."""
    top: int
    """Largest code."""

    @property
    def high(self) -> int:
        """Exponent of the largest number."""
        return (self.top >> self.mantissa) - 1 + self.low


_E2M1 = _Element(1, 0, 0b111)
_E4M3 = _Element(3, -6, 0b1111110)


class _Float(NamedTuple):
    """The float whose bits are worked on."""

    dtype: jnp.dtype
    bits: jnp.dtype
    fraction: int
    bias: int


def _float_of(dtype) -> _Float:
    """float64 for itself, float32 for all narrower ones, which it holds exactly."""
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{dtype} is not a float; cast to float32 first")
    if dtype == jnp.float64:
        return _Float(dtype, jnp.dtype(jnp.int64), 52, 1023)
    return _Float(jnp.dtype(jnp.float32), jnp.dtype(jnp.int32), 23, 127)


def _bits(x: jax.Array, f: _Float) -> tuple[jax.Array, jax.Array]:
    """Magnitude and sign (as a bool) of floats."""
    bits = jax.lax.bitcast_convert_type(x.astype(f.dtype), f.bits)
    return bits & (2 ** (f.bits.itemsize * 8 - 1) - 1), bits < 0


def _exponents(magnitude: jax.Array, axis: int, f: _Float, element: _Element, rule: Rule) -> jax.Array:
    """k of each group's scale 2^k, kept as an axis of size 1; 128 for a group that is not finite."""
    step, ones = 1 << f.fraction, (1 << element.mantissa) - 1
    if rule == "rceil":  # carries into the exponent where the mantissa is above that of the largest code
        carry = step - 1 - ((element.top & ones) << (f.fraction - element.mantissa))
    elif rule == "even":
        carry = step >> (element.mantissa + 1)
    elif rule == "floor":
        carry = 0
    else:
        raise ValueError(f'rule={rule!r} is unknown; use "rceil", "even" or "floor"')
    largest = jnp.max(magnitude, axis=axis, keepdims=True)
    k = ((largest + carry) >> f.fraction) - f.bias - element.high
    finite = (largest < (2 * f.bias + 1) << f.fraction) & (k <= 127)
    return jnp.where(finite, jnp.maximum(k, -127), 128).astype(jnp.int32)


def _codes(magnitude: jax.Array, k: jax.Array, f: _Float, element: _Element) -> jax.Array:
    """Codes of magnitude / 2^k, to nearest, ties to even, saturating."""
    step = 1 << f.fraction
    # Bits whose exponent may fall below zero, where those of a float would lose digits. Far below, all round to zero.
    subnormal, _ = _bits(magnitude.astype(f.dtype), f)
    subnormal = jnp.maximum(subnormal - ((f.bias + f.fraction - 1) << f.fraction), -100 << f.fraction)
    y = jnp.where(magnitude < step, subnormal, magnitude) - (k.astype(f.bits) << f.fraction)
    exponent, digits = (y >> f.fraction) - f.bias, (y & (step - 1)) | step
    shift = f.fraction - element.mantissa + jnp.clip(element.low - exponent, 0, element.mantissa + 2)
    rounded = (digits + (1 << (shift - 1)) - 1 + ((digits >> shift) & 1)) >> shift
    # A carry out of the mantissa is one into the exponent.
    return jnp.minimum(rounded + ((jnp.maximum(exponent, element.low) - element.low) << element.mantissa), element.top)


def _values(code: jax.Array, negative: jax.Array, k: jax.Array, element: _Element, dtype) -> jax.Array:
    """+-code 2^k in a dtype, exact wherever it holds the number; NaN where k is 128 and for codes above the largest."""
    dtype, f = jnp.dtype(dtype), _float_of(dtype)
    one = 1 << element.mantissa
    code, k = code.astype(f.bits), k.astype(f.bits)
    digits = jnp.where(code < one, code, (code & (one - 1)) | one)
    n = jnp.maximum(code >> element.mantissa, 1) - 1 + element.low - element.mantissa + k
    bits = _bits(digits.astype(f.dtype), f)[0]
    exponent, fraction = (bits >> f.fraction) + n, bits & ((1 << f.fraction) - 1)
    subnormal = digits << jnp.clip(n + f.bias + f.fraction - 1, 0, f.fraction)
    bits = jnp.where((exponent < 1) | (digits == 0), subnormal, exponent << f.fraction | fraction)
    infinity = (2 * f.bias + 1) << f.fraction
    bits = jnp.where((exponent > 2 * f.bias) & (digits > 0), infinity, bits)
    bits = jnp.where((k == 128) | (code > element.top), infinity | infinity >> 1, bits)
    bits |= jnp.where(negative, -(2 ** (f.bits.itemsize * 8 - 1)), 0).astype(f.bits)
    if dtype == jnp.bfloat16:  # a cast would flush subnormals; the upper half is the number, whose digits are few
        return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), dtype)
    return jax.lax.bitcast_convert_type(bits, f.dtype).astype(dtype)


def _grouped(x: jax.Array, axis: int) -> tuple[jax.Array, int]:
    """Axis `axis` < 0 split into groups and places in the group, and the axis of places."""
    size = x.shape[axis]
    if size % GROUP:
        raise ValueError(
            f"axis of {size} does not divide into groups of {GROUP}; pad it to {-(-size // GROUP) * GROUP}"
        )
    at = x.ndim + axis
    return x.reshape(*x.shape[:at], size // GROUP, GROUP, *x.shape[at + 1 :]), axis


@partial(jax.jit, static_argnums=(0, 2, 3, 4), inline=True)
def _by_shard(f: Callable, args: Sequence[jax.Array], outs: int, sides: tuple[int, ...], settings: tuple):
    """f(*args, *settings), with so many results, on each shard of arrays that are cut alike.

    `sides` are those of a block, in the last axes of the first array.
    """
    first = jax.typeof(args[0])
    partition = jax.sharding.PartitionSpec(*first.sharding.spec, *[None] * (first.ndim - len(first.sharding.spec)))
    if not any(partition):
        return f(*args, *settings)
    for side, size, part in zip(sides[::-1], first.shape[::-1], tuple(partition)[::-1], strict=False):
        axes = (part,) if isinstance(part, str) else part or ()
        ways = math.prod(first.sharding.mesh.shape[axis] for axis in axes)
        if ways > 1 and size % (ways * side):
            raise ValueError(
                f"an axis of {size} cut over {' x '.join(axes)} = {ways} devices has shards of {size / ways:g}, "
                f"which do not divide into blocks of {side}; cut it over fewer, or over another axis"
            )
    out = (partition,) * outs if outs > 1 else partition
    specs = (partition,) * len(args)
    return jax.shard_map(lambda *args: f(*args, *settings), in_specs=specs, out_specs=out)(*args)


def _check(x: jax.Array, nonfinite: NonFinite) -> None:
    if nonfinite not in ("error", "nan"):
        raise ValueError(f'nonfinite={nonfinite!r} is unknown; use "error" or "nan"')
    if nonfinite == "error" and not isinstance(x, Tracer):
        bad = int(jnp.sum(~jnp.isfinite(x)))
        if bad:
            raise ValueError(
                f"{bad:,} of {x.size:,} values are NaN or infinite and have no code; mend them, or pass "
                'nonfinite="nan" for blocks that decode to NaN'
            )


def _encode(x: jax.Array, element: _Element, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """[.., k] -> codes with the sign above them, uint8 [.., k], and E8M0 scales, uint8 [.., k / 32]."""
    f = _float_of(x.dtype)
    x, axis = _grouped(x, -1)
    magnitude, negative = _bits(x, f)
    k = _exponents(magnitude, axis, f, element, rule)
    code = _codes(magnitude, k, f, element)
    if element == _E2M1 and rule == "even":  # compressed-tensors writes -0 as 0
        negative &= magnitude > 0
    code = (code | (negative.astype(f.bits) << element.top.bit_length())).astype(jnp.uint8)
    return code.reshape(*x.shape[:-2], -1), (k[..., 0] + 127).astype(jnp.uint8)


def _decode(code: jax.Array, scale: jax.Array, element: _Element, dtype) -> jax.Array:
    code, _ = _grouped(code, -1)
    k = (scale.astype(jnp.int32) - 127)[..., None]
    negative = code >> element.top.bit_length() > 0
    values = _values(code & ((1 << element.top.bit_length()) - 1), negative, k, element, dtype)
    return values.reshape(*code.shape[:-2], -1)


def mxfp4_encode(x: jax.Array, rule: Rule = "rceil", *, nonfinite: NonFinite = "error") -> tuple[jax.Array, jax.Array]:
    """Encodes blocks of 32 values as MXFP4: 4-bit floats (E2M1) and a power of two, 4.25 bits a value.

    x = +-{0, 0.5, 1, 1.5, 2, 3, 4, 6} 2^(scale - 127), to nearest, ties to even.

    Args:
      x: [.., k] floats; k divides by 32, on every shard where it is cut.
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
    _check(x, nonfinite)

    return _by_shard(_mxfp4_encode, (x,), 2, (GROUP,), (rule,))


def _mxfp4_encode(x, rule):
    code, scale = _encode(x, _E2M1, rule)
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
    _check_scales(packed, scale, 2)

    return _by_shard(_mxfp4_decode, (packed, scale), 1, (GROUP // 2,), (jnp.dtype(dtype),))


def _mxfp4_decode(packed, scale, dtype):
    wide = packed.astype(jnp.uint16)
    pair = jax.lax.bitcast_convert_type((wide | wide << 4) & 0x0F0F, jnp.uint8)
    return _decode(pair.reshape(*packed.shape[:-1], -1), scale, _E2M1, dtype)


def mxfp8_encode(x: jax.Array, rule: Rule = "rceil", *, nonfinite: NonFinite = "error") -> tuple[jax.Array, jax.Array]:
    """Encodes blocks of 32 values as MXFP8: 8-bit floats (E4M3) and a power of two.

    Args:
      x: [.., k] floats; k divides by 32, on every shard where it is cut.
      rule, nonfinite: as in `mxfp4_encode`.

    Returns:
      float8_e4m3fn [.., k] and the E8M0 scales, uint8 [.., k / 32].

    Raises:
      ValueError: as in `mxfp4_encode`.

    Source: OCP Microscaling Formats 1.0.
    """
    _check(x, nonfinite)

    return _by_shard(_mxfp8_encode, (x,), 2, (GROUP,), (rule,))


def _mxfp8_encode(x, rule):
    code, scale = _encode(x, _E4M3, rule)
    return jax.lax.bitcast_convert_type(code, jnp.float8_e4m3fn), scale


def mxfp8_decode(values: jax.Array, scale: jax.Array, dtype=jnp.float32) -> jax.Array:
    """Inverse of `mxfp8_encode`: float8_e4m3fn [.., k], uint8 [.., k / 32] -> [.., k] in a dtype."""
    _check_scales(values, scale, 1)

    return _by_shard(_mxfp8_decode, (values, scale), 1, (GROUP,), (jnp.dtype(dtype),))


def _mxfp8_decode(values, scale, dtype):
    return _decode(jax.lax.bitcast_convert_type(values, jnp.uint8), scale, _E4M3, dtype)


def _check_scales(packed: jax.Array, scale: jax.Array, per: int) -> None:
    if scale.shape != (*packed.shape[:-1], packed.shape[-1] * per // GROUP) or packed.shape[-1] * per % GROUP:
        raise ValueError(
            f"scales {list(scale.shape)} do not fit elements {list(packed.shape)} with {per} to an entry; there is one "
            f"for {GROUP} elements of the last axis"
        )


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
@partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _round(x: jax.Array, element: _Element, axis: int, rule: Rule) -> jax.Array:
    magnitude, negative, k, f = _scaled(x, element, axis, rule)
    return _values(_codes(magnitude, k, f, element), negative, k, element, x.dtype).reshape(x.shape)


def _scaled(x, element, axis, rule):
    f = _float_of(x.dtype)
    grouped, axis = _grouped(x, axis)
    magnitude, negative = _bits(grouped, f)
    return magnitude, negative, _exponents(magnitude, axis, f, element, rule), f


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _round_bwd(element, axis, rule, x, d_out):
    # Straight through; nothing to what saturates, since moving it would not move its code.
    magnitude, _, k, f = _scaled(x, element, axis, rule)
    top = _values(jnp.full_like(k, element.top), jnp.zeros_like(k, bool), k, element, f.dtype)
    return (jnp.where((magnitude <= _bits(top, f)[0]).reshape(x.shape), d_out, 0),)


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
    return _round(x, _E2M1, axis, rule)


def mxfp8_round(x: jax.Array, axis: int = -1, rule: Rule = "rceil") -> jax.Array:
    """What x becomes in MXFP8 (E4M3), with a straight-through gradient; see `mxfp4_round`."""
    return _round(x, _E4M3, axis, rule)


def fp8_block_encode(w: jax.Array, *, nonfinite: NonFinite = "error") -> tuple[jax.Array, jax.Array]:
    """Encodes a weight as 8-bit floats (E4M3) with one scale for each square of 128 x 128.

    w = q scale_inv, scale_inv = amax / 448, or 1 for a square of zeros.

    Args:
      w: [.., o, i] floats. Squares at the edges may be smaller; where an axis is cut, shards divide by 128.
      nonfinite: see the module.

    Returns:
      float8_e4m3fn [.., o, i] and the scales, float32 [.., ceil(o / 128), ceil(i / 128)].

    Raises:
      ValueError: values that are not finite, or shards that do not divide.

    Source: `weight_scale_inv` of the released K2 weights.
    """
    _check(w, nonfinite)

    return _by_shard(_fp8_block_encode, (w,), 2, (BLOCK, BLOCK), ())


def _fp8_block_encode(w):
    w = w.astype(jnp.float32)
    amax = _amax(_squares(w), (-3, -1))
    scale = jnp.where(amax == 0, 1, _quotient(amax, 448))
    f = _float_of(jnp.float32)
    magnitude, negative = _bits(_quotient(w, _spread(scale, w.shape)), f)
    code = _codes(magnitude, jnp.zeros((), jnp.int32), f, _E4M3) | (negative.astype(f.bits) << 7)
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

    return _by_shard(_fp8_block_decode, (q, scale_inv), 1, (BLOCK, BLOCK), (jnp.dtype(dtype),))


def _fp8_block_decode(q, scale_inv, dtype):
    return (q.astype(jnp.float32) * _spread(scale_inv.astype(jnp.float32), q.shape)).astype(dtype)


def _amax(w: jax.Array, axis, *, keepdims: bool = False) -> jax.Array:
    """Largest magnitude of float32; NaN if one is not finite, which XLA's own maximum may pass over."""
    largest = jnp.max(_bits(w, _float_of(w.dtype))[0], axis=axis, keepdims=keepdims)
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
      w: [.., o, i] floats; i divides by 32, on every shard where it is cut.
      scale_dtype: bfloat16 or float16.
      nonfinite: see the module.

    Returns:
      int32 [.., o, i / 8], the first value in the lowest bits, and the scales [.., o, i / 32].

    Raises:
      ValueError: a width that does not divide, or values that are not finite.

    Source: `pack-quantized` of the released K2-Thinking weights.
    """
    _check(w, nonfinite)

    return _by_shard(_int4_encode, (w,), 2, (GROUP,), (jnp.dtype(scale_dtype),))


def _int4_encode(w, scale_dtype):
    w, axis = _grouped(w.astype(jnp.float32), -1)
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
    _check_scales(packed, scale, 8)

    return _by_shard(_int4_decode, (packed, scale), 1, (GROUP // 8,), (jnp.dtype(dtype),))


def _int4_decode(packed, scale, dtype):
    nibble = (packed[..., None] >> _NIBBLES) & 15
    q, _ = _grouped((nibble - 8).reshape(*packed.shape[:-1], -1), -1)
    return (q * scale.astype(jnp.float32)[..., None]).reshape(*packed.shape[:-1], -1).astype(dtype)


@partial(jax.tree_util.register_dataclass, data_fields=("packed", "scale"), meta_fields=("kind",))
@dataclass(frozen=True)
class QTensor:
    """A weight [.., in, out] that stays packed as it was released: [.., out, in], with blocks along `in`.

    A pytree of two arrays, so it may stand where an array does in a tree of parameters. `kind` says which of this
    module's formats it is in.
    """

    packed: jax.Array
    scale: jax.Array
    kind: Kind = "mxfp4"

    @classmethod
    def encode(cls, w: jax.Array, kind: Kind = "mxfp4") -> QTensor:
        """Packs a weight [.., in, out]."""
        packed, scale = _KINDS[kind].encode(w.mT)
        return cls(packed, scale, kind)

    def decode(self, dtype) -> jax.Array:
        """The weight [.., in, out], laid out in memory as a plain one is: so a product has the same bits."""
        w = _KINDS[self.kind].decode(self.packed, self.scale, dtype).mT
        return with_layout_constraint(w, Layout(tuple(range(w.ndim))))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        *lead, o, i = self.packed.shape
        return (*lead, i * _KINDS[self.kind].per_entry, o)

    @property
    def ndim(self) -> int:
        return self.packed.ndim

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """As stored."""
        return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in (self.packed, self.scale))

    def __getitem__(self, index) -> QTensor:
        """By leading axes."""
        return QTensor(self.packed[index], self.scale[index], self.kind)


class _Kind(NamedTuple):
    encode: Callable
    decode: Callable
    per_entry: int
    """Values in one entry of `packed`."""


_KINDS: dict[str, _Kind] = {
    "mxfp4": _Kind(mxfp4_encode, mxfp4_decode, 2),
    "int4": _Kind(int4_encode, int4_decode, 8),
    "fp8_block": _Kind(fp8_block_encode, fp8_block_decode, 1),
}
