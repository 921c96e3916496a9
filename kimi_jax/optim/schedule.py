"""The learning rate over a run."""

import jax.numpy as jnp
import optax

from kimi_jax.config import OptimConfig


def cosine_with_warmup(peak: float, steps: int, warmup_fraction: float, start: int = 0) -> optax.Schedule:
    """Linear warmup, then a cosine to zero (Kimi K3 report, section 3).

    With w = max(1, round(warmup_fraction * steps)): peak (i + 1) / w up to step i = w - 1, then
    peak (1 + cos(pi (i + 1 - w) / (steps + 1 - w))) / 2. Every step moves: the rate is zero only at i = `steps`,
    after the last one. With a `start` s, steps are counted from there: i - s of `steps` - s, so that a run that has
    ended may be trained further without a jump from its last rate, zero.

    Args:
        peak: highest rate.
        steps: steps of the run.
        warmup_fraction: part of them, from `start` on, with a rising rate, in [0, 1).
        start: step at which the warmup begins; before it the rate is the first one.

    Returns:
        A function of the 0-based step.

    >>> rate = cosine_with_warmup(1.0, 10, 0.2)
    >>> [round(float(rate(i)), 3) for i in (0, 1, 2, 9, 10)]
    [0.5, 1.0, 0.97, 0.03, 0.0]
    """
    if steps < 1 or not 0 <= warmup_fraction < 1:
        raise ValueError(f"steps={steps} must be at least 1 and warmup_fraction={warmup_fraction} lie in [0, 1)")
    if not 0 <= start < steps:
        raise ValueError(f"start={start} must lie between 0 and steps={steps} - 1")
    steps -= start
    warmup = max(1, round(warmup_fraction * steps))
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps + 1)
    if start == 0:
        return lambda count: rate(count + 1)
    return lambda count: rate(jnp.maximum(count - start, 0) + 1)


def schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """The learning rate of a run of `steps` steps: `cosine_with_warmup` of its settings."""
    return cosine_with_warmup(config.learning_rate, steps, config.warmup_fraction, config.schedule_from)
