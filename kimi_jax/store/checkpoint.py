"""Checkpoints of a run: one flat dict of arrays a step, with JSON beside it, written in the background by Orbax."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from kimi_jax import files
from kimi_jax.config import ConfigError
from kimi_jax.files import FileError
from kimi_jax.parallel import processes
from kimi_jax.store.checksums import (
    CHECKSUMS,
    FORMAT,
    Damaged,
    Step,
    check,
    damage,
    files_in,
    newest_whole,
    note_old,
    parse,
    steps_in,
    sums_of,
    text_of,
)
from kimi_jax.store.orbax_format import TEMPORARY, process_of
from kimi_jax.store.sliced import CHUNK_BYTES

Tree = TypeVar("Tree")


for _noisy in ("absl", "orbax"):
    logging.getLogger(_noisy).setLevel(logging.CRITICAL)  # what fails is raised here too, in one line


def flatten(tree: Any) -> dict[str, jax.Array]:
    """Any pytree as a dict from dotted path to leaf: the form on disk."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def unflatten(like: Tree, flat: dict[str, jax.Array]) -> Tree:
    """The inverse of `flatten`, with the structure of `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), [flat[name] for name in flatten(like)])


def _chunking(key, value) -> ocp.options.ArrayOptions.Saving.StorageOptions:
    """Layers and experts apart, so that one can be read without the others."""
    lead = tuple(range(max(0, np.ndim(value) - 2))) or None
    return ocp.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=CHUNK_BYTES, shard_axes=lead)


_IN_CHUNKS = ocp.options.ArrayOptions(saving=ocp.options.ArrayOptions.Saving(scoped_storage_options_creator=_chunking))


class Checkpoints:
    """The checkpoints of one run's folder, newest last; each is the folder of its step.

    A checkpoint has its name only when all of it is on the disk, checksums included: killed while writing, the one
    before is still the latest. What is wrong with a checkpoint is found before anything of it is used.

    Args:
        folder: of the checkpoints; made if `write`.
        keep_last: how many of the newest a save leaves.
        keep_every: steps that divide by it are left too.
        write: this is the run that writes here. What an earlier one left half-written is removed.
    """

    def __init__(self, folder: str | Path, *, keep_last: int = 1, keep_every: int | None = None, write: bool = False):
        self.folder = Path(folder).resolve()
        self._keep_last, self._keep_every = keep_last, keep_every
        self._saving: Future[None] | None = None
        self._background = ThreadPoolExecutor(1, "checkpoint")
        self._known: dict[int, Step] = {}
        if write:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                if processes.is_lead():
                    self._remove_partial()
            except OSError as error:
                raise files.problem(error, self.folder, "write") from error

    @property
    def latest(self) -> int | None:
        """The newest step. Whether it is whole shows when it is used: an older one is never taken in its place."""
        return max(self.steps, default=None)

    @property
    def steps(self) -> list[int]:
        return steps_in(self.folder)

    def newest_whole(self, before: int | None = None) -> int | None:
        """The newest step, of those before `before`, that is whole. Reads all of it."""
        return newest_whole(self.folder, before)

    def check(self, step: int | None = None) -> None:
        """Compares all of a checkpoint with its checksums.

        Raises:
            CheckpointError: it is not whole; the message names the newest that is.
            ConfigError: there is no such step.
        """
        check(self.folder, self._at(step))

    def metadata(self, step: int | None = None) -> dict:
        """The JSON stored with a checkpoint."""
        return self._step(step).metadata

    def shapes(self, step: int | None = None) -> dict[str, Any]:
        """Path -> shape and dtype of what a checkpoint holds."""
        found = self._verified(step)
        with self._reading(found):
            saved = ocp.metadata(str(found.root)).metadata
            if not isinstance(saved, dict):
                raise ValueError("it finds no arrays")
        return saved

    def save(self, step: int, tree: Any, metadata: dict) -> None:
        """Starts to write; returns once the arrays are copied to the host, so that they may be donated.

        Raises:
            FileError: the save before this one failed, or this one cannot begin.
        """
        self.wait()
        if (self.folder / str(step)).exists():
            raise FileError(f"{self.folder} has a checkpoint {step} already; move it away, or choose another --name")
        try:
            with ocp.Context(array_options=_IN_CHUNKS):
                custom = metadata | {FORMAT: 1}
                writing = ocp.save_async(str(self._partial(step)), flatten(tree), custom_metadata=custom)
        except OSError as error:
            raise self._failed(step, error) from error
        self._saving = self._background.submit(self._finish, step, writing)
        self._step_saving = step

    def restore(self, like: Tree, step: int | None = None) -> Tree:
        """Reads the arrays of `like` (arrays or shapes, e.g. a part of what was saved) with its shardings.

        Raises:
            CheckpointError: the checkpoint is not whole.
            ConfigError: it lacks arrays, or they have other shapes or dtypes.
        """

        def spec(leaf):
            sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        wanted = jax.tree.map(spec, flatten(like))
        self._check(wanted, step)
        found = self._verified(step)
        options = ocp.options.PyTreeOptions(loading=ocp.options.PyTreeOptions.Loading(partial_load=True))
        with ocp.Context(pytree_options=options), self._reading(found):
            return unflatten(like, ocp.load(str(found.root), wanted))

    def wait(self) -> None:
        """Returns once what `save` began is whole on disk.

        Raises:
            FileError: it could not be written.
        """
        if self._saving is None:
            return
        error = self._saving.exception()
        self._saving = None
        if error is not None:
            raise self._failed(self._step_saving, error) from error

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._background.shutdown()

    def _partial(self, step: int) -> Path:
        return self.folder / f"{step}{files.PARTIAL}"

    def _finish(self, step: int, writing: ocp.AsyncResponse) -> None:
        """Waits until Orbax has written all, adds the checksums and gives the checkpoint its name. In the background.

        With several processes, each reads what it wrote; the lead does the rest.
        """
        partial, count, own = self._partial(step), jax.process_count(), jax.process_index()
        try:
            writing.result()
            mine = [path for path in files_in(partial) if process_of(path) == own]
            sums = sums_of(partial, mine)
            if count > 1:
                if own:
                    files.write(partial / f"{CHECKSUMS}.{own}", text_of(sums))
                _barrier()
                for other in range(1, count) if own == 0 else ():
                    part = partial / f"{CHECKSUMS}.{other}"
                    sums |= parse(files.read_text(part))
                    part.unlink()
            if own == 0:
                sums |= sums_of(partial, [path for path in files_in(partial) if path not in sums])
                files.write(partial / CHECKSUMS, text_of(sums))
                partial.rename(self.folder / str(step))
                files.sync_folder(self.folder)
                self._remove_old()
            if count > 1:
                _barrier()
        except BaseException:
            if own == 0:
                with contextlib.suppress(OSError):  # room for the next try; what is left is removed at the next start
                    self._remove_partial()
            raise

    def _failed(self, step: int, error: BaseException) -> FileError:
        """The one line for a save that failed, whatever failed in it: Orbax and TensorStore raise what they like."""
        cause = _root(error)
        code = re.search(r"(?:OS error |os_error_code=')(\d+)", str(cause))
        if code:
            cause = OSError(int(code[1]), os.strerror(int(code[1])))
        if isinstance(cause, OSError):
            return files.problem(cause, self.folder / str(step), "write checkpoint")
        reason = (str(cause).strip() or repr(cause)).partition("\n")[0]
        newest = self.latest
        kept = "there is none before it" if newest is None else f"the newest is step {newest}"
        return FileError(f"cannot write checkpoint {self.folder / str(step)}: {reason}; {kept}")

    def _remove_partial(self) -> None:
        """Removes what a save left that did not end, and a removal."""
        for child in self.folder.iterdir():
            if (
                re.fullmatch(rf"\d+({re.escape(files.PARTIAL)}|{re.escape(TEMPORARY)}).*", child.name)
                and child.is_dir()
            ):
                shutil.rmtree(child)

    def _remove_old(self) -> None:
        """Removes the checkpoints that are not to be kept. First their name: half a checkpoint has none."""
        for step in self.steps[: -self._keep_last]:
            if not self._keep_every or step % self._keep_every:
                (self.folder / str(step)).rename(self._partial(step))
                shutil.rmtree(self._partial(step))

    def _at(self, step: int | None) -> int:
        step = self.latest if step is None else step
        if step is None or step not in self.steps:
            raise ConfigError(f"{self.folder} has no checkpoint {step}; it has {self.steps}")
        return step

    def _step(self, step: int | None) -> Step:
        """A step's folder, looked at."""
        step = self._at(step)
        if step not in self._known:
            with self._whole(step):
                self._known[step] = Step(self.folder / str(step))
            if self._known[step].sums is None and processes.is_lead():
                note_old(self.folder / str(step))
        return self._known[step]

    def _verified(self, step: int | None) -> Step:
        """A step's folder, with this process's share of its files compared with their checksums."""
        found = self._step(step)
        share = list(found.sums or ())[jax.process_index() :: jax.process_count()]
        with self._whole(self._at(step)):
            found.verify(share)
        return found

    @contextlib.contextmanager
    def _whole(self, step: int):
        try:
            yield
        except Damaged as error:
            raise damage(self.folder, step, str(error)) from error

    @contextlib.contextmanager
    def _reading(self, found: Step):
        """Without checksums, it is Orbax that finds out that a checkpoint is not whole."""
        try:
            yield
        except Exception as error:  # Orbax raises `Exception` itself where it cannot read an array
            if found.sums is not None:
                raise
            reason = str(_root(error)).strip().partition("\n")[0]
            raise damage(self.folder, int(found.root.name), f"Orbax cannot read it ({reason})") from error

    def _check(self, wanted: dict[str, jax.ShapeDtypeStruct], step: int | None) -> None:
        """Names every array that is absent or has another shape or dtype."""
        saved = self.shapes(step)
        problems = [f"missing: {name}" for name in sorted(wanted.keys() - saved.keys())]
        for name in sorted(wanted.keys() & saved.keys()):
            here, there = (wanted[name].shape, wanted[name].dtype), (tuple(saved[name].shape), saved[name].dtype)
            if here != there:
                problems.append(f"{name} is {there[1]}{list(there[0])}, this run needs {here[1]}{list(here[0])}")
        if problems:
            raise ConfigError(f"the checkpoint in {self.folder} does not fit:\n  " + "\n  ".join(problems))


def _root(error: BaseException) -> BaseException:
    """What an error was raised from, first of all."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


_barriers = itertools.count()  # a barrier's name is used once; all processes save alike, so their counts agree


def _barrier() -> None:
    """Waits, without the devices, for all processes to come here; for as long as a disk may take."""
    name = f"kimi_jax_checkpoint_{next(_barriers)}"
    asyncio.run(ocp.multihost.sync_global_processes(name, operation_id="kimi_jax", timeout=6 * 3600))


def find(path: str | Path) -> Path:
    """The folder of checkpoints that a user means by a run's folder or by that folder itself."""
    path = Path(path)
    for folder in (path / "checkpoints", path):
        if folder.is_dir() and any(child.name.isdigit() for child in folder.iterdir()):
            return folder
    raise ConfigError(f"no checkpoint in {path}; name the folder of a run, e.g. runs/k3_tiny")


def host_bytes(tree: Any) -> int:
    """Size of a tree of arrays or shapes."""
    return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


@contextlib.contextmanager
def opened(folder: str | Path, **options):
    """`Checkpoints`, closed at the end even when something fails."""
    checkpoints = Checkpoints(folder, **options)
    try:
        yield checkpoints
    finally:
        checkpoints.close()
