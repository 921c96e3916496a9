"""The learning rate over a run."""

import optax


def cosine_with_warmup(peak: float, steps: int, warmup_fraction: float) -> optax.Schedule:
    """Linear warmup, then a cosine to zero (Kimi K3 report, section 3).

    With w = max(1, round(warmup_fraction * steps)): peak (i + 1) / w up to step i = w - 1, then
    peak (1 + cos(pi (i + 1 - w) / (steps + 1 - w))) / 2. Every step moves: the rate is zero only at i = `steps`,
    after the last one.

    Args:
        peak: highest rate.
        steps: steps of the run.
        warmup_fraction: part of them with a rising rate, in [0, 1).

    Returns:
        A function of the 0-based step.

    >>> rate = cosine_with_warmup(1.0, 10, 0.2)
    >>> [round(float(rate(i)), 3) for i in (0, 1, 2, 9, 10)]
    [0.5, 1.0, 0.97, 0.03, 0.0]
    """
    if steps < 1 or not 0 <= warmup_fraction < 1:
        raise ValueError(f"steps={steps} must be at least 1 and warmup_fraction={warmup_fraction} lie in [0, 1)")
    warmup = max(1, round(warmup_fraction * steps))
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps + 1)
    return lambda count: rate(count + 1)
