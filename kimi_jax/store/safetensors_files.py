"""A directory of safetensors files: checked before anything is read, read in slices, written one tensor at a time.

Nothing here knows a model. Reading maps files into memory tensor by tensor, so that a slice costs its own pages alone
and none stay behind; writing streams into a temporary name.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
import xxhash

from kimi_jax import files
from kimi_jax.files import FileError

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
ONLY = "model-00001-of-00001.safetensors"
"""What some tools call a single file, which needs no index either."""
LARGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""
BLOCK = 64 * 2**20
"""Bytes read or written at a time."""


class CheckpointError(FileError, ValueError):
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
        problems += [
            f"{shown(name)} is not in {file}, where the index has it"
            for name, file in sorted((_index(self.path) or {}).items())
            if name not in self.files[file].entries
        ]
        if problems:
            raise CheckpointError(f"{self.path} is not whole; download it again:\n  {listed(problems)}")

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
        CheckpointError: it is truncated or corrupt, or cannot be read.
    """
    try:
        with open(file, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            head = handle.read(8)
            length = int.from_bytes(head, "little")
            problem = None
            if len(head) < 8:
                problem = "it has no header"
            elif length > min(size - 8, LARGEST_HEADER):
                problem = f"its header claims {length:,} bytes"
            else:
                head += handle.read(length)
    except OSError as error:
        raise files.problem(error, file, "read") from error
    try:
        if problem is not None:
            raise ValueError(problem)
        return shard_of(head, size)
    except (ValueError, FileError) as error:
        raise CheckpointError(f"{file} ({size:,} bytes) is truncated or corrupt: {error}; fetch it again") from error


def shard_of(header: bytes, size: int | None = None) -> Shard:
    """Reads a header, of a file of `size` bytes if that is known.

    Raises:
        ValueError, FileError: it does not add up; the message names the tensor.
    """
    found: list[tuple[int, int, str, Entry]] = []
    for name, value in files.parse_json(header[8:], "its header", unique=True).items():
        if name != "__metadata__":
            found.append(_entry(name, value))
    found.sort(key=lambda item: item[:2])
    end = 0
    for start, stop, name, entry in found:
        if start != end or stop - start != entry.num_bytes:
            raise ValueError(
                f"{name} {entry.dtype}{list(entry.shape)} cannot lie at bytes {start:,} to {stop:,} after byte {end:,}"
            )
        end = stop
    if size is not None and size != len(header) + end:
        raise ValueError(f"its header describes {len(header) + end:,} bytes")
    return Shard(header, {name: entry for _, _, name, entry in found})


def _entry(name: str, value: Any) -> tuple[int, int, str, Entry]:
    """Start, stop, name and entry of a tensor, out of a header that nobody has checked."""
    if not name.isprintable():
        raise ValueError(f"the name {shown(name)} holds control characters")
    if not isinstance(value, dict):
        raise ValueError(f"{shown(name)} is described by {shown(value)}, not by dtype, shape and data_offsets")
    dtype, shape, offsets = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{shown(name)} has the unknown dtype {shown(dtype)}")
    if not _sizes(shape):
        raise ValueError(f"{shown(name)} has the shape {shown(shape)}, not a list of sizes")
    if not _sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{shown(name)} has the data_offsets {shown(offsets)}, not a first and a last byte")
    return offsets[0], offsets[1], name, Entry(dtype, tuple(shape), offsets[0])


def _sizes(values: object) -> TypeGuard[list[int]]:
    """Whether these are sizes, of anything that a disk holds."""
    return (
        isinstance(values, list)
        and len(values) <= 32  # NumPy's own limit on axes is 64
        and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63 for n in values)
    )


def shown(value: object) -> str:
    """A value or name out of a file in a message: on one line, and short."""
    plain = isinstance(value, str) and value.isprintable() and value != ""
    text = str(value) if plain else repr(value)
    return text if len(text) <= 200 else f"{text[:190]}.. ({len(text):,} characters)"


def listed(problems: Sequence[str], most: int = 100) -> str:
    """Problems, a line each; of very many the first."""
    lines = list(problems[:most])
    if len(problems) > most:
        lines.append(f"and {len(problems) - most:,} more")
    return "\n  ".join(lines)


def _index(path: Path) -> dict[str, str] | None:
    """The index of a directory, tensor -> file; None if it has none.

    Raises:
        CheckpointError: it is not one, or names files that are none of the directory's.
    """
    file = path / INDEX
    if not file.is_file():
        return None
    check_links(path, [INDEX])
    try:
        index = files.read_json(file).get("weight_map")
    except FileError as error:
        raise CheckpointError(f"{file} is not an index with a weight_map: {error}") from error
    if not (isinstance(index, dict) and all(isinstance(name, str) for name in index.values())):
        raise CheckpointError(f"{file} is not an index with a weight_map of names to files; fetch it again")
    if not index:
        raise CheckpointError(f"{file} is an index that names no tensors; fetch it again")
    outside = [f for f in sorted(set(index.values())) if "/" in f or "\\" in f or ".." in f or "\0" in f]
    if outside:
        raise CheckpointError(f"{file} names files outside its directory: {', '.join(map(shown, outside))}")
    odd = [f for f in sorted(set(index.values())) if not f.endswith(".safetensors") or not f.isprintable()]
    if odd:
        names = ", ".join(map(shown, odd))
        raise CheckpointError(f"{file} names files that do not end in .safetensors: {names}; fetch it again")
    return index


def _files(path: Path) -> list[str]:
    """The directory's tensor files; those that its index names, if it has one."""
    index = _index(path)
    if index is None:
        found = [name for name in (SINGLE, ONLY) if (path / name).is_file()][:1]
        if not found:
            shards = sorted(file.name for file in path.glob("model-*-of-*.safetensors"))
            more = f"; it has {len(shards)} shards, whose index is to be fetched too" if shards else ""
            raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}{more}")
    else:
        found = sorted(set(index.values()))
        absent = [f for f in found if not (path / f).is_file()]
        if absent:
            names = ", ".join(absent[:20]) + (f" and {len(absent) - 20:,} more" if len(absent) > 20 else "")
            raise CheckpointError(f"{path} lacks {names}, which its index names; download them again")
    check_links(path, found)
    return found


def check_links(path: Path, names: Iterable[str]) -> None:
    """Rejects files of a directory that are links to anywhere but its own files and, in a hub's cache, its blobs.

    A link in a folder from elsewhere must not bring in other files of this machine.

    Raises:
        CheckpointError: each link is named with where it leads.
    """
    root = Path(os.path.realpath(path))
    own = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    wrong = []
    for name in names:
        real = Path(os.path.realpath(root / name))
        if not any(real.is_relative_to(folder) for folder in own):
            wrong.append(f"{name} -> {real}")
        elif not real.exists():
            wrong.append(f"{name} -> {real}, which does not exist")
    if wrong:
        raise CheckpointError(
            f"{path} holds links that lead out of it; replace them by the files themselves: {', '.join(wrong[:20])}"
        )


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


def write(file: Path, shard: Shard, blocks: Iterable[np.ndarray]) -> str:
    """Writes a file from its tensors' data in order; it has its name only when it is whole and on the disk.

    Returns:
        Its checksum.

    Raises:
        ValueError: more or less data than the header describes.
        FileError: the operating system does not allow it.
    """
    digest = xxhash.xxh3_64(shard.header)
    with files.writing(file) as handle:
        handle.write(shard.header)
        for block in blocks:
            data = as_bytes(block)
            digest.update(data)
            handle.write(data)
        if handle.tell() != shard.num_bytes:
            raise ValueError(f"{file} came to {handle.tell():,} bytes instead of {shard.num_bytes:,}")
    return digest.hexdigest()


def as_bytes(values: np.ndarray) -> memoryview:
    """The array's data in C order, copied only where it lies otherwise."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
