"""Routed experts as matmuls over tokens grouped by expert: static shapes, and no token is dropped.

Every (token, choice) pair becomes one row. Rows are sorted by expert, multiplied by their expert's matrices and
gathered back. Row movement is by gathers in both directions of differentiation, never by a floating-point
scatter-add, so two runs agree bit for bit.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.ops.quant.qtensor import QTensor


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class Stacked:
    """One layer's matrices [e, ..], left in the array of all layers.

    A loop over layers copies what it takes a slice of: all experts of a layer, where a step of generation needs few. To
    the loop this is a pytree of `first` alone, sliced instead; the array stays outside. So it lives within one trace.
    """

    first: jax.Array
    """Where the layer's matrices begin, int32; in front of the loop, of each layer."""
    all: jax.Array | QTensor
    """[layers * e, ..], without a gradient."""
    num_experts: int

    @classmethod
    def of(cls, w: jax.Array | QTensor, stack: int) -> "Stacked":
        """Of matrices [.., e, d, f] whose first `stack` axes are layers."""
        *layers, e = w.shape[: stack + 1]
        first = e * jnp.arange(math.prod(layers), dtype=jnp.int32).reshape(layers)
        return cls(first, jax.tree.map(lambda a: a.reshape(-1, *a.shape[stack + 1 :]), w), e)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_experts, *self.all.shape[1:])

    def __getitem__(self, expert: jax.Array) -> jax.Array | QTensor:
        return self.all[self.first + expert]

    def tree_flatten(self):
        return (self.first,), self

    @classmethod
    def tree_unflatten(cls, outside: "Stacked", children):
        return cls(children[0], outside.all, outside.num_experts)


Backend = Literal["blocks", "ragged"]
Activation = Callable[[jax.Array, jax.Array], jax.Array]
Matrices = Sequence[jax.Array | QTensor | Stacked]
"""w_gate and w_up [e, d, f], w_down [e, f, d]; only arrays take a gradient."""


class Layout(NamedTuple):
    """Who sits where. M = n k pairs of a token and one of its choices, numbered token * k + choice."""

    pair: jax.Array  # [rows] the pair in each row; M in a row of padding
    row: jax.Array  # [n, k] the row of each pair
    groups: jax.Array  # [blocks] the group of each block, or, without blocks, [groups] the rows of each group
    ends: jax.Array | None = None  # with blocks: [groups] where each group's blocks end; what follows is padding


def vary_like(x: jax.Array, *like: jax.Array | QTensor | Stacked) -> jax.Array:
    """x, typed as varying over every mesh axis over which `like` varies: what a loop inside shard_map starts from."""
    axes = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves((x, like))))
    new = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
    return jax.lax.pcast(x, new, to="varying") if new else x


def seat(pair: jax.Array, place: jax.Array, num_rows: int, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Seats pair[i] in row place[i], nobody when that is num_rows or more: (pair [num_rows], row [shape])."""
    m = shape[0] * shape[1]
    row = vary_like(jnp.zeros(m, jnp.int32), place).at[pair].set(place, unique_indices=True)
    empty = vary_like(jnp.full(num_rows, m, jnp.int32), place)
    return empty.at[place].set(pair, unique_indices=True, mode="drop"), row.reshape(shape)


def sort_by_expert(indices: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[n, k] -> the pairs sorted by expert (stable), the expert of each, the pairs of each expert; int32."""
    flat = indices.reshape(-1).astype(jnp.int32)
    m = flat.size
    if num_experts * m < 2**31:  # one integer holds expert and pair: sorts about four times as fast
        packed = jnp.sort(flat * m + jnp.arange(m, dtype=jnp.int32))
        expert, pair = packed // m, packed % m
    else:
        pair = jnp.argsort(flat, stable=True).astype(jnp.int32)
        expert = flat[pair]
    return pair, expert, jnp.bincount(flat, length=num_experts).astype(jnp.int32)


def lay_out(
    pair: jax.Array, group: jax.Array, place: jax.Array, sizes: jax.Array, shape: tuple[int, ...], block: int
) -> Layout:
    """Lays out pairs by group; block > 0 pads each group to a multiple of the block.

    pair[i] belongs to group[i] and is place[i]-th when pairs are sorted by group, or, from pair.size on, left out.
    """
    m, num_groups = pair.size, sizes.size
    if not block:
        return Layout(*seat(pair, place, m, shape), sizes)
    # Any split of m rows over the groups fits: sum ceil(size / block) <= (m + min(groups, m) (block - 1)) / block.
    num_blocks = (m + min(num_groups, m) * (block - 1)) // block
    ends = jnp.cumsum(-(-sizes // block), dtype=jnp.int32)  # in blocks
    shift = (ends - -(-sizes // block)) * block - (jnp.cumsum(sizes, dtype=jnp.int32) - sizes)  # padded - sorted row
    place = jnp.where(place < m, place + shift[group], num_blocks * block)
    numbers = jnp.arange(num_blocks, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, numbers, side="right", method="compare_all").astype(jnp.int32)
    seats = seat(pair, place, num_blocks * block, shape)
    return Layout(*seats, jnp.minimum(owner, num_groups - 1), ends)


@jax.custom_vjp
def dispatch(x: jax.Array, layout: Layout) -> jax.Array:
    """[n, d] -> [rows, d]: each pair's token; zeros in rows of padding."""
    return x.at[layout.pair // layout.row.shape[1]].get(mode="fill", fill_value=0)


def collect(rows: jax.Array, layout: Layout) -> jax.Array:
    """[rows, d] -> [n, d]: the sum of a token's rows in at least float32, rounded once: dispatch's transpose."""
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    picked = rows.at[layout.row].get(mode="fill", fill_value=0)
    return jnp.sum(picked, axis=1, dtype=wide).astype(rows.dtype)


dispatch.defvjp(lambda x, layout: (dispatch(x, layout), layout), lambda layout, d_rows: (collect(d_rows, layout), None))


@jax.custom_vjp
def combine(rows: jax.Array, weights: jax.Array, layout: Layout) -> jax.Array:
    """[rows, d], [n, k] -> [n, d]: the weighted sum of a token's rows, in at least float32."""
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    return jnp.sum(rows[layout.row].astype(wide) * weights.astype(wide)[..., None], axis=1).astype(rows.dtype)


def _combine_bwd(residuals, d_out):
    rows, weights, layout = residuals
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    share = weights.reshape(-1).astype(wide).at[layout.pair].get(mode="fill", fill_value=0)
    d_rows = share[:, None] * dispatch(d_out, layout).astype(wide)
    d_weights = jnp.sum(rows[layout.row].astype(wide) * d_out.astype(wide)[:, None], axis=-1)
    return d_rows.astype(rows.dtype), d_weights.astype(weights.dtype), None


combine.defvjp(lambda *args: (combine(*args), args), _combine_bwd)


def unpacked(w: jax.Array | QTensor, dtype: jnp.dtype) -> jax.Array:
    """A weight in the dtype of the product, decoded if it is packed."""
    return w.decode(dtype) if isinstance(w, QTensor) else w.astype(dtype)


def _dot(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def _each_block(step: Callable, carry, span: "_Span", layout: Layout, dtype: jnp.dtype):
    """carry = step(i, expert, its matrices, carry) for each block i of a span.

    Each matrix is read in place, where a batched matmul would first copy one for every block, and unpacked once for
    all blocks of its expert: there is never more than one.
    """
    ends = layout.ends
    assert ends is not None

    def expert(state):
        i, carry = state
        group = layout.groups[i]
        chosen = [unpacked(w[group - span.group], dtype) for w in span.matrices]
        blocks = lambda i, carry: step(i, group - span.group, chosen, carry)  # noqa: E731
        return ends[group], jax.lax.fori_loop(i, ends[group], blocks, carry)

    begin = vary_like(jnp.asarray(span.begin, jnp.int32), ends)
    return jax.lax.while_loop(lambda state: state[0] < span.end, expert, (begin, carry))[1]


def _ragged_matmul(rows, w, sizes):
    w = unpacked(w, rows.dtype)
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    return jax.lax.ragged_dot(rows, w, sizes, preferred_element_type=wide).astype(rows.dtype)


def grouped_mlp(
    rows: jax.Array, parts: Sequence[Matrices], layout: Layout, activation: Activation, block: int
) -> jax.Array:
    """[rows, d] -> [rows, d]: each row through its group's expert, without a gradient; see `grouped_mlp_grad`.

    Several parts hold the experts of consecutive groups: with blocks they need not be copied together. Packed experts
    are decoded one at a time with blocks, else one matrix of all of them at a time, for a gradient all three.
    """
    if not block:
        return _mlp(partial(_ragged_matmul, sizes=layout.groups), rows, _whole(parts), activation)
    blocks = rows.reshape(-1, block, rows.shape[1])
    out = vary_like(jnp.zeros_like(blocks), blocks, layout.groups, *parts[0])

    def step(i, expert, chosen, out):
        return out.at[i].set(_mlp(_narrow_dot, blocks[i], chosen, activation))

    for span in _spans(parts, layout):
        out = _each_block(step, out, span, layout, blocks.dtype)
    return out.reshape(rows.shape)


def grouped_mlp_grad(
    rows: jax.Array,
    share: jax.Array,
    d_out: jax.Array,
    parts: Sequence[Matrices],
    layout: Layout,
    activation: Activation,
    block: int,
) -> tuple[jax.Array, jax.Array, list[list[jax.Array] | None]]:
    """Gradients of sum(d_out * share * grouped_mlp(rows)), which is recomputed, so that nothing of it has to be kept.

    Args:
      rows, d_out: [rows, d].
      share: [rows], at least float32.
      parts, layout, activation, block: as in `grouped_mlp`.

    Returns:
      Of rows, in their dtype; of share; of each part's matrices, in at least float32, None of packed ones.
    """
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    learns = not isinstance(parts[0][0], QTensor)
    if not block:
        contract = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])

        def outer(a, b):
            return jax.lax.ragged_dot_general(a, b, layout.groups, contract, preferred_element_type=wide)

        dot = partial(_ragged_matmul, sizes=layout.groups)
        whole = [unpacked(w, rows.dtype) for w in _whole(parts)]  # pyright: ignore
        d_rows, d_share, d_whole = _mlp_grad(dot, outer, rows, share, d_out, whole, activation)
        if not learns:
            return d_rows, d_share, [None] * len(parts)
        cuts = np.cumsum([matrices[0].shape[0] for matrices in parts])[:-1]
        return d_rows, d_share, [list(part) for part in zip(*(jnp.split(d, cuts) for d in d_whole), strict=True)]
    blocks, d_blocks = (a.reshape(-1, block, a.shape[1]) for a in (rows, d_out))
    shares = share.reshape(-1, block)

    def zeros(shape, dtype):
        return vary_like(jnp.zeros(shape, dtype), blocks, d_blocks, shares, layout.groups, *parts[0])

    def step(i, expert, chosen, carry):
        d_rows, d_share, d_matrices = carry
        d_row, d_s, d_chosen = _mlp_grad(
            _narrow_dot, lambda a, b: _dot(a.T, b), blocks[i], shares[i], d_blocks[i], chosen, activation
        )
        if d_matrices is not None:
            d_matrices = [d_w.at[expert].add(d) for d_w, d in zip(d_matrices, d_chosen, strict=True)]
        return d_rows.at[i].set(d_row), d_share.at[i].set(d_s), d_matrices

    d_rows, d_share, d_parts = zeros(blocks.shape, blocks.dtype), zeros(shares.shape, shares.dtype), []
    for span in _spans(parts, layout):
        d_matrices = [zeros(w.shape, wide) for w in span.matrices] if learns else None
        carry = d_rows, d_share, d_matrices
        d_rows, d_share, d_matrices = _each_block(step, carry, span, layout, blocks.dtype)
        d_parts.append(d_matrices)
    return d_rows.reshape(rows.shape), d_share.reshape(share.shape), d_parts


class _Span(NamedTuple):
    """The blocks of one part: from `begin` to `end`, and the group of its first expert."""

    matrices: Matrices
    group: int
    begin: jax.Array | int
    end: jax.Array


def _spans(parts, layout):
    assert layout.ends is not None
    group, begin = 0, 0
    for matrices in parts:
        end = layout.ends[group + matrices[0].shape[0] - 1]
        yield _Span(matrices, group, begin, end)
        group, begin = group + matrices[0].shape[0], end


def _whole(parts):
    if len(parts) == 1:
        return parts[0]
    return [jax.tree.map(lambda *ws: jnp.concatenate(ws), *part) for part in zip(*parts, strict=True)]


def _narrow_dot(a, b):
    return _dot(a, b).astype(a.dtype)


def _mlp(dot, x, matrices, activation):
    w_gate, w_up, w_down = matrices
    return dot(activation(dot(x, w_gate), dot(x, w_up)), w_down)


def _mlp_grad(dot, outer, x, share, d_out, matrices, activation):
    w_gate, w_up, w_down = matrices
    hidden, pull = jax.vjp(activation, dot(x, w_gate), dot(x, w_up))
    d_share = jnp.sum(dot(hidden, w_down).astype(share.dtype) * d_out.astype(share.dtype), axis=-1)
    d_y = (share[:, None] * d_out.astype(share.dtype)).astype(x.dtype)
    d_gate, d_up = pull(dot(d_y, w_down.mT))
    d_x = dot(d_gate, w_gate.mT) + dot(d_up, w_up.mT)
    return d_x, d_share, [outer(x, d_gate), outer(x, d_up), outer(hidden, d_y)]


def choose_backend(backend: Backend | None, m: int, num_groups: int) -> tuple[Backend, int]:
    """The backend for m rows in groups, and the rows of its blocks, within 8 and 64; "ragged" has no blocks: 0.

    A block takes as long as some 8 rows, and half of a group's last one is padding: for groups of g rows the loop is
    shortest with blocks of 4 sqrt(g). Taken is the power of two at or below that (`benchmarks/experts.py`).
    """
    if backend is None:
        backend = "blocks" if jax.default_backend() == "cpu" else "ragged"
    if backend == "ragged":
        return backend, 0
    if backend == "blocks":
        return backend, min(max(8, 1 << (max(1, 16 * m // num_groups).bit_length() - 1) // 2), 64)
    raise ValueError(f'backend={backend!r} is unknown; use "blocks", "ragged" or None')


def expert_mlp(
    x: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    w_gate: jax.Array | QTensor | Stacked,
    w_up: jax.Array | QTensor | Stacked,
    w_down: jax.Array | QTensor | Stacked,
    activation: Activation,
    *,
    backend: Backend | None = None,
) -> jax.Array:
    """Sends each token through its chosen experts and sums their outputs by weight.

    y_i = cast(sum_j weight_ij * cast(activation(x_i w_gate[e_ij], x_i w_up[e_ij]) w_down[e_ij]))

    An expert's output is rounded to x.dtype; the weighting, after w_down, and the sum are in at least float32.
    No token is dropped for any routing: all tokens may choose one expert. All shapes are static.

    Args:
      x: [n, d].
      indices: [n, k] integers in [0, e).
      weights: [n, k], at least float32.
      w_gate, w_up: [e, d, f], as arrays, packed, or with "blocks" `Stacked`; only arrays take a gradient.
      w_down: [e, f, d], likewise.
      activation: (gate [..., f], up [..., f]) -> [..., f]; with zeros it must be finite.
      backend: "blocks" pads each expert's rows to a multiple of a block and loops over blocks: for CPUs, where
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
    backend, block = choose_backend(backend, indices.size, num_experts)
    pair, expert, sizes = sort_by_expert(indices, num_experts)
    layout = lay_out(pair, expert, jnp.arange(indices.size, dtype=jnp.int32), sizes, indices.shape, block)
    run = partial(_forward, activation, block)
    if block and not isinstance(w_gate, Stacked):
        run = jax.custom_vjp(run)
        run.defvjp(lambda *args: (_forward(activation, block, *args), args), partial(_backward, activation, block))
    return run(x, weights, (w_gate, w_up, w_down), layout)


def _forward(activation, block, x, weights, matrices, layout):
    return combine(grouped_mlp(dispatch(x, layout), [matrices], layout, activation, block), weights, layout)


def _backward(activation, block, inputs, d_y):
    """From the inputs alone: computing the rows again is quicker on CPUs than three loops that keep and read them."""
    x, weights, matrices, layout = inputs
    rows, d_out = dispatch(x, layout), dispatch(d_y, layout)
    share = weights.reshape(-1).at[layout.pair].get(mode="fill", fill_value=0)
    d_rows, d_share, (d_matrices,) = grouped_mlp_grad(rows, share, d_out, [matrices], layout, activation, block)
    if d_matrices is not None:
        d_matrices = tuple(d.astype(w.dtype) for d, w in zip(d_matrices, matrices, strict=True))
    return collect(d_rows, layout), d_share[layout.row], d_matrices, None
