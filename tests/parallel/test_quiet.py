"""libtpu says nothing where no TPU is, wherever a command asks JAX for its devices first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FIRST = {
    "training": "from kimi_jax.parallel import processes; processes.initialize()",
    "a dry run": "from kimi_jax.cli import train; train(['k3_tiny', '--dry-run'])",
    "the sizes": "from kimi_jax.cli import inspect; inspect(['k3_tiny', '--optim'])",
}
"""What comes first in a command, before it asks how many processes there are."""


@pytest.mark.skipif("TPU_SKIP_MDS_QUERY" not in os.environ, reason="JAX has found a TPU")
@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST.keys())
def test_libtpu_is_quiet_whatever_comes_first(first):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "JAX_PLATFORMS"))}
    program = f"{first}\nimport jax\njax.process_count()"
    if "initialize" not in first:
        program = first
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
