"""Products with weights that are sharded over the mesh: gathered where tokens differ, summed where widths are split."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from kimi_jax.parallel.spec import axes_of, mesh_axes_of, per_device, spec_of, vary, varying

Axes = tuple[str, ...]


def gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """`jax.lax.all_gather(.., tiled=True)` over one mesh axis after the other.

    XLA for TPUs turns a gather over several axes of a torus into an all-reduce of the full array: twice the traffic.
    """
    for axis in reversed(axes):
        x = jax.lax.all_gather(x, axis, axis=dim, tiled=True)
    return x


def sum_scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """`jax.lax.psum_scatter(.., tiled=True)`, the transpose of `gather`, likewise."""
    for axis in axes:
        x = jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    return x


def narrowed(w: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """w in the dtype of a product, cast here: in a scan over layers, one layer at a time. It has no gradient.

    Of f32 parameters that a loop takes slices of and casts, XLA for TPUs casts the full stack before the loop and
    keeps both: for the experts of K3 9.5 GiB a chip. It leaves alone what is read as integers.
    """
    if w.dtype == dtype:
        return w
    bits = jax.lax.bitcast_convert_type(w, jnp.dtype(f"uint{8 * w.dtype.itemsize}"))
    return jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(bits), w.dtype).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_weight(w: jax.Array, parts: tuple[Axes, ...], rows: Axes, dtype: jnp.dtype) -> jax.Array:
    """A device's shard of a weight -> the full weight, in the dtype of the product.

    It travels in that dtype. Its gradient is summed over tokens, and so over devices, in at least float32, and each
    device keeps its part: an all-gather forward, a reduce-scatter backward.

    Args:
        w: the local part.
        parts: for each axis of w, the mesh axes it is sharded over and gathered from.
        rows: mesh axes over which the tokens of the product differ.
        dtype: of the product.
    """
    w = w.astype(dtype)
    for dim, axes in enumerate(parts):
        if axes:
            w = gather(w, axes, dim)
    return vary(w, rows)


def _gather_weight_bwd(parts, rows, dtype, like, d_w):
    del dtype
    d_w = d_w.astype(jnp.promote_types(like.dtype, jnp.float32))
    for dim, axes in enumerate(parts):
        if axes:
            d_w = sum_scatter(d_w, axes, dim)
    repeated = tuple(axis for axis in rows if axis in varying(d_w) and axis not in varying(like))
    return (_psum(d_w, repeated).astype(like.dtype),)


# An empty array carries the weight's dtype and mesh axes to the backward pass.
gather_weight.defvjp(lambda w, parts, rows, dtype: (gather_weight(w, parts, rows, dtype), w[:0]), _gather_weight_bwd)


def einsum(equation: str, x: jax.Array, w: jax.Array, *, dtype: jnp.dtype | None = None, **options) -> jax.Array:
    """x times a weight, in x's dtype, on any mesh.

    Mesh axes that shard rows of x (its letters in the result) are gathered from the weight, as are those of a
    contracted letter that x has in full; a letter that is sharded in both is contracted in parts, and summed. The
    result is sharded as x's rows and the weight's remaining letters are.

    Args:
        equation: of two operands, without dots.
        x: activations.
        w: weight in its stored dtype and partition.
        dtype: of the product, x's by default.
        options: of `jnp.einsum`.

    >>> einsum("td,df->tf", jnp.ones((2, 3)), jnp.ones((3, 4))).shape
    (2, 4)
    """
    dtype = x.dtype if dtype is None else dtype
    inputs, out = equation.split("->")
    x_letters, w_letters = inputs.split(",")
    x_cut, w_cut = (
        {letter: axes_of(part) for letter, part in zip(letters, spec_of(a), strict=True)}
        for letters, a in ((x_letters, x), (w_letters, w))
    )
    rows = tuple(axis for letter in x_letters if letter in out for axis in x_cut[letter])
    summed, gathered = (), []
    for letter in w_letters:
        kept = tuple(axis for axis in w_cut[letter] if axis not in rows)
        if letter not in out:
            kept = kept if kept == x_cut[letter] else ()
            summed += kept
        gathered.append(tuple(axis for axis in w_cut[letter] if axis not in kept))
        w_cut[letter] = kept
    cut = {**w_cut, **x_cut}
    result = P(*[cut[letter] or None for letter in out])

    def product(x, w):
        w = gather_weight(w, tuple(gathered), mesh_axes, dtype)
        y = jnp.einsum(equation, x.astype(dtype), w, **options)
        return _psum(y, summed)

    mesh_axes = mesh_axes_of(x)
    return per_device(product, result)(x, w)


def _psum(x: jax.Array, axes: Axes) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x
