"""From mesh sizes in a config to meshes of devices.

Arrays carry their sharding in their type (`AxisType.Explicit`), so only the edge of a run (parameters, optimizer,
batches) is told where things go; layers read it off their arguments. One device is no mesh at all, and mesh axes of
size one are left out: then the same code meets no axis and has no collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from kimi_jax import config as configs
from kimi_jax.config import ConfigError
from kimi_jax.parallel.processes import quiet_libtpu
from kimi_jax.parallel.spec import product


def make_mesh(config: configs.Mesh, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh | None:
    """The mesh of a run: its axes larger than one, outermost first, all Explicit. None for one device.

    Args:
        config: size of each axis.
        devices: what the mesh is laid over; the process's by default.

    Raises:
        ConfigError: there are fewer devices than the mesh has; or, over several processes, more.
    """
    if devices is None:
        quiet_libtpu()  # here JAX looks for devices first
        devices = jax.devices()
    if config.size > len(devices):
        raise ConfigError(
            f"a mesh of {product(config.shape)} = {config.size} devices is larger than the {len(devices)} there are; "
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
            f"a mesh of {product(config.shape)} = {config.size} devices leaves {len(devices) - config.size} of "
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


def on_mesh(mesh: jax.sharding.Mesh | None) -> AbstractContextManager:
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
