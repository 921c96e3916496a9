"""Files: written so that a crash never leaves half of one, read with an error that names the file, and hashed.

Everything of ours that reaches a disk goes through here, except what Orbax and TensorBoard write. Imports nothing of
ours.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

PARTIAL = ".partial"
"""Ending of a file or folder that is being written."""
BLOCK = 16 * 2**20
"""Bytes read at a time."""


class FileError(Exception):
    """A file or folder that cannot be used. The message is one line: which file, what is wrong, what to do."""


def problem(error: OSError, path: str | Path, doing: str) -> FileError:
    """The one line for an error of the operating system.

    >>> print(problem(OSError(errno.ENOSPC, "No space left on device"), "runs/a", "write"))
    cannot write runs/a: No space left on device; free some space or choose another disk
    """
    fixes = {
        errno.ENOSPC: "free some space or choose another disk",
        errno.EDQUOT: "free some space or choose another disk",
        errno.ENAMETOOLONG: "choose a shorter name",
        errno.EEXIST: "a part of the path is a file; choose another path",
        errno.ENOTDIR: "a part of the path is a file; choose another path",
        errno.EACCES: "change its permissions or choose another path",
        errno.EPERM: "change its permissions or choose another path",
        errno.EROFS: "choose a path on a disk that can be written",
        errno.ENOENT: "check the path",
        errno.EISDIR: "choose another path",
    }
    fix = fixes.get(error.errno or 0, "check the path and the disk")
    return FileError(f"cannot {doing} {path}: {error.strerror or error}; {fix}")


@contextmanager
def writing(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a file to be written as a whole: it has its name only when all of it is on the disk.

    The data goes to a file of another name beside it, is flushed to the disk, and renamed; the folder is flushed too,
    so that neither a crash nor a power failure leaves half a file under the name. Missing parent folders are made. If
    the block raises, the old file stays as it was.

    Raises:
        FileError: the operating system does not allow it.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}{PARTIAL}")  # always the same, so that what a crash leaves is used again
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(partial, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise problem(error, path, "write") from error


def write(path: str | Path, content: bytes | memoryview | str) -> None:
    """Writes a file as a whole (see `writing`); text as UTF-8, whatever the locale is."""
    with writing(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def write_json(path: str | Path, content: Any) -> None:
    """Writes indented JSON and a line break, as a whole."""
    write(path, json.dumps(content, indent=2) + "\n")


def copy(source: str | Path, path: str | Path) -> None:
    """Copies the content of a file, as a whole."""
    try:
        with open(source, "rb") as file, writing(path) as out:
            shutil.copyfileobj(file, out, BLOCK)
    except OSError as error:
        raise problem(error, source, "read") from error


def sync_folder(path: str | Path) -> None:
    """Flushes a folder's list of names to the disk, where the file system can."""
    with suppress(OSError):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, without a byte order mark.

    Raises:
        FileError: it cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise problem(error, path, "read") from error
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path} is not UTF-8: {error.reason} at byte {error.start}; fetch or write it again"
        ) from error


def parse_json(text: str | bytes, where: str | Path, *, unique: bool = False) -> dict[str, Any]:
    """A JSON object; with `unique`, one in which no name occurs twice.

    Raises:
        FileError: it is not JSON, is nested too deeply, or is no object; the message begins with `where`.
    """
    try:
        pairs = _unique if unique else None
        found = json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise FileError(f"{where} is JSON nested too deeply to be read; fetch or write it again") from error
    except ValueError as error:
        raise FileError(f"{where} is not JSON: {error}; fetch or write it again") from error
    if not isinstance(found, dict):
        kind = "null" if found is None else type(found).__name__
        raise FileError(f"{where} holds {kind} where a JSON object is due; fetch or write it again")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return found


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file; see `parse_json`."""
    return parse_json(read_text(path), path)


def check_room(path: str | Path, needed: int) -> None:
    """Checks that the disk of a path, which need not exist yet, has room for so many bytes.

    Raises:
        FileError: it has not.
    """
    path = Path(path).absolute()
    folder = path
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise problem(error, path, "write") from error
    if needed > free:
        raise FileError(f"{path} needs {needed:,} bytes and the disk has {free:,} free; choose another disk")


def check_writable(path: str | Path) -> None:
    """Checks that a file of this name can be written, by making what `writing` makes, and leaves nothing behind.

    Raises:
        FileError: it cannot.
    """
    path, made = Path(path), []
    try:
        for folder in reversed((path.parent, *path.parent.parents)):
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        partial = path.with_name(f".{path.name}{PARTIAL}")
        if not partial.exists():
            partial.touch()
            partial.unlink()
    except OSError as error:
        raise problem(error, path, "write") from error
    except ValueError as error:  # a NUL, or no name at all
        raise FileError(f"{str(path)!r} is no name of a file ({error}); choose another path") from error
    finally:
        for folder in reversed(made):
            with suppress(OSError):
                folder.rmdir()


def checksum(data: bytes | memoryview) -> str:
    """XXH3 of some bytes, 16 hex digits: finds damage, not malice. Tens of GB/s, without the interpreter's lock."""
    return xxhash.xxh3_64_hexdigest(data)


def file_checksum(path: str | Path) -> str:
    """`checksum` of a file's content, read in blocks."""
    digest = xxhash.xxh3_64()
    try:
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
    except OSError as error:
        raise problem(error, path, "read") from error
    return digest.hexdigest()


def unit_hash(key: str) -> float:
    """A number in [0, 1) that depends on the key alone, on every machine alike. Names that are not UTF-8 are allowed.

    >>> round(unit_hash("abc.py"), 4)
    0.8085
    """
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogateescape"), digest_size=6).digest(), "big") / 2**48
