"""Next-token cross-entropy, weighted by token: sums and not means, so that parts of a batch add up."""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums weight * nll over tokens: nll = log(sum_v exp(logits_v)) - logits_target.

    Divide the first by the second only after adding up all micro-batches and devices: a mean of means weights
    tokens by the company they keep.

    Args:
      logits: [..., vocab].
      targets: [...] int token ids; any value where the weight is 0.
      weights: [...] weight of each token, 0 for padding: what the logits hold there, NaN included, has no effect.

    Returns:
      (sum of weight * nll in nats, sum of weights), scalars in at least float32.
    """
    nll, weights, _ = _nll(logits, targets, weights)
    return jnp.sum(weights * nll), jnp.sum(weights)


def _nll(logits, targets, weights, vocab_axes=()):
    """-> nll [...], weights [...], log-probabilities' normaliser [..., 1], all in at least float32."""
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    weights = weights.astype(wide)
    logits = jnp.where((weights != 0)[..., None], logits.astype(wide), 0)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.sum(jnp.where(_one_hot(targets, logits, vocab_axes), logits, 0), axis=-1)
    if vocab_axes:
        top = jax.lax.pmax(total, vocab_axes)
        total = top + jnp.log(jax.lax.psum(jnp.exp(total - top), vocab_axes))
        chosen = jax.lax.psum(chosen, vocab_axes)
    return total[..., 0] - chosen, weights, total


def _one_hot(targets, logits, vocab_axes=()):
    first = jax.lax.axis_index(vocab_axes) * logits.shape[-1] if vocab_axes else 0
    return targets[..., None] == first + jnp.arange(logits.shape[-1])


def chunked_cross_entropy(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    gradients: bool,
    chunk_size: int = 1024,
    vocab_axes: tuple[str, ...] = (),
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array] | None]:
    """`cross_entropy` of logits = x head, without ever holding the logits of more than `chunk_size` tokens.

    The gradient of a sum over tokens is known up to one factor as soon as a chunk's logits are, so it is taken
    while they are there: one matmul forward and two for the gradients, none repeated. For use inside a custom VJP.

    Args:
      x: [n, d] hidden states.
      head: [d, vocab] in x's dtype.
      targets: [n] int token ids; any value where the weight is 0.
      weights: [n] weight of each token, 0 for padding: what x holds there, NaN included, has no effect.
      gradients: whether to compute them.
      chunk_size: tokens at a time; need not divide their number.
      vocab_axes: inside shard_map, the mesh axes that the vocabulary is split over; `head` is this device's part.

    Returns:
      The sum of weight * nll in nats, in weights' dtype; and, if asked for, its gradients by x [n, d],
      head [d, vocab] and weights [n] in that dtype.
    """
    n, wide = x.shape[0], weights.dtype
    x = jnp.where((weights != 0)[:, None], x, 0)
    chunk = min(chunk_size, n)
    fill = -n % chunk
    x = jnp.pad(x, ((0, fill), (0, 0))).reshape(-1, chunk, x.shape[-1])
    targets, weights = (jnp.pad(a, (0, fill)).reshape(-1, chunk) for a in (targets, weights))

    def step(carry, chunk):
        loss, d_head = carry
        x, targets, weights = chunk
        logits = jnp.dot(x, head, preferred_element_type=wide)
        nll, _, total = _nll(logits, targets, weights, vocab_axes)
        loss += jnp.sum(weights * nll)
        if not gradients:
            return (loss, d_head), None
        probs = jnp.exp(logits - total)
        d_logits = weights[:, None] * jnp.where(_one_hot(targets, logits, vocab_axes), probs - 1, probs)
        d_head += jnp.dot(x.astype(wide).T, d_logits)
        d_x = jnp.dot(d_logits, head.astype(wide).T)
        return (loss, d_head), (jax.lax.psum(d_x, vocab_axes) if vocab_axes else d_x, nll)

    # Zeros made of the inputs, so that inside shard_map they vary over devices as what is added to them does.
    d_head = jnp.zeros_like(head, wide) if gradients else None
    (loss, d_head), outputs = jax.lax.scan(step, (jnp.sum(weights[:0]), d_head), (x, targets, weights))
    if d_head is None or outputs is None:
        return loss, None
    d_x, nll = (a.reshape(-1, *a.shape[2:])[:n] for a in outputs)
    return loss, (d_x, d_head, nll)
