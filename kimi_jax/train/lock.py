"""One process at a time in the folder of a run: a lock that the kernel releases when its holder dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kimi_jax import files
from kimi_jax.config import ConfigError

LOCK = ".lock"
"""File that a running run holds locked in its folder; who holds it is written inside, as JSON."""
JOBS = ("SLURM_JOB_ID", "SKYPILOT_TASK_ID")
"""Variables with the id of a job, which stays the same when the scheduler starts the job again elsewhere."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a run's folder, which is made if need be; at the end an empty one is removed again.

    The lock is `flock` on an open file, so it ends with its process, however that ends. What the file then still says
    counts only on file systems whose locks do not reach other machines: there the holder may be alive elsewhere. It is
    taken for dead if it ran on this machine (same host name, or same boot for containers that share a kernel), or
    under the same job of a scheduler, which starts a job again only when it has ended.

    Raises:
        ConfigError: another process holds the lock, or the folder cannot be written.
    """
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        number = _acquire(folder / LOCK)
    except (OSError, ValueError) as error:  # ValueError: a name that the locale's encoding lacks, or with a zero
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot write to {folder}: {why}; choose another --train.runs-dir or --name") from error
    try:
        yield
    finally:
        _release(folder / LOCK, number)
        with suppress(OSError):  # not empty: the usual case
            for path in missing:
                path.rmdir()


def _acquire(path: Path) -> int:
    """The descriptor of the locked file, which says that this process holds it."""
    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            held = _lock(number)
            if held is False:
                raise _in_use(path, _read(number), here=True)
            if not _is_at(path, number):  # its holder removed it between our opening and locking: that lock is nobody's
                os.close(number)
                continue
            holder = _read(number)
            if holder and _may_run(holder, alone=held is True):
                raise _in_use(path, holder, here=_is_here(holder))
            content = (json.dumps(_own()) + "\n").encode()
            os.ftruncate(number, 0)
            os.pwrite(number, content, 0)
            return number
        except BaseException:
            with suppress(OSError):
                os.close(number)
            raise


def _release(path: Path, number: int) -> None:
    """Removes the file while it is still locked, so that nobody finds what it says; then unlocks it."""
    with suppress(OSError):
        if _is_at(path, number):  # else the folder was renamed, and another run may be at its place
            path.unlink()
    os.close(number)


def _lock(number: int) -> bool | None:
    """Whether the lock is ours now; None where the file system has no locks."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # ENOSYS, EOPNOTSUPP, ENOLCK: some network file systems
        return None
    return True


def _is_at(path: Path, number: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(number))
    except FileNotFoundError:
        return False


def _own() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot": _boot(),
        "job": next((f"{name}={os.environ[name]}" for name in JOBS if os.environ.get(name)), ""),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _boot() -> str:
    """What is the same in all processes of a kernel from its start to its end; nothing outside Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _read(number: int) -> dict[str, Any]:
    """What the file says of its holder; nothing if it is new or damaged."""
    try:
        return files.parse_json(os.pread(number, 4096, 0), LOCK)
    except (files.FileError, OSError):
        return {}


def _is_here(holder: dict[str, Any]) -> bool:
    own = _own()
    return holder.get("host") == own["host"] or bool(own["boot"] and holder.get("boot") == own["boot"])


def _may_run(holder: dict[str, Any], *, alone: bool) -> bool:
    """Whether the holder that a file names may still run. `alone`: this machine's kernel says nobody holds the lock."""
    own = _own()
    if own["job"] and holder.get("job") == own["job"]:
        return False
    if not _is_here(holder):
        return True
    if alone or holder.get("boot") != own["boot"]:
        return False
    pid = holder.get("pid")
    if not isinstance(pid, int) or isinstance(pid, bool) or not 0 < pid < 2**31 or pid == own["pid"]:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs, as another user
    return True


def _in_use(path: Path, holder: dict[str, Any], *, here: bool) -> ConfigError:
    who = f"process {holder.get('pid', '?')} on host {holder.get('host', '?')}"
    if here:
        fix = "wait until it ends or end it, or choose another --name"
    else:
        fix = f"if it does not run any more, remove {path}; else end it, or choose another --name"
    return ConfigError(f"{path.parent} is in use by {who} since {holder.get('started', '?')}, says {path}; {fix}")
