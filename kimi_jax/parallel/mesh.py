"""From mesh sizes and rules in a config to meshes, partition specs and shardings.

Arrays carry their sharding in their type (`AxisType.Explicit`), so only the edge of a run (parameters, optimizer,
batches) is told where things go; layers read it off their arguments. One device is no mesh at all, and mesh axes of
size one are left out: then the same code meets no axis and has no collective.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax import config as configs
from kimi_jax.config import ConfigError, Rules
from kimi_jax.parallel.processes import quiet_libtpu

WHOLE = ("head_dim", "conv", "width", "latent", "rank_out", "router", "repeats", "length", "slots", "tail")
"""Logical axes that no rule may cut."""


def make_mesh(config: configs.Mesh, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh | None:
    """The mesh of a run: its axes larger than one, outermost first, all Explicit. None for one device.

    Args:
        config: size of each axis.
        devices: what to lay the mesh over; the process's by default.

    Raises:
        ConfigError: there are fewer devices than the mesh has; or, over several processes, more.
    """
    if devices is None:
        quiet_libtpu()  # here JAX looks for devices first
        devices = jax.devices()
    if config.size > len(devices):
        raise ConfigError(
            f"a mesh of {_product(config.shape)} = {config.size} devices is larger than the {len(devices)} there are; "
            "lower mesh.* until the product fits"
            + (
                f", or emulate them: JAX_NUM_CPU_DEVICES={config.size} (or XLA_FLAGS="
                f"--xla_force_host_platform_device_count={config.size})"
                if devices[0].platform == "cpu" and config.size <= 64
                else ""
            )
        )
    if config.size < len(devices) and jax.process_count() > 1:
        raise ConfigError(
            f"a mesh of {_product(config.shape)} = {config.size} devices leaves {len(devices) - config.size} of "
            f"{len(devices)} idle, whose processes would wait for ever; raise mesh.data, mesh.fsdp or another axis"
        )
    if config.size == 1:
        return None
    slices: dict[int, list[Any]] = {}
    for device in devices[: config.size]:
        # Elsewhere every host counts as a slice of its own.
        slice_index = getattr(device, "slice_index", 0) if device.platform == "tpu" else 0
        slices.setdefault(slice_index, []).append(device)
    if config.data % len(slices):
        raise ConfigError(
            f"mesh.data={config.data} does not divide over {len(slices)} slices; set it to a multiple: no other axis "
            "may cross the network between them"
        )
    shape = (config.data // len(slices), *tuple(config.shape.values())[1:])
    laid = np.concatenate([_lay(shape, part) for part in slices.values()])
    axes = {name: size for name, size in config.shape.items() if size > 1}
    return jax.sharding.Mesh(
        laid.reshape(tuple(axes.values())), tuple(axes), axis_types=(AxisType.Explicit,) * len(axes)
    )


def _lay(shape: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    """Devices in the order that suits the network of a slice."""
    try:
        # An axis may take a part of a dimension of a TPU's torus, as 4 x 128 of 8 x 8 x 8.
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except AssertionError:  # two devices a chip that JAX knows no layout for (v4): chip by chip
        return np.array(devices).reshape(shape)


def abstract_mesh(config: configs.Mesh) -> jax.sharding.AbstractMesh:
    """`make_mesh` without devices: for shapes and types alone."""
    axes = {name: size for name, size in config.shape.items() if size > 1}
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))


def on(mesh: jax.sharding.Mesh | None) -> AbstractContextManager:
    """Sets the mesh for a `with` block; nothing for None."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def current_mesh() -> jax.sharding.Mesh | jax.sharding.AbstractMesh | None:
    """The mesh that is set, with its devices where it has any; None without one. Not inside `jax.jit`."""
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        return None
    concrete = jax.sharding.get_mesh()
    return abstract if concrete.empty else concrete


def platform() -> str:
    """Where code is compiled for: the mesh's devices, else JAX's default backend."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    return jax.default_backend() if device is None else device.platform


def spec(rules: Rules, names: Iterable[str], sizes: dict[str, int]) -> P:
    """The partition of an array by the logical names of its axes.

    Args:
        rules: logical name -> mesh axes.
        names: one logical name an axis.
        sizes: mesh axes that there are; others are left out.

    Raises:
        ConfigError: two axes of the array on one mesh axis, or an unknown name.

    >>> spec(Rules(), ("embed", "heads", "head_dim"), {"fsdp": 4, "tensor": 2})
    PartitionSpec('fsdp', 'tensor', None)
    """
    names, used, parts = tuple(names), {}, []
    for name in names:
        if name not in WHOLE and not hasattr(rules, name):
            raise ConfigError(f"axis {name!r} of {names} is in no rule; there are {', '.join(vars(rules))}")
        axes = tuple(axis for axis in getattr(rules, name, ()) if axis in sizes)
        for axis in axes:
            if axis in used:
                raise ConfigError(
                    f"axes {used[axis]!r} and {name!r} of an array {names} are both cut over mesh axis {axis!r} of "
                    f"size {sizes[axis]}; change rules.{used[axis]} or rules.{name}"
                )
            used[axis] = name
        parts.append(axes if len(axes) > 1 else axes[0] if axes else None)
    return P(*parts)


def check_divides(what: str, names: Sequence[str], shape: Sequence[int], partition: P, sizes: dict[str, int]) -> None:
    """Refuses an axis whose size the mesh axes of its partition do not divide."""
    for name, size, part in zip(names, shape, partition, strict=True):
        axes = axes_of(part)
        ways = math.prod(sizes[axis] for axis in axes)
        if size % ways:
            fit = [n for n in range(1, ways + 1) if size % n == 0]
            raise ConfigError(
                f"{what}: {name}={size} does not divide over mesh {_product({a: sizes[a] for a in axes})} = {ways}; "
                f"set {' x '.join(f'mesh.{a}' for a in axes)} to one of {fit}, or change rules.{name}"
            )


def axes_of(part) -> tuple[str, ...]:
    """The mesh axes in one entry of a spec."""
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def axis_of(part) -> str | None:
    """The only mesh axis in one entry of a spec, None if there is none."""
    axes = axes_of(part)
    assert len(axes) <= 1, axes
    return axes[0] if axes else None


def placed(mesh, rules: Rules, names: Sequence[str]) -> NamedSharding | None:
    """The sharding of an array by the logical names of its axes; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, spec(rules, names, dict(mesh.shape)))


def spec_of(x) -> P:
    """The partition in an array's type, one entry an axis; all None without a mesh."""
    partition = getattr(jax.typeof(x).sharding, "spec", P())
    return P(*partition, *[None] * (x.ndim - len(partition)))


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


def mesh_axes_of(*arrays) -> tuple[str, ...]:
    """All mesh axes that the arrays' types are cut over, in order of the mesh."""
    used = {axis for x in arrays for part in spec_of(x) for axis in axes_of(part)}
    return tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in used)


def per_device(f: Callable, out_specs) -> Callable:
    """`f` run on each device's part of its arguments, inside which mesh axes have names.

    Args:
        f: takes trees of arrays; None is allowed.
        out_specs: the partition of each result.

    Returns:
        A function of whole arrays, whose types say how they are cut; without a mesh, `f`.
    """

    def run(*args):
        if jax.sharding.get_abstract_mesh().empty:
            return f(*args)
        return jax.shard_map(f, in_specs=jax.tree.map(spec_of, args), out_specs=out_specs)(*args)

    return run


def relay(x: jax.Array, partition: P) -> jax.Array:
    """Moves an array to another partition; the array itself without a mesh."""
    return x if jax.sharding.get_abstract_mesh().empty else jax.sharding.reshard(x, partition)


def varying(x) -> frozenset[str]:
    """Inside `per_device`: the mesh axes over which an array may differ, by its type."""
    return jax.typeof(x).manual_axis_type.varying


def vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Inside `per_device`: says that an array may differ over `axes`; its gradient is summed over the new ones."""
    new = tuple(axis for axis in axes if axis not in varying(x))
    return jax.lax.pcast(x, new, to="varying") if new else x


def _product(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1"
