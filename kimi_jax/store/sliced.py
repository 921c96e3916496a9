"""Checkpoints that are written slice by slice, and arrays of a checkpoint of which slices are read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tensorstore

from kimi_jax import files
from kimi_jax.files import FileError
from kimi_jax.store import orbax_format
from kimi_jax.store.checksums import (
    CHECKSUMS,
    FORMAT,
    Damaged,
    Step,
    Sum,
    damage,
    note_old,
    sums_of,
    text_of,
)
from kimi_jax.store.orbax_format import ITEM, METADATA, WHOLE, ZARR
from kimi_jax.store.safetensors_files import CheckpointError

CHUNK_BYTES = 64 * 2**20
"""Most bytes of an array that are written as one: what it costs to read any slice of it."""


@dataclass(frozen=True)
class Stored:
    """An array of a checkpoint, of which slices are read."""

    shape: tuple[int, ...]
    read: Callable[[tuple], np.ndarray]
    """Numbers and slices, an axis each or for the first axes -> what is stored there."""


def open_arrays(folder: Path, step: int) -> dict[str, Stored]:
    """The arrays of a checkpoint by their names.

    A chunk of a `SlicedCheckpoint` is compared with its checksum when it is first read; of what Orbax wrote, a slice
    may be in any file, so all are compared here.

    Raises:
        CheckpointError: it is not whole; `Stored.read` raises it too.
    """
    root = folder / str(step) / ITEM
    try:
        found = Step(folder / str(step))
        names = orbax_format.names(found.arrays)
        if orbax_format.is_plain(found.arrays):  # chunks are read in place
            found.verify(f"{ITEM}/{name}/{ZARR}" for name in names)
        else:
            found.verify()
    except Damaged as error:
        raise damage(folder, step, str(error)) from error
    if found.sums is None:
        note_old(found.root)
    if orbax_format.is_plain(found.arrays):
        return {name: _mapped(root / name, found) for name in names}
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 6 * CHUNK_BYTES}})
    opening = {
        name: tensorstore.open(orbax_format.array_spec(root, name, found.arrays), open=True, read=True, context=context)
        for name in names
    }
    try:
        arrays = {name: future.result() for name, future in opening.items()}
    except ValueError as error:
        raise damage(folder, step, f"an array cannot be opened ({str(error).splitlines()[0]})") from error
    return {
        name: Stored(tuple(array.shape), lambda index, array=array: np.asarray(array[index].read().result()))
        for name, array in arrays.items()
    }


def _mapped(folder: Path, step: Step) -> Stored:
    """An array of uncompressed chunks."""
    try:
        about = files.read_json(folder / ZARR)
        shape, chunk, dtype = tuple(about["shape"]), tuple(about["chunks"]), jnp.dtype(about["dtype"])
        compressed = about["compressor"] is not None
    except (FileError, KeyError, TypeError) as error:
        raise damage(step.root.parent, int(step.root.name), f"{ITEM}/{folder.name}/{ZARR}: {error}") from error
    if compressed:
        raise CheckpointError(f"{folder / ZARR} is of compressed chunks, which no conversion here writes")

    def data_of(at: tuple[int, ...]) -> np.ndarray:
        file = folder / ".".join(map(str, at))
        try:
            step.verify([file.relative_to(step.root).as_posix()])
            return np.asarray(np.memmap(file, np.uint8, "r")).view(dtype).reshape(chunk)
        except (Damaged, ValueError, OSError) as error:
            raise damage(step.root.parent, int(step.root.name), str(error)) from error

    def read(index: tuple) -> np.ndarray:
        index = (*index, *[slice(None)] * (len(shape) - len(index)))
        spans = [
            range(size)[i if isinstance(i, slice) else slice(i, i + 1)] for i, size in zip(index, shape, strict=True)
        ]
        chunks = [range(span.start // part, -(-span.stop // part)) for span, part in zip(spans, chunk, strict=True)]
        out = None
        for at in itertools.product(*chunks):
            data = data_of(at)
            ends = [(max(s.start, i * n), min(s.stop, (i + 1) * n)) for s, i, n in zip(spans, at, chunk, strict=True)]
            data = data[tuple(slice(lo - i * n, hi - i * n) for (lo, hi), i, n in zip(ends, at, chunk, strict=True))]
            if math.prod(map(len, chunks)) == 1:
                out = data
                break
            if out is None:
                out = np.empty([len(span) for span in spans], dtype)
            out[tuple(slice(lo - s.start, hi - s.start) for (lo, hi), s in zip(ends, spans, strict=True))] = data
        assert out is not None
        return out.reshape([len(s) for s, i in zip(spans, index, strict=True) if isinstance(i, slice)])

    return Stored(shape, read)


class SlicedCheckpoint:
    """A checkpoint that is written slice by slice, for arrays that no memory holds; `Checkpoints` reads it.

    Each array is a folder of uncompressed chunks (zarr), one file each, which has its name only when it is whole: a
    writer that was killed resumes with the chunks that are absent.
    """

    def __init__(self, folder: Path, step: int, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]]):
        self.root = folder / str(step)
        self.shapes = dict(shapes)
        self.chunk_shapes = {name: chunk_shape(shape, dtype.itemsize) for name, (shape, dtype) in shapes.items()}
        for name, (shape, dtype) in shapes.items():
            about = orbax_format.array_metadata(shape, self.chunk_shapes[name], dtype)
            files.write_json(self.root / ITEM / name / ZARR, about)

    def chunks(self, name: str) -> Iterator[tuple[tuple[slice, ...], Path]]:
        """Every chunk of an array: which slice it is, and its file."""
        shape, chunk = self.shapes[name][0], self.chunk_shapes[name]
        for at in np.ndindex(*(size // part for size, part in zip(shape, chunk, strict=True))):
            index = tuple(slice(i * part, (i + 1) * part) for i, part in zip(at, chunk, strict=True))
            yield index, self.root / ITEM / name / ".".join(map(str, at))

    def finish(self, metadata: dict, checksums: Mapping[Path, str] | None = None) -> None:
        """Makes the chunks a checkpoint, once all of them are there.

        Args:
            metadata: JSON to store with it.
            checksums: of chunks, as `write_chunk` returned them; a chunk without one is read again for it.

        Raises:
            CheckpointError: a chunk is absent, or has another size.
        """
        sizes = {
            file: math.prod(self.chunk_shapes[name]) * dtype.itemsize
            for name, (_, dtype) in self.shapes.items()
            for _, file in self.chunks(name)
        }
        wrong = [_path(file) for file, size in sizes.items() if not file.is_file() or file.stat().st_size != size]
        if wrong:
            raise CheckpointError(f"{self.root} is not whole: {', '.join(wrong)} absent or of another size")
        shapes = {name: shape for name, (shape, _) in self.shapes.items()}
        files.write_json(self.root / ITEM / METADATA, orbax_format.tree_metadata(shapes))
        files.write_json(self.root / WHOLE, orbax_format.checkpoint_metadata(metadata | {FORMAT: 1}))
        known = {file: (checksums or {}).get(file) for file in sizes}
        sums = {_path(file): Sum(sizes[file], checksum) for file, checksum in known.items() if checksum is not None}
        others = [WHOLE, f"{ITEM}/{METADATA}", *(f"{ITEM}/{name}/{ZARR}" for name in self.shapes)]
        sums |= sums_of(self.root, [path for path in [*map(_path, sizes), *others] if path not in sums])
        files.write(self.root / CHECKSUMS, text_of(sums))


def write_chunk(file: Path, values: np.ndarray) -> str:
    """Writes one chunk of a `SlicedCheckpoint`, and returns its checksum."""
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    files.write(file, data)
    return files.checksum(data)


def _path(file: Path) -> str:
    """A chunk's path in its step's folder."""
    return "/".join(file.parts[-3:])


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The shape of an array's chunks, of at most `CHUNK_BYTES`: leading axes are split first, of a matrix the longer.

    >>> chunk_shape((22, 3, 896, 3072, 1792), 1), chunk_shape((7168, 163840), 2)
    ((1, 1, 8, 3072, 1792), (7168, 4096))
    """
    chunk = list(shape)
    last = sorted(range(len(shape))[-2:], key=lambda axis: -shape[axis])
    for axis in [*range(len(shape) - 2), *last]:
        room = CHUNK_BYTES * chunk[axis] // max(1, math.prod(chunk) * itemsize)
        if room < chunk[axis]:
            chunk[axis] = next((n for n in range(room, 0, -1) if shape[axis] % n == 0), 1)
    return tuple(chunk)
