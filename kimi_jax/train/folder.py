"""The folder of a run: what it holds, whether the disk has room for it, and removing it as a whole."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import jax

from kimi_jax import files
from kimi_jax.config import Config, ConfigError

CHECKPOINTS = "checkpoints"
FILES = ("config.json", "metrics.jsonl", "curves.png", "sample.txt", "skipped_batch.npz")
FOLDERS = (CHECKPOINTS, "tensorboard", "tokenizer")
ARTIFACTS = (*FILES, *FOLDERS)
"""All that a run writes, in the order in which a restart moves it away."""

MOVING, REMOVED = ".restart", ".removed"
"""Folders of a restart: of what has been moved away so far, and, once that is all, of what is to be deleted."""


def check_folder(folder: Path, config: Config, state_bytes: int) -> None:
    """Checks that a run can write its files, and that the disk has room for its checkpoints, one in flight included.

    Raises:
        ConfigError: it cannot, or has not.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write_test_{jax.process_index()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error}; choose another --train.runs-dir") from error
    for name in FILES:
        if (folder / name).is_dir():
            raise ConfigError(f"{folder / name} is a folder, and a run writes a file there; move it away")
    for name in FOLDERS:
        path = folder / name
        if os.path.lexists(path) and not path.is_dir():
            found = f"a link to {os.readlink(path)}, which is no folder" if path.is_symlink() else "a file"
            raise ConfigError(f"{path} is {found}, and a run writes a folder there; make one, or move it away")
    held = folder / CHECKPOINTS  # it may be a link to another disk
    steps = [path for path in held.iterdir() if path.name.isdigit()] if held.is_dir() else []
    where = held if held.is_dir() else folder
    needed = state_bytes * (config.train.keep_last + 1)
    free = shutil.disk_usage(where).free + sum(map(folder_size, steps))  # new checkpoints take the place of these
    if needed > free:
        raise ConfigError(
            f"{where}: {config.train.keep_last} checkpoints and one being written need {needed:,} bytes, "
            f"{free:,} are free; choose another --train.runs-dir or a smaller --train.keep-last"
        )


def folder_size(folder: Path) -> int:
    """Bytes of all files in a folder, as far as other processes do not take them away meanwhile."""
    held = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                held += os.stat(os.path.join(parent, name)).st_size
    return held


def check_removable(folder: Path) -> None:
    """Checks that a restart would remove all of a run: what a link leads to is not its to remove.

    Raises:
        ConfigError: a file or folder of the run is a link.
    """
    for name in ARTIFACTS:
        path = folder / name
        if path.is_symlink():
            raise ConfigError(
                f"{path} is a link to {os.readlink(path)}, where --restart removes nothing: empty or move what is "
                "there, remove the link, and make it again if the new run is to use it; or choose another --name"
            )


def remove_run(folder: Path) -> None:
    """Removes what a run writes, all of it or nothing, and nothing else that the folder may hold.

    Everything is moved into one folder first, whose new name then says that the restart is decided: a crash before
    that is undone by `settle_restart` at the next start, one after it is finished.

    Raises:
        FileError: something cannot be moved, and all is as it was; or something cannot be deleted.
    """
    moving = folder / MOVING
    try:
        moving.mkdir()
        for name in ARTIFACTS:
            if os.path.lexists(folder / name):
                (folder / name).rename(moving / name)
        moving.rename(folder / REMOVED)
    except OSError as error:
        settle_restart(folder)
        raise files.problem(error, error.filename or moving, "remove") from error
    settle_restart(folder)


def settle_restart(folder: Path) -> None:
    """Ends what a restart began before it was killed: undoes it if it was still moving files, else deletes them.

    Raises:
        FileError: something cannot be moved or deleted.
    """
    moving, removed = folder / MOVING, folder / REMOVED
    try:
        if moving.is_dir():
            for path in moving.iterdir():
                path.rename(folder / path.name)
            moving.rmdir()
        if removed.is_dir():
            shutil.rmtree(removed)
    except OSError as error:
        raise files.problem(error, error.filename or folder, "move or remove") from error
    files.sync_folder(folder)
