"""A row's tokens split over a mesh axis: what each operation that mixes tokens needs from the other devices.

Per-device code for inside a `shard_map`: device i of `axis` holds the i-th of equal spans of each row. The short
convolution needs the few inputs before its span, Kimi Delta Attention what the spans before do to a state (its
size does not depend on the row's length), attention the latents of the full row, and other queries in place of half
of its own, or the last device would do twice the mean. With `axis` None the full row is here, and the operations are
the plain ones.

`documents` are the document numbers of the full row (`segments.document_ids`), the same on each device of `axis`:
a span's own say neither whether its first token continues the document before, nor which document is the row's
first. None: each row is one document.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from kimi_jax.ops import conv, segments
from kimi_jax.ops import kda as kda_op
from kimi_jax.parallel.dense import gather_weight


def local_span(documents: jax.Array | None, t: int, axis: str | None) -> jax.Array | None:
    """This device's t places of a full row's documents [b, T]; None for None.

    Raises:
      ValueError: documents that are not of as many tokens as all spans together.
    """
    return None if documents is None else _local(documents, t, axis)


def _local(row, t, axis):
    shards = 1 if axis is None else lax.axis_size(axis)
    if row.shape[1] != shards * t:
        raise ValueError(
            f"documents {list(row.shape)} are of {row.shape[1]} tokens, but {shards} spans of {t} make {shards * t}; "
            "give those of the whole row on each device"
        )
    return row if axis is None else lax.dynamic_slice_in_dim(row, lax.axis_index(axis) * t, t, axis=1)


def short_conv(x: jax.Array, weight: jax.Array, *, documents: jax.Array | None, axis: str | None) -> jax.Array:
    """`conv.short_conv` over a row split over `axis`: y_t = silu(sum_j weight[w-1-j] x_{t-j}).

    The w - 1 inputs before the span come from the device before, or from several where spans are shorter.

    Args:
      x: [b, t, *channels], this device's span.
      weight: [*channels, w]; the last tap multiplies the current token.
      documents: [b, T] numbers of the full row, or None.
      axis: the mesh axis of the spans, or None.

    Returns:
      y: [b, t, *channels] in x.dtype, 0 at padding.

    Raises:
      ValueError: documents that are not of as many tokens as all spans together.
    """
    t, before = x.shape[1], weight.shape[-1] - 1
    here = local_span(documents, t, axis)
    if axis is None or before == 0:
        return conv.short_conv(x, weight, segment_ids=here)[0]
    shards = lax.axis_size(axis)
    tail, missing, back = [], before, 0
    while missing > 0:
        back, size = back + 1, min(missing, t)
        # A device with none that far back receives zeros, as before the row.
        sent = [(source, source + back) for source in range(shards - back)]
        tail.insert(0, lax.ppermute(x[:, t - size :], axis, sent))
        missing -= size
    tail = jnp.concatenate(tail, axis=1)
    if documents is not None:
        # Only inputs of the span's first document count, and none if the span begins with padding.
        padded = jnp.pad(documents, ((0, 0), (before, 0)))
        around = lax.dynamic_slice_in_dim(padded, lax.axis_index(axis) * t, before + 1, axis=1)
        own = (around[:, :-1] == around[:, -1:]) & (around[:, -1:] > 0)
        tail = jnp.where(own.reshape(*own.shape, *[1] * (x.ndim - 2)), tail, 0)
    return conv.short_conv(x, weight, segment_ids=here, tail=tail)[0]


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    documents: jax.Array | None,
    axis: str | None,
    scale: float | None = None,
    chunk_size: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """`ops.kda.kda` in chunks over a row split over `axis`, its state zero before the row.

    Each span is an affine map of the state, S_after = A_i S + B_i, o = o0 + reads^T S. Devices exchange (A_i, B_i),
    for any length, and compose those before theirs into the state that their span starts from.

    Args:
      q, k: [b, t, h, k], L2-normalised over the last axis; this device's span, as the following.
      v: [b, t, h, v].
      g: [b, t, h, k] log decay <= 0; -inf forgets the state.
      beta: [b, t, h].
      documents: [b, T] numbers of the full row, or None.
      axis: the mesh axis of the spans, or None.
      scale: factor on q; None for k ** -0.5.
      chunk_size: tokens a chunk.

    Returns:
      o [b, t, h, v] in v's dtype, and the state [b, h, k, v] after the row, the same on each device of `axis`.

    Raises:
      ValueError: as `ops.kda.kda`, or documents that are not of as many tokens as all spans together.

    Source: Kimi Linear (arXiv 2510.26692), section 3, whose chunk recurrence this carries on over devices.
    """
    t, size = k.shape[1], k.shape[-1]
    if documents is not None:
        here, resets = (_local(row, t, axis) for row in (documents, segments.resets(documents)))
        q, k, v, g, beta = kda_op.mask_documents(q, k, v, g, beta, here, resets)
    if axis is None:
        return kda_op.kda(q, k, v, g, beta, scale=scale, chunk_size=chunk_size)
    o, reads, transition, written = kda_op.span(q, k, v, g, beta, scale=scale, chunk_size=chunk_size)
    spans = lax.all_gather(jnp.concatenate([transition, written], axis=-1), axis)  # [shards, b, h, k, k + v]
    here, shards = lax.axis_index(axis), lax.axis_size(axis)
    state = jnp.zeros_like(written)
    for shard in range(shards - 1):
        after = spans[shard, ..., :size] @ state + spans[shard, ..., size:]
        state = jnp.where(shard < here, after, state)
    o += jnp.einsum("bthk,bhkv->bthv", reads, state)
    after = jnp.where(here == shards - 1, transition @ state + written, 0)
    return o.astype(v.dtype), lax.psum(after, axis)


def gather_latents(latent: jax.Array, axis: str | None, axes: tuple[str, ...] = ()) -> jax.Array:
    """[b, t, r] of each device -> [b, T, r] of the full row, on each device.

    What attention needs of other devices' tokens: a few hundred numbers each, from which every head's keys and
    values are made here. Gradients are summed over devices in at least float32.

    Args:
      latent: [b, t, r], this device's span.
      axis: the mesh axis of the spans, or None.
      axes: mesh axes over which the row is used differently, such as those of heads.
    """
    spans = () if axis is None else (axis,)
    return gather_weight(latent, ((), spans, ()), axes, latent.dtype)


def causal(
    attend: Callable[..., tuple[jax.Array, jax.Array]],
    q: jax.Array,
    latent: jax.Array,
    *,
    documents: jax.Array | None,
    axis: str | None,
    axes: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """Attention of a span's queries to their full row, the same work on each device.

    Later tokens see more keys. Of 2 n halves of spans, device i of n computes numbers 2 i and 2 n - 1 - 2 i: for that
    it exchanges the second half of its queries with device n - 1 - i, and back what comes out. Spans of an odd length
    stay as they are.

    Args:
      attend: (q [b, t, h, k], latent [b, T, r], q_documents=, kv_documents=, q_start=) -> (o [b, t, h, v], any), as
        `ops.attention.latent_attention`.
      q: [b, t, h, k], this device's span.
      latent: [b, t, r], likewise.
      documents: [b, T] numbers of the full row, or None.
      axis: the mesh axis of the spans, or None.
      axes: as in `gather_latents`.

    Returns:
      o of this device's span; and what attend returned beside it, of those queries that this device computed.

    Raises:
      ValueError: documents that are not of as many tokens as all spans together.
    """
    t = q.shape[1]
    here = local_span(documents, t, axis)
    runs = [0] if axis is None else query_runs(t, lax.axis_index(axis), lax.axis_size(axis))
    o, other = attend(
        _mirrored(q, axis),
        gather_latents(latent, axis, axes),
        q_documents=None if here is None else _mirrored(here, axis),
        kv_documents=documents,
        q_start=jnp.array(runs),
    )
    return _mirrored(o, axis), other


def query_runs(t: int, device, devices: int) -> list:
    """Where in a row the equal runs of queries begin that one of `devices` computes in `causal`; spans are of t."""
    if devices == 1 or t % 2:
        return [device * t]
    return [device * t, (devices - 1 - device) * t + t // 2]


def _mirrored(x, axis):
    """x [b, t, ..] with its second half exchanged with the device as far from the row's other end; undoes itself."""
    devices = 1 if axis is None else lax.axis_size(axis)
    if len(query_runs(x.shape[1], 0, devices)) == 1:
        return x
    here, there = jnp.split(x, 2, axis=1)
    return jnp.concatenate([here, lax.ppermute(there, axis, [(i, devices - 1 - i) for i in range(devices)])], axis=1)
