"""In what dtype micro-batches are added up, seen without compiling."""

from pathlib import Path

import jax
import jax.numpy as jnp

from kimi_jax.train.step import abstract_state, make_optimizer, make_step
from tests import tiny


def test_gradients_of_bf16_parameters_are_accumulated_in_float32(tmp_path: Path):
    config = tiny.with_model(tiny.config(tmp_path, accumulation=2), dtype="bfloat16", param_dtype="bfloat16")
    optimizer, ids = make_optimizer(config), jax.ShapeDtypeStruct((4, 8), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", "segment_ids", "num_bytes"), ids)
    batch["loss_weights"] = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    state = abstract_state(config, optimizer)
    assert state.params["embed"].dtype == jnp.bfloat16
    program = jax.make_jaxpr(make_step(config, optimizer))(state, batch)
    (loop,) = (each for each in program.jaxpr.eqns if each.primitive.name == "scan" and each.params["length"] == 2)
    first = loop.params["num_consts"]
    carried = [variable.aval for variable in loop.invars[first : first + loop.params["num_carry"]]]
    for name in ("embed", "head"):
        found = {aval.dtype for aval in carried if aval.shape == state.params[name].shape}
        assert found == {jnp.dtype("float32")}, name
    assert not any(aval.dtype == jnp.bfloat16 for aval in carried)
