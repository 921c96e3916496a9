"""Initial values of parameters: functions of a NumPy generator and a shape.

An initialiser is part of a model's tree definition, so equal arguments give the same function: two models of one config
then share their compiled programs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

Init = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


@cache
def normal(std: float) -> Init:
    return lambda rng, shape: rng.standard_normal(shape, np.float32) * np.float32(std)


def zeros(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, np.float32)


def ones(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.ones(shape, np.float32)


@cache
def uniform(bound: float) -> Init:
    return lambda rng, shape: rng.uniform(-bound, bound, shape)


@cache
def log_uniform(low: float, high: float) -> Init:
    """log U(low, high): A_log of Kimi Linear (Mamba-2)."""
    return lambda rng, shape: np.log(rng.uniform(low, high, shape))


def inverse_softplus_dt(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Mamba-2's dt_bias: softplus^-1(dt), dt = exp(U(log 1e-3, log 1e-1)), at least 1e-4."""
    dt = np.maximum(np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape)), 1e-4)
    return dt + np.log(-np.expm1(-dt))
