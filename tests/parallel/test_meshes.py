"""Whole steps on meshes: losses, every gradient and three optimizer steps, beside one device.

What a mesh does to each layer is asked in `test_layers.py` and of the optimizer in `tests/optim/test_sharded.py`; here
is what they are together. Each mesh, model, accumulation, recomputation and precision occurs; `slow` has the product.
"""

import pytest

from tests.parity import MESHES, check

FAST = [
    ("k3", "data 8", 1, "none", False),
    ("kimi_linear", "fsdp 8", 4, "full", False),
    ("all to all", "expert 8", 1, "none", False),
    ("clipped", "tensor 4 data 2", 1, "none", False),
    ("k2", "seq 4 data 2", 1, "none", False),
    ("k3", "fsdp 2 expert 4", 1, "full", False),
    # Loops over layers, whose gradients differ most where something is summed twice or not at all.
    ("scanned", "expert 2 tensor 2 seq 2", 1, "full", True),
]
OTHERS = [
    ("scanned", "expert 2 tensor 2 seq 2", 1, "full", False),
    ("all to all", "fsdp 2 expert 4", 1, "none", False),
    ("k2", "expert 2 tensor 2 seq 2", 4, "full", True),
]


def name(case) -> str:
    return "-".join(map(str, case)).replace(" ", "")


@pytest.mark.parametrize("case", FAST, ids=name)
def test_a_step_does_not_depend_on_the_mesh(case):
    check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=name)
def test_other_models_with_other_settings(case):
    check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", ["k3", "kimi_linear"])
def test_full_product(model, mesh, accumulation, remat, x64):
    check(model, mesh, accumulation, remat, x64)
