"""`param` declares a parameter once: shape, axes, initialiser, dtype and how the optimizer sees it.

A module's parameters are declared as shapes (`jax.ShapeDtypeStruct`), so building any model, 2.78 T parameters
included, allocates nothing; `kimi.init` fills them. Axes in a rule are negative (counted from the right), so
that stacking layers in front never changes what a rule means. `kimi.declared` lists what a config's parameters are.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax.config import Rules
from kimi_jax.model.init import Init
from kimi_jax.model.rules import Muon, QKClip, Rule
from kimi_jax.ops.quant.qtensor import QTensor
from kimi_jax.parallel import dense
from kimi_jax.parallel.mesh import current_mesh
from kimi_jax.parallel.spec import check_divides, spec_for

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Declaration:
    """All that is known of a parameter before it has values; kept as the variable's metadata."""

    shape: tuple[int, ...]
    """Stacked layers in front, then one number for each of `axes`."""
    dtype: np.dtype
    axes: tuple[str, ...]
    """Logical names of the axes of one layer's parameter."""
    init: Init
    rule: Rule
    clip: QKClip | None

    @property
    def stack(self) -> tuple[int, ...]:
        """Leading axes of layers that are scanned over."""
        return self.shape[: len(self.shape) - len(self.axes)]

    @property
    def size(self) -> int:
        """Number of scalars."""
        return math.prod(self.shape)


def param(
    shape: tuple[int, ...],
    axes: str,
    init: Init,
    rule: Rule,
    *,
    stack: tuple[int, ...] = (),
    dtype: jnp.dtype,
    clip: QKClip | None = None,
) -> nnx.Param:
    """Declares one parameter.

    Args:
        shape: shape of one layer's parameter.
        axes: logical names of its axes, separated by blanks, e.g. "embed heads head_dim".
        init: fills an array of `shape` from a NumPy generator.
        rule: `Muon`, `AdamW` or `Balanced`.
        stack: leading axes of layers that are scanned over.
        dtype: stored dtype.
        clip: how QK-Clip scales it, for query and key weights of MLA.
    """
    names = tuple(axes.split())
    if len(names) != len(shape):
        raise ValueError(f"{len(shape)} axes {shape} need as many names, got {names}")
    if isinstance(rule, Muon) and sorted(rule.rows + rule.cols) != sorted(set(rule.rows + rule.cols)):
        raise ValueError(f"rows {rule.rows} and cols {rule.cols} of a Muon rule overlap")
    if isinstance(rule, Muon) and min(rule.rows + rule.cols) < -len(shape):
        raise ValueError(f"a Muon rule over axes {rule.rows}, {rule.cols} reaches outside shape {shape}")
    declared = Declaration((*stack, *shape), np.dtype(dtype), names, init, rule, clip)
    return nnx.Param(jax.ShapeDtypeStruct(declared.shape, declared.dtype), declared=declared)


def named_params(module: nnx.Module) -> dict[str, nnx.Param]:
    """Dotted path -> variable, e.g. `segments.1.runs.0.attention.w_q`, in the order of `jax.tree.leaves`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(module, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _is_packed(x) -> bool:
    return isinstance(x, QTensor)


def arrays(module: nnx.Module) -> dict[str, jax.Array]:
    """Dotted path -> array: the plain dict that the optimizer and checkpoints work on. A packed weight is one entry."""
    return dict(zip(named_params(module), jax.tree.leaves(module, is_leaf=_is_packed), strict=True))


def with_arrays(module: Tree, values: dict[str, jax.Array]) -> Tree:
    """The module with its parameters replaced by `values`, a dict as `arrays` returns it; weights may be packed."""
    names = named_params(module)  # type: ignore[arg-type]
    if values.keys() != names.keys():
        missing, extra = sorted(names.keys() - values.keys()), sorted(values.keys() - names.keys())
        raise ValueError(f"parameters differ from the model's: missing {missing}, unexpected {extra}")
    return jax.tree.unflatten(jax.tree.structure(module, is_leaf=_is_packed), [values[name] for name in names])


def partitions(declared: Mapping[str, Declaration], rules: Rules, sizes: dict[str, int]) -> dict[str, P]:
    """Dotted path -> how the parameter is sharded over mesh axes of these sizes.

    Raises:
        ConfigError: an axis that the mesh does not divide, or two axes of one parameter on one mesh axis.
    """
    result = {}
    for name, each in declared.items():
        partition = spec_for(rules, each.axes, sizes)
        check_divides(name, each.axes, each.shape[len(each.stack) :], partition, sizes)
        result[name] = P(*[None] * len(each.stack), *partition)
    return result


def shapes(declared: Mapping[str, Declaration], rules: Rules | None = None) -> dict[str, Any]:
    """Dotted path -> `jax.ShapeDtypeStruct`, with its sharding on the current mesh if there is one."""
    mesh = current_mesh()
    if mesh is None:
        return {name: jax.ShapeDtypeStruct(each.shape, each.dtype) for name, each in declared.items()}
    return {
        name: jax.ShapeDtypeStruct(declared[name].shape, declared[name].dtype, sharding=NamedSharding(mesh, partition))
        for name, partition in partitions(declared, rules or Rules(), dict(mesh.shape)).items()
    }


def filled(
    declared: Mapping[str, Declaration], like: Mapping[str, jax.ShapeDtypeStruct], seed: int
) -> dict[str, jax.Array]:
    """Initial values with the shapes and shardings of `like`, each process what its devices hold.

    Each layer's parameter (each expert's, too) draws from its own NumPy generator, seeded by `seed`, the path and
    the layer, so that values depend neither on the order of parameters, nor on the mesh, nor on the platform.
    """
    return {name: _filled(name, each, like[name], seed) for name, each in declared.items()}


def _filled(name: str, declared: Declaration, like: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    shape, sharding = like.shape, like.sharding
    lead = len(declared.stack) + (declared.axes[0] == "experts")  # axes of blocks with their own numbers
    whole = (slice(None),) * len(shape)
    held: Any = {None: whole} if sharding is None else sharding.addressable_devices_indices_map(shape)
    bounds = {d: tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True)) for d, index in held.items()}
    parts = {b: np.empty([stop - start for start, stop in b], like.dtype) for b in set(bounds.values())}
    for block in np.ndindex(*shape[:lead]):
        takers = [b for b in parts if all(lo <= i < hi for i, (lo, hi) in zip(block, b[:lead], strict=True))]
        if takers:
            rng = np.random.default_rng([seed, zlib.crc32(name.encode()), *block])
            drawn = declared.init(rng, shape[lead:])
            for b in takers:
                here = tuple(i - lo for i, (lo, _) in zip(block, b[:lead], strict=True))
                parts[b][here] = drawn[tuple(slice(*ends) for ends in b[lead:])]
    if sharding is None:
        return jnp.asarray(parts[bounds[None]])
    on_devices = [jax.device_put(parts[b], device) for device, b in bounds.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, on_devices)


def count(module: nnx.Module) -> int:
    """Number of scalar parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(module, is_leaf=_is_packed))


def einsum(equation: str, x: jax.Array, weight: nnx.Param, **options) -> jax.Array:
    """x times a weight, on any mesh; see `parallel.dense.einsum`."""
    return dense.einsum(equation, x, weight.get_value(), **options)


def exact_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Dtype of what a bf16 model still stores exactly (A_log, dt_bias, conv, o_norm, correction bias)."""
    return jnp.promote_types(dtype, jnp.float32)
