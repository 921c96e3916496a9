"""Routed experts on many devices, exactly balanced: every device computes S K rows, for any routing.

R ranks of the expert axis hold m = E / R experts each and S tokens each, and every token chooses K experts. Ranks
whose experts are wanted by fewer than S K pairs lend their time: each borrows the weights of some experts of one other
rank, and computes exactly the rows that this takes off it. At most m borrowed experts are ever needed, so m reserved
slots make every plan feasible: static shapes, no capacity factor, no token dropped, nothing recompiled.

The plan is a function of the counts [R, E] in integers only, so all ranks find the same one. A rank's rows sit in 2m
slots: its m experts, and m for those of the one rank it borrows from. Rows travel from source order (destination, slot)
to destination order (source, slot) as one contiguous slice per pair of ranks; the way back is the same with the roles
exchanged. Weighting and the sum over choices happen at the source, as on one device.
"""

from functools import partial
from typing import NamedTuple

import jax

from kimi_jax.ops import experts
from kimi_jax.ops.quant.qtensor import QTensor
from kimi_jax.parallel.dense import gather, gather_weight, narrowed, sum_scatter
from kimi_jax.parallel.expert_move import Transport, expert_window, move, row_window
from kimi_jax.parallel.expert_plan import Balance, Routes, Traffic, by_rank, routes
from kimi_jax.parallel.spec import vary, varying


class _Settings(NamedTuple):
    activation: experts.Activation
    axis: str
    gather_axes: tuple[str, ...]
    transport: Transport
    block: int
    balance: Balance

    num_rows: int
    """On a rank, at most."""
    weight_axes: frozenset[str]
    """Mesh axes over which expert weights differ. Residuals of a scan may forget it."""

    def move_rows(self, rows: jax.Array, traffic: Traffic, num_rows: int) -> jax.Array:
        window = row_window(min(rows.shape[0], num_rows), traffic.size.shape[0], self.transport)
        return move(rows, traffic, num_rows, axis=self.axis, transport=self.transport, window=window)

    def lend(self, w: jax.Array, way: Routes) -> jax.Array:
        """Home experts -> borrowed ones."""
        if self.transport == "ragged":
            return self._move_experts(w[way.order], way.weights)
        lines = w.shape[1]
        return self._move_experts(w, way.weights, place=lambda line: way.order[line // lines] * lines + line % lines)

    def give_back(self, d_w: jax.Array, way: Routes) -> jax.Array:
        """Transpose of `lend`."""
        return self._move_experts(d_w, way.weights.back, overlap=True)[by_rank(way.order)]

    def _move_experts(self, w, traffic, **options):
        """Lines of matrices travel, so that a window can be less than an expert."""
        m, lines, columns = w.shape
        flat, window = w.reshape(m * lines, columns), expert_window(m, lines, traffic.size.shape[0])
        carry = partial(move, axis=self.axis, transport=self.transport, window=window, **options)
        return carry(flat, traffic.times(lines), m * lines).reshape(w.shape)


_WIDTH = (1, 1, 2)
"""Where w_gate, w_up and w_down have the experts' own model width."""


def _fetch(s: _Settings, w: jax.Array | QTensor, width: int, dtype, way: Routes) -> list[jax.Array | QTensor]:
    """[m, ..] home experts of this rank -> those it computes, home and borrowed, in the dtype of the product.

    Packed ones travel and stay packed.
    """
    w = (
        _gathered(w, s.gather_axes, width)
        if isinstance(w, QTensor)
        else gather(narrowed(w, dtype), s.gather_axes, width)
    )
    if s.balance == "none":
        return [w]
    return [w, jax.tree.map(lambda a: s.lend(a, way), w)]


def _gathered(w: QTensor, axes: tuple[str, ...], width: int) -> QTensor:
    return jax.tree.map(lambda a: gather(a, axes, 3 - width), w)  # stored [e, out, in]


def _fetch_all(s: _Settings, matrices, dtype, way: Routes) -> list[experts.Matrices]:
    parts = [_fetch(s, w, width, dtype, way) for w, width in zip(matrices, _WIDTH, strict=True)]
    return list(zip(*parts, strict=True))


def _return(s: _Settings, d_parts, w: jax.Array, width: int, way: Routes) -> jax.Array:
    """Transpose of `_fetch`: sums an expert's gradients where it lives, in at least float32 throughout."""
    d_w, *d_lent = d_parts
    if d_lent:
        d_w = d_w + s.give_back(d_lent[0], way)
    if s.gather_axes:
        d_w = sum_scatter(d_w, s.gather_axes, width)
    repeated = tuple(sorted(varying(d_w) - s.weight_axes))
    return (jax.lax.psum(d_w, repeated) if repeated else d_w).astype(w.dtype)


def _forward(s: _Settings, x, weights, matrices, way: Routes):
    held = _fetch_all(s, matrices, x.dtype, way)
    rows = s.move_rows(experts.dispatch(x, way.source), way.rows, s.num_rows)
    rows = experts.grouped_mlp(experts.dispatch(rows, way.slots), held, way.slots, s.activation, s.block)
    rows = s.move_rows(experts.collect(rows, way.slots), way.rows.back, weights.size)
    return experts.combine(rows, weights, way.source)


def _backward(s: _Settings, inputs, d_y):
    """Recomputes the rows; gradients of routing weights are computed where the outputs are, so they do not travel."""
    # As in jax.checkpoint: without it the compiler would take the rows and weights of the forward pass, and keep them.
    (x, weights, matrices, way), d_y = jax.lax.optimization_barrier((inputs, d_y))
    held = _fetch_all(s, matrices, x.dtype, way)

    def there(rows):
        return experts.dispatch(s.move_rows(rows, way.rows, s.num_rows), way.slots)

    def back(rows):
        return s.move_rows(experts.collect(rows, way.slots), way.rows.back, weights.size)

    rows, d_out = (there(experts.dispatch(a, way.source)) for a in (x, d_y))
    share = there(weights.reshape(-1, 1)[way.source.pair])[:, 0]
    d_rows, d_share, d_held = experts.grouped_mlp_grad(rows, share, d_out, held, way.slots, s.activation, s.block)
    d_x = experts.collect(back(d_rows), way.source)
    d_weights = back(d_share[:, None])[way.source.row, 0]
    if d_held[0] is None:  # packed
        return d_x, d_weights, None, None
    d_parts = zip(*d_held, strict=True)
    # The barrier has made all one type; these are to have their own.
    d_matrices = [_return(s, d, w, width, way) for d, w, width in zip(d_parts, inputs[2], _WIDTH, strict=True)]
    return d_x, d_weights, tuple(d_matrices), None


def expert_parallel_mlp(
    x: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    w_gate: jax.Array | QTensor,
    w_up: jax.Array | QTensor,
    w_down: jax.Array | QTensor,
    activation: experts.Activation,
    *,
    axis: str | None,
    gather_axes: tuple[str, ...] = (),
    balance: Balance = "exact",
    transport: Transport = "gather",
    backend: experts.Backend | None = None,
) -> jax.Array:
    """`ops.experts.expert_mlp` on a rank of an expert axis: the same numbers, with the work shared out.

    Call it inside `jax.shard_map`. Each slice of the mesh along `axis` that holds tokens of its own balances them among
    its ranks. The output is linear in parts of f: where f is split over a mesh axis, sum the result over it.

    The gradient keeps only the inputs and integers, and under `jax.checkpoint` the inputs. Gradients of expert weights
    are summed over ranks in at least float32: those of experts lent, of gathered widths and of mesh axes that hold
    other tokens but the same weights.

    Args:
      x: [S, z] this rank's tokens.
      indices: [S, K] experts of each token, of all E.
      weights: [S, K] their weights, at least float32.
      w_gate, w_up: [m, z', f] this rank's m = E / R experts in their stored dtype; they travel in x.dtype. Or packed:
        so they travel and stay until an expert is computed, and take no gradient.
      w_down: [m, f, z'].
      activation: (gate [.., f], up [.., f]) -> [.., f]; with zeros it must be finite.
      axis: mesh axis of the experts, or None if they are not split: then this is `expert_mlp`.
      gather_axes: mesh axes over which z' is a part of z, to be gathered. That comes before lending, since ranks along
        these axes may hold other tokens and so borrow other experts; what a rank receives is no more for that.
      balance: "exact": each rank computes S K rows. "none": each rank computes what its own experts were sent, and
        needs room for R S min(K, m) rows, in case all choose the same; that room is what balance does away with.
      transport: see `move`.
      backend: see `expert_mlp`.

    Returns:
      [S, z] in x.dtype.

    Raises:
      ValueError: an unknown backend, balance or transport.

    Source: K3 report, section 5.2.1 and appendix E (exactly balanced expert parallelism with redundant experts).
    """
    matrices = (w_gate, w_up, w_down)
    packed = isinstance(w_gate, QTensor)
    axes = frozenset().union(*map(varying, jax.tree.leaves((x, indices, weights, matrices))), gather_axes)
    rows = tuple(sorted(axes))
    x, indices, weights = (vary(a, rows) for a in (x, indices, weights))
    if axis is None:

        def fetch(w, width):
            if packed:
                return jax.tree.map(lambda a: vary(a, rows), _gathered(w, gather_axes, width))
            return gather_weight(w, ((),) * width + (gather_axes,) + ((),) * (2 - width), rows, x.dtype)

        matrices = [fetch(w, width) for w, width in zip(matrices, _WIDTH, strict=True)]
        return experts.expert_mlp(x, indices, weights, *matrices, activation=activation, backend=backend)  # pyright: ignore
    m, r = w_gate.shape[0], jax.lax.axis_size(axis)
    num_rows = indices.size if balance == "exact" else r * x.shape[0] * min(indices.shape[1], m)
    _, block = experts.choose_backend(backend, indices.size, m)
    way = routes(indices, m * r, axis, balance, block, num_rows)
    weight_axes = varying(jax.tree.leaves(w_gate)[0])
    settings = _Settings(activation, axis, gather_axes, transport, block, balance, num_rows, weight_axes)
    run = jax.custom_vjp(partial(_forward, settings))
    run.defvjp(lambda *args: (_forward(settings, *args), args), partial(_backward, settings))
    return run(x, weights, matrices, way)
