"""Partition specs: from logical axis names to mesh axes, and what array types say of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax.config import ConfigError, Rules

WHOLE = ("head_dim", "conv", "width", "latent", "rank_out", "router", "repeats", "length", "slots", "tail")
"""Logical axes that are never sharded."""


def spec_for(rules: Rules, names: Iterable[str], sizes: dict[str, int]) -> P:
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
                f"{what}: {name}={size} does not divide over mesh {product({a: sizes[a] for a in axes})} = {ways}; "
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
    return None if mesh is None else NamedSharding(mesh, spec_for(rules, names, dict(mesh.shape)))


def spec_of(x) -> P:
    """The partition in an array's type, one entry an axis; all None without a mesh."""
    partition = getattr(jax.typeof(x).sharding, "spec", P())
    return P(*partition, *[None] * (x.ndim - len(partition)))


def mesh_axes_of(*arrays) -> tuple[str, ...]:
    """All mesh axes that the arrays' types are sharded over, in order of the mesh."""
    used = {axis for x in arrays for part in spec_of(x) for axis in axes_of(part)}
    return tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in used)


def per_device(f: Callable, out_specs) -> Callable:
    """`f` run on each device's part of its arguments, inside which mesh axes have names.

    Args:
        f: takes trees of arrays; None is allowed.
        out_specs: the partition of each result.

    Returns:
        A function of global arrays, whose types say how they are sharded; without a mesh, `f`.
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


def product(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1"
