"""Checkpoints of a run: one flat dict of arrays a step, with JSON beside it, written in the background by Orbax."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from kimi_jax.config import ConfigError
from kimi_jax.store.sliced import CHUNK_BYTES

Tree = TypeVar("Tree")


for _noisy in ("absl", "orbax"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)


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
    """The checkpoints of one run's folder, newest last.

    A checkpoint becomes visible when it is whole: killed while writing, the one before is still the latest.
    """

    def __init__(self, folder: str | Path, *, keep_last: int = 1, keep_every: int | None = None, write: bool = False):
        policies = ocp.training.preservation_policies
        keep: list = [policies.LatestN(keep_last)]
        if keep_every is not None:
            keep.append(policies.EveryNSteps(keep_every))
        self._orbax = ocp.training.Checkpointer(
            str(Path(folder).resolve()),
            preservation_policy=policies.AnyPreservationPolicy(keep) if write else None,  # type: ignore[arg-type]
            cleanup_tmp_directories=write,
        )

    @property
    def latest(self) -> int | None:
        """Step of the newest whole checkpoint."""
        newest = self._orbax.latest
        return None if newest is None else newest.step

    @property
    def steps(self) -> list[int]:
        return sorted(found.step for found in self._orbax.checkpoints)

    def metadata(self, step: int | None = None) -> dict:
        """The JSON stored with a checkpoint."""
        return self._orbax.metadata(self._at(step)).custom_metadata  # type: ignore[return-value]

    def shapes(self, step: int | None = None) -> dict[str, Any]:
        """Path -> shape and dtype of what a checkpoint holds."""
        saved = self._orbax.metadata(self._at(step)).metadata
        assert isinstance(saved, dict)
        return saved

    def save(self, step: int, tree: Any, metadata: dict) -> None:
        """Starts to write; returns once the arrays are copied to the host, so that they may be donated."""
        self._orbax.wait()  # two saves at once would make Orbax skip the second
        with ocp.Context(array_options=_IN_CHUNKS):
            self._orbax.save_async(step, flatten(tree), custom_metadata=metadata, force=True)

    def restore(self, like: Tree, step: int | None = None) -> Tree:
        """Reads the arrays of `like` (arrays or shapes, e.g. a part of what was saved) with its shardings."""

        def spec(leaf):
            sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        wanted = jax.tree.map(spec, flatten(like))
        self._check(wanted, step)
        options = ocp.options.PyTreeOptions(loading=ocp.options.PyTreeOptions.Loading(partial_load=True))
        with ocp.Context(pytree_options=options):
            return unflatten(like, self._orbax.load(self._at(step), wanted))

    def wait(self) -> None:
        """Returns once what `save` began is whole on disk."""
        self._orbax.wait()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._orbax.close()

    def _at(self, step: int | None) -> int:
        step = self.latest if step is None else step
        if step not in self.steps:
            raise ConfigError(f"{self._orbax.directory} has no checkpoint {step}; it has {self.steps}")
        return step

    def _check(self, wanted: dict[str, jax.ShapeDtypeStruct], step: int | None) -> None:
        """Names every array that is absent or has another shape or dtype."""
        saved = self.shapes(step)
        problems = [f"missing: {name}" for name in sorted(wanted.keys() - saved.keys())]
        for name in sorted(wanted.keys() & saved.keys()):
            here, there = (wanted[name].shape, wanted[name].dtype), (tuple(saved[name].shape), saved[name].dtype)
            if here != there:
                problems.append(f"{name} is {there[1]}{list(there[0])}, this run needs {here[1]}{list(here[0])}")
        if problems:
            raise ConfigError(f"the checkpoint in {self._orbax.directory} does not fit:\n  " + "\n  ".join(problems))


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
