"""The folder of a run: what lies in it, whether the disk holds it, and removing it."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import jax

from kimi_jax.config import Config, ConfigError

ARTIFACTS = (
    *("config.json", "metrics.jsonl", "curves.png", "sample.txt", "skipped_batch.npz"),
    *("checkpoints", "tensorboard", "tokenizer"),
)


def check_folder(folder: Path, config: Config, state_bytes: int) -> None:
    """The disk can be written and holds the checkpoints to come, one in flight included."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write_test_{jax.process_index()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error}; choose another --train.runs-dir") from error
    needed = state_bytes * (config.train.keep_last + 1)
    free = shutil.disk_usage(folder).free + folder_size(folder)
    if needed > free:
        raise ConfigError(
            f"{folder}: {config.train.keep_last} checkpoints and one being written need {needed:,} bytes, "
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


def remove_run(folder: Path) -> None:
    """Removes what a run writes, and nothing else that may lie in the folder."""
    for name in ARTIFACTS:
        path = folder / name
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    partial_path = path.with_name(path.name + ".partial")
    partial_path.write_text(text)
    os.replace(partial_path, path)
