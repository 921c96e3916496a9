"""Short causal convolution over packed rows."""

import jax
import jax.numpy as jnp

from kimi_jax.ops.segments import document_ids, positions
from kimi_jax.ops.situ import silu


def _spread(mask: jax.Array, like: jax.Array) -> jax.Array:
    """[b, t] -> [b, t, 1, ..], to go with an array of channels."""
    return mask.reshape(*mask.shape, *[1] * (like.ndim - 2))


@jax.checkpoint  # shifted copies of x would be kept otherwise
def short_conv(
    x: jax.Array,
    weight: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    tail: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Convolves each channel with its own few taps, causally, then applies SiLU.

    y_t = silu(sum_j weight[w-1-j] x_{t-j}),  j = 0 .. w-1

    No tap crosses into another document. What stands before the row's first document is `tail`; leading padding
    does not come between them. Computed in at least float32.

    Args:
      x: [b, t, *channels].
      weight: [*channels, w]; the last tap multiplies the current token.
      segment_ids: [b, t] int32, 0 for padding; None when each row is one document.
      tail: [b, w-1, *channels] the inputs before the row, newest last; None for zeros.

    Returns:
      y: [b, t, *channels] in x.dtype, 0 at padding whatever x holds there.
      new_tail: [b, w-1, *channels] in x.dtype, the last inputs of the row's last document (and of `tail`, where
        that document is the first and short); the `tail` itself for a row of padding.

    Raises:
      ValueError: shapes that do not fit.

    Source: Kimi Linear report; the released `modeling_kimi_linear.py` (Conv1d weights, last tap newest).
    """
    b, t, *channels = x.shape
    before = weight.shape[-1] - 1
    if weight.shape[:-1] != tuple(channels):
        raise ValueError(f"conv weight {weight.shape} must be [*channels, taps], with the channels {channels} of x")
    if tail is None:
        history = jnp.zeros((b, before, *channels), x.dtype)
    elif tail.shape == (b, before, *channels):
        history = tail.astype(x.dtype)
    else:
        raise ValueError(f"conv tail {tail.shape} must hold the last taps - 1 inputs: {(b, before, *channels)}")

    if segment_ids is None:
        inputs = jnp.concatenate([history, x], axis=1)
        new_tail = inputs[:, t:]
    else:
        document, place = document_ids(segment_ids), positions(segment_ids)
        real = document > 0
        row = jax.vmap(lambda inputs, tail, first: jax.lax.dynamic_update_slice_in_dim(inputs, tail, first, 0))
        window = jax.vmap(lambda inputs, start: jax.lax.dynamic_slice_in_dim(inputs, start, before, 0))
        x = jnp.where(_spread(real, x), x, 0)  # a NaN in padding times a zero tap is still NaN
        # The tail goes right before the first real token, over leading padding that nothing reads.
        inputs = jnp.pad(x, ((0, 0), (before, 0), *[(0, 0)] * len(channels)))
        inputs = row(inputs, history, jnp.argmax(real, axis=1))
        last = jnp.where(jnp.any(real, axis=1), t - 1 - jnp.argmax(real[:, ::-1], axis=1), -1)
        # Token i stands at inputs[i + before]; a document's own inputs and, for the first, the tail are kept.
        number = jnp.max(document, axis=1)
        length = jnp.where(number > 1, jnp.take_along_axis(place, last[:, None], axis=1)[:, 0] + 1, before)
        reach = jnp.where(document == 1, before, place)  # how many inputs back a token sees
        own = jnp.arange(before) >= before - length[:, None]
        new_tail = jnp.where(_spread(own, x), window(inputs, last + 1), 0)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    inputs, weight = inputs.astype(wide), weight.astype(wide)
    total = inputs[:, before:] * weight[..., before]
    for back in range(1, before + 1):
        shifted = inputs[:, before - back : before - back + t]
        if segment_ids is not None:
            shifted = jnp.where(_spread(jnp.greater_equal(reach, back), x), shifted, 0)
        total += shifted * weight[..., before - back]
    y = silu(total)
    if segment_ids is not None:
        y = jnp.where(_spread(real, y), y, 0)
    return y.astype(x.dtype), new_tail
