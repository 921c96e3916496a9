"""Batches on a mesh: their sharding, and which rows a process holds."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding

from kimi_jax.config import Config, ConfigError
from kimi_jax.parallel.mesh import current_mesh
from kimi_jax.parallel.spec import check_divides, placed, spec_for


def process_part(sharding: NamedSharding | None, rows: int) -> tuple[int, int]:
    """(index, count): which of equal parts of a batch's rows this process's devices hold.

    Raises:
        ConfigError: its rows are not one of equal parts.
    """
    if sharding is None:
        return 0, 1
    held = [
        index[0].indices(rows)[:2]  # type: ignore[index]
        for index in sharding.addressable_devices_indices_map((rows, sharding.num_devices)).values()
    ]
    first, last = min(start for start, _ in held), max(stop for _, stop in held)
    count = last - first
    if rows % count or first % count or sum(stop - start for start, stop in set(held)) != count:
        raise ConfigError(
            f"process {jax.process_index()} holds rows {sorted(set(held))} of {rows}, which are not one of equal "
            "parts; choose mesh sizes whose batch axes (data, fsdp, expert) divide evenly over processes"
        )
    return first // count, rows // count


def to_devices(batch: dict[str, np.ndarray], sharding: NamedSharding | None, part: tuple[int, int] = (0, 1)) -> dict:
    """A process's part of the rows of a batch `[b, t]` as arrays on the mesh; the batch itself without one."""
    if sharding is None:
        return dict(batch)
    index, count = part

    def put(values: np.ndarray) -> jax.Array:
        first = index * len(values)
        shape = (count * len(values), *values.shape[1:])

        def cut(where):
            start, stop = where[0].indices(shape[0])[:2]
            return values[(slice(start - first, stop - first), *where[1:])]

        return jax.make_array_from_callback(shape, sharding, cut)

    return {name: put(values) for name, values in batch.items()}


def batch_sharding(config: Config) -> jax.sharding.NamedSharding | None:
    """How a batch `[rows, t]` is sharded over the current mesh; None without one.

    Raises:
        ConfigError: the mesh does not divide the rows of a micro-batch, or the tokens of a row.
    """
    mesh = current_mesh()
    if mesh is None:
        return None
    names, sizes = ("batch", "time"), dict(mesh.shape)
    shape = (config.data.batch_size // config.train.accumulation, config.data.sequence_length)
    what = "a micro-batch of data.batch_size / train.accumulation rows of data.sequence_length tokens"
    check_divides(what, names, shape, spec_for(config.rules, names, sizes), sizes)
    return placed(mesh, config.rules, names)
