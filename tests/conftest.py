"""Eight CPU devices, programs that compile quickly and once, and the comparisons that every test of numbers uses.

The settings are environment variables, set before JAX starts, so that pytest's workers and the processes that tests
start have them too.
"""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator

from tests.jax_private import quick_xla_flags

# Compiling is most of the suite's time: nothing here runs long enough to be worth optimising.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["XLA_FLAGS"] = quick_xla_flags(os.environ.get("XLA_FLAGS", ""))
# Tests, workers and processes compile many programs that another has compiled before. A folder of the developer's own
# (JAX_COMPILATION_CACHE_DIR) keeps them for the next session too.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="kimi_jax_tests_")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

import jax
import numpy as np
import pytest

jax.config.update("jax_num_cpu_devices", 8)

# The longest files, longest first: one that starts last would leave the other worker with nothing to do.
LONGEST = [
    *("test_meshes", "test_train", "test_processes", "test_notebooks", "test_aot", "test_layers", "test_mesh_settings"),
    *("test_qat", "test_checkpoint", "test_model", "test_golden_models", "test_step", "test_convert", "test_kda"),
    *("test_k2", "test_packaging", "test_expert", "test_context"),
]


def pytest_collection_modifyitems(items):
    """Puts LONGEST first; workers take whole files, in this order by --no-loadscope-reorder."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


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
def forget_programs():
    """Every executable holds memory maps, of which a process may have 65,530: one that compiles all day crashes."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def optimised() -> Iterator[None]:
    """For modules whose tests look at what XLA's optimisations do: memory, collectives, the last bits."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def x64():
    """Runs a test with 64-bit arrays."""
    with jax.enable_x64(True):
        yield
