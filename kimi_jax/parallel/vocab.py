"""Embedding lookup and cross-entropy with a vocabulary that is sharded over the mesh."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from kimi_jax.ops.loss import chunked_cross_entropy
from kimi_jax.parallel.dense import Axes, _psum, gather, gather_weight, sum_scatter
from kimi_jax.parallel.spec import axes_of, mesh_axes_of, per_device, spec_of, vary, varying


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
    """Mesh axes that the head's width, its vocabulary, and tokens are sharded over."""

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
    # Summed at once, so that the full gradient is not kept: it is still to be multiplied by one number only.
    d_head = sum_scatter(d_head, axes.width, 0)
    d_head = _psum(d_head, tuple(axis for axis in axes.rows if axis in varying(d_head) - varying(head)))
    return loss, (d_x, d_head, d_weights, jnp.zeros(0, x.dtype), jnp.zeros(0, head.dtype))


def _summed_bwd(axes, chunk_size, residuals, d_loss):
    del axes, chunk_size
    d_x, d_head, d_weights, x, head = residuals  # the last two, empty, carry dtypes
    return (d_loss * d_x).astype(x.dtype), (d_loss * d_head).astype(head.dtype), None, d_loss * d_weights


_summed.defvjp(_summed_fwd, _summed_bwd)
