"""A weight that stays packed in the format it was released in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from kimi_jax.ops.quant.blocks import fp8_block_decode, fp8_block_encode, int4_decode, int4_encode
from kimi_jax.ops.quant.mx import mxfp4_decode, mxfp4_encode

Kind = Literal["mxfp4", "int4", "fp8_block"]


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
