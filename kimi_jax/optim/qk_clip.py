"""QK-Clip: scales down the query and key weights of heads whose attention logits grew too large."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec, reshard

from kimi_jax.model.rules import QKClip


def clip_factor(max_logits: jax.Array, tau: float) -> jax.Array:
    """gamma = min(1, tau / S_max) for each head, at least float32.

    One wherever S_max is at most tau, and wherever it is not finite: -inf means that no query was seen, NaN and
    +inf that the step is broken, which must not zero a head for good.

    >>> clip_factor(jnp.array([200.0, 100.0, -3.0, 0.0, -jnp.inf, jnp.inf, jnp.nan]), 100.0).tolist()
    [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    logits = max_logits.astype(jnp.promote_types(max_logits.dtype, jnp.float32))
    over = (logits > tau) & (logits < jnp.inf)
    return jnp.where(over, tau / jnp.where(over, logits, tau), 1)


def _per_layer(gamma: jax.Array, rows: np.ndarray, weight: jax.Array) -> jax.Array:
    """[*rows.shape, h]: the factors of the weight's layers, split over heads as the weight is."""
    sharding = jax.typeof(weight).sharding
    if set(sharding.mesh.axis_types) != {AxisType.Explicit}:  # no mesh, or shardings left to the compiler
        return gamma[rows]
    heads = sharding.spec[-2]
    gamma = reshard(gamma, PartitionSpec(None, heads))
    return gamma.at[rows].get(out_sharding=PartitionSpec(*[None] * rows.ndim, heads))


def qk_clip(
    tau: float, clips: dict[str, QKClip], layers: dict[str, np.ndarray]
) -> optax.GradientTransformationExtraArgs:
    """Rescales weights after the update; the last transformation of a chain.

    W <- (W + update) gamma_h^exponent,  gamma_h = min(1, tau / S_max^h)

    per head h (axis -2) and per part of the last axis, with the exponents of `QKClip.parts`: 1/2 for the query and
    key parts of a head, 1 for the query part that meets the key shared by all heads. Updates of heads with
    gamma = 1 are returned bit for bit.

    Args:
        tau: largest logit (scaled, before the softmax) that goes unpunished.
        clips: path -> parts, for the leaves to scale; others pass unchanged.
        layers: path -> integers in the leaf's stack shape (its axes of layers; shape () for none): the row of
            `max_logits` of each layer.

    Returns:
        A transformation whose `update` takes `max_logits` [MLA layers, h], each head's largest logit in the step,
        replicated or split over heads.

    Raises:
        ValueError: shapes that do not fit together, or `params` or `max_logits` missing in `update`.

    Source: Kimi K2 report (arXiv 2507.20534), section 2.1.
    """
    if clips.keys() != layers.keys():
        raise ValueError(f"QK-Clip needs the layers of {sorted(clips)}, got those of {sorted(layers)}")

    def check(path, shape, max_logits):
        rows, widths = np.asarray(layers[path]), [width for width, _ in clips[path].parts]
        if len(shape) < rows.ndim + 2 or shape[: rows.ndim] != rows.shape:
            raise ValueError(f"{path}: shape {shape} must be the layers' {rows.shape}, then heads and head_dim last")
        if sum(widths) != shape[-1]:
            raise ValueError(f"{path}: QK-Clip parts {widths} must add up to the last axis of shape {shape}")
        if rows.size and not 0 <= rows.min() <= rows.max() < max_logits.shape[0]:
            raise ValueError(f"{path}: layers {rows.tolist()} lie outside the {max_logits.shape[0]} of max_logits")
        if shape[-2] != max_logits.shape[1]:
            raise ValueError(f"{path}: {shape[-2]} heads in shape {shape}, but {max_logits.shape[1]} in max_logits")

    def update(updates, state, params=None, *, max_logits=None, **extra):
        del extra
        if params is None or max_logits is None:
            raise ValueError("QK-Clip scales weights by logits: call update with params and max_logits=[layers, h]")
        gamma = clip_factor(max_logits, tau)
        clipped = dict(updates)
        for path, clip in clips.items():
            value, step = params[path], updates[path]
            check(path, value.shape, max_logits)
            rows = np.asarray(layers[path])
            exponents = np.concatenate([np.full(width, exponent, gamma.dtype) for width, exponent in clip.parts])
            factor = _per_layer(gamma, rows, value)[..., None] ** exponents  # [*layers, h, head_dim]
            factor = jnp.expand_dims(factor, range(rows.ndim, value.ndim - 2))
            clipped[path] = jnp.where(factor == 1, step, (value + step) * factor - value).astype(step.dtype)
        return clipped, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
