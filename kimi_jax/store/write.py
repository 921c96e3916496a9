"""Released checkpoints out: planned as a whole, written tensor by tensor."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kimi_jax import files
from kimi_jax.config import ConfigError, ModelConfig
from kimi_jax.model.kimi import Kimi
from kimi_jax.model.param import arrays
from kimi_jax.ops.quant.qtensor import Kind, QTensor
from kimi_jax.store import safetensors_files
from kimi_jax.store.names import Stored, Tensor, manifest, match, stored
from kimi_jax.store.pending import check_new, pending
from kimi_jax.store.read import PARTS, copy_strips, on_host, unpack
from kimi_jax.store.released_config import CONFIG, differences, export_config, read_config, released_config
from kimi_jax.store.safetensors_files import DTYPES, INDEX, CheckpointError, Directory, Entry, Shard, listed

SHARD_BYTES = 5 * 2**30


def pack(w: np.ndarray, kind: Kind) -> dict[str, np.ndarray]:
    """Encodes a matrix `[out, in]` on the host: its `packed` and its `scale`.

    Raises:
        ValueError: NaN or infinity in it, or a width that does not divide into groups.
    """
    if not np.isfinite(w).all():
        raise ValueError(f"{np.count_nonzero(~np.isfinite(w)):,} of {w.size:,} values are NaN or infinite")
    with on_host():
        q = _pack(np.ascontiguousarray(w), kind)
        return {"packed": np.asarray(q.packed), "scale": np.asarray(q.scale)}


@partial(jax.jit, static_argnums=1)
def _pack(w, kind):
    return QTensor.encode(w.mT, kind)


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
        elif entry.dtype == "F64" and self.original is not None and name in self.original.where:
            w = s.tensor.encode(*(source.value(param, s.tensor.index) for param in s.tensor.params))
            released = self.original.read(name)  # kept while the parameter is what it rounds to
            yield released if (released.astype(w.dtype) == w).all() else _cast(w, dtype)
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
        step = max(1, safetensors_files.BLOCK // (4 * max(1, math.prod(tensor.shape[1:]))))
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
    copy_strips(out, values)
    return out


def plan(config: ModelConfig, *, packed: bool, max_shard_bytes: int = SHARD_BYTES) -> Plan:
    """How a model is written in the layout of its family; `packed` in its quantized format, if it has one."""
    parts = list(manifest(config, packed=packed))
    shards = safetensors_files.divide((s.entry for s in parts), max_shard_bytes)
    index = safetensors_files.index_of(shards) if len(shards) > 1 else None
    text = export_config(config, packed=packed)
    return Plan(json.dumps(text, indent=2) + "\n", shards, {s.name: s for s in parts}, index)


def plan_like(config: ModelConfig, headers: dict[str, Shard], folder: str | Path, original: Directory | None) -> Plan:
    """How a model is written in the place of another of the same shape, tensors it does not have included.

    Args:
        config: the model.
        headers: of the files to write.
        folder: with the config.json and, if there is one, the index to write.
        original: tensors that are carried through, and those whose released bytes are kept while they are unchanged.

    Raises:
        CheckpointError: they are not those of the model.
    """
    folder = Path(folder)
    theirs, ours = released_config(read_config(folder)), released_config(config)
    if theirs != ours:
        raise CheckpointError(f"{folder / CONFIG} is not the model's:\n  " + "\n  ".join(differences(theirs, ours)))
    entries = {name: entry for shard in headers.values() for name, entry in shard.entries.items()}
    found = match(entries, config, folder)
    lost = sorted(name for name in entries.keys() - found.keys() if original is None or name not in original.where)
    if lost:
        raise CheckpointError(f"{folder} lacks the data of:\n  {listed(lost)}")
    # Both were parsed by now. As they are, with a byte order mark and their line ends.
    config_text, index = (
        (folder / name).read_bytes().decode() if (folder / name).is_file() else None for name in (CONFIG, INDEX)
    )
    assert config_text is not None
    return Plan(config_text, headers, found, index, original)


def save_release(
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
        CheckpointError: `path` exists and is not an empty directory, its temporary name `PATH.partial` is taken, or a
            matrix is one that the format cannot hold.
        FileError: the disk is too small, or the operating system does not allow it.
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
    with pending(path, ["save", path.name, os.getpid(), time.time_ns()], made.num_bytes) as folder:
        for file, shard in made.files.items():
            safetensors_files.write(folder.path / file, shard, made.blocks(file, source))
        write_texts(folder.path, made)


def write_texts(folder: Path, made: Plan) -> None:
    """Writes the index, if there is one, and config.json."""
    if made.index is not None:
        files.write(folder / INDEX, made.index)
    files.write(folder / CONFIG, made.config)


def _model_alone(config: ModelConfig) -> ModelConfig:
    """The config without what the numbers do not depend on."""
    return replace(config, dtype="float32", param_dtype="float32", remat="none")
