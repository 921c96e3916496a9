"""In what dtype the gradients of many layers to one block's sum are added up, seen without compiling."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core

from kimi_jax.model.kimi import Kimi
from tests import tiny


def loops(jaxpr):
    """All scans of a program, those inside others too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda v: isinstance(v, core.ClosedJaxpr | core.Jaxpr)):
            if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
                yield from loops(getattr(value, "jaxpr", value))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_the_bank_are_carried_in_float32(dtype):
    config = replace(
        tiny.MODEL, num_layers=6, mla_layers=tuple(range(6)), kda=None, attn_res_block_size=3, remat="full", dtype=dtype
    )
    tokens, bank = jnp.zeros((1, 5), jnp.int32), (2, 1, 5, config.hidden_size)
    program = jax.make_jaxpr(jax.grad(lambda model: jnp.sum(model.hidden(tokens)[0].astype(jnp.float32))))(Kimi(config))
    carried = [
        variable.aval.dtype
        for loop in loops(program.jaxpr)
        if loop.params["reverse"]
        for variable in loop.invars[loop.params["num_consts"] :][: loop.params["num_carry"]]
        if variable.aval.shape == bank
    ]
    assert carried and set(carried) == {jnp.dtype("float32")}
