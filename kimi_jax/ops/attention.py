"""Softmax attention, causal and packed, in blocks of queries and keys.

No block is larger than query_block x key_block, forward or backward: the softmax is kept as a running maximum and
sum while blocks of keys pass, and the backward pass computes each block again from the log-sum-exp of its queries.
Pairs of blocks in which no query sees a key are skipped. Keys and values may be made from something smaller, a block
at a time (`latent_attention`), so that those of a long row never exist together.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

QUERY_BLOCK, KEY_BLOCK = 128, 512


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    q_documents: jax.Array | None = None,
    kv_documents: jax.Array | None = None,
    q_start: int | jax.Array = 0,
    query_block: int = QUERY_BLOCK,
    key_block: int = KEY_BLOCK,
) -> tuple[jax.Array, jax.Array]:
    """Each query attends to the earlier keys of its document.

    o_i = sum_j softmax_j(scale <q_i, k_j>) v_j  over j <= slot of i, with equal documents > 0

    Heads may share keys: with g key heads, query head h reads key head h // (heads / g). Scores, softmax and sums
    are in at least float32. What a query does not see may hold anything, NaN included, if it is padding or in no
    slot up to the last query's.

    Args:
      q: [b, t, h, k]; query i stands in slot q_start + i, or as q_start says.
      k: [b, s, g, k] with g dividing h; key j stands in slot j.
      v: [b, s, g, v].
      scale: factor on the scores.
      q_documents: [b, t] int document numbers (`segments.document_ids`), 0 for padding; None: all in document 1.
      kv_documents: [b, s] the same for the keys.
      q_start: slot of the first query; may be traced, and differ between the devices of a `shard_map`. Or of the first
        of each of equal runs of queries, [runs].
      query_block, key_block: queries and keys at a time.

    Returns:
      o: [b, t, h, v] in at least float32; 0 where a query sees nothing.
      max_logits: [h] largest scaled score seen in the batch, -inf if none; carries no gradient.

    Raises:
      ValueError: shapes that do not fit.
    """
    b, _, h, width = q.shape
    s, g = k.shape[1:3]
    if k.shape != (b, s, g, width) or v.shape[:3] != (b, s, g) or h % g:
        raise ValueError(
            f"attention over q {q.shape}, k {k.shape}, v {v.shape}: "
            "k must be [b, s, g, k] and v [b, s, g, v] with g dividing the heads of q [b, t, h, k]"
        )
    where = (q_documents, kv_documents, q_start)
    return _blocked(_heads_first, scale, (query_block, key_block), q, (k, v), (), *where)


def latent_attention(
    q: jax.Array,
    latent: jax.Array,
    w_k_b: jax.Array,
    w_v_b: jax.Array,
    *,
    scale: float,
    q_documents: jax.Array | None = None,
    kv_documents: jax.Array | None = None,
    q_start: int | jax.Array = 0,
    query_block: int = QUERY_BLOCK,
    key_block: int = KEY_BLOCK,
) -> tuple[jax.Array, jax.Array]:
    """`attention` over keys and values that are made from latents, a block at a time.

    k_j = [latent_j[:r] W_k_b, latent_j[r:]],  v_j = latent_j[:r] W_v_b; the second part of k serves all heads.

    Args:
      q: [b, t, h, nope + rope].
      latent: [b, s, r + rope].
      w_k_b: [r, h, nope].
      w_v_b: [r, h, v].
      The others as in `attention`.

    Returns:
      As `attention`. Gradients of latents and weights are summed in at least float32 over blocks.

    Raises:
      ValueError: shapes that do not fit.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; its rotated parts come rotated.
    """
    b, _, h, width = q.shape
    rank = w_k_b.shape[0]
    rope = latent.shape[-1] - rank
    if latent.shape[0] != b or w_k_b.shape != (rank, h, width - rope) or w_v_b.shape[:2] != (rank, h) or rope < 0:
        raise ValueError(
            f"latent_attention over q {q.shape}, latent {latent.shape}, w_k_b {w_k_b.shape}, w_v_b {w_v_b.shape}: "
            "they must be [b, t, h, nope + rope], [b, s, r + rope], [r, h, nope] and [r, h, v]"
        )
    where = (q_documents, kv_documents, q_start)
    return _blocked(_from_latents, scale, (query_block, key_block), q, latent, (w_k_b, w_v_b), *where)


def _heads_first(source, weights):
    """(k, v) [b, s, g, ..] -> [b, g, s, ..]"""
    del weights
    return tuple(jnp.swapaxes(a, 1, 2) for a in source)


def _from_latents(latent, weights):
    """latent [b, s, r + rope] -> k [b, h, s, nope + rope], v [b, h, s, v]"""
    w_k_b, w_v_b = (w.astype(latent.dtype) for w in weights)
    kv, k_rope = jnp.split(latent, [w_k_b.shape[0]], axis=-1)
    k_nope, v = jnp.einsum("bsr,rhk->bhsk", kv, w_k_b), jnp.einsum("bsr,rhv->bhsv", kv, w_v_b)
    k_rope = jnp.broadcast_to(k_rope[:, None], (*k_nope.shape[:3], k_rope.shape[-1]))
    return jnp.concatenate([k_nope, k_rope], axis=-1), v


def _blocked(expand, scale, blocks, q, source, weights, q_documents, kv_documents, q_start):
    """Attention whose keys and values [b, g, s, ..] are expand(source, weights) for leaves [b, s, ..] of source."""
    b, t = q.shape[:2]
    s = jax.tree.leaves(source)[0].shape[1]
    if q_documents is None:
        q_documents = jnp.ones((b, t), jnp.int32)
    if kv_documents is None:
        kv_documents = jnp.ones((b, s), jnp.int32)
    q_start = jnp.atleast_1d(jnp.asarray(q_start, jnp.int32))
    if t % q_start.size:
        raise ValueError(f"{t} queries are not {q_start.size} equal runs; give one q_start, or as many as divide them")
    given = (q, source, weights, q_documents, kv_documents, q_start)
    # All are made to differ over the same mesh axes here, where autodiff sums gradients over those they did not.
    varying = lambda x: jax.typeof(x).manual_axis_type.varying  # noqa: E731
    axes = frozenset().union(*[varying(x) for x in jax.tree.leaves(given)])
    given = jax.tree.map(lambda x: lax.pcast(x, tuple(sorted(axes - varying(x))), to="varying"), given)
    return _attend(expand, scale, (min(blocks[0], t // q_start.size), min(blocks[1], s)), *given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(expand, scale, blocks, q, source, weights, q_documents, kv_documents, q_start):
    return _forward(expand, scale, blocks, q, source, weights, q_documents, kv_documents, q_start)[0]


def _forward(expand, scale, blocks, q, source, weights, q_documents, kv_documents, q_start):
    pairs = _Pairs(blocks, q_documents, kv_documents, q_start)
    _, v = jax.eval_shape(expand, source, weights)
    (b, t, h, _), g, wide = q.shape, v.shape[1], jnp.promote_types(v.dtype, jnp.float32)

    def keys(j, carry):
        at_k = pairs.keys(j)
        k, v = expand(pairs.load(source, at_k), weights)

        def queries(at_q, carry):
            def update(rows):
                o, top, total = rows
                logits = _logits(scale, pairs.load(q, at_q), k, pairs.seen(at_q, at_k), wide)
                before = _by_head(top, g)
                top = jnp.maximum(before, jnp.max(logits, axis=-1))
                base = jnp.where(top > -jnp.inf, top, 0)
                part, kept = jnp.exp(logits - base[..., None]), _by_row(jnp.exp(before - base))
                o = kept[..., None] * o + jnp.einsum("bgmts,bgsv->btgmv", part, v.astype(wide)).reshape(o.shape)
                return o, _by_row(top), kept * total + _by_row(jnp.sum(part, axis=-1))

            new = pairs.when_any_seen(at_q, at_k, update, tuple(_take(x, at_q) for x in carry))
            return tuple(_put(x, new, at_q) for x, new in zip(carry, new, strict=True))

        return pairs.over_queries(j, queries, carry)

    # Filled after q, so that they differ over the mesh axes that q does.
    zero = functools.partial(jnp.full_like, q, dtype=wide)
    start = zero(0, shape=(b, t, h, v.shape[-1])), zero(-jnp.inf, shape=(b, t, h)), zero(0, shape=(b, t, h))
    o, top, total = pairs.over_keys(keys, start)
    total = jnp.where(total > 0, total, 1)
    o = o / total[..., None]
    # Where a query sees nothing, exp(-inf - 0) = 0 is what the backward pass needs.
    log_sum = jnp.where(top > -jnp.inf, top, 0) + jnp.log(total)
    kept = (q, source, weights, q_documents, kv_documents, q_start, o, log_sum)
    return (o, jnp.max(top, axis=(0, 1))), kept


def _backward(expand, scale, blocks, kept, cotangents):
    q, source, weights, q_documents, kv_documents, q_start, o, log_sum = kept
    pairs = _Pairs(blocks, q_documents, kv_documents, q_start)
    wide = o.dtype
    d_o, _ = cotangents  # max_logits carries no gradient
    mean = jnp.where(q_documents[:, :, None] > 0, jnp.sum(d_o * o, axis=-1), 0)  # of dot(d_o, v) under the softmax

    def keys(j, carry):
        d_q, d_source, d_weights = carry
        at_k = pairs.keys(j)
        (k, v), pull = jax.vjp(expand, pairs.load(source, at_k), weights)
        g = k.shape[1]

        def queries(at_q, carry):
            d_q, d_k, d_v = carry

            def update(sums):
                d_q, d_k, d_v = sums
                q_i = pairs.load(q, at_q)
                logits = _logits(scale, q_i, k, pairs.seen(at_q, at_k), wide)
                part = jnp.exp(logits - _by_head(_take(log_sum, at_q), g)[..., None])
                d_o_i = _grouped(pairs.load(d_o, at_q), g)
                d_v += jnp.einsum("bgmts,btgmv->bgsv", part, d_o_i)
                d_part = jnp.einsum("btgmv,bgsv->bgmts", d_o_i, v.astype(wide))
                d_logits = scale * part * (d_part - _by_head(_take(mean, at_q), g)[..., None])
                d_q += jnp.einsum("bgmts,bgsk->btgmk", d_logits, k.astype(wide)).reshape(d_q.shape)
                d_k += jnp.einsum("bgmts,btgmk->bgsk", d_logits, _grouped(q_i, g).astype(wide))
                return d_q, d_k, d_v

            new, d_k, d_v = pairs.when_any_seen(at_q, at_k, update, (_take(d_q, at_q), d_k, d_v))
            return _put(d_q, new, at_q), d_k, d_v

        zeros = jnp.zeros_like(k, wide), jnp.zeros_like(v, wide)
        d_q, d_k, d_v = pairs.over_queries(j, queries, (d_q, *zeros))
        d_block, d_w = pull((d_k.astype(k.dtype), d_v.astype(v.dtype)))
        # A last block that overlaps the one before brings zeros for what that one had.
        d_source = jax.tree.map(lambda x, new: _put(x, _take(x, at_k) + new, at_k), d_source, d_block)
        return d_q, d_source, jax.tree.map(lambda x, new: x + new, d_weights, d_w)

    start = jnp.zeros_like(q, wide), jax.tree.map(jnp.zeros_like, source)
    start = *start, jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, wide)), weights)
    d_q, d_source, d_weights = pairs.over_keys(keys, start)
    d_weights = jax.tree.map(lambda d, x: d.astype(x.dtype), d_weights, weights)
    return d_q.astype(q.dtype), d_source, d_weights, None, None, None


_attend.defvjp(_forward, _backward)


class _Block(NamedTuple):
    begin: jax.Array
    """Where in the array the block begins: the last is moved back to end with the array, so that nothing is padded."""
    slots: jax.Array
    """[c]"""
    documents: jax.Array
    """[b, c], 0 for what takes no part: padding, what nobody sees, and what the block before has dealt with."""


class _Pairs(NamedTuple):
    """The pairs of a block of queries and a block of keys."""

    blocks: tuple[int, int]
    q_documents: jax.Array
    kv_documents: jax.Array
    q_start: jax.Array
    """[runs]"""

    @property
    def run(self) -> int:
        """Queries of a run."""
        return self.q_documents.shape[1] // self.q_start.size

    @property
    def counts(self) -> tuple[int, int]:
        """Blocks of queries, of each run, and of keys."""
        return -(-self.run // self.blocks[0]), -(-self.kv_documents.shape[1] // self.blocks[1])

    def queries(self, run, i) -> _Block:
        documents = lax.dynamic_slice_in_dim(self.q_documents, run * self.run, self.run, 1)
        begin, places, documents = _block(documents, i, self.blocks[0])
        return _Block(run * self.run + begin, self.q_start[run] + places, documents)

    def keys(self, j) -> _Block:
        begin, slots, documents = _block(self.kv_documents, j, self.blocks[1])
        return _Block(begin, slots, jnp.where(slots < self._end, documents, 0))

    @property
    def _end(self) -> jax.Array:
        """The slot after the last query's."""
        return jnp.max(self.q_start) + self.run

    def load(self, tree, at: _Block):
        """The block of each array, 0 where it takes no part: a score of -inf does not stop a NaN value (0 * NaN),
        nor a NaN key in the gradient."""

        def load(x):
            return jnp.where(at.documents.reshape(*at.documents.shape, *[1] * (x.ndim - 2)) > 0, _take(x, at), 0)

        return jax.tree.map(load, tree)

    def seen(self, at_q: _Block, at_k: _Block) -> jax.Array:
        same = (at_q.documents[:, :, None] == at_k.documents[:, None]) & (at_q.documents > 0)[:, :, None]
        return same & (at_k.slots <= at_q.slots[:, None])

    def when_any_seen(self, at_q: _Block, at_k: _Block, update: Callable, carry):
        if self.counts == (1, 1):
            return update(carry)
        return lax.cond(jnp.any(self.seen(at_q, at_k)), update, lambda carry: carry, carry)

    def over_keys(self, body: Callable, carry):
        """Runs body(j, carry) for the blocks of keys up to the last query's slot."""
        size, count = self.blocks[1], self.counts[1]
        return _loop(0, (self._end + size - 1) // size, count, body, carry)

    def over_queries(self, j, body: Callable, carry):
        """Runs body(block, carry) for the blocks of queries, in each run from the first with a slot of key block j."""
        count, runs = self.counts[0], self.q_start.size

        def over_run(run, carry):
            first = (j * self.blocks[1] - self.q_start[run]) // self.blocks[0]
            return _loop(first, count, count, lambda i, carry: body(self.queries(run, i), carry), carry)

        return _loop(0, runs, runs, over_run, carry)


def _loop(begin, end, count, body, carry):
    if count == 1:
        return body(0, carry)
    return lax.fori_loop(jnp.maximum(begin, 0), jnp.minimum(end, count), body, carry)


def _block(documents, i, size):
    """Block i of documents [b, ..]: where it begins, its places, and its documents, 0 for those of block i - 1."""
    begin = jnp.minimum(i * size, documents.shape[1] - size)
    places = begin + jnp.arange(size)
    return begin, places, jnp.where(places >= i * size, lax.dynamic_slice_in_dim(documents, begin, size, 1), 0)


def _take(x, at):
    return lax.dynamic_slice_in_dim(x, at.begin, len(at.slots), axis=1)


def _put(x, block, at):
    return lax.dynamic_update_slice_in_dim(x, block, at.begin, axis=1)


def _grouped(x, g):
    """[b, c, h, ..] -> [b, c, g, h / g, ..]"""
    return x.reshape(*x.shape[:2], g, -1, *x.shape[3:])


def _by_head(x, g):
    """[b, c, h] -> [b, g, h / g, c]"""
    return _grouped(x, g).transpose(0, 2, 3, 1)


def _by_row(x):
    """[b, g, h / g, c] -> [b, c, h]"""
    return x.transpose(0, 3, 1, 2).reshape(x.shape[0], x.shape[3], -1)


def _logits(scale, q, k, seen, dtype):
    """Scores [b, g, h / g, c, s] of q [b, c, h, k] on k [b, g, s, k], -inf where unseen: before exp, never after."""
    logits = scale * jnp.einsum("btgmk,bgsk->bgmts", _grouped(q, k.shape[1]), k, preferred_element_type=dtype)
    return jnp.where(seen[:, None, None], logits, -jnp.inf)
