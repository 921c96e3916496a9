"""The same numbers on every mesh: losses, every gradient and three optimizer steps, beside one device."""

import pytest

from tests.parity import MESHES, check

COMPILE_QUICKLY = True


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", ["k3", "kimi_linear"])
def test_numbers_do_not_depend_on_the_mesh(model, mesh):
    check(model, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", ["k3", "kimi_linear"])
def test_full_product(model, mesh, accumulation, remat, x64):
    check(model, mesh, accumulation, remat, x64)
