"""Moves rows and expert weights between the ranks of an expert axis."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from kimi_jax.ops import experts
from kimi_jax.parallel.expert_plan import Traffic
from kimi_jax.parallel.spec import varying

Transport = Literal["gather", "a2a", "ragged"]


def move(
    rows: jax.Array,
    traffic: Traffic,
    num_rows: int,
    *,
    axis: str,
    transport: Transport,
    window: int,
    overlap: bool = False,
    place: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Moves slices of rows between the ranks of an axis, and sums slices that land on each other.

    It is linear: the transpose of moving by `traffic` is moving by `traffic.back`.

    Args:
      rows: [n, d].
      traffic: which slices; the same on all ranks.
      num_rows: of the result.
      axis: mesh axis.
      transport: "gather" is an all-gather of windows of the buffers, the reference. "a2a" is a dense all-to-all of
        windows of the slices, as many times as the largest slice needs: none is too large, and memory is a window for
        each rank. "ragged" is `lax.ragged_all_to_all`, which moves the slices and nothing else: GPUs and most TPU
        slices have it, CPUs do not.
      window: rows between a pair of ranks at a time, at most n and num_rows; not for "ragged".
      overlap: whether slices may land on each other.
      place: index into `rows` of each number that the slices count in: moves rows[place(arange(n))] without that copy.
        Not for "ragged", whose slices must be contiguous.

    Returns:
      [num_rows, d], zero where nothing lands.
    """
    start, size, land = traffic
    me = jax.lax.axis_index(axis)
    empty = experts.vary_like(jnp.zeros((num_rows, rows.shape[1]), rows.dtype), rows, size)
    if transport == "ragged":
        # This collective checks nothing: sizes never leave the buffers, and the clamp lets no error turn into one.
        size = jnp.clip(size, 0, min(rows.shape[0], num_rows))

        def exchange_slices(size):
            slices = start[me], size[me], land[me], size[:, me]
            return jax.lax.ragged_all_to_all(rows, empty, *slices, axis_name=axis)

        if not overlap:
            return exchange_slices(size)
        turn = jnp.cumsum(size > 0, axis=0, dtype=jnp.int32)  # a destination hears one source at a time
        turns = _same_number(jnp.max(turn), axis)
        return jax.lax.fori_loop(
            0, turns, lambda i, out: out + exchange_slices(jnp.where(turn == i + 1, size, 0)), empty
        )
    numbers = jnp.arange(window, dtype=jnp.int32)
    if transport == "gather":
        first, last = jnp.zeros_like(start), jnp.max(jnp.where(size > 0, start + size, 0))
    elif transport == "a2a":
        first, last = start, jnp.max(size)
    else:
        raise ValueError(f'transport={transport!r} is unknown; use "gather", "a2a" or "ragged"')

    def take(numbers):
        numbers = jnp.clip(numbers, 0, rows.shape[0] - 1)
        return rows[numbers if place is None else place(numbers)]

    def exchange(i):
        """The i-th window of each source: [source, window, d]."""
        if transport == "gather":
            return jax.lax.all_gather(take(i * window + numbers), axis)
        return jax.lax.all_to_all(take(start[me][:, None] + i * window + numbers), axis, 0, 0, tiled=True)

    def round_(i, out):
        got = exchange(i)
        ahead = first[:, me] + i * window - start[:, me]  # of each source: the window's begin, in the slice
        brings = (size[:, me] > 0) & (ahead + window > 0) & (ahead < size[:, me])
        sources = jnp.argsort(~brings).astype(jnp.int32)  # often one or none

        def put(j, out):
            p = sources[j]
            at = jnp.clip(land[p, me] + ahead[p], 0, num_rows - window)
            source = at - land[p, me] + numbers  # what belongs there, in the slice
            valid = (source >= jnp.maximum(ahead[p], 0)) & (source < jnp.minimum(ahead[p] + window, size[p, me]))
            new = jnp.where(valid[:, None], got[p].at[source - ahead[p]].get(mode="clip"), 0)
            new = jax.lax.dynamic_slice_in_dim(out, at, window) + new
            return jax.lax.dynamic_update_slice_in_dim(out, new, at, 0)

        return jax.lax.fori_loop(0, jnp.sum(brings, dtype=jnp.int32), put, out)

    return jax.lax.fori_loop(0, _same_number(-(-last // window), axis), round_, empty)


def _same_number(turns: jax.Array, axis: str) -> jax.Array:
    """Turns of a loop with collectives: where other mesh axes hold other tokens, as many as any of them needs.

    The ranks of `axis` agree anyway. Devices of one program that leave a loop at different times hang some platforms.
    """
    others = tuple(sorted(varying(turns) - {axis}))
    return jax.lax.pmax(turns, others) if others else turns


def row_window(num_rows: int, num_ranks: int, transport: Transport) -> int:
    """Rows of tokens between two ranks at a time: all for "gather", else an even share and a quarter more."""
    return num_rows if transport == "gather" else min(num_rows, _eights(-(-5 * num_rows // (4 * num_ranks))))


def expert_window(m: int, lines: int, num_ranks: int) -> int:
    """Lines of experts between two ranks at a time: few are lent as a rule, and all windows together are m at most."""
    even = m * lines // num_ranks
    return min(m * lines, _eights(max(even // 2, min(even, lines))))


def _eights(n: int) -> int:
    return max(8, -(-n // 8) * 8)
