"""A folder that is written under a temporary name, resumed after a crash, and renamed when it is whole.

`TARGET.partial` holds a hidden record: the plan, and a line with size and checksum for each file that was finished. So
only folders of ours are ever emptied, a file that a power failure cut short is written again, and a lock on the record
keeps a second process out.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from kimi_jax import files
from kimi_jax.store.safetensors_files import CheckpointError

RECORD = ".kimi_jax.jsonl"
PLAN = "kimi_jax plan"
"""Key of the record's first line."""


class Pending:
    """A folder that is being written.

    Attributes:
        path: where, under its temporary name.
        resumed: an earlier call with the same plan was stopped, and its files are there.
    """

    def __init__(self, path: Path, record: BinaryIO, finished: dict[str, tuple[int, str]], resumed: bool):
        self.path, self.resumed = path, resumed
        self._record, self._finished = record, finished

    def is_finished(self, file: Path) -> bool:
        """Whether a file is there as it was written: by its size and checksum."""
        known = self._finished.get(file.relative_to(self.path).as_posix())
        if known is None or not file.is_file() or file.is_symlink():
            return False
        return file.stat().st_size == known[0] and files.file_checksum(file) == known[1]

    def finish(self, file: Path, checksum: str) -> None:
        """Records a file that is whole."""
        name, size = file.relative_to(self.path).as_posix(), file.stat().st_size
        self._finished[name] = size, checksum
        self._append({"file": name, "size": size, "checksum": checksum})

    @property
    def checksums(self) -> dict[Path, str]:
        """Checksums of the files that are finished."""
        return {self.path / name: checksum for name, (_, checksum) in self._finished.items()}

    def start_over(self) -> None:
        """The next call with this plan is to begin with an empty folder: what is here is wrong."""
        self._append({"start over": True})

    def _append(self, line: dict[str, Any]) -> None:
        self._record.write(json.dumps(line).encode() + b"\n")


def check_new(path: Path) -> None:
    """Rejects a target where something is, or that cannot be made.

    Raises:
        CheckpointError: it exists and is not an empty folder, or its temporary name is taken by what is not ours.
        FileError: its folder cannot be made or written.
    """
    try:
        if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
            raise CheckpointError(f"{path} exists already; choose a new directory or remove it")
        partial = partial_of(path)
        _check_ours(partial)
        folder = path.parent
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise CheckpointError(f"{path} cannot be made in {folder}; choose another folder or change its permissions")
    except OSError as error:
        raise files.problem(error, path, "write") from error


def partial_of(path: Path) -> Path:
    """The temporary name of a folder."""
    return path.with_name(path.name + files.PARTIAL)


@contextmanager
def pending(target: Path, plan: list[Any], needed: int) -> Iterator[Pending]:
    """The folder under its temporary name: a new one, or one that the same plan left; renamed at the end.

    If the block raises, the folder stays for the next call.

    Args:
        target: a new directory.
        plan: what is written, of JSON values; a folder with another plan of ours is emptied.
        needed: bytes that it takes.

    Raises:
        CheckpointError: the name is taken; another process is writing it.
        FileError: the disk is too small, or the operating system does not allow it.
    """
    check_new(target)
    partial = partial_of(target)
    digest = hashlib.sha256(json.dumps(plan).encode()).hexdigest()
    try:
        held = 0
        if _record_of(partial) is not None:
            held = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
        files.check_room(target, needed - held)
        partial.mkdir(parents=True, exist_ok=True)
        # The lock, too: open until the folder has its name. Without a buffer, so that closing it writes nothing.
        with open(partial / RECORD, "a+b", buffering=0) as record:
            _lock(record, partial)
            yield _begun(partial, record, digest)
            os.sync()  # nothing half-written has the name, even after the power fails
            os.replace(partial, target)  # an empty folder there is taken over
            files.sync_folder(target.parent)
            (target / RECORD).unlink()
    except OSError as error:
        name = error.filename
        if isinstance(name, str) and not Path(name).absolute().is_relative_to(partial):
            raise files.problem(error, name, "read") from error
        raise files.problem(error, target, "write") from error


def _begun(partial: Path, record: BinaryIO, digest: str) -> Pending:
    """The folder as the same plan left it; empty, if another did."""
    found, finished = _parse_record(partial)
    if found == digest:
        for torn in partial.rglob(f".*{files.PARTIAL}"):
            torn.unlink()
        record.write(b"\n")  # ends a line that was cut short
        return Pending(partial, record, finished, resumed=True)
    _empty(partial)
    record.truncate(0)
    record.write(json.dumps({PLAN: digest, "host": socket.gethostname(), "pid": os.getpid()}).encode() + b"\n")
    os.fsync(record.fileno())
    return Pending(partial, record, {}, resumed=False)


def _check_ours(partial: Path) -> None:
    """Rejects what a user may have put where a folder of ours is to be."""
    if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
        what = "link" if partial.is_symlink() else "file"
        raise CheckpointError(f"{partial} is a {what}, where the unfinished folder is to be; move or remove it")
    if partial.is_dir() and any(partial.iterdir()) and _record_of(partial) is None:
        raise CheckpointError(
            f"{partial} holds files that no unfinished conversion left; move or remove it, or choose another target"
        )


def _record_of(partial: Path) -> str | None:
    """The plan in a folder's record; None if there is none. An empty record alone was cut short: it is ours too."""
    if not (partial / RECORD).is_file() or (partial / RECORD).is_symlink():
        return None
    found, _ = _parse_record(partial)
    return "" if found is None and len(list(partial.iterdir())) == 1 else found


def _parse_record(partial: Path) -> tuple[str | None, dict[str, tuple[int, str]]]:
    """Plan and finished files. Lines that a power failure damaged are left out: those files are written again."""
    plan, finished = None, {}
    for number, line in enumerate((partial / RECORD).read_bytes().splitlines()):
        try:
            found = files.parse_json(line, RECORD)
        except (files.FileError, UnicodeDecodeError):
            continue
        if number == 0 and isinstance(found.get(PLAN), str):
            plan = found[PLAN]
        elif "start over" in found and plan is not None:
            plan = ""
        elif {"file", "size", "checksum"} <= found.keys():
            finished[found["file"]] = found["size"], found["checksum"]
    return plan, finished


def _lock(record: BinaryIO, partial: Path) -> None:
    """Keeps other processes out for as long as the record is open."""
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CheckpointError(
            f"{partial} is being written by another process{_owner(partial)}; wait for it, or choose another target"
        ) from error
    except OSError:
        return  # a file system without locks
    if os.fstat(record.fileno()).st_nlink == 0 or not partial.is_dir():
        raise CheckpointError(f"{partial} was finished by another process just now; look at its target")


def _owner(partial: Path) -> str:
    with suppress(OSError, files.FileError, IndexError):
        first = files.parse_json((partial / RECORD).read_bytes().splitlines()[0], RECORD)
        return f" (pid {first.get('pid')} on {first.get('host')})"
    return ""


def _empty(partial: Path) -> None:
    for path in partial.iterdir():
        if path.name == RECORD:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
