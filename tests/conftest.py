"""Eight CPU devices, and the comparisons that every test of numbers uses."""

import os
from functools import cache

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest
from jax._src import compiler

jax.config.update("jax_num_cpu_devices", 8)

# Of XLA's two ways to write a fusion's code for CPUs, the default runs some 20 MLIR passes over each.
QUICK = {"xla_cpu_use_fusion_emitters": False}
XLA_OPTIONS = compiler.get_compile_options


@cache
def known_to_xla() -> bool:
    """Whether this XLA has the options of QUICK: it refuses what it does not know."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=QUICK)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def quick_options(*args, env_options_overrides=None, **kwargs):
    """What jax tells XLA, and QUICK: jax has a setting for some of XLA's options only. What a jit sets itself wins."""
    return XLA_OPTIONS(*args, env_options_overrides=QUICK | dict(env_options_overrides or {}), **kwargs)


def default_fusions() -> dict[str, bool]:
    """`compiler_options` of a jit in a quick module whose programs are compared to the last bits."""
    return dict.fromkeys(QUICK, True) if known_to_xla() else {}


def quick_environment() -> dict[str, str]:
    """Environment variables with which another process compiles quickly."""
    flags = [os.environ.get("XLA_FLAGS", ""), *(f"--{name}={value}" for name, value in QUICK.items() if known_to_xla())]
    return {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": " ".join(flags).strip()}


# The longest files, longest first: one that starts last would leave the other worker with nothing to do.
LONGEST = [
    *("test_mesh_settings", "test_notebooks", "test_train", "test_distributed", "test_meshes", "test_aot"),
    *("test_checkpoint", "test_qat", "test_k2", "test_model", "test_golden_models", "test_expert", "test_context"),
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
def compile_quickly(request):
    """Large graphs compile in a quarter of the time without XLA's optimisations and its MLIR passes over fusions.

    Modules ask with COMPILE_QUICKLY = True.
    """
    quick = getattr(request.module, "COMPILE_QUICKLY", False)
    jax.config.update("jax_disable_most_optimizations", quick)
    if quick and known_to_xla():
        compiler.get_compile_options = quick_options
    yield
    compiler.get_compile_options = XLA_OPTIONS
    jax.config.update("jax_disable_most_optimizations", False)
    # Every executable holds memory maps, of which a process may have 65,530: one that compiles all day crashes.
    jax.clear_caches()


@pytest.fixture
def x64():
    """Runs a test with 64-bit arrays."""
    with jax.enable_x64(True):
        yield
