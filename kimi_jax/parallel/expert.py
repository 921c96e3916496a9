"""Routed experts on many devices, exactly balanced: every device computes S K rows, whatever the router says.

R ranks of the expert axis hold m = E / R experts each and S tokens each, and every token chooses K experts. Ranks
whose experts are wanted by fewer than S K pairs lend their time: each borrows the weights of some experts of one other
rank, and computes exactly the rows that this takes off it. At most m borrowed experts are ever needed, so m reserved
slots make every plan feasible: static shapes, no capacity factor, no token dropped, nothing recompiled.

The plan is a function of the counts [R, E] in integers only, so all ranks find the same one. A rank's rows sit in 2m
slots: its m experts, and m for those of the one rank it borrows from. Rows travel from source order (destination, slot)
to destination order (source, slot) as one contiguous slice per pair of ranks; the way back is the same with the roles
exchanged. Weighting and the sum over choices happen at the source, as on one device.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from kimi_jax.ops import experts
from kimi_jax.ops.quant.mx import QTensor
from kimi_jax.parallel.dense import gather, gather_weight, narrowed, sum_scatter
from kimi_jax.parallel.mesh import vary, varying

Balance = Literal["exact", "none"]
Transport = Literal["gather", "a2a", "ragged"]


class Plan(NamedTuple):
    """Which rank computes how many rows of each expert; int32, the same on every rank."""

    alloc: jax.Array  # [e, r] rows of expert e computed on rank r
    order: jax.Array  # [r, m] the experts of each home rank by falling load, as numbers in 0..m
    donor: jax.Array  # [r] the rank that each rank borrows from
    first: jax.Array  # [r] place in the donor's order of the first expert borrowed
    borrowed: jax.Array  # [r] experts borrowed; they follow each other in the donor's order


class Traffic(NamedTuple):
    """Slices [source, destination] of a buffer on the source that land in one on the destination."""

    start: jax.Array
    size: jax.Array
    land: jax.Array

    @property
    def back(self) -> "Traffic":
        return Traffic(self.land.T, self.size.T, self.start.T)

    def times(self, n: int) -> "Traffic":
        return Traffic(self.start * n, self.size * n, self.land * n)


class Routes(NamedTuple):
    """Everything that moving rows takes, on one rank: the only thing the backward pass keeps beside its inputs."""

    rows: Traffic  # of rows
    weights: Traffic  # of experts, counted in experts, from the donor's order to the borrowing slots
    order: jax.Array  # [m] this rank's experts as they are lent
    source: experts.Layout  # this rank's tokens <-> rows by (destination, slot)
    slots: experts.Layout  # rows by (source, slot) <-> rows by slot


def _before(x: jax.Array, axis: int = -1) -> jax.Array:
    """Sum of what comes before each entry."""
    return jnp.cumsum(x, axis, dtype=jnp.int32) - x


def _overlap(begin_a, size_a, begin_b, size_b):
    return jnp.maximum(jnp.minimum(begin_a + size_a, begin_b + size_b) - jnp.maximum(begin_a, begin_b), 0)


def _by_rank(x: jax.Array) -> jax.Array:
    """The order of each row's entries, int32, stable."""
    return jnp.argsort(x, axis=-1, stable=True).astype(jnp.int32)


def plan(counts: jax.Array, balance: Balance = "exact") -> Plan:
    """Who computes what.

    Up to R - 1 times, the most overloaded home rank hands the emptiest rank exactly the rows that fill it. So each rank
    is filled once and borrows from one home. Then the experts of a home, by falling load, and its receivers, by falling
    amount and itself last, lie on one line, and a receiver computes what its interval overlaps: the busiest experts
    leave, which takes the fewest weights along.

    Args:
      counts: [R, E] integers: how many pairs of each source rank chose each expert. The total divides by R.
      balance: "exact", or "none": every expert's rows stay at home.

    Returns:
      The plan; with "exact", `alloc.sum(0)` is the same for all ranks.
    """
    r, e = counts.shape
    m = e // r
    load = jnp.sum(counts, 0, dtype=jnp.int32).reshape(r, m)
    home = jnp.sum(load, 1, dtype=jnp.int32)
    order = _by_rank(-load)
    sent = jnp.zeros_like(home + home[:, None])  # [home, receiver]
    if balance == "exact":

        def fill(_, carry):
            surplus, sent = carry
            most, least = jnp.argmax(surplus), jnp.argmin(surplus)
            amount = -surplus[least]
            return surplus.at[most].add(-amount).at[least].set(0), sent.at[most, least].add(amount)

        _, sent = jax.lax.fori_loop(0, r - 1, fill, (home - jnp.sum(home, dtype=jnp.int32) // r, sent))
    elif balance != "none":
        raise ValueError(f'balance={balance!r} is unknown; use "exact" or "none"')
    me = jnp.eye(r, dtype=bool)
    donor = jnp.argmax(sent, 0).astype(jnp.int32)
    sent = jnp.where(me, home[:, None] - jnp.sum(sent, 1, keepdims=True, dtype=jnp.int32), sent)

    def begins(sizes, order):  # on each home's line
        line = jnp.take_along_axis(sizes, order, -1)
        return jnp.take_along_axis(_before(line), _by_rank(order), -1)

    receivers = _by_rank(jnp.where(me, 1, -sent))
    alloc = _overlap(begins(load, order)[..., None], load[..., None], begins(sent, receivers)[:, None], sent[:, None])
    foreign = jnp.where(me[:, None], 0, alloc) > 0  # [home, expert, receiver]
    place = _by_rank(order)[..., None]
    first = jnp.min(jnp.where(foreign, place, m), axis=(0, 1))
    borrowed = jnp.sum(foreign, axis=(0, 1), dtype=jnp.int32)
    return Plan(alloc.reshape(e, r), order, donor, jnp.where(borrowed > 0, first, 0), borrowed)


def _reseat(sizes: jax.Array, target: jax.Array, total: int) -> tuple[jax.Array, jax.Array]:
    """Segments that follow each other, and where each is to begin: the segment and the new place of `total` rows.

    Rows after the last segment get places from `total` on.
    """
    numbers = jnp.arange(total, dtype=jnp.int32)
    segment = jnp.repeat(jnp.arange(sizes.size, dtype=jnp.int32), sizes, total_repeat_length=total)
    place = numbers + (target - _before(sizes))[segment]
    return segment, jnp.where(numbers < jnp.sum(sizes, dtype=jnp.int32), place, total + numbers)


def routes(indices: jax.Array, num_experts: int, axis: str, balance: Balance, block: int, num_rows: int) -> Routes:
    """This rank's part of the plan for its tokens' choices [S, K]; `num_rows` rows fit on a rank, in blocks."""
    pair, _, count = experts.sort_by_expert(indices, num_experts)
    counts = jax.lax.all_gather(count, axis)
    alloc, order, donor, first, borrowed = plan(counts, balance)
    (r, m), me = order.shape, jax.lax.axis_index(axis)
    ranks, local = jnp.arange(r, dtype=jnp.int32), jnp.arange(m, dtype=jnp.int32)

    # The rows of expert e, by source and then by destination: both cut the same line.
    begin, cut = _before(counts, 0), _before(alloc, 1)
    size = jnp.sum(_overlap(begin[..., None], counts[..., None], cut, alloc), axis=1, dtype=jnp.int32)  # [r, r]
    rows = Traffic(_before(size, 1), size, _before(size, 0))

    # Slots of each rank: the expert in it, or one that sends no rows.
    lent = jnp.take_along_axis(order[donor], jnp.minimum(first[:, None] + local, m - 1), 1) + donor[:, None] * m
    expert = jnp.concatenate([ranks[:, None] * m + local, lent], axis=1)
    held = jnp.concatenate([jnp.ones_like(lent, bool), local < borrowed[:, None]], axis=1)
    if balance == "none":
        expert, held = expert[:, :m], held[:, :m]
    num_slots = expert.shape[1]

    # Source: pairs by (expert, destination) -> by (destination, slot).
    mine = _overlap(begin[me][:, None], count[:, None], cut, alloc)  # [e, destination]
    by_slot = jnp.where(held, mine[expert, ranks[:, None]], 0)
    home, place = jnp.repeat(ranks, m)[:, None], _by_rank(order).reshape(-1, 1)
    slot = jnp.clip(jnp.where(home == ranks, jnp.tile(local, r)[:, None], m + place - first), 0, num_slots - 1)
    target = _before(by_slot.reshape(-1)).reshape(by_slot.shape)[ranks, slot]
    m_pairs = indices.size
    _, place = _reseat(mine.reshape(-1), target.reshape(-1), m_pairs)
    source = experts.Layout(*experts.seat(pair, place, m_pairs, indices.shape), size[me])

    # Destination: rows by (source, slot) -> by (slot, source).
    theirs = _overlap(begin[:, expert[me]], counts[:, expert[me]], cut[expert[me], me], alloc[expert[me], me])
    theirs = jnp.where(held[me], theirs, 0)  # [source, slot]
    target = _before(theirs.T.reshape(-1)).reshape(-1, r).T
    segment, place = _reseat(theirs.reshape(-1), target.reshape(-1), num_rows)
    numbers, sizes = jnp.arange(num_rows, dtype=jnp.int32), jnp.sum(theirs, 0, dtype=jnp.int32)
    slots = experts.lay_out(numbers, segment % num_slots, place, sizes, (num_rows, 1), block)

    lends = donor == ranks[:, None]  # [donor, borrower]
    weights = Traffic(*(jnp.where(lends, a, 0) for a in (first, borrowed, jnp.zeros_like(first))))
    return Routes(rows, weights, order[me], source, slots)


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
      place: where in `rows` a number that the slices count in lies: moves rows[place(arange(n))] without that copy.
        Not for "ragged", whose slices must lie together.

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
        return self._move_experts(d_w, way.weights.back, overlap=True)[_by_rank(way.order)]

    def _move_experts(self, w, traffic, **options):
        """Lines of matrices travel, so that a window can be less than an expert."""
        m, lines, columns = w.shape
        flat, window = w.reshape(m * lines, columns), expert_window(m, lines, traffic.size.shape[0])
        carry = partial(move, axis=self.axis, transport=self.transport, window=window, **options)
        return carry(flat, traffic.times(lines), m * lines).reshape(w.shape)


def row_window(num_rows: int, num_ranks: int, transport: Transport) -> int:
    """Rows of tokens between two ranks at a time: all for "gather", else an even share and a quarter more."""
    return num_rows if transport == "gather" else min(num_rows, _eights(-(-5 * num_rows // (4 * num_ranks))))


def expert_window(m: int, lines: int, num_ranks: int) -> int:
    """Lines of experts between two ranks at a time: few are lent as a rule, and all windows together are m at most."""
    even = m * lines // num_ranks
    return min(m * lines, _eights(max(even // 2, min(even, lines))))


def _eights(n: int) -> int:
    return max(8, -(-n // 8) * 8)


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
    """Computes the rows anew, and the routing weights' gradients where the outputs are, so these need not travel."""
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
