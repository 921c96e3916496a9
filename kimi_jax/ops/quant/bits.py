"""Small floats by integer arithmetic on the bits of a float: exponents, codes, values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

Rule = Literal["rceil", "even", "floor"]
"""How the largest magnitude of a block picks the scale 2^k.

rceil: the smallest at which it fits, so nothing saturates. The released weights have it: encoding what one of their
blocks decodes to gives its bytes again. even: the magnitude's exponent, after rounding to the element's precision, less
the element's largest, as compressed-tensors does. floor: the same without rounding (OCP MX 1.0). With these two, the
largest magnitudes of a block may be above the largest code, and saturate.
"""


NonFinite = Literal["error", "nan"]


GROUP = 32
"""Values that share a scale in MXFP4, MXFP8 and INT4."""


class Element(NamedTuple):
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


E2M1 = Element(1, 0, 0b111)


E4M3 = Element(3, -6, 0b1111110)


class Float(NamedTuple):
    """The float whose bits are worked on."""

    dtype: jnp.dtype
    bits: jnp.dtype
    fraction: int
    bias: int


def float_of(dtype) -> Float:
    """float64 for itself, float32 for all narrower ones, which it holds exactly."""
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"{dtype} is not a float; cast to float32 first")
    if dtype == jnp.float64:
        return Float(dtype, jnp.dtype(jnp.int64), 52, 1023)
    return Float(jnp.dtype(jnp.float32), jnp.dtype(jnp.int32), 23, 127)


def bits_of(x: jax.Array, f: Float) -> tuple[jax.Array, jax.Array]:
    """Magnitude and sign (as a bool) of floats."""
    bits = jax.lax.bitcast_convert_type(x.astype(f.dtype), f.bits)
    return bits & (2 ** (f.bits.itemsize * 8 - 1) - 1), bits < 0


def exponents(magnitude: jax.Array, axis: int, f: Float, element: Element, rule: Rule) -> jax.Array:
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


def codes(magnitude: jax.Array, k: jax.Array, f: Float, element: Element) -> jax.Array:
    """Codes of magnitude / 2^k, to nearest, ties to even, saturating."""
    step = 1 << f.fraction
    # Bits whose exponent may fall below zero, where those of a float would lose digits. Far below, all round to zero.
    subnormal, _ = bits_of(magnitude.astype(f.dtype), f)
    subnormal = jnp.maximum(subnormal - ((f.bias + f.fraction - 1) << f.fraction), -100 << f.fraction)
    y = jnp.where(magnitude < step, subnormal, magnitude) - (k.astype(f.bits) << f.fraction)
    exponent, digits = (y >> f.fraction) - f.bias, (y & (step - 1)) | step
    shift = f.fraction - element.mantissa + jnp.clip(element.low - exponent, 0, element.mantissa + 2)
    rounded = (digits + (1 << (shift - 1)) - 1 + ((digits >> shift) & 1)) >> shift
    # A carry out of the mantissa is one into the exponent.
    return jnp.minimum(rounded + ((jnp.maximum(exponent, element.low) - element.low) << element.mantissa), element.top)


def values_of(code: jax.Array, negative: jax.Array, k: jax.Array, element: Element, dtype) -> jax.Array:
    """+-code 2^k in a dtype, exact wherever it holds the number; NaN where k is 128 and for codes above the largest."""
    dtype, f = jnp.dtype(dtype), float_of(dtype)
    one = 1 << element.mantissa
    code, k = code.astype(f.bits), k.astype(f.bits)
    digits = jnp.where(code < one, code, (code & (one - 1)) | one)
    n = jnp.maximum(code >> element.mantissa, 1) - 1 + element.low - element.mantissa + k
    bits = bits_of(digits.astype(f.dtype), f)[0]
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


def in_groups(x: jax.Array, axis: int) -> tuple[jax.Array, int]:
    """Axis `axis` < 0 split into groups and places in the group, and the axis of places."""
    size = x.shape[axis]
    if size % GROUP:
        raise ValueError(
            f"axis of {size} does not divide into groups of {GROUP}; pad it to {-(-size // GROUP) * GROUP}"
        )
    at = x.ndim + axis
    return x.reshape(*x.shape[:at], size // GROUP, GROUP, *x.shape[at + 1 :]), axis


@partial(jax.jit, static_argnums=(0, 2, 3, 4), inline=True)
def by_shard(f: Callable, args: Sequence[jax.Array], outs: int, sides: tuple[int, ...], settings: tuple):
    """f(*args, *settings), with so many results, on each shard of arrays that are sharded alike.

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


def check_nonfinite(x: jax.Array, nonfinite: NonFinite) -> None:
    if nonfinite not in ("error", "nan"):
        raise ValueError(f'nonfinite={nonfinite!r} is unknown; use "error" or "nan"')
    if nonfinite == "error" and not isinstance(x, Tracer):
        bad = int(jnp.sum(~jnp.isfinite(x)))
        if bad:
            raise ValueError(
                f"{bad:,} of {x.size:,} values are NaN or infinite and have no code; mend them, or pass "
                'nonfinite="nan" for blocks that decode to NaN'
            )


def check_scales(packed: jax.Array, scale: jax.Array, per: int) -> None:
    if scale.shape != (*packed.shape[:-1], packed.shape[-1] * per // GROUP) or packed.shape[-1] * per % GROUP:
        raise ValueError(
            f"scales {list(scale.shape)} do not fit elements {list(packed.shape)} with {per} to an entry; there is one "
            f"for {GROUP} elements of the last axis"
        )
