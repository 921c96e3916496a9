"""Per-Head Muon: momentum whose blocks are orthogonalised by Newton-Schulz (Kimi K3 report, section 2; Moonlight)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, PartitionSpec

from kimi_jax.model.rules import Muon

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEP_BYTES = 256 * 2**20
"""Bytes of momentum, on one device, that are orthogonalised at once where a parameter's layers allow it; the
temporary memory of an update is about six times that."""


class MuonState(NamedTuple):
    momentum: dict[str, jax.Array]
    """One array per parameter, in its shape and at least float32."""


def newton_schulz(
    x: jax.Array,
    *,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
) -> jax.Array:
    """Moves all singular values of each matrix towards one, keeping its singular vectors.

    X <- X / max(|X|_F, eps); then `steps` times X <- a X + (b A + c A^2) X with A = X X^T and (a, b, c) the
    coefficients. These are tuned for speed: singular values end in about [0.68, 1.13], not at one.

    Args:
        x: [..., m, n], a batch of matrices; the iteration runs on the smaller side.
        steps: iterations.
        coefficients: of the odd quintic polynomial.
        eps: lower bound of the Frobenius norm, so that a zero matrix stays zero.

    Returns:
        [..., m, n], at least float32. Products have the precision of `jax.default_matmul_precision` (the released
        training code uses bfloat16).

    Source: Moonlight (arXiv 2502.16982), section 2.1; Jordan et al., Muon.

    >>> y = newton_schulz(jnp.array([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]))
    >>> bool(jnp.all(jnp.abs(jnp.linalg.svd(y)[1] - 0.9) < 0.25))
    True
    """
    a, b, c = coefficients
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / jnp.maximum(jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True)), eps)

    def step(_, x):
        gram = x @ x.mT
        return a * x + (b * gram + c * (gram @ gram)) @ x

    x = jax.lax.fori_loop(0, steps, step, x)  # a loop needs less memory than its unrolled form, and is as fast
    return x.mT if tall else x


def block_shape(shape: tuple[int, ...], rule: Muon) -> tuple[int, int, int]:
    """(number of blocks, rows, columns) of the matrices that a parameter of this shape consists of.

    >>> block_shape((8, 64, 4, 16), Muon(rows=(-3,), cols=(-1,)))  # [l, d, h, k], per head
    (32, 64, 16)
    """
    rows = math.prod(shape[axis] for axis in rule.rows)
    cols = math.prod(shape[axis] for axis in rule.cols)
    return math.prod(shape) // (rows * cols), rows, cols


class _Layout(NamedTuple):
    """How one device sees a parameter: [layers, ..., matrix axes], all axes in front of the matrix's flattened to one.

    `order` moves it to [layers, blocks, first side, second side]. The sides are rows and columns, a split one first,
    then a shorter one, so that transposed blocks run together. A side's axes are flattened as they are laid out on the
    device: that may permute rows or columns of the full matrix, which the iteration does not notice, since
    NS(P X Q) = P NS(X) Q for permutations.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    sides: tuple[int, int]
    names: tuple[tuple[str, ...], tuple[str, ...]]
    """Mesh axes over which the sides are split."""
    parts: tuple[int, int]
    """Into how many."""
    split: frozenset[str]
    """Mesh axes over which anything of it is split: on the others every device has, and iterates, the same."""
    nbytes: int


def _layout(value: jax.Array, rule: Muon) -> _Layout:
    sharding, ndim = jax.typeof(value).sharding, value.ndim
    names = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in sharding.spec]
    parts = [math.prod(sharding.mesh.shape[name] for name in axis) for axis in names]
    local = [size // part for size, part in zip(value.shape, parts, strict=True)]

    def over(numbers, axes):
        return math.prod(numbers[axis] for axis in axes)

    rows, cols = (tuple(ndim + axis for axis in axes) for axes in (rule.rows, rule.cols))
    first, second = sorted((rows, cols), key=lambda axes: (over(parts, axes) == 1, over(value.shape, axes)))
    lead = min(rows + cols)
    batch = tuple(axis for axis in range(lead, ndim) if axis not in rows + cols)
    return _Layout(
        shape=(over(local, range(lead)), *local[lead:]),
        order=(0, *(1 + axis - lead for axis in batch + first + second)),
        sides=(over(local, first), over(local, second)),
        names=(sum((names[axis] for axis in first), ()), sum((names[axis] for axis in second), ())),
        parts=(over(parts, first), over(parts, second)),
        split=frozenset(sum(names, ())),
        nbytes=math.prod(local) * jnp.promote_types(value.dtype, jnp.float32).itemsize,
    )


def _batches(layouts: dict[str, _Layout], step_bytes: int) -> Iterator[tuple[list[str], int]]:
    """(leaves that are iterated together, steps in which their layers are walked), blocks of one kind at a time.

    Blocks of a kind have equal sides, split over equal axes. All go in one step if they fit in `step_bytes`: fewest
    loops to compile, fullest stacks. Otherwise leaves with the same number of layers walk together, as many layers a
    step as fit, at least one.
    """
    kinds: dict[Any, list[str]] = {}
    for path, layout in layouts.items():
        kinds.setdefault((layout.sides, layout.names, layout.split), []).append(path)
    for paths in kinds.values():
        if sum(layouts[path].nbytes for path in paths) <= step_bytes:
            yield paths, 1
            continue
        walks: list[tuple[int, list[str], int]] = []  # layers, leaves, bytes of a layer of each
        for path in sorted(paths, key=lambda path: layouts[path].shape[0]):
            layers = max(layouts[path].shape[0], 1)
            size = layouts[path].nbytes // layers
            if walks and walks[-1][0] == layers and walks[-1][2] + size <= step_bytes:
                walks[-1] = layers, [*walks[-1][1], path], walks[-1][2] + size
            else:
                walks.append((layers, [path], size))
        for layers, some, size in walks:
            kind = layouts[some[0]]
            shards = math.prod(kind.parts)
            blocks = sum(math.prod(layouts[path].shape) for path in some) // (layers * math.prod(kind.sides))
            fitting = [n for n in range(1, layers + 1) if layers % n == 0 and n * size <= step_bytes] or [1]
            # The least padding of traded stacks, then the fewest steps.
            yield some, layers // min(fitting, key=lambda n: (layers // n * -(n * blocks // -shards), -n))


def _trade(blocks: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """The n-th part of every device's stack to the n-th device; its own inverse."""
    # XLA's CPU decomposition of all-to-all fails on operands whose layouts differ; the barrier gives them one.
    return jax.lax.all_to_all(jax.lax.optimization_barrier(blocks), names, 0, 0, tiled=True)


def _orthogonalise(values: dict[str, jax.Array], layouts: dict[str, _Layout], iteration: dict):
    """Directions of a device's parts of some leaves, all of one kind, as one batch."""
    moved = [value.transpose(layouts[path].order) for path, value in values.items()]
    layout = layouts[next(iter(values))]
    (first, second), (p, q), names = layout.sides, layout.parts, sum(layout.names, ())
    stacks = [value.reshape(-1, first, second) for value in moved]
    blocks = stacks[0] if len(stacks) == 1 else jnp.concatenate(stacks)
    count, scale = len(blocks), 0.2 * math.sqrt(max(first * p, second * q))
    if names:  # trade the stack for full matrices: one all-to-all before the iteration, one after, none inside
        blocks = jnp.pad(blocks, ((0, -count % (p * q)), (0, 0), (0, 0)))
        blocks = _trade(blocks, names).reshape(p, q, -1, first, second)
        blocks = blocks.transpose(2, 0, 3, 1, 4).reshape(-1, p * first, q * second)
    blocks = newton_schulz(blocks, **iteration) * scale  # rms 0.2 for any shape, as an AdamW update (section 2.2)
    if names:
        blocks = blocks.reshape(-1, p, first, q, second).transpose(1, 3, 0, 2, 4).reshape(-1, first, second)
        blocks = _trade(blocks, names)[:count]
    results, start = {}, 0
    for path, value, stack in zip(values, moved, stacks, strict=True):
        order, part = layouts[path].order, blocks[start : start + len(stack)].reshape(value.shape)
        results[path] = part.transpose([order.index(axis) for axis in range(len(order))])
        start += len(stack)
    return results


def _row_major(x: jax.Array) -> jax.Array:
    """Keeps the iteration's favourite layout out of the buffers that it slices, which would be copied in full."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def scale_by_muon(
    rules: dict[str, Muon],
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    step_bytes: int = STEP_BYTES,
) -> optax.GradientTransformationExtraArgs:
    """Turns gradients into Muon's directions, block by block.

    M <- mu M + G;  update = 0.2 sqrt(max(rows, cols)) NewtonSchulz(G + mu M)   (M alone without Nesterov)

    Every block (a head, an expert, a layer of a stack) has its own norm and its own iteration, whatever else is in
    the tree; blocks of one shape, and of its transpose, run as one batch. Under a mesh of explicit axes each device
    works on what it holds: full blocks (its heads, its experts) need no communication, and parts of blocks are
    traded for full ones before the iteration and back after it. Work is not split over axes on which a parameter is
    replicated: gathering the directions costs more than a head's iteration does; shard over `fsdp` instead.

    Kinds of blocks with more than `step_bytes` on a device are walked layer by layer in a loop that writes the
    directions over the gradients and the new momentum over the old one, so that, with both donated, no further copy
    of either is made.

    Args:
        rules: path -> which axes are a block's rows and columns, for every leaf of the updates.
        momentum: mu.
        nesterov: look one step ahead.
        steps, coefficients, eps: of `newton_schulz`.
        step_bytes: bytes of momentum on a device that one step of the walk takes.

    Returns:
        A transformation of flat dicts {path: array}; updates and momentum are at least float32, sharded as the
        parameters are. Its `update` takes `accept`, a boolean scalar: where false the momentum stays (chosen here,
        slice by slice, since a choice made afterwards would keep two copies).

    Raises:
        ValueError: the paths of the parameters are not those of the rules.
    """
    iteration = {"steps": steps, "coefficients": coefficients, "eps": eps}

    def init(params):
        if params.keys() != rules.keys():
            missing, extra = sorted(params.keys() - rules.keys()), sorted(rules.keys() - params.keys())
            raise ValueError(f"Muon rules differ from the parameters: no rule for {missing}, no parameter for {extra}")
        return MuonState({p: jnp.zeros_like(v, jnp.promote_types(v.dtype, jnp.float32)) for p, v in params.items()})

    def advance(grads, old, layouts, accept):
        """(directions, momentum) of some leaves' local parts."""
        new = {path: momentum * old[path] + grad for path, grad in grads.items()}
        ahead = {path: grad + momentum * new[path] for path, grad in grads.items()} if nesterov else new
        if accept is not None:
            new = {path: jnp.where(accept, new[path], old[path]) for path in new}
        return _orthogonalise(ahead, layouts, iteration), new

    def walk(grads, old, layouts, accept, count):
        """`advance` over the layers in `count` steps, in place."""

        def body(i, carry):
            def part(v):
                return _row_major(jax.lax.dynamic_slice_in_dim(v, i * (len(v) // count), len(v) // count))

            def put(v, new):
                return jax.lax.dynamic_update_slice_in_dim(v, _row_major(new), i * (len(v) // count), 0)

            grads, old = jax.tree.map(part, carry)
            return jax.tree.map(put, carry, advance(grads, old, layouts, accept))

        return jax.lax.fori_loop(0, count, body, (grads, old))

    def update(updates, state, params=None, *, accept=None, **extra):
        del params, extra
        layouts = {path: _layout(value, rules[path]) for path, value in state.momentum.items()}

        def on_device(grads, old, accept):
            shapes = {path: value.shape for path, value in old.items()}
            directions, new = {}, {}
            for paths, count in _batches(layouts, step_bytes):
                some, same = ({p: values[p].reshape(layouts[p].shape) for p in paths} for values in (grads, old))
                if count > 1:
                    some, same = walk(some, same, layouts, accept, count)
                else:
                    some, same = advance(some, same, layouts, accept)
                directions |= {path: value.reshape(shapes[path]) for path, value in some.items()}
                new |= {path: value.reshape(shapes[path]) for path, value in same.items()}
            return directions, new

        updates = {path: grad.astype(state.momentum[path].dtype) for path, grad in updates.items()}
        shardings = {path: jax.typeof(value).sharding for path, value in state.momentum.items()}
        mesh = next(iter(shardings.values())).mesh if shardings else None
        run: Any = on_device
        if mesh is not None and set(mesh.axis_types) == {AxisType.Explicit}:
            specs = {path: sharding.spec for path, sharding in shardings.items()}
            specs = (specs, specs, PartitionSpec()), (specs, specs)
            run = jax.shard_map(on_device, mesh=mesh, in_specs=specs[0], out_specs=specs[1])
        directions, new = run(updates, state.momentum, accept)
        return directions, MuonState(new)

    return optax.GradientTransformationExtraArgs(init, update)
