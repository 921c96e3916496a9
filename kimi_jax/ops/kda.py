"""Kimi Delta Attention: a gated delta rule whose decay differs from channel to channel.

Each head keeps a state S [k, v], a linear map from keys to values. A token decays it, corrects what it
answers to the token's key, and reads it with the token's query:

    S   <- diag(exp g_t) S
    S   <- S + beta_t k_t (v_t - S^T k_t)^T
    o_t  = S^T (scale q_t)

Three forms give one answer: `recurrent` steps through tokens (reference and decoding), `chunked` steps
through chunks (training, prefill), `associative` combines chunks in a tree (parallel in time).

**A gate may be -inf**: the state is forgotten there, forward and gradient. Packed documents are built on
it (`mask_documents`). It works because nothing here subtracts two decays: every exponent is a sum of
gates, so it is <= 0, and a row's numbers come from rows at or before it alone, bit for bit.

Source: Kimi Linear (arXiv 2510.26692), section 3; Kimi K3 (arXiv 2607.24653), eq. 5 for the bounded gate.
Einsum letters: b batch, t time, n chunk, c place in chunk, h heads, k key dim, v value dim.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kimi_jax.ops import segments
from kimi_jax.ops.situ import sigmoid

FORMS = ("chunked", "recurrent", "associative")
# exp(A_log) beyond this is no decay rate but an overflow in waiting: inf * 0 is NaN.
_MAX_A_LOG = 60.0


def decay_gate(f: jax.Array, A_log: jax.Array, dt_bias: jax.Array, *, lower_bound: float | None = None) -> jax.Array:
    """Turns the gate projection into log decays.

    g = lower_bound * sigmoid(exp(A_log) * (f + dt_bias))    with a bound (Kimi K3: -5)
    g = -exp(A_log) * softplus(f + dt_bias)                  without (Kimi Linear)

    A_log is taken as at most 60, so that exp(A_log) stays finite and a gate that underflows is 0, not NaN.

    Args:
      f: [.., h, k] output of the gate projection, split into heads.
      A_log: [h] log decay rate, one a head.
      dt_bias: [h, k].
      lower_bound: the most negative g, or None for no bound.

    Returns:
      g [.., h, k] <= 0, at least float32.

    Raises:
      ValueError: shapes that would broadcast into a different function, or a bound that is not negative.

    Source: Kimi K3 (arXiv 2607.24653), eq. 5; Kimi Linear (arXiv 2510.26692), section 4.
    """
    if dt_bias.ndim != 2 or f.shape[-2:] != dt_bias.shape:
        raise ValueError(
            f"decay_gate takes f [.., h, k] and dt_bias [h, k], not f {list(f.shape)} and "
            f"dt_bias {list(dt_bias.shape)}; reshape both to heads first"
        )
    if A_log.shape != dt_bias.shape[:1]:
        raise ValueError(
            f"A_log {list(A_log.shape)} is not one rate for each of {dt_bias.shape[0]} heads; "
            f"give A_log [{dt_bias.shape[0]}] (released files pad it with zeros: A_log[:{dt_bias.shape[0]}])"
        )
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound={lower_bound} is not negative; Kimi K3 has -5.0, None means no bound")
    dtype = jnp.promote_types(f.dtype, jnp.float32)
    u = f.astype(dtype) + dt_bias.astype(dtype)
    rate = jnp.exp(jnp.minimum(A_log.astype(dtype), _MAX_A_LOG))[:, None]
    if lower_bound is None:
        return -rate * jax.nn.softplus(u)
    return lower_bound * sigmoid(rate * u)  # its derivative keeps its digits where g is near the bound


def mask_documents(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    segment_ids: jax.Array,
    resets: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Writes document boundaries into the inputs, so that the recurrence needs no segment ids.

    Padding becomes q = k = v = 0, g = 0, beta = 0, which leaves the state as it is and reads 0, whatever
    stood there before (NaN included). A document's first token gets g = -inf, which forgets the state;
    only the row's first document keeps its gate, for it owns the initial state.

    Args:
      q, k, v, g, beta: as in `kda`.
      segment_ids: [b, t] integers; 0 is padding, a maximal run of one id >= 1 is a document.
      resets: [b, t] bool, `segments.resets` of the full row where these tokens are a span of it: whether a
        span's first token begins a document depends on the token before.

    Returns:
      (q, k, v, g, beta), masked.
    """
    resets = segments.resets(segment_ids) if resets is None else resets
    real = segment_ids > 0
    q, k, v, g = [jnp.where(real[:, :, None, None], x, 0) for x in (q, k, v, g)]
    g = jnp.where(resets[:, :, None, None], -jnp.inf, g)
    return q, k, v, g, jnp.where(real[:, :, None], beta, 0)


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    form: str = "chunked",
    chunk_size: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """Kimi Delta Attention over a batch of rows.

    S <- diag(exp g_t) S;  S <- S + beta_t k_t (v_t - S^T k_t)^T;  o_t = S^T (scale q_t)

    Arithmetic is in at least float32; products follow jax.default_matmul_precision (the inverse inside a
    chunk is always at the highest). Memory of the backward pass: `recurrent` keeps a state a token,
    `chunked` a state a chunk (the inside of a chunk is computed again), `associative` several a chunk.

    Args:
      q, k: [b, t, h, k], L2-normalised over the last axis.
      v: [b, t, h, v].
      g: [b, t, h, k] log decay <= 0; -inf forgets the state.
      beta: [b, t, h] write strength, 0 to 1.
      initial_state: [b, h, k, v], or None for zeros. It belongs to a row's first document.
      segment_ids: [b, t] integers for packed rows; 0 is padding (output 0, state unchanged), a maximal
        run of one id >= 1 is a document. None: each row is one document.
      scale: factor on q; None for k ** -0.5.
      form: "chunked", "recurrent" or "associative".
      chunk_size: tokens a chunk, any number >= 1; powers of two waste nothing.

    Returns:
      o [b, t, h, v] in v's dtype, and the final state [b, h, k, v] in the arithmetic's dtype: the one
      after the last real token of each row.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown form, chunk_size < 1, or no tokens.

    Source: Kimi Linear (arXiv 2510.26692), section 3.

    >>> one = jnp.ones((1, 3, 1, 1))
    >>> o, state = kda(one, one, 2 * one, 0 * one, one[..., 0])  # writes 2 at the key 1, three times
    >>> o.ravel().tolist(), state.item()
    ([2.0, 2.0, 2.0], 2.0)
    """
    _check(q, k, v, g, beta, initial_state, segment_ids, form, chunk_size)
    t, out_dtype = v.shape[1], v.dtype
    if segment_ids is not None:
        q, k, v, g, beta = mask_documents(q, k, v, g, beta, segment_ids)
    dtype = jnp.promote_types(jnp.result_type(q, k, v, g, beta), jnp.float32)
    if initial_state is None:
        # Shaped after the inputs, so that it is laid out over devices as they are.
        initial_state = jnp.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None, :], dtype)
    state = initial_state.astype(dtype)
    if form == "recurrent":
        o, state = _recurrent(q, k, v, g, beta, state)
    else:
        run = _chunked if form == "chunked" else _associative
        q, k, v, g, beta = [_split_chunks(x, chunk_size) for x in (q, k, v, g, beta)]
        o, state = run(q, k, v, g, beta, state)
        o = _join_chunks(o, t, chunk_size)
    o *= k.shape[-1] ** -0.5 if scale is None else scale
    return o.astype(out_dtype), state


def span(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    scale: float | None = None,
    chunk_size: int = 64,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """A span of tokens as an affine map of the state S that it starts from, in one pass over its chunks.

    o_t = o0_t + reads_t^T S,    S_after = transition S + state

    Spans that follow one another combine with `compose`; a device that holds one span of a long row needs no
    more than (transition, state) from the others. Write document boundaries into the inputs first
    (`mask_documents`, with the resets of the full row).

    Args:
      q, k, v, g, beta, scale, chunk_size: as in `kda`.

    Returns:
      o0 [b, t, h, v], the outputs from zero, and reads [b, t, h, k], the queries carried back to the span's
      start; transition [b, h, k, k], and the state [b, h, k, v] reached from zero. All in at least float32.
    """
    _check(q, k, v, g, beta, None, None, "chunked", chunk_size)
    t, size = k.shape[1:4:2]
    dtype = jnp.promote_types(jnp.result_type(q, k, v, g, beta), jnp.float32)
    # The recurrence acts on each column of the state alone: run it on the columns [I | 0] with values [0 | v],
    # and the final state is [transition | state], the outputs [reads | o0].
    start = jnp.zeros_like(k[:, 0, :, :, None] * jnp.concatenate([k, v], -1)[:, 0, :, None, :], dtype)
    start += jnp.eye(*start.shape[-2:], dtype=dtype)
    q, k, v, g, beta = [_split_chunks(x, chunk_size) for x in (q, k, v, g, beta)]
    o, end = _chunked(q, k, v, g, beta, start)
    o = _join_chunks(o, t, chunk_size) * (size**-0.5 if scale is None else scale)
    return o[..., size:], o[..., :size], end[..., :size], end[..., size:]


def span_transition(
    k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, *, chunk_size: int = 64
) -> tuple[jax.Array, jax.Array]:
    """What a span of tokens does to any state: S_after = transition S_before + state; see `span`.

    Args:
      k, v, g, beta, chunk_size: as in `kda`.

    Returns:
      transition [b, h, k, k], and the state [b, h, k, v] reached from zero.
    """
    return span(jnp.zeros_like(k), k, v, g, beta, chunk_size=chunk_size)[2:]


def compose(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The (transition, state) of two spans, the first followed by the second; associative.

    (A2, B2) after (A1, B1) = (A2 A1, A2 B1 + B2)

    Args:
      first, second: (transition [.., k, k], state [.., k, v]) as `span_transition` returns them. A state
        S stands for the pair (0, S).

    Returns:
      (transition, state) of the joined span.
    """
    return second[0] @ first[0], second[0] @ first[1] + second[1]


def _recurrent(q, k, v, g, beta, state):
    """One token at a time; arrays [b, t, h, ..]."""

    def step(S, x):
        q, k, v, g, beta = [a.astype(S.dtype) for a in x]
        S = jnp.exp(g)[..., None] * S
        u = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", S, k))
        S = S + k[..., None] * u[..., None, :]
        return S, jnp.einsum("bhkv,bhk->bhv", S, q)

    state, o = lax.scan(step, state, [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)])
    return jnp.moveaxis(o, 0, 1), state


def _chunked(q, k, v, g, beta, state):
    """One chunk at a time; arrays [n, b, c, h, ..]. Backward computes a chunk again from its first state.

    The inputs are cast, and heads moved before places, inside the step, so that no full array is copied.
    """

    def step(S, x):
        q, k, v, g, beta = [jnp.swapaxes(a, 1, 2).astype(S.dtype) for a in x]
        S, o = _advance(S, q, k, v, beta, *_within(q, k, g, beta))
        return S, jnp.swapaxes(o, 1, 2)

    state, o = lax.scan(jax.checkpoint(step), state, (q, k, v, g, beta))
    return o, state


def _associative(q, k, v, g, beta, state):
    """All chunks at once, their (transition, state) pairs combined in a tree; arrays [n, b, c, h, ..]."""
    q, k, v, g, beta = [jnp.swapaxes(x, 2, 3).astype(state.dtype) for x in (q, k, v, g, beta)]
    inside, size = _within(q, k, g, beta), k.shape[-1]
    start = jnp.eye(size, size + v.shape[-1], dtype=v.dtype)  # as in `span`
    end, _ = _advance(start, q, k, v, beta, *inside)
    # A leading pair (0, initial state) makes element n of the scan the state at the start of chunk n.
    transition = jnp.concatenate([jnp.zeros_like(end[:1, ..., :size]), end[..., :size]])
    written = jnp.concatenate([state[None], end[..., size:]])
    _, states = lax.associative_scan(compose, (transition, written))
    _, o = _advance(states[:-1], q, k, v, beta, *inside)
    return jnp.swapaxes(o, 2, 3), states[-1]


# An inverse is no place for the fast, low-precision products that accelerators default to.
_matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def _within(q, k, g, beta):
    """What a chunk computes independently of the state it starts from; arrays [.., c, k], c a power of two.

    For i, j in the chunk, with decay(i, j) = exp(g_{j+1} + .. + g_i):
      scores[i, j]  = sum_k q_i k_j decay(i, j)                  j <= i, else 0
      inverse       = (I + A)^-1,  A[i, j] = beta_i sum_k k_i k_j decay(i, j)   j < i, else 0

    Both grow by doubling. Blocks of size m pair up, and between the later and the earlier block of a pair
    decay is measured from the earlier block's last row: decay(i, j) = exp(since_i) exp(until_j), where
    since sums the gates from the later block's first row to i and until those from after j to the earlier
    block's last. Both are <= 0 for any gates, so nothing overflows and no mask is needed. The inverse of
    the pair is [[P, 0], [-D B P, D]], from the inverses P and D of its blocks: products of matrices alone,
    and none with growing powers, which repeated keys would make overflow.

    Returns:
      scores and inverse [.., c, c], since and until [.., c, k] for the chunk as one block.
    """
    lead, c = k.shape[:-2], k.shape[-2]
    blocks = lambda x, m: x.reshape(*lead, c // (2 * m), 2, m, x.shape[-1])  # noqa: E731
    halves = lambda x, m: (blocks(x, m)[..., 0, :, :], blocks(x, m)[..., 1, :, :])  # noqa: E731
    written = beta[..., None] * k
    scores = jnp.sum(q * k, -1)[..., None]  # [.., c, m], the blocks stacked over rows
    inverse = jnp.ones_like(scores)
    since, until = g, jnp.zeros_like(g)
    m = 1
    while m < c:
        (since_0, since_1), (until_0, until_1) = halves(since, m), halves(until, m)
        earlier = halves(k, m)[0] * jnp.exp(until_0)
        decay = jnp.exp(since_1)
        later = jnp.concatenate([halves(written, m)[1] * decay, halves(q, m)[1] * decay], -2)
        cross = jnp.einsum("...ik,...jk->...ij", later, earlier)
        (P, D), (scores_0, scores_1) = halves(inverse, m), halves(scores, m)
        low = -_matmul(D, _matmul(cross[..., :m, :], P))
        inverse = _triangle(P, low, D).reshape(*lead, c, 2 * m)
        scores = _triangle(scores_0, cross[..., m:, :], scores_1).reshape(*lead, c, 2 * m)
        since = jnp.concatenate([since_0, since_1 + since_0[..., -1:, :]], -2).reshape(g.shape)
        until = jnp.concatenate([until_0 + since_1[..., -1:, :], until_1], -2).reshape(g.shape)
        m *= 2
    return scores, inverse, since, until


def _triangle(first, low, second):
    """[[first, 0], [low, second]]"""
    return jnp.concatenate(
        [
            jnp.concatenate([first, jnp.zeros_like(low)], -1),
            jnp.concatenate([low, second], -1),
        ],
        -2,
    )


def _advance(S, q, k, v, beta, scores, inverse, since, until):
    """Carries a state over a chunk: (state after it, outputs); arrays [.., c, ..].

    u [c, v], what each token writes at its key, solves (I + A) u = beta (v - (exp(since) k)^T S). Leading
    columns of S beyond v's get no values.
    """
    v = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(S.shape[-1] - v.shape[-1], 0)])
    decay = jnp.exp(since)
    u = inverse @ (beta[..., None] * (v - (k * decay) @ S))
    o = (q * decay) @ S + scores @ u
    S = decay[..., -1, :, None] * S + jnp.swapaxes(k * jnp.exp(until), -1, -2) @ u
    return S, o


def _split_chunks(x, chunk_size):
    """[b, t, h, ..] -> [n, b, c, h, ..], filled up with zeros (which neither decay nor write) to whole
    chunks, and each chunk to c, a power of two."""
    b, t = x.shape[:2]
    size = min(chunk_size, t)
    n = -(-t // size)
    c = 1 << (size - 1).bit_length()
    rest = [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, [(0, 0), (0, n * size - t), *rest]).reshape(b, n, size, *x.shape[2:])
    x = jnp.pad(x, [(0, 0), (0, 0), (0, c - size), *rest])
    return jnp.moveaxis(x, 1, 0)


def _join_chunks(x, t, chunk_size):
    """[n, b, c, h, v] -> [b, t, h, v]: undoes `_split_chunks`."""
    n, b = x.shape[:2]
    size = min(chunk_size, t)
    return jnp.moveaxis(x[:, :, :size], 0, 1).reshape(b, n * size, *x.shape[3:])[:, :t]


def _check(q, k, v, g, beta, initial_state, segment_ids, form, chunk_size):
    """Refuses what would broadcast, or end in a message from inside XLA."""
    if k.ndim != 4 or v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"k {list(k.shape)} and v {list(v.shape)} are not [b, t, h, k] and [b, t, h, v]")
    b, t, h, _ = k.shape
    if t == 0:
        raise ValueError("kda needs t >= 1 tokens, but k has t=0; skip the call and keep the state")
    state_shape = (b, h, k.shape[-1], v.shape[-1])
    for name, x, shape, legend in (
        ("q", q, k.shape, "[b, t, h, k]"),
        ("g", g, k.shape, "[b, t, h, k], one log decay a channel"),
        ("beta", beta, (b, t, h), "[b, t, h]"),
        ("initial_state", initial_state, state_shape, "[b, h, k, v], keys before values"),
        ("segment_ids", segment_ids, (b, t), "[b, t]"),
    ):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {list(x.shape)} but k and v ask for {list(shape)}: {legend}")
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta), ("initial_state", initial_state)):
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} is {x.dtype}; give a floating dtype")
    if form not in FORMS:
        raise ValueError(f"form={form!r} is unknown; choose one of {', '.join(FORMS)}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} holds no token; give 1 or more (64 suits most shapes)")
