"""Released directories to checkpoints and back, one slice at a time, for models that no memory holds.

A converted directory is a run's folder without the run: `checkpoints/0` with the parameters, quantized experts still
packed; `tokenizer/`; and `assets/`, which is all that parameters do not tell of the release: its headers, the tensors
of other parts of the model, config, index and other files. So the way back gives the release's own bytes, of whatever
was not changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from kimi_jax.config import Config, ConfigError, ModelConfig, at_step, from_dict, to_dict
from kimi_jax.model.kimi import declared
from kimi_jax.store import checkpoint, released_config, safetensors_files, sliced
from kimi_jax.store.open import config_for, is_release, release_tokenizer
from kimi_jax.store.read import Release
from kimi_jax.store.safetensors_files import CheckpointError
from kimi_jax.store.sliced import SlicedCheckpoint
from kimi_jax.store.write import Parameters, Plan, check_disk, check_new, plan, plan_like
from kimi_jax.text.tokenizer import RELEASED

ASSETS, HEADERS, CARRIED, FILES = "assets", "headers", "carried", "files"
PLAN = "plan.sha256"


def convert(
    source: str | Path,
    target: str | Path,
    *,
    verify: bool = False,
    like: str | Path | None = None,
    packed: bool = True,
    step: int | None = None,
    console: Console | None = None,
) -> dict[str, int]:
    """Converts a released directory to a checkpoint, or a checkpoint to a released directory.

    Everything is checked before anything is written. The target has its name only when it is whole; until then it is
    `TARGET.partial`, and the same call goes on with what a killed one left there.

    Args:
        source: a directory from the hub, or the folder of a run or of an earlier conversion.
        target: a new directory.
        verify: reads both again at the end, and compares every tensor byte for byte.
        like: a released or converted directory whose layout, dtypes, config and other tensors an exported checkpoint
            takes. By default those that the checkpoint was converted from.
        packed: exports in the quantized format of the family where there is nothing to be like; else in bf16.
        step: which checkpoint to export; the newest by default.
        console: where progress is shown.

    Returns:
        `bytes` and `tensors` of the released side.

    Raises:
        CheckpointError, ConfigError: a source that is not whole or not of the family, a target that exists, too small
            a disk; bytes that differ, with `verify`.
    """
    source, target = Path(source), Path(target).absolute()
    console = console or Console(stderr=True, highlight=False)
    check_new(target)
    if is_release(source):
        if like is not None:
            raise ConfigError(f"{source} is a released directory; --like is for exports")
        return _import(source, target, verify, console)
    return _export(source, target, verify, like, packed, step, console)


def _import(source: Path, target: Path, verify: bool, console: Console) -> dict[str, int]:
    release = Release(source)
    tokenizer = release_tokenizer(source, release.config)
    config = config_for(target.name, release.config)
    others = _other_files(source)
    carried = _carried(release)
    leaf_bytes = {name: int(np.prod(shape)) * dtype.itemsize for name, (shape, dtype) in release.leaves.items()}
    files = release.directory.files
    needed = sum(leaf_bytes.values()) + sum(shard.num_bytes for shard in carried.values())
    needed += sum((source / name).stat().st_size for name in others) + sum(len(s.header) for s in files.values())
    stamp = [[name, (source / name).stat().st_mtime_ns, (source / name).stat().st_size] for name in [*files, *others]]
    with _partial(target, ["import", str(source.resolve()), stamp], needed, console) as partial:
        root = partial / ASSETS
        for folder in (HEADERS, CARRIED, FILES):
            (root / folder).mkdir(parents=True, exist_ok=True)
        shapes = {f"params.{name}": leaf for name, leaf in release.leaves.items()}
        written = SlicedCheckpoint(partial / "checkpoints", 0, shapes)
        with _bar(console, "import", needed) as advance:
            for name, size in leaf_bytes.items():
                chunks = list(written.chunks(f"params.{name}"))
                for index, file in chunks:
                    if not file.is_file():
                        sliced.write_chunk(file, release.read(name, index))
                    advance(size / len(chunks))
            for file, shard in files.items():
                _write(root / HEADERS / file, shard.header)
                advance(len(shard.header))
            for file, shard in carried.items():
                if not (root / CARRIED / file).is_file():
                    parts = (block for name in shard.entries for block in release.directory.blocks(name))
                    safetensors_files.write(root / CARRIED / file, shard, parts)
                advance(shard.num_bytes)
            if carried:
                _write(root / CARRIED / safetensors_files.INDEX, safetensors_files.index_of(carried).encode())
            for name in others:
                _copy(source / name, root / FILES / name)
                advance((source / name).stat().st_size)
        if tokenizer is not None:
            tokenizer.save(partial / "tokenizer")
        written.finish({"config": to_dict(config), "packed": release.kinds})
        if verify:
            exported = _Exported(partial, 0)
            _verify(source, exported.plan(None, True), exported.source, console)
    return {"bytes": sum(e.num_bytes for e in release.directory.entries.values()), "tensors": len(release.stored)}


def _export(
    source: Path, target: Path, verify: bool, like, packed: bool, step: int | None, console: Console
) -> dict[str, int]:
    exported = _Exported(source, step)
    made = exported.plan(None if like is None else Path(like), packed)
    others = exported.other_files(None if like is None else Path(like))
    needed = made.num_bytes + sum(path.stat().st_size for path in others.values())
    whole = exported.folder / str(exported.step) / sliced.WHOLE
    layout = [[file, hashlib.sha256(shard.header).hexdigest()] for file, shard in made.files.items()]
    stamp = [str(whole.resolve()), whole.stat().st_mtime_ns, made.config, layout]
    with _partial(target, ["export", *stamp], needed, console) as partial:
        with _bar(console, "export", made.num_bytes) as advance:
            for file, shard in made.files.items():
                if (partial / file).is_file():
                    advance(shard.num_bytes)
                    continue
                safetensors_files.write(partial / file, shard, _counted(made.blocks(file, exported.source), advance))
        for name, path in others.items():
            _copy(path, partial / name)
        if made.index is not None:
            _write(partial / safetensors_files.INDEX, made.index.encode())
        _write(partial / released_config.CONFIG, made.config.encode())
        if verify:
            _verify(partial, made, exported.source, console)
    tensors = [entry for shard in made.files.values() for entry in shard.entries.values()]
    return {"bytes": sum(entry.num_bytes for entry in tensors), "tensors": len(tensors)}


class _Exported:
    """A checkpoint whose parameters are written in a released layout."""

    def __init__(self, path: Path, step: int | None):
        self.folder = checkpoint.find(path)
        with checkpoint.opened(self.folder) as checkpoints:
            metadata = checkpoints.metadata(step)
            latest = checkpoints.latest
        assert latest is not None
        self.step = latest if step is None else step
        self.config: ModelConfig = at_step(from_dict(Config, metadata["config"]), self.step).model
        stored = sliced.open_arrays(self.folder, self.step)
        held = {name.removeprefix("params."): a for name, a in stored.items() if name.startswith("params.")}
        kinds = metadata.get("packed", {})
        problems = []
        for name, like in declared(self.config).items():
            leaves = [f"{name}.packed", f"{name}.scale"] if name in kinds else [name]
            problems += [f"missing: {leaf}" for leaf in leaves if leaf not in held]
            if name in held and held[name].shape != like.shape:
                problems.append(f"shape: {name} is {list(held[name].shape)}, the config needs {list(like.shape)}")
        if problems:
            raise CheckpointError(f"{self.folder} does not hold the model of its config:\n  " + "\n  ".join(problems))
        self.source = Parameters(lambda leaf, index: held[leaf].read(index), kinds)
        self.assets = self.folder.parent / ASSETS
        self.tokenizer = self.folder.parent / "tokenizer"

    def plan(self, like: Path | None, packed: bool) -> Plan:
        """What is to be written: in the place of a release where there is one, else in the family's layout."""
        if like is not None and is_release(like):
            directory = safetensors_files.Directory(like)
            return plan_like(self.config, directory.files, like, directory)
        assets = self._assets(like)
        if assets is None:
            return plan(self.config, packed=packed)
        files = {}
        for path in sorted((assets / HEADERS).iterdir()):
            files[path.name] = safetensors_files.shard_of(path.read_bytes())
        carried = assets / CARRIED
        original = safetensors_files.Directory(carried) if (carried / safetensors_files.INDEX).is_file() else None
        return plan_like(self.config, files, assets / FILES, original)

    def other_files(self, like: Path | None) -> dict[str, Path]:
        """Files beside tensors, config and index: name -> where it is."""
        folder = like if like is not None and is_release(like) else self._assets(like)
        if folder is None:
            ours = self.tokenizer.iterdir() if self.tokenizer.is_dir() else ()
            return {path.name: path for path in ours if path.name in RELEASED}
        folder = folder / FILES if (folder / FILES).is_dir() else folder
        return {
            name: folder / name
            for name in _other_files(folder)
            if name not in (released_config.CONFIG, safetensors_files.INDEX)
        }

    def _assets(self, like: Path | None) -> Path | None:
        if like is None:
            return self.assets if self.assets.is_dir() else None
        if not (like / ASSETS).is_dir():
            raise ConfigError(f"{like} is neither a released directory nor one that was converted from it")
        return like / ASSETS


def _verify(folder: Path, made: Plan, source: Parameters, console: Console) -> None:
    """Compares the tensors of a released directory with what parameters give, byte for byte."""
    directory, different = safetensors_files.Directory(folder), []
    with _bar(console, "verify", made.num_bytes) as advance:
        for file, shard in made.files.items():
            if directory.files[file].header != shard.header:
                different.append(f"the header of {file}")
                continue
            with open(folder / file, "rb") as handle:
                handle.seek(len(shard.header))
                for name, entry in shard.entries.items():
                    blocks = map(safetensors_files.as_bytes, made.tensor(name, entry, source))
                    if not all([handle.read(len(block)) == block for block in blocks]):
                        different.append(name)
                    advance(entry.num_bytes)
    if different:
        raise CheckpointError(f"{len(different)} tensors of {folder} differ:\n  " + "\n  ".join(different))


def _carried(release: Release) -> dict[str, safetensors_files.Shard]:
    """Files for the tensors that parameters do not give back, named as those they come from."""
    parts: dict[str, list] = {}
    for name in release.carried:
        entry = release.directory.entries[name]
        parts.setdefault(release.directory.where[name], []).append((name, entry.dtype, entry.shape))
    return {file: safetensors_files.make_shard(tensors) for file, tensors in sorted(parts.items())}


def _other_files(folder: Path) -> list[str]:
    """Relative paths of all files but tensors and hidden ones."""
    found = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return [
        path.as_posix()
        for path in found
        if path.suffix != ".safetensors" and not any(part.startswith(".") for part in path.parts)
    ]


@contextmanager
def _partial(target: Path, what: list, needed: int, console: Console) -> Iterator[Path]:
    """The folder under its temporary name: a new one, or one that the same conversion left; renamed at the end."""
    partial = target.with_name(target.name + ".partial")
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()
    left = (partial / PLAN).read_text() if (partial / PLAN).is_file() else None
    held = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file()) if left == digest else 0
    check_disk(target, needed - held)
    if left == digest:
        console.print(f"Going on with {partial}")
    else:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(partial / PLAN, digest.encode())
    yield partial
    (partial / PLAN).unlink()
    os.sync()  # nothing half-written has the name, even after the power fails
    if target.exists():
        target.rmdir()
    partial.rename(target)


@contextmanager
def _bar(console: Console, what: str, total: int) -> Iterator[Any]:
    """A progress bar over bytes on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda size: progress.advance(task, size)


def _counted(blocks: Iterable[np.ndarray], advance) -> Iterator[np.ndarray]:
    for block in blocks:
        yield block
        advance(block.nbytes)


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, file)


def _copy(source: Path, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    shutil.copyfile(source, partial)
    os.replace(partial, file)
