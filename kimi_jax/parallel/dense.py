"""Products with weights that are cut over the mesh: gathered where tokens differ, summed where widths are split."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from kimi_jax.ops.loss import linear_cross_entropy
from kimi_jax.sharding import axes_of, mesh_axes_of, per_device, spec_of, vary, varying

Axes = tuple[str, ...]


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_weight(w: jax.Array, parts: tuple[Axes, ...], rows: Axes, dtype: jnp.dtype) -> jax.Array:
    """A device's part of a weight -> the weight whole, in the dtype of the product.

    It travels in that dtype. Its gradient is summed over tokens, and so over devices, in at least float32, and each
    device keeps its part: an all-gather forward, a reduce-scatter backward.

    Args:
        w: the local part.
        parts: for each axis of w, the mesh axes it is cut over and gathered from.
        rows: mesh axes over which the tokens of the product differ.
        dtype: of the product.
    """
    w = w.astype(dtype)
    for dim, axes in enumerate(parts):
        if axes:
            w = jax.lax.all_gather(w, axes, axis=dim, tiled=True)
    return vary(w, rows)


def _gather_weight_bwd(parts, rows, dtype, like, d_w):
    del dtype
    d_w = d_w.astype(jnp.promote_types(like.dtype, jnp.float32))
    for dim, axes in enumerate(parts):
        if axes:
            d_w = jax.lax.psum_scatter(d_w, axes, scatter_dimension=dim, tiled=True)
    repeated = tuple(axis for axis in rows if axis in varying(d_w) and axis not in varying(like))
    return ((jax.lax.psum(d_w, repeated) if repeated else d_w).astype(like.dtype),)


# An empty array carries the weight's dtype and mesh axes to the backward pass.
gather_weight.defvjp(lambda w, parts, rows, dtype: (gather_weight(w, parts, rows, dtype), w[:0]), _gather_weight_bwd)


def einsum(equation: str, x: jax.Array, w: jax.Array, *, dtype: jnp.dtype | None = None, **options) -> jax.Array:
    """x times a weight, in x's dtype, on any mesh.

    Mesh axes that cut rows of x (its letters in the result) are gathered from the weight, as are those of a
    contracted letter that x has whole; a letter that both have cut is contracted in parts, and summed. The result is
    cut as x's rows and the weight's remaining letters are.

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
        return jax.lax.psum(y, summed) if summed else y

    mesh_axes = mesh_axes_of(x)
    return per_device(product, result)(x, w)


def lookup(table: jax.Array, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of an embedding table: `[v, d]`, `[b, t]` -> `[b, t, d]` in `dtype`.

    The table stays where it is: devices that share its width between them look up each other's tokens, a part of the
    width each, and swap. Cast after the look-up: the gradient of a frequent token is a long sum, which bf16 would not
    hold.
    """
    (vocab, width), rows = map(axes_of, spec_of(table)), mesh_axes_of(tokens)

    def local(table, tokens):
        shape = tokens.shape
        table = gather_weight(table, ((), ()), rows, table.dtype)
        ids = tokens.reshape(-1)
        if width:
            ids = jax.lax.all_gather(ids, width, tiled=True)
        if vocab:
            ids = ids - jax.lax.axis_index(vocab) * table.shape[0]
            ids = jnp.where((ids >= 0) & (ids < table.shape[0]), ids, table.shape[0])
        x = table.at[ids].get(mode="fill", fill_value=0 if vocab else None).astype(dtype)
        if vocab:
            x = jax.lax.psum(x, vocab)
        if width:
            x = jax.lax.all_to_all(x, width, split_axis=0, concat_axis=1, tiled=True)
        return x.reshape(*shape, -1)

    return per_device(local, P(*spec_of(tokens), None))(table, tokens)


def cross_entropy(x: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`ops.loss.linear_cross_entropy` over the tokens of all devices; a vocabulary may be split among them.

    Args:
        x: [b, t, d] hidden states.
        head: [d, vocab], in its stored dtype.
        targets, weights: [b, t].

    Returns:
        (summed weight * nll, summed weights), the same on all devices.
    """
    (width, vocab), rows = map(axes_of, spec_of(head)), mesh_axes_of(x)

    def local(x, head, targets, weights):
        head = gather_weight(head, (width, ()), rows, x.dtype)
        sums = linear_cross_entropy(x, head, targets, weights, vocab_axes=vocab)
        return jax.lax.psum(sums, rows) if rows else sums

    return per_device(local, (P(), P()))(x, head, targets, weights)
