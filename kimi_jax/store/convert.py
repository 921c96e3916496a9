"""Released directories to checkpoints and back, one slice at a time, for models that no memory holds.

A converted directory is a run's folder without the run: `checkpoints/0` with the parameters, quantized experts still
packed; `tokenizer/`; and `assets/`, which is all that parameters do not tell of the release: its headers, the tensors
of other parts of the model, config, index and other files. So the way back gives the release's own bytes, of whatever
was not changed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from kimi_jax import files
from kimi_jax.config import Config, ConfigError, ModelConfig, at_step, from_dict, to_dict
from kimi_jax.model.kimi import declared
from kimi_jax.store import checkpoint, released_config, safetensors_files, sliced
from kimi_jax.store.open import config_for, is_release, release_tokenizer
from kimi_jax.store.pending import Pending, check_new, pending
from kimi_jax.store.read import Release
from kimi_jax.store.safetensors_files import CheckpointError, check_links, listed
from kimi_jax.store.sliced import SlicedCheckpoint
from kimi_jax.store.write import Parameters, Plan, plan, plan_like, write_texts
from kimi_jax.text.tokenizer import RELEASED

ASSETS, HEADERS, CARRIED, FILES = "assets", "headers", "carried", "files"


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
    `TARGET.partial`, and the same call resumes from what a killed one left there: files whose size and checksum are
    those they were written with stay, all others are written again.

    Args:
        source: a directory from the hub, or the folder of a run or of an earlier conversion.
        target: a new directory; with `verify`, also one that an earlier call made, which is verified alone.
        verify: reads both again at the end, and compares every tensor and file byte for byte.
        like: a released or converted directory whose layout, dtypes, config and other tensors an exported checkpoint
            takes. By default those that the checkpoint was converted from.
        packed: exports in the quantized format of the family where there is nothing to be like; else in bf16.
        step: which checkpoint to export; the newest by default.
        console: where progress is shown.

    Returns:
        `bytes` and `tensors` of the released side, and `written`: 0 if the target was there and is verified.

    Raises:
        CheckpointError, ConfigError: a source that is not whole or not of the family, a target that exists or that
            another process is writing; bytes that differ, with `verify`.
        FileError: the disk is too small, or the operating system does not allow it.
    """
    source, target = Path(source), Path(target).absolute()
    console = console or Console(stderr=True, highlight=False)
    there = _is_there(source, target)
    if not (verify and there):
        check_new(target)
    if not is_release(source):
        return _export(_Exported(source, step), target, verify, like, packed, console)
    if like is not None:
        raise ConfigError(f"{source} is a released directory; --like is for exports")
    if target.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"{target} is inside of {source}, which is read whole; choose a target outside of it")
    return _import(source, target, verify, console)


def _is_there(source: Path, target: Path) -> bool:
    """Whether the target is a folder with something in it; and whether both paths can be looked at.

    Raises:
        FileError: the operating system does not allow it, as for a name that is too long or a path through a file.
    """
    for path, doing in ((source, "read"), (target, "write")):
        try:
            path.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise files.problem(error, path, doing) from error
    return target.is_dir() and any(target.iterdir())


def _import(source: Path, target: Path, verify: bool, console: Console) -> dict[str, int]:
    release = Release(source)
    others = _other_files(source)
    result = {
        "bytes": sum(e.num_bytes for e in release.directory.entries.values()),
        "tensors": len(release.stored),
    }
    if verify and _is_there(source, target):
        _verify_import(source, target, others, console)
        return result | {"written": 0}
    tokenizer = release_tokenizer(source, release.config)
    config = config_for(target.name, release.config)
    carried = _carried(release)
    leaf_bytes = {name: int(np.prod(shape)) * dtype.itemsize for name, (shape, dtype) in release.leaves.items()}
    shards = release.directory.files
    needed = sum(leaf_bytes.values()) + sum(shard.num_bytes for shard in carried.values())
    needed += sum((source / name).stat().st_size for name in others) + sum(len(s.header) for s in shards.values())
    stamp = [[name, (source / name).stat().st_mtime_ns, (source / name).stat().st_size] for name in [*shards, *others]]
    with _pending(target, ["import", str(source.resolve()), stamp], needed, console) as made:
        root = made.path / ASSETS
        for folder in (HEADERS, CARRIED, FILES):
            (root / folder).mkdir(parents=True, exist_ok=True)
        shapes = {f"params.{name}": leaf for name, leaf in release.leaves.items()}
        written = SlicedCheckpoint(made.path / "checkpoints", 0, shapes)
        with _bar(console, "import", needed) as advance:
            for name, size in leaf_bytes.items():
                chunks = list(written.chunks(f"params.{name}"))
                for index, file in chunks:
                    if not made.is_finished(file):
                        made.finish(file, sliced.write_chunk(file, release.read(name, index)))
                    advance(size / len(chunks))
            for file, shard in shards.items():
                files.write(root / HEADERS / file, shard.header)
                advance(len(shard.header))
            for file, shard in carried.items():
                if not made.is_finished(root / CARRIED / file):
                    parts = (block for name in shard.entries for block in release.directory.blocks(name))
                    made.finish(root / CARRIED / file, safetensors_files.write(root / CARRIED / file, shard, parts))
                advance(shard.num_bytes)
            if carried:
                files.write(root / CARRIED / safetensors_files.INDEX, safetensors_files.index_of(carried))
            for name in others:
                files.copy(source / name, root / FILES / name)
                advance((source / name).stat().st_size)
        if tokenizer is not None:
            tokenizer.save(made.path / "tokenizer")
        written.finish({"config": to_dict(config), "packed": release.kinds}, made.checksums)
        if verify:
            with _starting_over(made):
                _verify_import(source, made.path, others, console)
    return result | {"written": needed}


def _verify_import(source: Path, target: Path, others: list[str], console: Console) -> None:
    """Compares a converted directory with the release that it was made from, byte for byte."""
    exported = _Exported(target, 0)
    if not (target / ASSETS).is_dir():
        raise CheckpointError(f"{target} has no folder {ASSETS}, so it is no conversion of {source}; choose another")
    plan = exported.plan(None, True)
    _compare(source, {name: target / ASSETS / FILES / name for name in others})
    _verify(source, plan, exported.source, console)


def _export(exported: _Exported, target: Path, verify: bool, like, packed: bool, console: Console) -> dict[str, int]:
    made = exported.plan(None if like is None else Path(like), packed)
    others = exported.other_files(None if like is None else Path(like))
    tensors = [entry for shard in made.files.values() for entry in shard.entries.values()]
    result = {"bytes": sum(entry.num_bytes for entry in tensors), "tensors": len(tensors)}
    if verify and _is_there(exported.folder, target):
        _verify_export(target, made, others, exported, console)
        return result | {"written": 0}
    needed = made.num_bytes + sum(path.stat().st_size for path in others.values())
    whole = exported.folder / str(exported.step) / sliced.WHOLE
    layout = [[file, hashlib.sha256(shard.header).hexdigest()] for file, shard in made.files.items()]
    stamp = [str(whole.resolve()), whole.stat().st_mtime_ns, made.config, layout]
    with _pending(target, ["export", *stamp], needed, console) as out:
        with _bar(console, "export", made.num_bytes) as advance:
            for file, shard in made.files.items():
                if out.is_finished(out.path / file):
                    advance(shard.num_bytes)
                    continue
                blocks = _counted(made.blocks(file, exported.source), advance)
                out.finish(out.path / file, safetensors_files.write(out.path / file, shard, blocks))
        for name, path in others.items():
            files.copy(path, out.path / name)
        write_texts(out.path, made)
        if verify:
            with _starting_over(out):
                _verify_export(out.path, made, others, exported, console)
    return result | {"written": needed}


def _verify_export(target: Path, made: Plan, others: dict[str, Path], exported: _Exported, console: Console) -> None:
    """Compares a released directory with the checkpoint that it was exported from, byte for byte."""
    texts = {released_config.CONFIG: made.config, safetensors_files.INDEX: made.index}
    for name, text in texts.items():
        found = (target / name).read_bytes() if (target / name).is_file() else None
        if found != (None if text is None else text.encode()):
            raise CheckpointError(f"{target / name} is not that of the export; convert to a new target")
    _compare(target, others)
    _verify(target, made, exported.source, console)


def _compare(folder: Path, expected: dict[str, Path]) -> None:
    """Compares files of a folder with others, byte for byte."""
    different = [
        name
        for name, path in expected.items()
        if not (folder / name).is_file()
        or not path.is_file()
        or files.file_checksum(folder / name) != files.file_checksum(path)
    ]
    if different:
        raise CheckpointError(f"{len(different)} files of {folder} differ; convert again:\n  {listed(different)}")


@contextmanager
def _starting_over(made: Pending) -> Iterator[None]:
    """What turned out to be wrong is not resumed from."""
    try:
        yield
    except CheckpointError:
        made.start_over()
        raise


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
            raise CheckpointError(f"{self.folder} does not hold the model of its config:\n  {listed(problems)}")
        self.source = Parameters(
            lambda leaf, index: _read(held[leaf], index, self.folder / str(self.step), leaf), kinds
        )
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
        headers = {}
        for path in sorted((assets / HEADERS).glob("*")):
            try:
                headers[path.name] = safetensors_files.shard_of(path.read_bytes())
            except (ValueError, files.FileError) as error:
                raise CheckpointError(f"{path} is truncated or corrupt: {error}; convert the release again") from error
        carried = assets / CARRIED
        original = safetensors_files.Directory(carried) if (carried / safetensors_files.INDEX).is_file() else None
        return plan_like(self.config, headers, assets / FILES, original)

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


def _read(array: sliced.Stored, index: tuple, folder: Path, leaf: str) -> np.ndarray:
    """A slice of an array of a checkpoint."""
    try:
        return array.read(index)
    except (OSError, ValueError) as error:  # a chunk that is absent, or not of its size
        raise CheckpointError(f"{folder}: {leaf} cannot be read: {error}; convert or copy it again") from error


def _verify(folder: Path, made: Plan, source: Parameters, console: Console) -> None:
    """Compares the tensors of a released directory with what parameters give, byte for byte."""
    directory, different = safetensors_files.Directory(folder), []
    with _bar(console, "verify", made.num_bytes) as advance:
        for file, shard in made.files.items():
            if file not in directory.files or directory.files[file].header != shard.header:
                different.append(f"the header of {file}")
                continue
            with open(folder / file, "rb") as handle:
                handle.seek(len(shard.header))
                for name, entry in shard.entries.items():
                    blocks = map(safetensors_files.as_bytes, made.tensor(name, entry, source))
                    if not all([handle.read(len(block)) == block for block in blocks]):
                        different.append(name)
                    advance(entry.num_bytes)
    different += [f"the header of {file}" for file in sorted(directory.files.keys() - made.files.keys())]
    if different:
        raise CheckpointError(f"{len(different)} tensors of {folder} differ:\n  {listed(different)}")


def _carried(release: Release) -> dict[str, safetensors_files.Shard]:
    """Files for the tensors that parameters do not give back, named as those they come from."""
    parts: dict[str, list] = {}
    for name in release.carried:
        entry = release.directory.entries[name]
        parts.setdefault(release.directory.where[name], []).append((name, entry.dtype, entry.shape))
    return {file: safetensors_files.make_shard(tensors) for file, tensors in sorted(parts.items())}


def _other_files(folder: Path) -> list[str]:
    """Relative paths of all files but tensors and hidden ones.

    Raises:
        CheckpointError: a link that leads out of the folder, or to a folder.
    """
    found: list[str] = []
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        base = Path(at).relative_to(folder)
        linked = [(base / name).as_posix() for name in folders if (Path(at) / name).is_symlink()]
        if linked:
            raise CheckpointError(f"{folder} holds links to folders; copy what they hold: {', '.join(sorted(linked))}")
        found += [(base / name).as_posix() for name in names if not name.startswith(".")]
    found = sorted(name for name in found if not name.endswith(".safetensors"))
    check_links(folder, found)
    return [name for name in found if (folder / name).is_file()]


@contextmanager
def _pending(target: Path, plan: list, needed: int, console: Console) -> Iterator[Pending]:
    """`pending`, which says that it resumes."""
    with pending(target, plan, needed) as made:
        if made.resumed:
            console.print(f"Resuming from {made.path}")
        yield made


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
