"""Per-Head Muon: momentum whose blocks are orthogonalised by Newton-Schulz (Kimi K3 report, section 2; Moonlight)."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from kimi_jax.layers.param import Muon

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


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


def _order(ndim: int, rule: Muon, wide: bool) -> tuple[int, ...]:
    """Order of axes with the batch in front, then the block's smaller and larger side."""
    rows, cols = (tuple(ndim + axis for axis in axes) for axes in (rule.rows, rule.cols))
    batch = tuple(axis for axis in range(ndim) if axis not in rows + cols)
    return batch + (rows + cols if wide else cols + rows)


def _orthogonalise(values: dict[str, jax.Array], rules: dict[str, Muon], steps, coefficients, eps):
    groups: dict[tuple[int, int], list[str]] = {}
    for path, value in values.items():
        _, rows, cols = block_shape(value.shape, rules[path])
        groups.setdefault((min(rows, cols), max(rows, cols)), []).append(path)
    results = {}
    for (short, long), paths in groups.items():
        orders, stacks = {}, []
        for path in paths:
            value, rule = values[path], rules[path]
            _, rows, cols = block_shape(value.shape, rule)
            orders[path] = _order(value.ndim, rule, rows <= cols)
            stacks.append(value.transpose(orders[path]).reshape(-1, short, long))
        blocks = stacks[0] if len(stacks) == 1 else jnp.concatenate(stacks)
        blocks = newton_schulz(blocks, steps=steps, coefficients=coefficients, eps=eps)
        blocks *= 0.2 * math.sqrt(long)  # rms 0.2 for any shape, as an AdamW update has (Moonlight, section 2.2)
        start = 0
        for path, stack in zip(paths, stacks, strict=True):
            order, shape = orders[path], values[path].shape
            part = blocks[start : start + len(stack)].reshape([shape[axis] for axis in order])
            results[path] = part.transpose([order.index(axis) for axis in range(len(order))])
            start += len(stack)
    return results


def scale_by_muon(
    rules: dict[str, Muon],
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    steps: int = 5,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
) -> optax.GradientTransformation:
    """Turns gradients into Muon's directions, block by block.

    M <- mu M + G;  update = 0.2 sqrt(max(rows, cols)) NewtonSchulz(G + mu M)   (M alone without Nesterov)

    Every block (a head, an expert, a layer of a stack) has its own norm and its own iteration, whatever else is in
    the tree; blocks of one shape, and of its transpose, run as one batch.

    Args:
        rules: path -> which axes are a block's rows and columns, for every leaf of the updates.
        momentum: mu.
        nesterov: look one step ahead.
        steps, coefficients, eps: of `newton_schulz`.

    Returns:
        A transformation of flat dicts {path: array}; updates and momentum are at least float32.

    Raises:
        ValueError: the paths of the parameters are not those of the rules.
    """

    def init(params):
        if params.keys() != rules.keys():
            missing, extra = sorted(params.keys() - rules.keys()), sorted(rules.keys() - params.keys())
            raise ValueError(f"Muon rules differ from the parameters: no rule for {missing}, no parameter for {extra}")
        return MuonState({p: jnp.zeros(v.shape, jnp.promote_types(v.dtype, jnp.float32)) for p, v in params.items()})

    def update(updates, state, params=None):
        del params
        new = {path: momentum * state.momentum[path] + grad for path, grad in updates.items()}
        ahead = {path: grad + momentum * new[path] for path, grad in updates.items()} if nesterov else new
        return _orthogonalise(ahead, rules, steps, coefficients, eps), MuonState(new)

    return optax.GradientTransformation(init, update)
