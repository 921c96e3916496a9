"""Products with weights that are cut over the mesh: gathered where tokens differ, summed where widths are split."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from kimi_jax.ops.loss import chunked_cross_entropy
from kimi_jax.parallel.mesh import axes_of, mesh_axes_of, per_device, spec_of, vary, varying

Axes = tuple[str, ...]


def gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """`jax.lax.all_gather(.., tiled=True)` over one mesh axis after the other.

    XLA for TPUs turns a gather over several axes of a torus into an all-reduce of the whole array: twice the traffic.
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

    Of f32 parameters that a loop takes slices of and casts, XLA for TPUs casts the whole stack before the loop and
    keeps both: for the experts of K3 9.5 GiB a chip. It leaves alone what is read as integers.
    """
    if w.dtype == dtype:
        return w
    bits = jax.lax.bitcast_convert_type(w, jnp.dtype(f"uint{8 * w.dtype.itemsize}"))
    return jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(bits), w.dtype).astype(dtype)


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
        return _psum(y, summed)

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
        held: Any = gather_weight(table, ((), ()), rows, table.dtype)
        ids = tokens.reshape(-1)
        if width:
            ids = jax.lax.all_gather(ids, width, tiled=True)
        size = held.shape[0]
        ways = jax.lax.axis_size(vocab) if vocab else 1
        outside = (ids < 0) | (ids >= size * ways)
        if vocab:
            ids = ids - jax.lax.axis_index(vocab) * size
        ids = jnp.where((ids >= 0) & (ids < size), ids, size)
        x = held.at[ids].get(mode="fill", fill_value=0).astype(dtype)
        if vocab:
            x = jax.lax.psum(x, vocab)
        x = jnp.where(outside[:, None], jnp.nan, x)  # better no answer than that of another token
        if width:
            x = jax.lax.all_to_all(x, width, split_axis=0, concat_axis=1, tiled=True)
        return x.reshape(*shape, -1)

    return per_device(local, P(*spec_of(tokens), None))(table, tokens)


def linear_cross_entropy(
    x: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, *, chunk_size: int = 1024
) -> tuple[jax.Array, jax.Array]:
    """`ops.loss.cross_entropy` of logits = x head over the tokens of all devices, a chunk of them at a time.

    Args:
        x: [.., d] hidden states.
        head: [d, vocab], in its stored dtype; the vocabulary may be split over a mesh axis that tokens are not.
        targets: [..] int token ids; any value where the weight is 0.
        weights: [..] weight of each token, 0 for padding: what x holds there, NaN included, has no effect.
        chunk_size: tokens of a device at a time; need not divide their number.

    Returns:
        (sum of weight * nll in nats, sum of weights), scalars in at least float32, the same on all devices.
    """
    (width, vocab), rows = map(axes_of, spec_of(head)), mesh_axes_of(x)

    def local(x, head, targets, weights):
        weights = weights.astype(jnp.promote_types(x.dtype, jnp.float32)).reshape(-1)
        axes = _HeadAxes(width, vocab, rows)
        loss = _summed(x.reshape(-1, x.shape[-1]), head, targets.reshape(-1), weights, axes, chunk_size)
        return loss, _psum(jnp.sum(weights), rows)

    return per_device(local, (P(), P()))(x, head, targets, weights)


class _HeadAxes(NamedTuple):
    """Mesh axes that the head's width, its vocabulary, and tokens are cut over."""

    width: Axes
    vocab: Axes
    rows: Axes


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _summed(x, head, targets, weights, axes: _HeadAxes, chunk_size):
    """Sum of weight * nll over the tokens of all devices."""
    return _sums(x, head, targets, weights, axes, chunk_size, gradients=False)[0]


def _sums(x, head, targets, weights, axes: _HeadAxes, chunk_size, *, gradients):
    whole = vary(gather(head.astype(x.dtype), axes.width, 0), axes.rows)
    loss, grads = chunked_cross_entropy(
        x, whole, targets, weights, gradients=gradients, chunk_size=chunk_size, vocab_axes=axes.vocab
    )
    return _psum(loss, axes.rows), grads


def _summed_fwd(x, head, targets, weights, axes, chunk_size):
    loss, grads = _sums(x, head, targets, weights, axes, chunk_size, gradients=True)
    assert grads is not None
    d_x, d_head, d_weights = grads
    # Summed at once, so that the whole gradient is not kept: what it is still to be multiplied by is one number.
    d_head = sum_scatter(d_head, axes.width, 0)
    d_head = _psum(d_head, tuple(axis for axis in axes.rows if axis in varying(d_head) - varying(head)))
    return loss, (d_x, d_head, d_weights, jnp.zeros(0, x.dtype), jnp.zeros(0, head.dtype))


def _summed_bwd(axes, chunk_size, residuals, d_loss):
    del axes, chunk_size
    d_x, d_head, d_weights, x, head = residuals  # the last two, empty, carry dtypes
    return (d_loss * d_x).astype(x.dtype), (d_loss * d_head).astype(head.dtype), None, d_loss * d_weights


_summed.defvjp(_summed_fwd, _summed_bwd)


def _psum(x: jax.Array, axes: Axes) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x
