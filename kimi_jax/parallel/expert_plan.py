"""The plan of exactly balanced experts: who computes which rows, and the routes that rows and weights take.

Integers only, so all ranks find the same plan from the same counts. See `expert` for what it is for.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from kimi_jax.ops import experts

Balance = Literal["exact", "none"]


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


def by_rank(x: jax.Array) -> jax.Array:
    """The order of each row's entries, int32, stable."""
    return jnp.argsort(x, axis=-1, stable=True).astype(jnp.int32)


def plan(counts: jax.Array, balance: Balance = "exact") -> Plan:
    """Which rank computes how many rows of each expert.

    Up to R - 1 times, the most overloaded home rank hands the emptiest rank exactly the rows that fill it. So each rank
    is filled once and borrows from one home. Then the experts of a home, by falling load, and its receivers, by falling
    amount and itself last, are laid out on one line, and a receiver computes what its interval overlaps: the busiest
    experts leave, which takes the fewest weights along.

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
    order = by_rank(-load)
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
        return jnp.take_along_axis(_before(line), by_rank(order), -1)

    receivers = by_rank(jnp.where(me, 1, -sent))
    alloc = _overlap(begins(load, order)[..., None], load[..., None], begins(sent, receivers)[:, None], sent[:, None])
    foreign = jnp.where(me[:, None], 0, alloc) > 0  # [home, expert, receiver]
    place = by_rank(order)[..., None]
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

    # The rows of expert e, by source and then by destination: both divide the same line.
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
    home, place = jnp.repeat(ranks, m)[:, None], by_rank(order).reshape(-1, 1)
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
