"""Checkpoints that are written slice by slice, and arrays of a checkpoint of which slices are read."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore

from kimi_jax import files

CHUNK_BYTES = 64 * 2**20
"""Most bytes of an array that are written as one: what it costs to read any slice of it."""


ITEM, METADATA, WHOLE = "state", "_METADATA", "_CHECKPOINT_METADATA"
"""Orbax's names in a checkpoint's folder."""


@dataclass(frozen=True)
class Stored:
    """An array of a checkpoint, of which slices are read."""

    shape: tuple[int, ...]
    read: Callable[[tuple], np.ndarray]
    """Numbers and slices, an axis each or for the first axes -> what lies there."""


def open_arrays(folder: Path, step: int) -> dict[str, Stored]:
    """The arrays of a checkpoint by their names."""
    root = folder / str(step) / ITEM
    stored = json.loads((root / METADATA).read_text())
    names = [entry["key_metadata"][0]["key"] for entry in stored["tree_metadata"].values()]
    if not stored["use_ocdbt"] and not stored["use_zarr3"]:  # of `SlicedCheckpoint`: chunks are read in place
        return {name: _mapped(root / name) for name in names}
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 6 * CHUNK_BYTES}})

    def opened(name: str):
        kv: Any = {"driver": "file", "path": f"{root}/{name}/"}
        if stored["use_ocdbt"]:
            kv = {"driver": "ocdbt", "base": f"file://{root}/", "path": f"{name}/"}
        spec = {"driver": "zarr3" if stored["use_zarr3"] else "zarr", "kvstore": kv, "recheck_cached_data": "open"}
        return tensorstore.open(spec, open=True, read=True, context=context)

    opening = {name: opened(name) for name in names}
    arrays = {name: future.result() for name, future in opening.items()}
    return {
        name: Stored(tuple(array.shape), lambda index, array=array: np.asarray(array[index].read().result()))
        for name, array in arrays.items()
    }


def _mapped(folder: Path) -> Stored:
    """An array of uncompressed chunks."""
    about = json.loads((folder / ".zarray").read_text())
    assert about["compressor"] is None, folder
    shape, chunk, dtype = tuple(about["shape"]), tuple(about["chunks"]), jnp.dtype(about["dtype"])

    def read(index: tuple) -> np.ndarray:
        index = (*index, *[slice(None)] * (len(shape) - len(index)))
        spans = [
            range(size)[i if isinstance(i, slice) else slice(i, i + 1)] for i, size in zip(index, shape, strict=True)
        ]
        chunks = [range(span.start // part, -(-span.stop // part)) for span, part in zip(spans, chunk, strict=True)]
        out = None
        for at in itertools.product(*chunks):
            data = np.asarray(np.memmap(folder / ".".join(map(str, at)), np.uint8, "r")).view(dtype).reshape(chunk)
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
    writer that is killed goes on with the chunks that are absent.
    """

    def __init__(self, folder: Path, step: int, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]]):
        self.root = folder / str(step)
        self.shapes = dict(shapes)
        self.chunk_shapes = {name: chunk_shape(shape, dtype.itemsize) for name, (shape, dtype) in shapes.items()}
        for name, (shape, dtype) in shapes.items():
            (self.root / ITEM / name).mkdir(parents=True, exist_ok=True)
            kind = dtype.newbyteorder("<").str if dtype.kind != "V" else dtype.name
            array = {"zarr_format": 2, "shape": shape, "chunks": self.chunk_shapes[name], "dtype": kind, "order": "C"}
            array |= {"compressor": None, "filters": None, "fill_value": None, "dimension_separator": "."}
            (self.root / ITEM / name / ".zarray").write_text(json.dumps(array))

    def chunks(self, name: str) -> Iterator[tuple[tuple[slice, ...], Path]]:
        """Every chunk of an array: which slice it is, and its file."""
        shape, chunk = self.shapes[name][0], self.chunk_shapes[name]
        for at in np.ndindex(*(size // part for size, part in zip(shape, chunk, strict=True))):
            index = tuple(slice(i * part, (i + 1) * part) for i, part in zip(at, chunk, strict=True))
            yield index, self.root / ITEM / name / ".".join(map(str, at))

    def finish(self, metadata: dict) -> None:
        """Makes the chunks a checkpoint, once all of them are there."""
        entry = {"value_type": "jax.Array", "skip_deserialize": False}
        tree = {
            repr((name,)): {
                "key_metadata": [{"key": name, "key_type": 2}],
                "value_metadata": entry | {"write_shape": list(shape)},
            }
            for name, (shape, _) in self.shapes.items()
        }
        plain = {"use_ocdbt": False, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
        (self.root / ITEM / METADATA).write_text(json.dumps({"tree_metadata": tree, **plain, "custom_metadata": None}))
        handler = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
        now = time.time_ns()
        whole = {
            "item_handlers": {ITEM: handler},
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": now,
            "commit_timestamp_nsecs": now,
            "custom_metadata": metadata,
        }
        (self.root / WHOLE).write_text(json.dumps(whole))


def write_chunk(file: Path, values: np.ndarray) -> None:
    """Writes one chunk of a `SlicedCheckpoint`."""
    files.write(file, np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The shape of an array's chunks, of at most `CHUNK_BYTES`: leading axes are cut first, of a matrix the longer.

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
