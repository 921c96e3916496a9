"""Released checkpoints in: read in slices onto any mesh.

What their tensors are called and how they are laid out is in `names`, their config.json in `released_config`, their
files in `safetensors_files`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.config import ConfigError, ModelConfig, Rules
from kimi_jax.model.kimi import Kimi, declared
from kimi_jax.model.param import shapes, with_arrays
from kimi_jax.ops.quant.bits import GROUP
from kimi_jax.ops.quant.blocks import BLOCK
from kimi_jax.ops.quant.qtensor import Kind, QTensor
from kimi_jax.parallel.spec import axes_of
from kimi_jax.store.names import Tensor, match
from kimi_jax.store.quantization import check_quantization
from kimi_jax.store.released_config import CONFIG, read_config
from kimi_jax.store.safetensors_files import DTYPES, Directory

PARTS = ("packed", "scale")
"""Arrays of a `QTensor`."""


def load_release(
    path: str | Path, *, dtype=jnp.float32, packed: bool = False, rules: Rules | None = None
) -> tuple[Kimi, ModelConfig]:
    """Loads a released directory of K3, Kimi Linear or K2 onto the current mesh, each process what its devices hold.

    What is quantized (MXFP4, block-FP8, INT4) is told by names and dtypes in the files, and decoded.

    Args:
        path: directory with `config.json` and `model.safetensors`, or shards and their index.
        dtype: of parameters and compute, whatever config.json says. What the family stores as F32 is at least f32.
            None for the narrowest that holds every number that is not quantized.
        packed: routed experts that are quantized stay so, as `QTensor`.
        rules: how parameters are cut over the mesh.

    Returns:
        The model and its config.

    Raises:
        CheckpointError: missing, unexpected or mis-shaped tensors, unreadable files, shard names that leave the
            directory; every one of them is named.
        ConfigError: a config.json that describes another kind of model.
    """
    if dtype is not None and jnp.dtype(dtype) == jnp.float64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ConfigError('dtype=float64 needs jax.config.update("jax_enable_x64", True)')
    release = Release(path)
    config = release.config
    if dtype is not None:
        config = replace(config, dtype=jnp.dtype(dtype).name, param_dtype=jnp.dtype(dtype).name)
    values = {}
    for name, like in shapes(declared(config), rules).items():
        kind = release.kinds.get(name) if packed else None
        if kind is None:
            values[name] = _array(release, name, like.shape, like.dtype, like.sharding)
        else:
            values[name] = jax.tree.map(
                lambda part, leaf: _array(release, leaf, part.shape, part.dtype, part.sharding),
                packed_shape(name, like, kind, release.shapes(name)),
                QTensor(f"{name}.packed", f"{name}.scale", kind),  # type: ignore[arg-type]
            )
    return with_arrays(Kimi(config), values), config


def _array(release: Release, leaf: str, shape, dtype, sharding) -> jax.Array:
    if sharding is None:
        return jnp.asarray(release.read(leaf, (slice(None),) * len(shape), dtype))
    held: dict[str, np.ndarray] = {}

    def read(index) -> np.ndarray:  # once for all devices that hold the same
        if str(index) not in held:
            held[str(index)] = release.read(leaf, index or (), dtype)
        return held[str(index)]

    return jax.make_array_from_callback(shape, sharding, read)


def packed_shape(
    name: str, like, kind: Kind, shapes: Mapping[str, jax.ShapeDtypeStruct], *, decoded: bool = False
) -> QTensor:
    """A parameter's packed form: `packed` and `scale` of these shapes, cut over the mesh as the parameter is.

    Args:
        name: path of the parameter.
        like: its shape and sharding.
        kind: its format.
        shapes: of `packed` and `scale`.
        decoded: it is to be decoded. An axis then stays whole where the mesh would cut through blocks.

    Raises:
        ConfigError: the mesh cuts through blocks, and the parameter is to stay packed.
    """
    sharding = like.sharding
    if sharding is not None:
        *lead, rows, cols = sharding.spec
        flipped = [cols, rows]  # it is stored transposed
        for part, s in shapes.items():
            for at, (size, axes) in enumerate(zip(s.shape[-2:], (cols, rows), strict=True)):
                ways = math.prod(sharding.mesh.shape[axis] for axis in axes_of(axes))
                if size % ways:
                    if not decoded:
                        raise ConfigError(
                            f"{name}.{part}: an axis of {size} blocks with a scale each does not divide over mesh axes "
                            f"{' x '.join(axes_of(axes))} = {ways}; load it decoded, or choose another mesh"
                        )
                    flipped[at] = None
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*lead, *flipped))
    parts = (jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in shapes.values())
    return QTensor(*parts, kind)  # type: ignore[arg-type]


class Release:
    """A released directory, opened and checked: the parameters of our tree, read in slices.

    Attributes:
        config: the model, in the dtypes that hold every number as released, at most float32.
        leaves: path -> shape and dtype of all arrays of the tree, experts that are quantized as `.packed` and `.scale`.
        kinds: path of each parameter that can stay packed -> its format.
        carried: names of the tensors whose bytes do not follow from `leaves`: those of other parts of a multimodal
            model, what is quantized outside of experts, and float64.

    Raises:
        CheckpointError: as in `load`.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        config = read_config(path)
        assert config.release is not None
        check_quantization(self.path / CONFIG, json.loads(config.release))
        self.directory = Directory(path)
        entries = self.directory.entries
        self.stored = match(entries, config, path)
        wide = any(
            s.part == "plain" and s.dtypes[0] == "BF16" and entries[name].dtype != "BF16"
            for name, s in self.stored.items()
        )
        dtype = "float32" if wide else "bfloat16"
        self.config = replace(config, dtype=dtype, param_dtype=dtype)
        self._parts: dict[str, dict[str, str]] = {}
        known: dict[str, Tensor] = {}
        for name, s in self.stored.items():
            known[s.tensor.name] = s.tensor
            self._parts.setdefault(s.tensor.name, {})[s.part] = name
        self._tensors = list(known.values())
        placed: dict[str, dict[tuple[int, ...], int]] = {}
        for number, tensor in enumerate(self._tensors):
            for param in tensor.params:
                placed.setdefault(param, {})[tensor.index] = number
        self._places: dict[str, np.ndarray] = {}
        self.kinds: dict[str, Kind] = {}
        self.leaves: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        for param, like in declared(self.config).items():
            indices = list(placed[param])
            stack = like.shape[: len(indices[0])]
            self._places[param] = np.empty(stack, np.int64)
            for index, number in placed[param].items():
                self._places[param][index] = number
            found: list[Kind | None] = list({self._kind(self._tensors[number]) for number in placed[param].values()})
            kind = found[0] if len(found) == 1 and like.axes[0] == "experts" else None
            if kind is None:
                self.leaves[param] = like.shape, like.dtype
                continue
            self.kinds[param] = kind
            parts = self._parts[self._tensors[placed[param][indices[0]]].name]
            for part in PARTS:
                entry = entries[parts[part]]
                self.leaves[f"{param}.{part}"] = (*stack, *entry.shape), DTYPES[entry.dtype]
        self.carried = [
            name
            for name in entries
            if name not in self.stored
            or (self.stored[name].part in PARTS and self.stored[name].tensor.params[0] not in self.kinds)
            or (self.stored[name].part == "plain" and entries[name].dtype == "F64")  # parameters hold less of it
        ]

    def shapes(self, param: str) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the arrays of a parameter that can stay packed."""
        return {part: jax.ShapeDtypeStruct(*self.leaves[f"{param}.{part}"]) for part in PARTS}

    def read(self, leaf: str, index: tuple[slice, ...], dtype=None) -> np.ndarray:
        """A slice of one of `leaves`, or of a packed parameter by its own path, which is then decoded."""
        param, _, part = leaf.rpartition(".")
        if param not in self.kinds:
            param, part = leaf, None
        places = self._places[param]
        stack = places.ndim
        numbers = places[index[:stack]]
        dtype = np.dtype(dtype or self.leaves[leaf][1])
        out: np.ndarray | None = None
        for at, number in np.ndenumerate(numbers):
            tensor = self._tensors[number]
            if part is not None:
                value = self.directory.read(self._parts[tensor.name][part])[index[stack:]]
            elif self._kind(tensor) is None:
                name = self._parts[tensor.name]["plain"]
                value = tensor.decode(self.directory.read(name))[tensor.params.index(param)][index[stack:]]
            else:
                value = self._decoded(tensor, param, index[stack:], dtype)
            if out is None:
                out = np.empty((*numbers.shape, *value.shape), dtype)
            copy_strips(out[at], value)
        assert out is not None
        return out

    def _kind(self, tensor: Tensor) -> Kind | None:
        return self.stored[next(iter(self._parts[tensor.name].values()))].kind

    def _decoded(self, tensor: Tensor, param: str, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """A slice of a layer's parameter out of a quantized tensor, of which no more than its blocks are read."""
        packed, scale = (self.directory.read(self._parts[tensor.name][part]) for part in PARTS)
        kind = self._kind(tensor)
        assert kind is not None
        sides = (BLOCK, BLOCK) if kind == "fp8_block" else (1, GROUP)
        blocks = []
        for axis, (size, side) in enumerate(zip(tensor.shape, sides, strict=True)):
            # Codecs split and move axes, so that a slice has its first and last row and column at its corners.
            numbers = np.broadcast_to(np.expand_dims(np.arange(size), 1 - axis), tensor.shape)
            part = tensor.decode(numbers)[tensor.params.index(param)][index]
            blocks.append(slice(part[(0,) * part.ndim] // side, part[(-1,) * part.ndim] // side + 1))
        entries = scale.shape[1] * sides[1] // packed.shape[1] if kind != "fp8_block" else 1
        rows, cols = (slice(b.start * side, b.stop * side) for b, side in zip(blocks, sides, strict=True))
        w = unpack(packed[rows, cols.start // entries : cols.stop // entries], scale[tuple(blocks)], kind, dtype)
        if w.shape != tensor.shape:
            whole = np.empty(tensor.shape, dtype)  # memory that is not touched is none
            copy_strips(whole[rows, cols], w)
            w = whole
        return tensor.decode(w)[tensor.params.index(param)][index]


def copy_strips(out: np.ndarray, value: np.ndarray) -> None:
    """out <- value, which may be transposed: in strips, so that both stay in the processor's cache."""
    if out.dtype == value.dtype:  # of the same dtype, bits: NumPy is slow with those it does not know
        out, value = (a.view(f"u{a.itemsize}") for a in (out, value))
    if value.ndim < 2 or value.flags.c_contiguous:
        out[...] = value
        return
    axis, fast = int(np.argmax(value.strides)), int(np.argmin(value.strides))
    lines = max(1, value.size // value.shape[fast] // value.shape[axis])
    step = max(1, 128 // lines)
    for start in range(0, value.shape[axis], step):
        part = (*(slice(None),) * axis, slice(start, start + step))
        out[part] = value[part]


def unpack(packed: np.ndarray, scale: np.ndarray, kind: Kind, dtype) -> np.ndarray:
    """Decodes a quantized matrix `[out, in]` on the host."""
    with on_host():
        return np.asarray(_unpack(np.asarray(packed), np.asarray(scale), kind, jnp.dtype(dtype)))


@partial(jax.jit, static_argnums=(2, 3))
def _unpack(packed, scale, kind, dtype):
    return QTensor(packed, scale, kind).decode(dtype).mT


def on_host():
    """One CPU device, whatever mesh is set."""
    device = jax.local_devices(backend="cpu")[0]
    return jax.set_mesh(jax.sharding.Mesh(np.array([device]), ("host",), axis_types=(jax.sharding.AxisType.Explicit,)))
