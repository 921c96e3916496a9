"""Eight CPU devices, and the comparisons that every test of numbers uses."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest

jax.config.update("jax_num_cpu_devices", 8)


def rel_to_rms(actual, expected) -> float:
    """Largest absolute error over the rms of `expected`: the measure of the golden tolerances."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert np.isfinite(actual).all()
    rms = np.sqrt(np.mean(expected**2)) if expected.size else 0.0
    return float(np.max(np.abs(actual - expected), initial=0.0) / max(rms, 1e-30))


def rel_to_max(actual, expected) -> float:
    """Largest absolute error over the largest magnitude of `expected` (at least 1e-12): for gradients."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert np.isfinite(actual).all()
    return float(np.max(np.abs(actual - expected), initial=0.0) / max(np.max(np.abs(expected), initial=0.0), 1e-12))


@pytest.fixture(autouse=True, scope="module")
def compile_quickly(request):
    """Large graphs compile in half the time without XLA's optimisations; modules ask with COMPILE_QUICKLY = True."""
    quick = getattr(request.module, "COMPILE_QUICKLY", False)
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    # Every executable holds memory maps, of which a process may have 65,530: one that compiles all day crashes.
    jax.clear_caches()


@pytest.fixture
def x64():
    """Runs a test with 64-bit arrays."""
    with jax.enable_x64(True):
        yield
