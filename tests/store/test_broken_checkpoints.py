"""Broken checkpoints: noticed before use, in one line that names the newest whole one; failed saves; no leaks."""

import json
import os
import resource
import tempfile
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax import files
from kimi_jax.config import ConfigError
from kimi_jax.files import FileError
from kimi_jax.store import checkpoint, checksums, orbax_format, sliced
from kimi_jax.store.checkpoint import Checkpoints
from kimi_jax.store.checksums import CHECKSUMS
from kimi_jax.store.safetensors_files import CheckpointError

NOISE = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
TREE = {"a": jnp.asarray(NOISE), "b": {"c": jnp.arange(5)}}


def saved(folder: Path, steps=(4, 8)) -> Path:
    with checkpoint.opened(folder, keep_last=len(steps), write=True) as checkpoints:
        for step in steps:
            checkpoints.save(step, jax.tree.map(lambda x, step=step: x + step, TREE), {"batches": step})
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder of two checkpoints, and what is in the newer one's files."""
    folder = saved(tmp_path_factory.mktemp("two"))
    newer = folder / "8"
    return folder, {path.relative_to(newer): path.read_bytes() for path in newer.rglob("*") if path.is_file()}


@pytest.fixture
def whole(two):
    """The same, put back in order after the test."""
    folder, contents = two
    yield folder
    for path in (folder / "8").rglob("*"):
        if path.is_file() and path.relative_to(folder / "8") not in contents:
            path.unlink()
    for path in [path for path in contents if (folder / "8" / path).is_dir()]:
        (folder / "8" / path).rmdir()
    for path, content in contents.items():
        (folder / "8" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "8" / path).write_bytes(content)


def use(folder: Path) -> None:
    """Takes the newest checkpoint as a run does."""
    with checkpoint.opened(folder) as checkpoints:
        step = checkpoints.latest
        checkpoints.metadata(step)
        state = checkpoints.restore(TREE, step)
        assert np.array_equal(state["a"], TREE["a"] + step)


def data_file(folder: Path) -> Path:
    return max((folder / "8/state").rglob("d/*"), key=lambda path: path.stat().st_size)


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def folder_in_its_place(folder: Path) -> None:
    path = data_file(folder)
    path.unlink()
    path.mkdir()


def empty(folder: Path) -> None:
    for path in sorted((folder / "8").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()


DAMAGE = {
    "data zeroed": (lambda f: zeroed(data_file(f)), "has checksum"),
    "data deleted": (lambda f: data_file(f).unlink(), "is missing"),
    "data truncated": (lambda f: os.truncate(data_file(f), 100), "has 100 bytes in place of"),
    "arrays' metadata deleted": (lambda f: (f / "8/state/_METADATA").unlink(), "state/_METADATA is missing"),
    "arrays' metadata emptied": (lambda f: (f / "8/state/_METADATA").write_text(""), "has 0 bytes in place of"),
    "arrays' metadata {}": (lambda f: (f / "8/state/_METADATA").write_text("{}"), "has 2 bytes in place of"),
    "manifest deleted": (lambda f: (f / "8/state/manifest.ocdbt").unlink(), "state/manifest.ocdbt is missing"),
    "manifest zeroed": (lambda f: zeroed(f / "8/state/manifest.ocdbt"), "state/manifest.ocdbt has checksum"),
    "metadata deleted": (lambda f: (f / "8/_CHECKPOINT_METADATA").unlink(), "_CHECKPOINT_METADATA is missing"),
    "metadata {}": (lambda f: (f / "8/_CHECKPOINT_METADATA").write_text("{}"), "has 2 bytes in place of"),
    "metadata garbage": (lambda f: zeroed(f / "8/_CHECKPOINT_METADATA"), "_CHECKPOINT_METADATA has checksum"),
    "checksums deleted": (lambda f: (f / f"8/{CHECKSUMS}").unlink(), f"{CHECKSUMS} is missing"),
    "checksums emptied": (lambda f: (f / f"8/{CHECKSUMS}").write_text(""), "does not have its own checksum"),
    "checksums not text": (lambda f: (f / f"8/{CHECKSUMS}").write_bytes(b"\xff"), "is not UTF-8"),
    "a folder for a file": (folder_in_its_place, "is not a file"),
    "an empty folder": (empty, "it is empty"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_broken_newest_checkpoint_is_one_line_that_names_the_newest_whole_one(whole, kind):
    break_it, what = DAMAGE[kind]
    break_it(whole)
    with pytest.raises(CheckpointError) as raised:
        use(whole)
    message = str(raised.value)
    assert message.startswith(f"{whole.resolve() / '8'} is damaged: ") and "\n" not in message
    assert what in message and "the newest whole checkpoint is step 4" in message and "--resume-from 4" in message
    checkpoints = Checkpoints(whole)
    assert checkpoints.latest == 8 and checkpoints.newest_whole() == checkpoints.newest_whole(before=8) == 4
    assert np.array_equal(checkpoints.restore(TREE, 4)["a"], TREE["a"] + 4)
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoints.check()


def test_without_a_whole_one_the_message_says_so(tmp_path):
    folder = saved(tmp_path, (4,))
    (folder / "4/_CHECKPOINT_METADATA").unlink()
    assert Checkpoints(folder).newest_whole() is None
    with pytest.raises(CheckpointError, match="no other checkpoint there is whole: start over with --restart"):
        use(folder)


def test_steps_that_are_not_there(tmp_path):
    with checkpoint.opened(saved(tmp_path)) as checkpoints:
        assert checkpoints.steps == [4, 8] and checkpoints.newest_whole() == 8 and checkpoints.newest_whole(8) == 4
        with pytest.raises(ConfigError, match=r"has no checkpoint 5; it has \[4, 8\]"):
            checkpoints.metadata(5)
    assert Checkpoints(tmp_path / "nowhere").latest is None and not (tmp_path / "nowhere").exists()


def as_of_version_0_1(folder: Path) -> None:
    """What version 0.1 wrote: no checksums, and no word of them."""
    for step in ("4", "8"):
        (folder / step / CHECKSUMS).unlink()
        whole = folder / step / "_CHECKPOINT_METADATA"
        content = json.loads(whole.read_text())
        del content["custom_metadata"][checksums.FORMAT]
        whole.write_text(json.dumps(content))


def test_checkpoints_of_version_0_1_load_with_a_note(tmp_path, capsys):
    folder = saved(tmp_path)
    as_of_version_0_1(folder)
    use(folder)
    use(folder)
    noted = capsys.readouterr().err.splitlines()
    assert len(noted) == 1 and "is of version 0.1, without checksums" in noted[0]
    assert np.array_equal(sliced.open_arrays(folder, 8)["a"].read((1,)), NOISE[1] + 8)


OLD_DAMAGE = ["data truncated", "data deleted", "arrays' metadata deleted", "arrays' metadata emptied", "metadata {}"]


@pytest.mark.parametrize(
    "kind", [*OLD_DAMAGE, "arrays' metadata {}", "manifest deleted", "manifest zeroed", "metadata garbage"]
)
def test_broken_checkpoints_of_version_0_1_are_one_line_too(tmp_path, kind):
    folder = saved(tmp_path)
    as_of_version_0_1(folder)
    DAMAGE[kind][0](folder)
    with pytest.raises(CheckpointError, match=r"8 is damaged: .*--resume-from 4"):
        use(folder)


def test_a_save_replaces_nothing_and_a_crash_leaves_nothing_that_counts(tmp_path):
    folder = saved(tmp_path)
    with checkpoint.opened(folder, write=True) as checkpoints, pytest.raises(FileError, match="has a checkpoint 8"):
        checkpoints.save(8, TREE, {})
    left = [f"12{files.PARTIAL}", f"12{files.PARTIAL}{orbax_format.TEMPORARY}", f"3{orbax_format.TEMPORARY}"]
    for name in [*left, "mine.partial", "16.set-aside"]:
        (folder / name / "state").mkdir(parents=True)
    assert Checkpoints(folder).latest == 8  # what another run may be writing stays
    assert all((folder / name).is_dir() for name in left)
    with checkpoint.opened(folder, write=True) as checkpoints:
        assert checkpoints.steps == [4, 8]
    assert sorted(child.name for child in folder.iterdir()) == ["16.set-aside", "4", "8", "mine.partial"]


def test_the_last_and_the_marked_are_kept(tmp_path):
    with checkpoint.opened(tmp_path, keep_last=2, keep_every=10, write=True) as checkpoints:
        for step in (5, 10, 15, 20, 25, 30, 35):
            checkpoints.save(step, TREE, {})
    assert Checkpoints(tmp_path).steps == [10, 20, 30, 35]


def test_arrays_may_be_donated_once_save_returns(tmp_path):
    values = jnp.arange(2**22, dtype=jnp.float32)
    step = jax.jit(lambda x: -x, donate_argnums=0)
    with checkpoint.opened(tmp_path, write=True) as checkpoints:
        jax.block_until_ready(values)
        checkpoints.save(1, {"x": values}, {})
        for _ in range(5):
            values = step(values)
        checkpoints.wait()
        like = {"x": jax.ShapeDtypeStruct((2**22,), np.float32)}
        assert np.array_equal(checkpoints.restore(like)["x"], np.arange(2**22, dtype=np.float32))


def test_a_save_that_fails_in_the_background_raises_one_line_at_the_next(tmp_path):
    noise = {"x": np.random.default_rng(0).standard_normal(2**16).astype(np.float32)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = Checkpoints(saved(tmp_path), keep_last=2, write=True)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))  # as a disk that is full
        checkpoints.save(12, noise, {})
        with pytest.raises(FileError) as raised:
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    message = str(raised.value)
    assert message.startswith(f"cannot write checkpoint {tmp_path.resolve() / '12'}: File too large; ")
    assert "\n" not in message
    assert sorted(child.name for child in tmp_path.iterdir()) == ["4", "8"]
    checkpoints.save(12, noise, {})  # the failure has been told; the next save works
    checkpoints.close()
    assert Checkpoints(tmp_path).newest_whole() == 12


def counts() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors by Linux's /proc")
def test_descriptors_and_threads_are_flat_over_saves(tmp_path):
    tree = {"x": np.arange(4)}
    memory = Path("/dev/shm")  # where flushing to the disk costs nothing
    root = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=root) as folder, checkpoint.opened(folder, write=True) as checkpoints:
        for step in range(10):
            checkpoints.save(step, tree, {})
        checkpoints.wait()
        before = counts()
        for step in range(10, 310):
            checkpoints.save(step, tree, {})
        checkpoints.wait()
        after = counts()
    assert after[0] <= before[0] + 2 and after[1] <= before[1] + 2, (before, after)
