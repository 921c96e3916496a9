"""How tokens are drawn: one set of settings for generation, samples of a run, the command line."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from kimi_jax.config import ConfigError

SEEDS = 2**32
"""There are so many seeds: JAX keeps 32 bits of one."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Greedy by default.

    >>> Sampling(temperature=0.8, top_p=0.95, max_new_tokens=64).seed
    0
    >>> Sampling(top_p=1.5)
    Traceback (most recent call last):
    ...
    kimi_jax.config.checks.ConfigError: top_p=1.5 must be a number above 0 and at most 1
    """

    temperature: float = 0.0
    """0 takes the likeliest token; else tokens are drawn from softmax(logits / temperature)."""
    top_p: float = 1.0
    """Draws from the likeliest tokens whose probabilities first reach this sum."""
    max_new_tokens: int = 200
    """Most tokens to add to a prompt."""
    stop: tuple[int, ...] = ()
    """Ids that end a continuation; the stop token is not part of it."""
    seed: int = 0
    """Of the random draws: the same seed, the same tokens."""

    def __post_init__(self) -> None:
        check_setting("temperature", self.temperature, "a finite number, at least 0 (0: the likeliest token)", 0)
        check_setting("top_p", self.top_p, "a number above 0 and at most 1", math.ulp(0.0), 1)
        check_setting("max_new_tokens", self.max_new_tokens, "a whole number, at least 1", 1, whole=True)
        check_setting("seed", self.seed, "a whole number from 0 to 2^32 - 1", 0, SEEDS - 1, whole=True)
        if not isinstance(self.stop, tuple):
            raise ConfigError(f"stop={self.stop!r} must be a tuple of token ids, e.g. stop=(5,)")
        for token in self.stop:
            check_setting("a token of stop", token, "a token id, at least 0", 0, whole=True)


def check_setting(
    name: str, value: object, allowed: str, low: float, high: float = sys.float_info.max, *, whole: bool = False
) -> None:
    """Checks a number: finite, within bounds, an integer if it must be.

    Raises:
        ConfigError: one line with the value and what is allowed.
    """
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not (number and low <= value <= high):  # type: ignore[operator]
        raise ConfigError(f"{name}={value!r:.60} must be {allowed}")
