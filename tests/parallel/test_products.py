"""Products and look-ups at their edges: order of gathers, dtype of sums over devices, ids past the end, uneven axes."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax.config import ConfigError
from kimi_jax.parallel.batch import process_part
from kimi_jax.parallel.dense import einsum, gather, sum_scatter
from kimi_jax.parallel.spec import check_divides
from kimi_jax.parallel.vocab import lookup


def mesh_of(**axes: int):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))


def test_an_axis_over_two_mesh_axes_comes_together_in_order():
    mesh, x = mesh_of(a=2, b=4), np.arange(16.0, dtype=np.float32)

    def there_and_back(part):
        full = gather(part, ("a", "b"), 0)
        return full, sum_scatter(full, ("a", "b"), 0)

    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, P(("a", "b"))))
        full, parts = jax.jit(jax.shard_map(there_and_back, out_specs=(P(("a", "b")), P(("a", "b")))))(split)
    np.testing.assert_array_equal(np.asarray(full).reshape(8, 16), np.tile(x, (8, 1)))
    np.testing.assert_array_equal(parts, 8 * x)


def test_gradients_of_weights_are_summed_over_devices_in_float32():
    """256 + 7 is no bf16 number."""
    mesh = mesh_of(fsdp=8)
    with jax.set_mesh(mesh):
        x = jax.device_put(np.array([256] + [1] * 7, np.float32)[:, None], NamedSharding(mesh, P("fsdp", None)))
        w = jax.device_put(np.ones((1, 8), np.float32), NamedSharding(mesh, P(None, "fsdp")))
        loss = lambda w: jnp.sum(einsum("td,df->tf", x.astype(jnp.bfloat16), w).astype(jnp.float32))  # noqa: E731
        np.testing.assert_array_equal(jax.jit(jax.grad(loss))(w), np.full((1, 8), 263.0))


def test_embeddings_of_a_frequent_token_and_of_none():
    table, frequent = jnp.ones((4, 2), jnp.float32), np.zeros((1, 512), np.int32)
    grad = jax.grad(lambda table: jnp.sum(lookup(table, frequent, jnp.bfloat16).astype(jnp.float32)))(table)
    np.testing.assert_array_equal(grad, np.array([[512.0] * 2] + [[0.0] * 2] * 3))
    found = lookup(table, np.array([[-1, 0, 3, 4, 5]], np.int32), jnp.float32)
    np.testing.assert_array_equal(np.isnan(found[0, :, 0]), [True, False, False, True, True])


def test_an_axis_divides_over_the_product_of_its_mesh_axes():
    sizes = {"fsdp": 2, "expert": 2}
    check_divides("w", ("embed",), (8,), P(("fsdp", "expert")), sizes)
    with pytest.raises(ConfigError, match=r"embed=6 .* = 4"):
        check_divides("w", ("embed",), (6,), P(("fsdp", "expert")), sizes)


@pytest.mark.parametrize("held, part", [([(0, 2), (2, 4)], (0, 2)), ([(4, 8)], (1, 2)), ([(6, 8), (6, 8)], (3, 4))])
def test_which_part_of_a_batch_a_process_holds(held, part):
    indices = {number: (slice(*rows), slice(None)) for number, rows in enumerate(held)}
    sharding = SimpleNamespace(num_devices=8, addressable_devices_indices_map=lambda shape: indices)
    assert process_part(sharding, 8) == part  # type: ignore[arg-type]
