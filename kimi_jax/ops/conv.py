"""Short causal convolution over packed rows."""

import jax
import jax.numpy as jnp

from kimi_jax.ops.segments import document_ids, positions
from kimi_jax.ops.situ import silu


def _spread(mask: jax.Array, like: jax.Array) -> jax.Array:
    """[b, t] -> [b, t, 1, ..], to go with an array of channels."""
    return mask.reshape(*mask.shape, *[1] * (like.ndim - 2))


def _window(x: jax.Array, start: int | jax.Array, size: int, reach: jax.Array | None, back: int | jax.Array):
    """x[:, start : start + size], without the outputs that do not see `back` inputs back."""
    part = jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)
    return part if reach is None else jnp.where(_spread(reach >= back, x), part, 0)


@jax.custom_vjp
def _taps(inputs: jax.Array, weight: jax.Array, reach: jax.Array | None) -> jax.Array:
    """[b, w-1+t, *channels] -> [b, t, *channels]: the weighted sum of shifts.

    The derivative is by hand for speed on CPUs, where what XLA fuses by itself was 10 times slower.
    """
    before = weight.shape[-1] - 1
    size = inputs.shape[1] - before
    shifts = [
        _window(inputs, before - back, size, reach, back) * weight[..., before - back] for back in range(before + 1)
    ]
    return sum(shifts[1:], shifts[0])


def _taps_bwd(residuals, d_out):
    inputs, weight, reach = residuals
    before, size = weight.shape[-1] - 1, d_out.shape[1]
    # The barrier has d_out computed once, rather than again inside each shift.
    sides = ((0, 0), (before, before))
    padded = jax.lax.optimization_barrier(jnp.pad(d_out, (*sides, *[(0, 0)] * (d_out.ndim - 2))))
    seen = None if reach is None else jnp.pad(reach, sides)
    shifts = [
        _window(padded, back, size + before, None if seen is None else seen[:, back : back + size + before], back)
        * weight[..., before - back]
        for back in range(before + 1)
    ]
    d_inputs = sum(shifts[1:], shifts[0])
    d_out = padded[:, before : before + size]
    d_weight = jax.lax.map(
        lambda tap: jnp.sum(_window(inputs, tap, size, reach, before - tap) * d_out, axis=(0, 1)),
        jnp.arange(before + 1),
    )
    return d_inputs, jnp.moveaxis(d_weight, 0, -1), None


_taps.defvjp(lambda *args: (_taps(*args), args), _taps_bwd)


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

    Source: Kimi Linear report, section 4; `fla/modules/convolution.py` for the layout of the taps.
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
        own = jnp.arange(before) >= before - length[:, None]
        new_tail = jnp.where(_spread(own, x), window(inputs, last + 1), 0)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    # How many earlier inputs a token sees: those of its document, and for the first document the tail too.
    reach = None if segment_ids is None else jnp.where(document == 1, before, place)
    y = silu(_taps(inputs.astype(wide), weight.astype(wide), reach))
    if segment_ids is not None:
        y = jnp.where(_spread(real, y), y, 0)
    return y.astype(x.dtype), new_tail
