"""What the tests use of JAX's and XLA's insides is still there, and was checked with these versions."""

import os

import jax
import jax._src.cache_key as keys
import pytest

from tests import jax_private


@pytest.mark.parametrize("package", ["jax", "jaxlib"])
def test_versions_are_those_that_were_checked(package):
    found, checked = jax_private.version_of(package), jax_private.CHECKED
    assert found <= checked, (
        f"{package} {found} is newer than {checked}, with which tests/jax_private.py was checked: the suite is slower "
        "without it. See whether each name there is still in JAX and each flag in XLA, then raise CHECKED"
    )


def test_names_and_flags_are_there():
    assert callable(keys._hash_accelerator_config) and callable(keys._hash_devices)
    # An option that XLA does not know is an error here, and ends the process in XLA_FLAGS.
    options = jax_private.default_fusions()
    assert int(jax.jit(lambda x: x + 1, compiler_options=options)(1)) == 2
    for name, value in jax_private.QUICK.items():
        assert f"--{name}={str(value).lower()}" in os.environ["XLA_FLAGS"]


def test_flags_are_added_once_and_to_what_is_known(monkeypatch):
    added = jax_private.quick_xla_flags("--xla_dump_to=/x")
    assert added == "--xla_dump_to=/x --xla_cpu_use_fusion_emitters=false"
    assert jax_private.quick_xla_flags(added) == added
    monkeypatch.setattr(jax_private, "version_of", lambda package: (jax_private.CHECKED[0] + 1, 0))
    assert jax_private.quick_xla_flags("") == "" and jax_private.default_fusions() == {}
