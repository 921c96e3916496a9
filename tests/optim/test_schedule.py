import jax
import numpy as np
import pytest

from kimi_jax.optim.schedule import cosine_with_warmup


@pytest.mark.parametrize(("steps", "fraction"), [(1, 0.0), (2, 0.5), (3, 0.9), (100, 0.0), (300, 0.01), (1000, 0.1)])
def test_formula(steps, fraction):
    warmup = max(1, round(fraction * steps))
    rates = np.array(jax.vmap(cosine_with_warmup(3e-3, steps, fraction))(np.arange(steps + 1)))
    i = np.arange(steps + 1)
    cosine = 0.5 * (1 + np.cos(np.pi * (i + 1 - warmup) / (steps + 1 - warmup)))
    np.testing.assert_allclose(rates, 3e-3 * np.where(i < warmup, (i + 1) / warmup, cosine), atol=3e-9)
    assert (rates[:-1] > 0).all() and rates[-1] == pytest.approx(0, abs=1e-9)  # no step of the run is wasted
    assert rates.argmax() == warmup - 1 and rates.max() == np.float32(3e-3)
    assert (np.diff(rates[warmup - 1 :]) < 0).all()


def test_stays_at_zero_after_the_end():
    assert cosine_with_warmup(1.0, 10, 0.1)(50) == 0


@pytest.mark.parametrize(("steps", "fraction"), [(0, 0.1), (10, 1.0), (10, -0.1)])
def test_refuses(steps, fraction):
    with pytest.raises(ValueError, match=f"steps={steps}.*warmup_fraction={fraction}"):
        cosine_with_warmup(1.0, steps, fraction)
