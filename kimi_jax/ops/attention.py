"""Softmax attention, causal and packed, in blocks of queries."""

import jax
import jax.numpy as jnp


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    q_documents: jax.Array | None = None,
    kv_documents: jax.Array | None = None,
    q_start: int | jax.Array = 0,
    block_size: int = 128,
) -> tuple[jax.Array, jax.Array]:
    """Each query attends to the earlier keys of its document.

    o_i = sum_j softmax_j(scale <q_i, k_j>) v_j  over j <= q_start + i with equal documents > 0

    Heads may share keys: with g key heads, query head h reads key head h // (heads / g). Scores, softmax and sums
    are in at least float32. More than `block_size` queries go block by block and are recomputed for the backward
    pass, so memory grows with block_size * s and not with t * s. What a query does not see may hold anything, NaN
    included.

    Args:
      q: [b, t, h, k]; query i stands in slot q_start + i.
      k: [b, s, g, k] with g dividing h; key j stands in slot j.
      v: [b, s, g, v].
      scale: factor on the scores.
      q_documents: [b, t] int document numbers (`segments.document_ids`), 0 for padding; None: all in document 1.
      kv_documents: [b, s] the same for the keys.
      q_start: slot of the first query; may be traced.
      block_size: queries at a time.

    Returns:
      o: [b, t, h, v] in at least float32; 0 where a query sees nothing.
      max_logits: [h] largest scaled score seen in the batch, -inf if none; carries no gradient.

    Raises:
      ValueError: shapes that do not fit.
    """
    b, t, h, width = q.shape
    s, g = k.shape[1:3]
    if k.shape != (b, s, g, width) or v.shape[:3] != (b, s, g) or h % g:
        raise ValueError(
            f"attention over q {q.shape}, k {k.shape}, v {v.shape}: "
            "k must be [b, s, g, k] and v [b, s, g, v] with g dividing the heads of q [b, t, h, k]"
        )
    wide = jnp.promote_types(v.dtype, jnp.float32)
    if q_documents is None:
        q_documents = jnp.ones((b, t), jnp.int32)
    else:
        q = jnp.where(q_documents[:, :, None, None] > 0, q, 0)
    slots = jnp.arange(s)
    if kv_documents is not None or s != t:
        # A score of -inf does not stop a NaN value (0 * NaN), nor a NaN key in the gradient: clear them at the source.
        live = jnp.broadcast_to(slots < q_start + t, (b, s))
        if kv_documents is not None:
            live &= kv_documents > 0
        k, v = (jnp.where(live[:, :, None, None], a, 0) for a in (k, v))
    if kv_documents is None:
        kv_documents = jnp.ones((b, s), jnp.int32)
    v = v.astype(wide)

    def block(q, documents, slot):
        """q [b, c, h, k], documents [b, c], slot [c]."""
        grouped = q.reshape(b, -1, g, h // g, width)
        logits = scale * jnp.einsum("btghk,bsgk->bghts", grouped, k, preferred_element_type=wide)
        seen = (documents[:, :, None] == kv_documents[:, None]) & (documents > 0)[:, :, None]
        seen &= slots <= slot[:, None]
        logits = jnp.where(seen[:, None, None], logits, -jnp.inf)  # before exp, or NaN gradients come through
        top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        part = jnp.exp(logits - jnp.where(top > -jnp.inf, top, 0))
        total = jnp.sum(part, axis=-1)
        o = jnp.einsum("bghts,bsgv->btghv", part, v)
        o = o / jnp.where(total > 0, total, 1).transpose(0, 3, 1, 2)[..., None]
        return o.reshape(b, -1, h, v.shape[-1]), jnp.max(top, axis=(0, 3, 4)).reshape(h)

    if t <= block_size:
        return block(q, q_documents, q_start + jnp.arange(t))
    blocks = -(-t // block_size)
    fill = blocks * block_size - t  # queries of no document, which see nothing
    q = jnp.pad(q, ((0, 0), (0, fill), (0, 0), (0, 0))).reshape(b, blocks, block_size, h, width)
    q_documents = jnp.pad(q_documents, ((0, 0), (0, fill))).reshape(b, blocks, block_size)
    slot = q_start + jnp.arange(blocks * block_size).reshape(blocks, block_size)
    step = jax.checkpoint(lambda _, xs: (None, block(*xs)))
    _, (o, top) = jax.lax.scan(step, None, (jnp.moveaxis(q, 1, 0), jnp.moveaxis(q_documents, 1, 0), slot))
    o = jnp.moveaxis(o, 0, 1).reshape(b, blocks * block_size, h, v.shape[-1])
    return o[:, :t], jnp.max(top, axis=0)
