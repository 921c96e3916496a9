"""A directory of safetensors files: checked before anything is read, read in slices, written one tensor at a time.

Nothing here knows a model. Reading maps files into memory tensor by tensor, so that a slice costs its own pages alone
and none stay behind; writing streams into a temporary name.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

DTYPES = {
    "BOOL": np.dtype(bool),
    **{f"{letter}{8 * size}": np.dtype(f"{letter.lower()}{size}") for letter in "IU" for size in (1, 2, 4, 8)},
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""
BLOCK = 64 * 2**20
"""Bytes read or written at a time."""


class CheckpointError(ValueError):
    """A checkpoint directory that cannot be used. The message names every offending file or tensor."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file, as its header has it."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte, from the end of the header."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Shard:
    """A file's header: its bytes, and its tensors in the order of their data."""

    header: bytes
    """Length, JSON and padding: all that comes before the data."""
    entries: dict[str, Entry]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(entry.num_bytes for entry in self.entries.values())


class Directory:
    """The tensors of a directory's safetensors files.

    Attributes:
        files: file name -> its header.
        entries: tensor name -> what it is.
        where: tensor name -> its file.

    Raises:
        CheckpointError: no files; one that is absent, truncated or corrupt; an index that names files elsewhere, or
            tensors that are in no file, or in two.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.files = {file: parse(self.path / file) for file in _files(self.path)}
        self.where: dict[str, str] = {}
        self.entries: dict[str, Entry] = {}
        problems = []
        for file, shard in self.files.items():
            problems += [f"in two files: {name}" for name in sorted(shard.entries.keys() & self.where.keys())]
            self.where |= dict.fromkeys(shard.entries, file)
            self.entries |= shard.entries
        if (self.path / INDEX).is_file():
            index = json.loads((self.path / INDEX).read_text())["weight_map"]
            problems += [
                f"{name} is not in {file}, where the index has it"
                for name, file in sorted(index.items())
                if name not in self.files[file].entries
            ]
        if problems:
            raise CheckpointError(f"{self.path} is not whole:\n  " + "\n  ".join(problems))

    def read(self, name: str) -> np.ndarray:
        """The tensor, mapped: what is sliced off it is read then. Keep no reference longer than needed."""
        file = self.where[name]
        shard, entry = self.files[file], self.entries[name]
        if not entry.num_bytes:
            return np.empty(entry.shape, DTYPES[entry.dtype])
        offset = len(shard.header) + entry.start
        raw = np.memmap(self.path / file, np.uint8, "r", offset, entry.num_bytes)
        return np.asarray(raw).view(DTYPES[entry.dtype]).reshape(entry.shape)

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """The tensor's bytes, read in blocks."""
        file, entry = self.where[name], self.entries[name]
        for start in range(0, entry.num_bytes, BLOCK):
            offset = len(self.files[file].header) + entry.start + start
            yield np.fromfile(self.path / file, np.uint8, min(BLOCK, entry.num_bytes - start), offset=offset)


def parse(file: Path) -> Shard:
    """A file's header, checked against its size: data of the right lengths, without gaps.

    Raises:
        CheckpointError: it is truncated or corrupt.
    """
    size = file.stat().st_size
    try:
        with open(file, "rb") as handle:
            head = handle.read(8)
            (length,) = struct.unpack("<Q", head)
            if length > min(size - 8, LARGEST_HEADER):
                raise ValueError(f"its header claims {length:,} bytes")
            head += handle.read(length)
        return shard_of(head, size)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{file} ({size:,} bytes) is truncated or corrupt: {error}") from error


def shard_of(header: bytes, size: int | None = None) -> Shard:
    """Reads a header, of a file of `size` bytes if that is known; ValueError for what does not add up."""
    found: list[tuple[int, int, str, Entry]] = []
    for name, value in json.loads(header[8:]).items():
        if name != "__metadata__":
            if value["dtype"] not in DTYPES:
                raise ValueError(f"{name} has the unknown dtype {value['dtype']!r}")
            entry = Entry(value["dtype"], tuple(value["shape"]), value["data_offsets"][0])
            found.append((entry.start, value["data_offsets"][1], name, entry))
    end = 0
    for start, stop, name, entry in sorted(found, key=lambda item: item[:2]):
        if start != end or stop - start != entry.num_bytes or min(entry.shape, default=0) < 0:
            raise ValueError(f"{name} {entry.dtype}{list(entry.shape)} cannot lie at bytes {start:,} to {stop:,}")
        end = stop
    if size is not None and size != len(header) + end:
        raise ValueError(f"its header describes {len(header) + end:,} bytes")
    return Shard(header, {name: entry for _, _, name, entry in sorted(found, key=lambda item: item[:2])})


def _files(path: Path) -> list[str]:
    """The directory's tensor files; those that its index names, if it has one."""
    if not (path / INDEX).is_file():
        if not (path / SINGLE).is_file():
            raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}")
        return [SINGLE]
    try:
        index = json.loads((path / INDEX).read_text())["weight_map"]
        if not (isinstance(index, dict) and all(isinstance(file, str) for file in index.values())):
            raise ValueError("weight_map must map names to files")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / INDEX} is not an index with a weight_map: {error}") from error
    files = sorted(set(index.values()))
    outside = [f for f in files if "/" in f or "\\" in f or ".." in f or "\0" in f]
    if outside:
        raise CheckpointError(f"{path / INDEX} names files outside its directory: {', '.join(outside)}")
    absent = [f for f in files if not (path / f).is_file()]
    if absent:
        raise CheckpointError(f"{path} lacks {', '.join(absent)}, which its index names; download them again")
    return files


def make_shard(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> Shard:
    """The header of a new file for (name, dtype, shape) in this order, wide dtypes first where alignment needs it."""
    tensors = list(tensors)
    starts = np.cumsum([0, *(Entry(dtype, shape, 0).num_bytes for _, dtype, shape in tensors)])
    if any(start % DTYPES[dtype].itemsize for start, (_, dtype, _) in zip(starts[:-1], tensors, strict=True)):
        tensors.sort(key=lambda tensor: -DTYPES[tensor[1]].itemsize)
    entries, start = {}, 0
    for name, dtype, shape in tensors:
        entries[name] = Entry(dtype, tuple(shape), start)
        start += entries[name].num_bytes
    values = {
        name: {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [e.start, e.start + e.num_bytes]}
        for name, e in entries.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **values}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Shard(struct.pack("<Q", len(text)) + text, entries)


def divide(tensors: Iterable[tuple[str, str, tuple[int, ...]]], max_bytes: int) -> dict[str, Shard]:
    """File name -> header, with at most `max_bytes` of data a file where no tensor alone is larger."""
    parts: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    used = 0
    for name, dtype, shape in tensors:
        size = Entry(dtype, shape, 0).num_bytes
        if parts[-1] and used + size > max_bytes:
            parts.append([])
            used = 0
        parts[-1].append((name, dtype, shape))
        used += size
    if len(parts) == 1:
        return {SINGLE: make_shard(parts[0])}
    return {f"model-{n:05d}-of-{len(parts):05d}.safetensors": make_shard(part) for n, part in enumerate(parts, 1)}


def index_of(files: Mapping[str, Shard]) -> str:
    """The text of the index over these files."""
    where = {name: file for file, shard in files.items() for name in shard.entries}
    total = sum(entry.num_bytes for shard in files.values() for entry in shard.entries.values())
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, indent=2) + "\n"


def write(file: Path, shard: Shard, blocks: Iterable[np.ndarray]) -> None:
    """Writes a file from its tensors' data in order; it has its name only when it is whole.

    Raises:
        ValueError: more or less data than the header describes.
    """
    partial = file.with_name(file.name + ".partial")
    with open(partial, "wb") as handle:
        handle.write(shard.header)
        for block in blocks:
            handle.write(as_bytes(block))
        if handle.tell() != shard.num_bytes:
            raise ValueError(f"{file} came to {handle.tell():,} bytes instead of {shard.num_bytes:,}")
    os.replace(partial, file)


def as_bytes(values: np.ndarray) -> memoryview:
    """The array's data in C order, copied only where it lies otherwise."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
