"""Released checkpoints in and out: the only file that knows Hugging Face's names and PyTorch's layouts.

Three released layouts of one model, told apart by the config: K3 nests its text model (`language_model.` in front of
names, `text_config` in config.json, `A_log` padded with zeros to `head_dim` entries); Kimi Linear does not, and stores
`A_log` as `[1, 1, heads, 1]`; K2 has DeepSeek-V3's names. A linear weight is `[out, in]` there and `[in, out]` here,
with heads as an axis. Channels that turn together are neighbours in both.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import shards
from kimi_jax.config import ConfigError, KDAConfig, MLAConfig, ModelConfig, MoEConfig, RoPEConfig, Rules
from kimi_jax.layers.param import arrays, declarations, named_params, place, with_arrays
from kimi_jax.layout import segments
from kimi_jax.model import Kimi
from kimi_jax.ops.mx import BLOCK, GROUP, Kind, QTensor
from kimi_jax.sharding import axes_of
from kimi_jax.shards import DTYPES, INDEX, CheckpointError, Directory, Entry, Shard

FLOAT32_NAMES = ("A_log", "dt_bias", "_conv1d.weight", "o_norm.weight", "e_score_correction_bias")
"""Endings of the tensors that are stored as F32; all others are BF16."""
NOT_TEXT = ("vision_tower.", "mm_projector.")
"""Tensors of a multimodal checkpoint that the text model has no use for."""
STRAY = ".rotary_emb.inv_freq"
"""Ending of buffers in K2's files that follow from the config."""
ROOT = "language_model."
"""What a multimodal release puts in front of its text tensors' names."""
PLAIN = ("F32", "BF16")
"""Dtypes of tensors that are not quantized."""
PARTS = ("packed", "scale")
"""Arrays of a `QTensor`."""
CONFIG = "config.json"
SHARD_BYTES = 5 * 2**30


@dataclass(frozen=True)
class Tensor:
    """One tensor of the released model, whatever its encoding on disk, and where it lives in our tree."""

    name: str
    shape: tuple[int, ...]
    params: tuple[str, ...]
    """Paths of the parameters that it holds: one, or two for `kv_b_proj`."""
    index: tuple[int, ...]
    """Place in the stacked parameters."""
    decode: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    """Released array -> a layer's parameters, as views."""
    encode: Callable[..., np.ndarray]
    rows: int | None
    """Axis of the layer's parameter that runs along the first axis here; None where they mix."""

    @property
    def dtype(self) -> str:
        return "F32" if self.name.endswith(FLOAT32_NAMES) else "BF16"


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: a released tensor, or the part of one that is quantized."""

    name: str
    dtypes: tuple[str, ...]
    """What it may be stored in; the family's own comes first."""
    shape: tuple[int, ...]
    tensor: Tensor
    kind: Kind | None
    part: str
    """`packed` or `scale`, as in `QTensor`; `shape`; `plain` for one that is not quantized."""

    @property
    def entry(self) -> tuple[str, str, tuple[int, ...]]:
        return self.name, self.dtypes[0], self.shape


def load(
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
    model = place(Kimi(config), rules or Rules())
    values = {}
    for name, like in arrays(model).items():
        kind = release.kinds.get(name) if packed else None
        if kind is None:
            values[name] = _array(release, name, like.shape, like.dtype, like.sharding)
        else:
            values[name] = jax.tree.map(
                lambda part, leaf: _array(release, leaf, part.shape, part.dtype, part.sharding),
                packed_shape(name, like, kind, release.shapes(name)),
                QTensor(f"{name}.packed", f"{name}.scale", kind),  # type: ignore[arg-type]
            )
    return with_arrays(model, values), config


def _array(release: Release, leaf: str, shape, dtype, sharding) -> jax.Array:
    if sharding is None:
        return jnp.asarray(release.read(leaf, (slice(None),) * len(shape), dtype))
    held: dict[str, np.ndarray] = {}

    def read(index) -> np.ndarray:  # once for all devices that hold the same
        if str(index) not in held:
            held[str(index)] = release.read(leaf, index or (), dtype)
        return held[str(index)]

    return jax.make_array_from_callback(shape, sharding, read)


def packed_shape(name: str, like, kind: Kind, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> QTensor:
    """A parameter's packed form: `packed` and `scale` of these shapes, cut over the mesh as the parameter is."""
    parts = (
        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=_flipped(f"{name}.{part}", like.sharding, s.shape))
        for part, s in shapes.items()
    )
    return QTensor(*parts, kind)  # type: ignore[arg-type]


def _flipped(leaf: str, sharding, shape: tuple[int, ...]):
    """A weight's sharding for an array of this shape, which is stored transposed."""
    if sharding is None:
        return None
    *lead, rows, cols = sharding.spec
    for size, part in zip(shape[-2:], (cols, rows), strict=True):
        ways = math.prod(sharding.mesh.shape[axis] for axis in axes_of(part))
        if size % ways:
            raise ConfigError(
                f"{leaf}: an axis of {size} blocks with a scale each does not divide over mesh axes "
                f"{' x '.join(axes_of(part))} = {ways}; load it decoded, or choose another mesh"
            )
    return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*lead, cols, rows))


class Release:
    """A released directory, opened and checked: the parameters of our tree, read in slices.

    Attributes:
        config: the model, in the dtypes that hold every number as released.
        leaves: path -> shape and dtype of all arrays of the tree, experts that are quantized as `.packed` and `.scale`.
        kinds: path of each parameter that can stay packed -> its format.
        carried: names of the tensors whose bytes do not follow from `leaves`: those of other parts of a multimodal
            model, and what is quantized outside of experts.

    Raises:
        CheckpointError: as in `load`.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        config = read_config(path)
        _check_quantization(self.path / CONFIG)
        self.directory = Directory(path)
        entries = self.directory.entries
        self.stored = match(entries, config, path)
        wide = any(
            s.part == "plain" and s.dtypes[0] == "BF16" and entries[name].dtype == "F32"
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
        model = Kimi(self.config)
        declared = declarations(model)
        for param, like in arrays(model).items():
            indices = list(placed[param])
            stack = like.shape[: len(indices[0])]
            self._places[param] = np.empty(stack, np.int64)
            for index, number in placed[param].items():
                self._places[param][index] = number
            found: list[Kind | None] = list({self._kind(self._tensors[number]) for number in placed[param].values()})
            kind = found[0] if len(found) == 1 and declared[param].axes[0] == "experts" else None
            if kind is None:
                self.leaves[param] = like.shape, np.dtype(like.dtype)
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
            _copy(out[at], value)
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
            _copy(whole[rows, cols], w)
            w = whole
        return tensor.decode(w)[tensor.params.index(param)][index]


def _copy(out: np.ndarray, value: np.ndarray) -> None:
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
    with _on_host():
        return np.asarray(_unpack(np.asarray(packed), np.asarray(scale), kind, jnp.dtype(dtype)))


def pack(w: np.ndarray, kind: Kind) -> dict[str, np.ndarray]:
    """Encodes a matrix `[out, in]` on the host: its `packed` and its `scale`.

    Raises:
        ValueError: NaN or infinity in it, or a width that does not divide into groups.
    """
    if not np.isfinite(w).all():
        raise ValueError(f"{np.count_nonzero(~np.isfinite(w)):,} of {w.size:,} values are NaN or infinite")
    with _on_host():
        q = _pack(np.ascontiguousarray(w), kind)
        return {"packed": np.asarray(q.packed), "scale": np.asarray(q.scale)}


@partial(jax.jit, static_argnums=(2, 3))
def _unpack(packed, scale, kind, dtype):
    return QTensor(packed, scale, kind).decode(dtype).mT


@partial(jax.jit, static_argnums=1)
def _pack(w, kind):
    return QTensor.encode(w.mT, kind)


def _on_host():
    """One CPU device, whatever mesh is set."""
    device = jax.local_devices(backend="cpu")[0]
    return jax.set_mesh(jax.sharding.Mesh(np.array([device]), ("host",), axis_types=(jax.sharding.AxisType.Explicit,)))


@dataclass
class Plan:
    """A released directory that is to be written: its files, and where the data of each tensor comes from."""

    config: str
    """Text of config.json."""
    files: dict[str, Shard]
    stored: dict[str, Stored]
    """Those of `files` that come from parameters; the others come from `original`."""
    index: str | None
    original: Directory | None = None
    """Tensors as they were released."""
    _last: tuple[str, dict[str, np.ndarray]] = field(default=("", {}), repr=False)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.files.values())

    def blocks(self, file: str, source: Parameters) -> Iterator[np.ndarray]:
        """The data of a file's tensors, in order, in blocks."""
        for name, entry in self.files[file].entries.items():
            yield from self.tensor(name, entry, source)

    def tensor(self, name: str, entry: Entry, source: Parameters) -> Iterator[np.ndarray]:
        """The data of one tensor, in blocks."""
        if name not in self.stored:
            assert self.original is not None
            yield from self.original.blocks(name)
            return
        s, dtype = self.stored[name], DTYPES[entry.dtype]
        if s.part == "shape":
            yield np.array(s.tensor.shape, dtype)
        elif s.part == "plain":
            for w in self._matrices(s.tensor, source):
                yield _cast(w, dtype)
        elif source.kinds.get(s.tensor.params[0]) == s.kind:
            yield source.fetch(f"{s.tensor.params[0]}.{s.part}", s.tensor.index)
        else:
            if self._last[0] != s.tensor.name:
                self._last = s.tensor.name, self._packed(s, source)
            yield self._last[1][s.part].astype(dtype)

    def _matrices(self, tensor: Tensor, source: Parameters) -> Iterator[np.ndarray]:
        """The tensor in its released shape; a large one in blocks of rows."""
        rows = tensor.shape[0] if tensor.shape else 1
        step = max(1, shards.BLOCK // (4 * max(1, math.prod(tensor.shape[1:]))))
        if tensor.rows is None or step >= rows or tensor.params[0] in source.kinds:
            yield tensor.encode(*(source.value(param, tensor.index) for param in tensor.params))
            return
        for start in range(0, rows, step):
            part = (*(slice(None),) * tensor.rows, slice(start, min(start + step, rows)))
            yield tensor.encode(source.fetch(tensor.params[0], (*tensor.index, *part)))

    def _packed(self, s: Stored, source: Parameters) -> dict[str, np.ndarray]:
        """A matrix in a quantized format: the bytes that it was released with, as long as it is still the same."""
        tensor, kind = s.tensor, s.kind
        assert kind is not None
        w = tensor.encode(*(source.value(param, tensor.index) for param in tensor.params))
        names = {part.part: part.name for part in stored(tensor, kind)}
        if self.original is not None and names["packed"] in self.original.where:
            released = {part: self.original.read(names[part]) for part in PARTS}
            before = unpack(released["packed"], released["scale"], kind, w.dtype)
            if before.tobytes() == np.ascontiguousarray(w).tobytes():
                return released
        try:
            return pack(w, kind)
        except ValueError as error:
            raise CheckpointError(f"{tensor.name} cannot be stored as {kind}: {error}") from error


@dataclass(frozen=True)
class Parameters:
    """Where parameters come from that are to be written."""

    fetch: Callable[[str, tuple], np.ndarray]
    """(path of an array, index) -> what lies there, on the host."""
    kinds: Mapping[str, Kind]
    """Parameters that are packed, as arrays `.packed` and `.scale` under their path."""

    def value(self, param: str, index: tuple) -> np.ndarray:
        """A parameter, decoded if it is packed."""
        kind = self.kinds.get(param)
        if kind is None:
            return self.fetch(param, index)
        return unpack(self.fetch(f"{param}.packed", index), self.fetch(f"{param}.scale", index), kind, np.float32).T


def _cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    out = np.empty(values.shape, dtype)
    _copy(out, values)
    return out


def plan(config: ModelConfig, *, packed: bool, max_shard_bytes: int = SHARD_BYTES) -> Plan:
    """How a model is written in the layout of its family; `packed` in its quantized format, if it has one."""
    parts = list(manifest(config, packed=packed))
    files = shards.divide((s.entry for s in parts), max_shard_bytes)
    index = shards.index_of(files) if len(files) > 1 else None
    text = released_config(config)
    if packed and (quantization := _quantization_config(config)) is not None:
        (text.get("text_config") or text)["quantization_config"] = quantization
    return Plan(json.dumps(text, indent=2) + "\n", files, {s.name: s for s in parts}, index)


def plan_like(config: ModelConfig, files: dict[str, Shard], folder: str | Path, original: Directory | None) -> Plan:
    """How a model is written in the place of another of the same shape, tensors it does not have included.

    Args:
        config: the model.
        files: headers to write.
        folder: with the config.json and, if there is one, the index to write.
        original: tensors that are carried through, and those whose released bytes are kept while they are unchanged.

    Raises:
        CheckpointError: they are not those of the model.
    """
    folder = Path(folder)
    theirs, ours = released_config(read_config(folder)), released_config(config)
    if theirs != ours:
        raise CheckpointError(f"{folder / CONFIG} is not the model's:\n  " + "\n  ".join(differences(theirs, ours)))
    entries = {name: entry for shard in files.values() for name, entry in shard.entries.items()}
    found = match(entries, config, folder)
    lost = sorted(name for name in entries.keys() - found.keys() if original is None or name not in original.where)
    if lost:
        raise CheckpointError(f"{folder} lacks the data of:\n  " + "\n  ".join(lost))
    index = (folder / INDEX).read_text() if (folder / INDEX).is_file() else None
    return Plan((folder / CONFIG).read_text(), files, found, index, original)


def differences(theirs: dict, ours: dict) -> list[str]:
    """Where two released configs differ, a line each."""
    theirs, ours = (whole | whole.get("text_config", {}) for whole in (theirs, ours))
    return [
        f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} here"
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key) != ours.get(key) and key != "text_config"
    ]


def save(
    path: str | Path, model: Kimi, config: ModelConfig, *, packed: bool = False, max_shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes the model in the released layout and dtypes, so that `save(load(x))` holds the bytes of x's tensors.

    The directory appears under its name only when it is whole.

    Args:
        path: a new directory.
        model: on the host or any mesh of one process. Experts may be `QTensor`.
        config: `model.config`.
        packed: in the quantized format of the family: K3's experts in MXFP4, K2 in block-FP8. Kimi Linear has none.
        max_shard_bytes: most bytes of a file.

    Raises:
        CheckpointError: `path` exists and is not an empty directory, or the disk is too small; a matrix that the
            format cannot hold.
    """
    path = Path(path).absolute()
    if _model_alone(config) != _model_alone(model.config):
        raise ConfigError("the config is not that of the model; pass model.config")
    check_new(path)
    values: dict[str, Any] = arrays(model)
    kinds: dict[str, Kind] = {name: value.kind for name, value in values.items() if isinstance(value, QTensor)}
    flat = {name: value for name, value in values.items() if name not in kinds}
    for name in kinds:
        flat |= {f"{name}.packed": values[name].packed, f"{name}.scale": values[name].scale}
    source = Parameters(lambda leaf, index: np.asarray(flat[leaf])[index], kinds)
    made = plan(config, packed=packed, max_shard_bytes=max_shard_bytes)
    check_disk(path, made.num_bytes)
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for file, shard in made.files.items():
        shards.write(partial / file, shard, made.blocks(file, source))
    if made.index is not None:
        (partial / INDEX).write_text(made.index)
    (partial / CONFIG).write_text(made.config)
    if path.exists():
        path.rmdir()
    partial.rename(path)


def _model_alone(config: ModelConfig) -> ModelConfig:
    """The config without what the numbers do not depend on."""
    return replace(config, dtype="float32", param_dtype="float32", remat="none")


def check_new(path: Path) -> None:
    """Refuses to write where something is."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists already; choose a new directory or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)


def check_disk(path: Path, needed: int) -> None:
    """Refuses a directory for which its disk is too small."""
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise CheckpointError(f"{path} needs {needed:,} bytes and the disk has {free:,} free; choose another disk")


def manifest(config: ModelConfig, *, packed: bool = True, root: str | None = None) -> Iterator[Stored]:
    """Every tensor of the files that the model is exported to, without allocating any."""
    for tensor in tensors(config, root):
        yield from stored(tensor, _family_kind(config, tensor) if packed else None)


def manifest_lines(config: ModelConfig, *, packed: bool = True) -> list[str]:
    """`manifest` as sorted lines `name DTYPE AxB`."""
    return sorted(f"{s.name} {s.dtypes[0]} {'x'.join(map(str, s.shape))}" for s in manifest(config, packed=packed))


def stored(tensor: Tensor, kind: Kind | None) -> list[Stored]:
    """What a tensor is on disk in a format."""
    if kind is None:
        return [Stored(tensor.name, (tensor.dtype, *PLAIN), tensor.shape, tensor, None, "plain")]
    o, i = tensor.shape
    parts: dict[str, tuple[str, tuple[str, ...], tuple[int, ...]]] = {
        "mxfp4": {"packed": ("_packed", ("U8",), (o, i // 2)), "scale": ("_scale", ("U8",), (o, i // GROUP))},
        "int4": {
            "packed": ("_packed", ("I32",), (o, i // 8)),
            "scale": ("_scale", ("BF16", "F16", "F32"), (o, i // GROUP)),
            "shape": ("_shape", ("I64", "I32"), (2,)),
        },
        "fp8_block": {
            "packed": ("", ("F8_E4M3",), (o, i)),
            "scale": ("_scale_inv", ("F32",), (-(-o // BLOCK), -(-i // BLOCK))),
        },
    }[kind]
    return [
        Stored(tensor.name + ending, dtypes, shape, tensor, kind, part)
        for part, (ending, dtypes, shape) in parts.items()
    ]


def _found_kind(entries: Mapping[str, Entry], name: str) -> Kind | None:
    """The format in which a tensor lies in files, told by names and dtypes alone."""
    if name + "_scale_inv" in entries or (name in entries and entries[name].dtype == "F8_E4M3"):
        return "fp8_block"
    packed = entries.get(name + "_packed")
    if name + "_shape" in entries or (packed is not None and packed.dtype == "I32"):
        return "int4"
    return "mxfp4" if packed is not None or name + "_scale" in entries else None


def match(entries: Mapping[str, Entry], config: ModelConfig, where: str | Path) -> dict[str, Stored]:
    """Finds the model's tensors among those of files.

    Raises:
        CheckpointError: tensors that are missing, unexpected, or of another shape or dtype: all of them, by name.
    """
    root = ROOT if any(name.startswith(ROOT) for name in entries) else ""
    found: dict[str, Stored] = {}
    problems = []
    for tensor in tensors(config, root):
        kind = _found_kind(entries, tensor.name)
        if kind is not None and len(tensor.shape) != 2:
            problems.append(f"quantized: {tensor.name} {list(tensor.shape)} is no matrix")
            kind = None
        if kind in ("mxfp4", "int4") and tensor.shape[1] % GROUP:
            problems.append(f"quantized: {tensor.name} has {tensor.shape[1]} columns, not a multiple of {GROUP}")
        for s in stored(tensor, kind):
            found[s.name] = s
            entry = entries.get(s.name)
            if entry is None:
                problems.append(f"missing: {s.name} {list(s.shape)}")
                continue
            if entry.shape != s.shape:
                problems.append(f"shape: {s.name} is {list(entry.shape)}, the config needs {list(s.shape)}")
            if entry.dtype not in s.dtypes:
                only = ", ".join(PLAIN if s.part == "plain" else s.dtypes)
                problems.append(f"dtype: {s.name} is {entry.dtype}, only {only} can be loaded")
    others = (name for name in sorted(entries.keys() - found.keys()) if not name.startswith(NOT_TEXT))
    problems += [f"unexpected: {name} {list(entries[name].shape)}" for name in others if not name.endswith(STRAY)]
    if problems:
        raise CheckpointError(f"{where} does not hold the model of its config.json:\n  " + "\n  ".join(problems))
    return found


def _family_kind(config: ModelConfig, tensor: Tensor) -> Kind | None:
    """The format in which the family releases a tensor."""
    if _is_k2(config):
        return "fp8_block" if "_proj" in tensor.name and len(tensor.shape) == 2 else None
    return "mxfp4" if _is_nested(config) and ".experts." in tensor.name else None


_MXFP8 = {
    "num_bits": 8,
    "type": "float",
    "strategy": "group",
    "group_size": GROUP,
    "symmetric": True,
    "dynamic": True,
    "scale_dtype": "torch.uint8",
}
"""How config.json says that inputs of the quantized products are rounded to MXFP8."""


def _activation_format(file: Path, whole: dict) -> Literal["mxfp8"] | None:
    """What the inputs of routed experts are rounded to: nothing in the released files, MXFP8 after our QAT."""
    found = whole.get("quantization_config") or whole.get("text_config", {}).get("quantization_config") or {}
    given = [group.get("input_activations") for group in found.get("config_groups", {}).values()]
    for inputs in filter(None, given):
        if any(inputs.get(key) != value for key, value in _MXFP8.items()):
            raise CheckpointError(f"{file}: input_activations={inputs} are not supported, only {_MXFP8} or null")
    return "mxfp8" if any(given) else None


def _quantization_config(config: ModelConfig) -> dict | None:
    """What config.json says of the format of the family."""
    if _is_k2(config):
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    if not _is_nested(config):
        return None
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": GROUP, "symmetric": True}
    group = {
        "format": "mxfp4-pack-quantized",
        "targets": ["Linear"],
        "weights": {**weights, "dynamic": False, "scale_dtype": "torch.uint8"},
        "input_activations": _MXFP8 if config.moe.activation_format == "mxfp8" else None,
        "output_activations": None,
    }
    kept = (
        "self_attn",
        "shared_experts",
        r"mlp\.(gate|up|gate_up|down)_proj",
        "lm_head",
        "vision_tower",
        "mm_projector",
    )
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [f"re:.*{part}.*" for part in kept],
        "kv_cache_scheme": None,
    }


def _check_quantization(file: Path) -> None:
    """Refuses a config.json that describes a format that is not read here; which tensors have it, their names say."""
    whole = json.loads(file.read_text())
    found = whole.get("quantization_config") or whole.get("text_config", {}).get("quantization_config")
    if found is None:
        return
    method, form = found.get("quant_method"), found.get("format")
    if method == "fp8":
        size = found.get("weight_block_size")
        if size != [BLOCK, BLOCK]:
            raise CheckpointError(f"{file}: weight_block_size={size} is not supported, only {[BLOCK, BLOCK]}")
    elif method != "compressed-tensors":
        raise CheckpointError(f"{file}: quant_method={method!r} is not supported, only 'compressed-tensors' and 'fp8'")
    elif form not in ("mxfp4-pack-quantized", "pack-quantized"):
        known = "'mxfp4-pack-quantized' and 'pack-quantized'"
        raise CheckpointError(f"{file}: compressed-tensors of format {form!r} are not supported, only {known}")
    for group in found.get("config_groups", {}).values():
        size = (group.get("weights") or {}).get("group_size", GROUP)
        if size != GROUP:
            raise CheckpointError(f"{file}: group_size={size} is not supported, only {GROUP}")


def tensors(config: ModelConfig, root: str | None = None) -> Iterator[Tensor]:
    """Every tensor of the released model, without allocating any; `root` begins the names, by default the family's."""
    ours = {name: variable.get_value().shape for name, variable in named_params(Kimi(config)).items()}
    if root is None:
        root = ROOT if _is_nested(config) else ""

    def tensor(name: str, param: str | tuple[str, ...], kind: str = "matrix", index: tuple[int, ...] = ()) -> Tensor:
        params = (param,) if isinstance(param, str) else param
        shapes = [ours[p][len(index) :] for p in params]
        shape, decode, encode = _CODECS[kind](config, shapes)
        rows = {"same": 0, "matrix": 1}.get(kind) if len(shapes[0]) == 2 else None
        return Tensor(root + name, shape, params, index, decode, encode, rows)

    yield tensor("lm_head.weight", "head")
    yield tensor("model.embed_tokens.weight", "embed", "same")
    yield tensor("model.norm.weight", "norm.weight", "same")
    if config.attn_res_block_size is not None:
        yield tensor("model.output_attn_res_proj.weight", "output_mix.query", "row")
        yield tensor("model.output_attn_res_norm.weight", "output_mix.norm", "same")
    for i, segment in enumerate(segments(config)):
        for j, run in enumerate(segment.runs):
            experts = _K2_MOE if _is_k2(config) else _MOE
            table = [*_BLOCK, *(_KDA if run.mixer == "kda" else _MLA), *(_DENSE if segment.dense else experts)]
            base = f"segments.{i}.runs.{j}."
            for (repeat, turn), layer in np.ndenumerate(segment.layers(j)):
                for name, param, kind in table:
                    params = tuple(base + p for p in param.split())
                    if params[0] not in ours:
                        continue  # a part that this config does not have
                    index = (repeat, turn)
                    if "{e}" not in name:
                        yield tensor(f"model.layers.{layer}.{name}", params, kind, index)
                        continue
                    for expert in range(config.moe.num_experts):
                        yield tensor(f"model.layers.{layer}.{name.format(e=expert)}", params, kind, (*index, expert))


# Released name, our parameter(s), codec. An expert's tensors have its number in the name.
_BLOCK = [
    ("input_layernorm.weight", "attention_norm.weight", "same"),
    ("post_attention_layernorm.weight", "mlp_norm.weight", "same"),
    ("self_attention_res_proj.weight", "attention_mix.query", "row"),
    ("self_attention_res_norm.weight", "attention_mix.norm", "same"),
    ("mlp_res_proj.weight", "mlp_mix.query", "row"),
    ("mlp_res_norm.weight", "mlp_mix.norm", "same"),
]
_KDA = [
    ("self_attn.q_proj.weight", "attention.w_q", "matrix"),
    ("self_attn.k_proj.weight", "attention.w_k", "matrix"),
    ("self_attn.v_proj.weight", "attention.w_v", "matrix"),
    ("self_attn.q_conv1d.weight", "attention.conv_q", "conv"),
    ("self_attn.k_conv1d.weight", "attention.conv_k", "conv"),
    ("self_attn.v_conv1d.weight", "attention.conv_v", "conv"),
    ("self_attn.f_a_proj.weight", "attention.w_f_a", "matrix"),
    ("self_attn.f_b_proj.weight", "attention.w_f_b", "matrix"),
    ("self_attn.b_proj.weight", "attention.w_beta", "matrix"),
    ("self_attn.A_log", "attention.A_log", "A_log"),
    ("self_attn.dt_bias", "attention.dt_bias", "flat"),
    ("self_attn.o_norm.weight", "attention.o_norm", "same"),
    ("self_attn.g_proj.weight", "attention.w_g", "matrix"),
    ("self_attn.g_a_proj.weight", "attention.w_g_a", "matrix"),
    ("self_attn.g_b_proj.weight", "attention.w_g_b", "matrix"),
    ("self_attn.o_proj.weight", "attention.w_o", "from_heads"),
]
_MLA = [
    ("self_attn.q_proj.weight", "attention.w_q", "matrix"),
    ("self_attn.q_a_proj.weight", "attention.w_q_a", "matrix"),
    ("self_attn.q_a_layernorm.weight", "attention.q_norm", "same"),
    ("self_attn.q_b_proj.weight", "attention.w_q_b", "matrix"),
    ("self_attn.kv_a_proj_with_mqa.weight", "attention.w_kv_a", "matrix"),
    ("self_attn.kv_a_layernorm.weight", "attention.kv_norm", "same"),
    ("self_attn.kv_b_proj.weight", "attention.w_k_b attention.w_v_b", "kv_b"),
    ("self_attn.g_proj.weight", "attention.w_g", "matrix"),
    ("self_attn.o_proj.weight", "attention.w_o", "from_heads"),
]
_DENSE = [
    ("mlp.gate_proj.weight", "mlp.w_gate", "matrix"),
    ("mlp.up_proj.weight", "mlp.w_up", "matrix"),
    ("mlp.down_proj.weight", "mlp.w_down", "matrix"),
]
_MOE = [
    ("block_sparse_moe.gate.weight", "mlp.w_router", "matrix"),
    ("block_sparse_moe.gate.e_score_correction_bias", "mlp.router_bias", "same"),
    ("block_sparse_moe.routed_expert_down_proj.weight", "mlp.w_latent_down", "matrix"),
    ("block_sparse_moe.routed_expert_up_proj.weight", "mlp.w_latent_up", "matrix"),
    ("block_sparse_moe.routed_expert_norm.weight", "mlp.latent_norm", "same"),
    ("block_sparse_moe.shared_experts.gate_proj.weight", "mlp.shared.w_gate", "matrix"),
    ("block_sparse_moe.shared_experts.up_proj.weight", "mlp.shared.w_up", "matrix"),
    ("block_sparse_moe.shared_experts.down_proj.weight", "mlp.shared.w_down", "matrix"),
    ("block_sparse_moe.experts.{e}.w1.weight", "mlp.w_gate", "matrix"),
    ("block_sparse_moe.experts.{e}.w3.weight", "mlp.w_up", "matrix"),
    ("block_sparse_moe.experts.{e}.w2.weight", "mlp.w_down", "matrix"),
]
_K2_MOE = [
    ("mlp.gate.weight", "mlp.w_router", "matrix"),
    ("mlp.gate.e_score_correction_bias", "mlp.router_bias", "same"),
    ("mlp.shared_experts.gate_proj.weight", "mlp.shared.w_gate", "matrix"),
    ("mlp.shared_experts.up_proj.weight", "mlp.shared.w_up", "matrix"),
    ("mlp.shared_experts.down_proj.weight", "mlp.shared.w_down", "matrix"),
    ("mlp.experts.{e}.gate_proj.weight", "mlp.w_gate", "matrix"),
    ("mlp.experts.{e}.up_proj.weight", "mlp.w_up", "matrix"),
    ("mlp.experts.{e}.down_proj.weight", "mlp.w_down", "matrix"),
]


def _matrix(num_in: int):
    """`[in.., out..]` here, `[out, in]` there."""

    def codec(config, shapes):
        (shape,) = shapes
        rows, cols = math.prod(shape[:num_in]), math.prod(shape[num_in:])
        return (cols, rows), lambda w: (w.T.reshape(shape),), lambda a: a.reshape(rows, -1).T

    return codec


def _reshaped(released: Callable[[tuple[int, ...]], tuple[int, ...]]):
    """The same numbers in the same order under another shape."""

    def codec(config, shapes):
        (shape,) = shapes
        there = released(shape)
        return there, lambda w: (w.reshape(shape),), lambda a: a if there == shape else a.reshape(there)

    return codec


def _kv_b(config, shapes):
    """Per head, the rows of W_k_b and then those of W_v_b."""
    (r, h, k), (_, _, v) = shapes

    def decode(w):
        return tuple(np.split(w.reshape(h, k + v, r).transpose(2, 0, 1), [k], axis=-1))

    def encode(w_k, w_v):
        return np.concatenate([w_k, w_v], axis=-1).transpose(1, 2, 0).reshape(h * (k + v), r)

    return (h * (k + v), r), decode, encode


def _a_log(config, shapes):
    """One number a head: K3 pads with zeros to `head_dim` entries, Kimi Linear stores `[1, 1, heads, 1]`."""
    ((h,),) = shapes
    if not _is_nested(config):
        return (1, 1, h, 1), lambda w: (w.reshape(h),), lambda a: a.reshape(1, 1, h, 1)
    size = max(h, config.kda.head_dim)

    def decode(w):
        if np.any(w[h:]):
            raise CheckpointError(f"A_log has {np.count_nonzero(w[h:])} non-zero entries past its {h} heads")
        return (w[:h],)

    return (size,), decode, lambda a: np.pad(a, (0, size - h))


_CODECS = {
    "same": _reshaped(lambda shape: shape),
    "row": _reshaped(lambda shape: (1, *shape)),
    "flat": _reshaped(lambda shape: (math.prod(shape),)),
    "conv": _reshaped(lambda shape: (math.prod(shape[:-1]), 1, shape[-1])),
    "matrix": _matrix(1),
    "from_heads": _matrix(2),
    "kv_b": _kv_b,
    "A_log": _a_log,
}


def _is_nested(config: ModelConfig) -> bool:
    """K3's layout. Attention Residuals are what only K3 has; the model types of both releases are the same."""
    return config.attn_res_block_size is not None


def _is_k2(config: ModelConfig) -> bool:
    """K2's layout. Of the family only K2 has rotary positions."""
    return config.mla.rope is not None


def read_config(path: str | Path) -> ModelConfig:
    """The model that a released config.json describes.

    Raises:
        ConfigError: a missing key, or a value that this family's code does not implement, with the key.
    """
    file = Path(path) / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{path} has no {CONFIG}")
    try:
        whole = json.loads(file.read_text())
        text = whole.get("text_config", whole)
        rotary = "n_routed_experts" in text  # K2, and nobody else in the family
        names, fixed = (_K2_NAMES, _K2_FIXED) if rotary else ({}, _FIXED)
        for key, value in fixed.items():
            key = names.get(key, key)
            if text.get(key, value) != value:
                raise ConfigError(f"{file}: {key}={text[key]!r} is not supported, only {value!r}")
        layers = text["num_hidden_layers"]
        mla, kda = (list(range(layers)), None) if rotary else _linear_attention(file, text)
        tokens = text | whole
        situ = {"situ": True, "silu": False}[text["hidden_act"]]
        return ModelConfig(
            vocab_size=text["vocab_size"],
            hidden_size=text["hidden_size"],
            num_layers=layers,
            mla_layers=tuple(sorted(mla)),
            num_dense_layers=text["first_k_dense_replace"],
            dense_hidden_size=text["intermediate_size"],
            situ_beta=text["activation_situ_beta"] if situ else None,
            situ_linear_beta=text["activation_situ_linear_beta"] if situ else None,
            attn_res_block_size=text.get("attn_res_block_size"),
            rms_norm_eps=text["rms_norm_eps"],
            initializer_range=text["initializer_range"],
            max_position_embeddings=text.get("max_position_embeddings") or text["model_max_length"],
            bos_token_id=tokens["bos_token_id"],
            eos_token_id=tokens["eos_token_id"],
            # K2's file may leave it out; [PAD] is its tokenizer's last id.
            pad_token_id=tokens.get("pad_token_id", text["vocab_size"] - 1) if rotary else tokens["pad_token_id"],
            kda=kda,
            mla=MLAConfig(
                num_heads=text["num_attention_heads"],
                q_lora_rank=text["q_lora_rank"],
                kv_lora_rank=text["kv_lora_rank"],
                qk_nope_head_dim=text["qk_nope_head_dim"],
                qk_rope_head_dim=text["qk_rope_head_dim"],
                v_head_dim=text["v_head_dim"],
                output_gate=bool(text.get("mla_use_output_gate")),
                rope=_rope(file, text) if rotary else None,
            ),
            moe=MoEConfig(
                num_experts=text[names.get("num_experts", "num_experts")],
                experts_per_token=text[names.get("num_experts_per_token", "num_experts_per_token")],
                num_shared_experts=text[names.get("num_shared_experts", "num_shared_experts")],
                hidden_size=text["moe_intermediate_size"],
                latent_size=text.get("routed_expert_hidden_size"),
                latent_norm=bool(text.get("latent_moe_use_norm")),
                renormalize=text[names.get("moe_renormalize", "moe_renormalize")],
                routed_scaling_factor=text["routed_scaling_factor"],
                aux_loss_alpha=text.get("aux_loss_alpha") or 0.0,
                activation_format=_activation_format(file, whole),
            ),
        )
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    except KeyError as error:
        raise ConfigError(f"{file} lacks or has an unknown value for {error}") from error
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{file} has a value of the wrong kind: {error}") from error


def _linear_attention(file: Path, text: dict) -> tuple[list[int], KDAConfig]:
    """The 0-based MLA layers, and the settings of all others."""
    linear, layers = text["linear_attn_config"], text["num_hidden_layers"]
    mla = [layer - 1 for layer in linear["full_attn_layers"]]
    if sorted([*mla, *(layer - 1 for layer in linear["kda_layers"])]) != list(range(layers)):
        raise ConfigError(f"{file}: full_attn_layers and kda_layers must name each of 1..{layers} once")
    return mla, KDAConfig(
        num_heads=linear["num_heads"],
        head_dim=linear["head_dim"],
        conv_size=linear["short_conv_kernel_size"],
        gate_lower_bound=linear.get("gate_lower_bound"),
        full_rank_gate=bool(linear.get("use_full_rank_gate")),
    )


def _rope(file: Path, text: dict) -> RoPEConfig:
    scaling = text.get("rope_scaling")
    if scaling is None:
        return RoPEConfig(theta=text["rope_theta"])
    kind = scaling.get("type", scaling.get("rope_type"))
    if kind != "yarn":
        raise ConfigError(f"{file}: rope_scaling of type {kind!r} is not supported, only 'yarn'")
    mscale = scaling["mscale_all_dim"]
    if scaling["mscale"] != mscale:  # else their ratio would scale the rotated channels
        raise ConfigError(f"{file}: mscale={scaling['mscale']} is not supported beside mscale_all_dim={mscale}")
    return RoPEConfig(
        theta=text["rope_theta"],
        factor=scaling["factor"],
        original_max_position_embeddings=scaling["original_max_position_embeddings"],
        beta_fast=scaling["beta_fast"],
        beta_slow=scaling["beta_slow"],
        mscale=mscale,
    )


_FIXED = {
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
"""What K3 and Kimi Linear have in common."""
_K2_NAMES = {
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
    "num_expert_group": "n_group",
}
"""What K2 calls the settings of the others."""
_K2_FIXED = {key: value for key, value in _FIXED.items() if key != "mla_use_nope"} | {
    "seq_aux": True,
    "attention_bias": False,
    "hidden_act": "silu",
}


def released_config(config: ModelConfig) -> dict:
    """The config.json of the released layout."""
    if _is_k2(config):
        return _k2_config(config)
    kda, mla, moe = config.kda, config.mla, config.moe
    assert kda is not None
    tokens = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    linear = {
        "full_attn_layers": [layer + 1 for layer in config.mla_layers],
        "kda_layers": [layer + 1 for layer in config.kda_layers],
        "num_heads": kda.num_heads,
        "head_dim": kda.head_dim,
        "short_conv_kernel_size": kda.conv_size,
    }
    if kda.full_rank_gate:
        linear["use_full_rank_gate"] = True
    if kda.gate_lower_bound is not None:
        linear["gate_lower_bound"] = kda.gate_lower_bound
    text = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.dense_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": mla.num_heads,
        "num_key_value_heads": mla.num_heads,
        "hidden_act": "silu" if config.situ_beta is None else "situ",
        "initializer_range": config.initializer_range,
        "rms_norm_eps": config.rms_norm_eps,
        **tokens,
        **_FIXED,
        "moe_intermediate_size": moe.hidden_size,
        "moe_renormalize": moe.renormalize,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.experts_per_token,
        "num_shared_experts": moe.num_shared_experts,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "first_k_dense_replace": config.num_dense_layers,
        "use_grouped_topk": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "linear_attn_config": linear,
        "dtype": "bfloat16",
    }
    optional = {
        "mla_use_output_gate": mla.output_gate or None,
        "attn_res_block_size": config.attn_res_block_size,
        "latent_moe_use_norm": moe.latent_norm or None,
        "routed_expert_hidden_size": moe.latent_size,
        "activation_situ_beta": config.situ_beta,
    }
    text |= {key: value for key, value in optional.items() if value is not None}
    if config.situ_beta is not None:
        text["activation_situ_linear_beta"] = config.situ_linear_beta  # null: no cap
    if not _is_nested(config):
        # Unused by the architecture, but the release has them and readers of it demand them.
        unused = {"head_dim": config.hidden_size // mla.num_heads, "rope_theta": 10000.0, "rope_scaling": None}
        return {**text, **unused, "model_max_length": config.max_position_embeddings}
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        **tokens,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "text_config": {**text, "max_position_embeddings": config.max_position_embeddings},
    }


def _k2_config(config: ModelConfig) -> dict:
    """`released_config` of K2: DeepSeek-V3's keys."""
    mla, moe, rope = config.mla, config.moe, config.mla.rope
    assert rope is not None
    shared = {
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.experts_per_token,
        "num_shared_experts": moe.num_shared_experts,
        "moe_renormalize": moe.renormalize,
        **_K2_FIXED,
    }
    return {
        "model_type": "kimi_k2",
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.dense_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": mla.num_heads,
        "num_key_value_heads": mla.num_heads,
        "first_k_dense_replace": config.num_dense_layers,
        "moe_intermediate_size": moe.hidden_size,
        **{_K2_NAMES.get(key, key): value for key, value in shared.items()},
        "routed_scaling_factor": moe.routed_scaling_factor,
        "aux_loss_alpha": moe.aux_loss_alpha,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_theta": rope.theta,
        "rope_scaling": {
            "type": "yarn",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale,
        },
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "dtype": "bfloat16",
    }
