"""Checksums of a checkpoint: written when it is saved, verified before it is used.

A step's folder holds the text file `checksums.txt`: a line for each other file (XXH3 in hex, size in bytes, path) and
at the end the checksum of these lines. So a bit that flips, a file that is cut off, emptied or deleted is noticed, in
arrays and in metadata alike. Checkpoints of version 0.1 have no such file: they load, with a note.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimi_jax import files
from kimi_jax.files import FileError
from kimi_jax.store.orbax_format import CUSTOM, ITEM, METADATA, WHOLE
from kimi_jax.store.safetensors_files import CheckpointError

CHECKSUMS = "checksums.txt"
TITLE = "checksums of kimi_jax 1"
FORMAT = "kimi_jax.checkpoint"
"""Key in a checkpoint's own metadata: it has checksums, so that their absence is damage."""

_READERS = min(8, os.cpu_count() or 1)


class Damaged(CheckpointError):
    """A step's folder is not whole. The message is only what is wrong; see `damage` for what to do."""


@dataclass(frozen=True)
class Sum:
    """What a file must be."""

    size: int
    checksum: str


def text_of(sums: Mapping[str, Sum]) -> str:
    """Content of `checksums.txt`."""
    lines = "".join(f"{s.checksum} {s.size:15d} {path}\n" for path, s in sorted(sums.items()))
    body = f"{TITLE}\n{lines}"
    return f"{body}{files.checksum(body.encode())}\n"


def parse(text: str) -> dict[str, Sum]:
    """The inverse of `text_of`.

    Raises:
        Damaged: it is not what `text_of` wrote.
    """
    *lines, last = text.removesuffix("\n").split("\n")
    body = "".join(f"{line}\n" for line in lines)
    if not text.endswith("\n") or last != files.checksum(body.encode()) or lines[0] != TITLE:
        raise Damaged(f"{CHECKSUMS} does not have its own checksum")
    found = (line.split(maxsplit=2) for line in lines[1:])
    return {path: Sum(int(size), checksum) for checksum, size, path in found}


def files_in(root: Path) -> list[str]:
    """Paths of all files of a step's folder, but the checksums themselves."""
    found = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return sorted(path for path in found if not path.startswith(CHECKSUMS))


def sums_of(root: Path, paths: Iterable[str]) -> dict[str, Sum]:
    """Sizes and checksums of files, which are flushed to the disk as well."""

    def one(path: str) -> Sum:
        files.sync_folder(root / path)  # a file takes it as a folder does
        return Sum((root / path).stat().st_size, files.file_checksum(root / path))

    paths = list(paths)
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(paths, pool.map(one, paths), strict=True))
    for folder in {(root / path).parent for path in paths}:
        files.sync_folder(folder)
    return found


@dataclass
class Step:
    """The folder of one checkpoint, looked at: sizes and metadata are right.

    Raises:
        Damaged: they are not.
    """

    root: Path
    metadata: dict[str, Any] = field(init=False)
    """The user's JSON."""
    arrays: dict[str, Any] = field(init=False)
    """Content of the arrays' `_METADATA`."""
    sums: dict[str, Sum] | None = field(init=False, default=None)
    """Path -> what the file must be; None for a checkpoint of version 0.1."""
    verified: set[str] = field(init=False, default_factory=set)

    def __post_init__(self):
        if not self.root.is_dir():
            raise Damaged("it is not a folder")
        if not any(self.root.iterdir()):
            raise Damaged("it is empty")
        about = f"{ITEM}/{METADATA}"
        if (self.root / CHECKSUMS).is_file():
            self.sums = parse(_text(self.root, CHECKSUMS))
            for path, expected in self.sums.items():
                self._check_size(path, expected)
            self.verify([WHOLE, about])
        whole, self.arrays = _json(self.root, WHOLE), _json(self.root, about)
        custom = whole.get(CUSTOM)
        if not isinstance(custom, dict):
            raise Damaged(f"{WHOLE} lacks {CUSTOM}")
        if not isinstance(self.arrays.get("tree_metadata"), dict):
            raise Damaged(f"{about} lacks tree_metadata")
        if self.sums is None and FORMAT in custom:
            raise Damaged(f"{CHECKSUMS} is missing")
        self.metadata = {key: value for key, value in custom.items() if key != FORMAT}

    def verify(self, paths: Iterable[str] | None = None) -> None:
        """Compares files with their checksums, each once; all files by default.

        Raises:
            Damaged: one differs.
        """
        if self.sums is None:
            return
        wanted = self.sums if paths is None else paths
        left = [path for path in wanted if path not in self.verified]
        for path in left:
            if path not in self.sums:
                raise Damaged(f"{CHECKSUMS} does not name {path}")
        left.sort(key=lambda path: -self.sums[path].size)  # type: ignore[index]
        with ThreadPoolExecutor(_READERS) as pool:
            for _ in pool.map(self._check, left):
                pass
        self.verified.update(left)

    def _check(self, path: str) -> None:
        assert self.sums is not None
        expected = self.sums[path]
        self._check_size(path, expected)
        try:
            found = files.file_checksum(self.root / path)
        except FileError as error:
            raise Damaged(str(error)) from error
        if found != expected.checksum:
            raise Damaged(f"{path} has checksum {found} in place of {expected.checksum}")

    def _check_size(self, path: str, expected: Sum) -> None:
        try:
            found = (self.root / path).stat()
        except FileNotFoundError as error:
            raise Damaged(f"{path} is missing") from error
        except OSError as error:
            raise Damaged(f"{path} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{path} is not a file")
        if found.st_size != expected.size:
            raise Damaged(f"{path} has {found.st_size:,} bytes in place of {expected.size:,}")


def steps_in(folder: Path) -> list[int]:
    """The steps that have a folder there, whole or not."""
    try:
        found = [child.name for child in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise files.problem(error, folder, "read") from error
    return sorted(int(name) for name in found if re.fullmatch(r"0|[1-9][0-9]{0,17}", name))


def check(folder: Path, step: int) -> None:
    """Reads all of a checkpoint and compares it with its checksums.

    Raises:
        CheckpointError: it is not whole; see `damage`.
    """
    try:
        Step(folder / str(step)).verify()
    except Damaged as error:
        raise damage(folder, step, str(error)) from error


def is_whole(folder: Path, step: int) -> bool:
    """Whether all of a checkpoint is as it was saved. Reads all of it."""
    try:
        Step(folder / str(step)).verify()
    except Damaged:
        return False
    return True


def newest_whole(folder: Path, before: int | None = None) -> int | None:
    """The newest step, of those before `before`, that is whole. Reads all of it, and of the broken ones after it."""
    older = (step for step in reversed(steps_in(folder)) if before is None or step < before)
    return next((step for step in older if is_whole(folder, step)), None)


def damage(folder: Path, step: int, what: str) -> CheckpointError:
    """The one line for a checkpoint that is not whole: which, what is wrong with it, and which one to take instead."""
    others = [other for other in reversed(steps_in(folder)) if other != step]
    whole = next((other for other in others if is_whole(folder, other)), None)
    if whole is None:
        fix = "no other checkpoint there is whole: start over with --restart, or convert it again"
    else:
        fix = f"the newest whole checkpoint is step {whole}: take it with --resume-from {whole} (in training) or --step"
        fix += f" {whole}"
    return CheckpointError(f"{folder / str(step)} is damaged: {what}; {fix}")


_noted: set[Path] = set()


def note_old(root: Path) -> None:
    """Says, once, that a checkpoint has no checksums."""
    if root not in _noted:
        _noted.add(root)
        line = f"{root} is of version 0.1, without checksums: damage to it may go unnoticed; the next save has them"
        print(line, file=sys.stderr)


def _text(root: Path, path: str) -> str:
    try:
        return files.read_text(root / path)
    except FileError as error:
        if not (root / path).exists():
            raise Damaged(f"{path} is missing") from error
        raise Damaged(str(error)) from error


def _json(root: Path, path: str) -> dict[str, Any]:
    text = _text(root, path)
    if not text.strip():
        raise Damaged(f"{path} is empty")
    try:
        return files.parse_json(text, path)
    except FileError as error:
        raise Damaged(str(error).removesuffix("; fetch or write it again")) from error
