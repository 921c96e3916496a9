"""Packed rows: where documents begin, and which tokens are padding.

`segment_ids [b, t]` int32 marks each token: 0 is padding, allowed anywhere in a row, and each maximal run
of one id >= 1 is a document. So 1, 1, 0, 1 is two documents, and 1, 1, 2, 2 is two.
"""

import jax
import jax.numpy as jnp


def starts(segment_ids: jax.Array) -> jax.Array:
    """Marks the first token of each document.

    start_t = (id_t >= 1) and (id_t != id_{t-1}), with id_{-1} = 0.

    Args:
      segment_ids: [b, t] integers, 0 for padding.

    Returns:
      [b, t] bool.

    Raises:
      ValueError: the ids are not a two-dimensional array of integers.

    >>> starts(jnp.array([[0, 1, 1, 0, 1, 2]])).astype(int).tolist()
    [[0, 1, 0, 0, 1, 1]]
    """
    if segment_ids.ndim != 2 or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(
            f"segment_ids is {segment_ids.dtype}{list(segment_ids.shape)}; "
            "give integers [batch, time] with 0 for padding"
        )
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    return (segment_ids > 0) & (segment_ids != before)


def document_ids(segment_ids: jax.Array) -> jax.Array:
    """Numbers the documents of each row 1, 2, ... in order; padding is 0.

    Two tokens belong to one document exactly when their numbers are equal and not 0, which the ids
    themselves do not say (the id may come back after a gap).

    Args:
      segment_ids: [b, t] integers, 0 for padding.

    Returns:
      [b, t] int32.

    >>> document_ids(jnp.array([[0, 1, 1, 0, 1, 2]])).tolist()
    [[0, 1, 1, 0, 2, 3]]
    """
    number = jnp.cumsum(starts(segment_ids), axis=1, dtype=jnp.int32)
    return jnp.where(segment_ids > 0, number, 0)


def resets(segment_ids: jax.Array) -> jax.Array:
    """Marks the tokens before which a recurrent state is forgotten.

    These are the starts of all documents but a row's first, which owns the initial state.

    Args:
      segment_ids: [b, t] integers, 0 for padding.

    Returns:
      [b, t] bool.

    >>> resets(jnp.array([[0, 1, 1, 0, 1, 2]])).astype(int).tolist()
    [[0, 0, 0, 0, 1, 1]]
    """
    return starts(segment_ids) & (document_ids(segment_ids) > 1)


def positions(segment_ids: jax.Array) -> jax.Array:
    """Counts tokens from the start of their document: 0, 1, 2, ...; 0 at padding.

    Args:
      segment_ids: [b, t] integers, 0 for padding.

    Returns:
      [b, t] int32.

    >>> positions(jnp.array([[0, 1, 1, 0, 1, 1]])).tolist()
    [[0, 0, 1, 0, 0, 1]]
    """
    place = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    begin = jax.lax.cummax(jnp.where(starts(segment_ids), place, 0), axis=1)
    return jnp.where(segment_ids > 0, place - begin, 0)
