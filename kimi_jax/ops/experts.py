"""Routed experts as matmuls over tokens grouped by expert: static shapes, and no token is dropped.

Every (token, choice) pair becomes one row. Rows are sorted by expert, multiplied by their expert's matrices and
gathered back. Row movement is by gathers in both directions of differentiation, never by a floating-point
scatter-add, so two runs agree bit for bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

Backend = Literal["blocks", "ragged"]


class _Plan(NamedTuple):
    """Who sits where. M = n k pairs of a token and one of its choices, numbered token * k + choice."""

    pair: jax.Array  # [rows] the pair in each row; M in a row of padding
    row: jax.Array  # [n, k] the row of each pair
    groups: jax.Array  # blocks: [blocks] expert of each block; ragged: [e] rows of each expert


def _plan(indices: jax.Array, num_experts: int, block: int) -> _Plan:
    """Sorts the pairs by expert; block > 0 pads each expert's rows to whole blocks."""
    flat = indices.reshape(-1).astype(jnp.int32)
    m = flat.size
    number = jnp.arange(m, dtype=jnp.int32)
    if num_experts * m < 2**31:  # one integer holds expert and pair: sorts about four times as fast
        packed = jnp.sort(flat * m + number)
        expert, pair = packed // m, packed % m
    else:
        pair = jnp.argsort(flat, stable=True).astype(jnp.int32)
        expert = flat[pair]
    sizes = jnp.bincount(flat, length=num_experts).astype(jnp.int32)
    if not block:
        row = jnp.zeros(m, jnp.int32).at[pair].set(number, unique_indices=True)
        return _Plan(pair, row.reshape(indices.shape), sizes)
    # Any split of m rows over the experts fits: sum ceil(size / block) <= (m + min(e, m) (block - 1)) / block.
    num_blocks = (m + min(num_experts, m) * (block - 1)) // block
    ends = jnp.cumsum(-(-sizes // block))  # in blocks
    shift = (ends - -(-sizes // block)) * block - (jnp.cumsum(sizes) - sizes)  # first padded row - first sorted row
    place = number + shift[expert]
    row = jnp.zeros(m, jnp.int32).at[pair].set(place, unique_indices=True)
    pair = jnp.full(num_blocks * block, m, jnp.int32).at[place].set(pair, unique_indices=True)
    owner = jnp.searchsorted(ends, jnp.arange(num_blocks), side="right", method="compare_all")
    return _Plan(pair, row.reshape(indices.shape), jnp.minimum(owner, num_experts - 1))


@jax.custom_vjp
def _dispatch(x: jax.Array, plan: _Plan) -> jax.Array:
    """[n, d] -> [rows, d]: each pair's token; zeros in rows of padding."""
    return x.at[plan.pair // plan.row.shape[1]].get(mode="fill", fill_value=0)


def _dispatch_bwd(plan, d_rows):
    wide = jnp.promote_types(d_rows.dtype, jnp.float32)
    return jnp.sum(d_rows[plan.row], axis=1, dtype=wide).astype(d_rows.dtype), None


_dispatch.defvjp(lambda x, plan: (_dispatch(x, plan), plan), _dispatch_bwd)


@jax.custom_vjp
def _combine(rows: jax.Array, weights: jax.Array, plan: _Plan) -> jax.Array:
    """[rows, d], [n, k] -> [n, d]: the weighted sum of a token's rows, in at least float32."""
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    return jnp.sum(rows[plan.row].astype(wide) * weights.astype(wide)[..., None], axis=1).astype(rows.dtype)


def _combine_bwd(residuals, d_out):
    rows, weights, plan = residuals
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    share = weights.reshape(-1).astype(wide).at[plan.pair].get(mode="fill", fill_value=0)
    d_rows = share[:, None] * d_out.at[plan.pair // plan.row.shape[1]].get(mode="fill", fill_value=0).astype(wide)
    d_weights = jnp.sum(rows[plan.row].astype(wide) * d_out.astype(wide)[:, None], axis=-1)
    return d_rows.astype(rows.dtype), d_weights.astype(weights.dtype), None


_combine.defvjp(lambda *args: (_combine(*args), args), _combine_bwd)


@jax.custom_vjp
def _block_matmul(rows: jax.Array, w: jax.Array, owner: jax.Array) -> jax.Array:
    """[blocks, c, d], [e, d, f], [blocks] -> [blocks, c, f]: every block times its expert's matrix.

    A loop over blocks reads each matrix in place. A batched matmul would first copy one for every block.
    """
    return jax.lax.map(lambda block: _dot(block[0], w[block[1]]).astype(rows.dtype), (rows, owner))


def _dot(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def _block_matmul_bwd(residuals, d_out):
    rows, w, owner = residuals

    def step(d_w, block):
        x, dy, expert = block
        return d_w.at[expert].add(_dot(x.T, dy)), _dot(dy, w[expert].T).astype(rows.dtype)

    zero = jnp.zeros(w.shape, jnp.promote_types(w.dtype, jnp.float32))
    d_w, d_rows = jax.lax.scan(step, zero, (rows, d_out, owner))
    return d_rows, d_w.astype(w.dtype), None


_block_matmul.defvjp(lambda *args: (_block_matmul(*args), args), _block_matmul_bwd)


def _ragged_matmul(rows, w, sizes):
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    return jax.lax.ragged_dot(rows, w, sizes, preferred_element_type=wide).astype(rows.dtype)


def _block_size(m: int, num_experts: int) -> int:
    """Small blocks waste little on padding, large ones on the loop: an eighth of the mean group, within 8 and 64."""
    return min(max(8, 1 << (max(1, m // num_experts) // 8).bit_length()), 64)


def expert_mlp(
    x: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    backend: Backend | None = None,
) -> jax.Array:
    """Sends each token through its chosen experts and sums their outputs by weight.

    y_i = cast(sum_j weight_ij * cast(activation(x_i w_gate[e_ij], x_i w_up[e_ij]) w_down[e_ij]))

    An expert's output is rounded to x.dtype; the weighting, after w_down, and the sum are in at least float32.
    Nothing is dropped, whatever the routing: all tokens may choose one expert. All shapes are static.

    Args:
      x: [n, d].
      indices: [n, k] integers in [0, e).
      weights: [n, k], at least float32.
      w_gate, w_up: [e, d, f].
      w_down: [e, f, d].
      activation: (gate [..., f], up [..., f]) -> [..., f]; with zeros it must be finite.
      backend: "blocks" pads each expert's rows to whole blocks and loops over those: for CPUs, where
        `lax.ragged_dot` multiplies every row by every expert. "ragged" is `lax.ragged_dot`, without padding. None
        takes "blocks" where JAX runs on the CPU; give "ragged" to compile for another device from there.

    Returns:
      [n, d] in x.dtype.

    Raises:
      ValueError: an unknown backend, or shapes that do not fit each other.

    Source: K3 report, section 2 (Stable LatentMoE); `KimiSparseMoeBlock` in `modeling_kimi_linear.py`.
    """
    (n, d), (num_experts, _, f) = x.shape, w_gate.shape
    if w_gate.shape != (num_experts, d, f) or w_up.shape != w_gate.shape or w_down.shape != (num_experts, f, d):
        raise ValueError(
            f"expert matrices {w_gate.shape}, {w_up.shape}, {w_down.shape} do not fit tokens {x.shape}; "
            "give w_gate and w_up as [experts, d, f] and w_down as [experts, f, d]"
        )
    if indices.shape != weights.shape or indices.shape[0] != n:
        raise ValueError(f"indices {indices.shape} and weights {weights.shape} must both be [{n} tokens, choices]")
    if backend is None:
        backend = "blocks" if jax.default_backend() == "cpu" else "ragged"
    if backend == "blocks":
        block = _block_size(indices.size, num_experts)
        plan = _plan(indices, num_experts, block)
        rows = _dispatch(x, plan).reshape(-1, block, d)
        matmul = partial(_block_matmul, owner=plan.groups)
    elif backend == "ragged":
        plan = _plan(indices, num_experts, 0)
        rows = _dispatch(x, plan)
        matmul = partial(_ragged_matmul, sizes=plan.groups)
    else:
        raise ValueError(f'backend={backend!r} is unknown; use "blocks", "ragged" or None')
    w_gate, w_up, w_down = (w.astype(x.dtype) for w in (w_gate, w_up, w_down))
    hidden = activation(matmul(rows, w_gate), matmul(rows, w_up))
    return _combine(matmul(hidden, w_down).reshape(-1, d), weights, plan)
