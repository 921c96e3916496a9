"""A run's folder: a restart removes all of a run or nothing, whenever it is killed, and only what is the run's."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from kimi_jax.config import ConfigError
from kimi_jax.files import FileError
from kimi_jax.train import folder as run_folder
from kimi_jax.train.folder import ARTIFACTS, FILES, FOLDERS, check_folder, check_removable, remove_run, settle_restart
from kimi_jax.train.loop import run_training
from tests import tiny


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run with all that one writes, and a file of the user's."""
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text(name)
    for name in FOLDERS:
        (folder / name / "inside").mkdir(parents=True)
        (folder / name / "inside" / "file").write_text(name)
    (folder / "notes.txt").write_text("mine")
    return folder


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def test_a_restart_removes_the_run_and_nothing_else(run):
    remove_run(run)
    assert tree(run) == {"notes.txt": b"mine"}


@pytest.mark.parametrize("moved", range(len(ARTIFACTS) + 1))
def test_a_restart_that_is_killed_has_removed_nothing(run, monkeypatch, moved):
    """At any rename but the last, which decides: the next start finds the run as it was."""
    before, rename, calls = tree(run), Path.rename, []

    def killed(self, target):
        calls.append(self)
        if len(calls) > moved:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_run(run)
    monkeypatch.setattr(Path, "rename", rename)
    settle_restart(run)
    assert tree(run) == before


def test_a_restart_that_is_killed_while_it_deletes_is_finished(run, monkeypatch):
    def killed(path):
        (path / "config.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(run_folder.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_run(run)
    monkeypatch.undo()
    assert not any((run / name).exists() for name in ARTIFACTS)
    settle_restart(run)
    assert tree(run) == {"notes.txt": b"mine"}


def test_a_restart_that_cannot_move_a_file_says_so_and_leaves_the_run(run, monkeypatch):
    before, rename = tree(run), Path.rename

    def busy(self, target):
        if self.name == "tensorboard" and self.parent == run:
            raise OSError(errno.EBUSY, "Device or resource busy", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", busy)
    with pytest.raises(FileError, match=rf"cannot remove {run / 'tensorboard'}: Device or resource busy"):
        remove_run(run)
    assert tree(run) == before


def test_the_next_start_settles_a_restart_before_anything_else(run, tmp_path):
    (run / run_folder.MOVING).mkdir()
    (run / "checkpoints").rename(run / run_folder.MOVING / "checkpoints")
    config = tiny.with_train(tiny.config(tmp_path), tensorboard=True)
    with pytest.raises(ConfigError, match="another run's"):
        (run / "sample.txt").unlink()
        (run / "sample.txt").symlink_to("another run's")
        run_training(config, restart=True)
    assert (run / "checkpoints" / "inside" / "file").is_file() and not (run / run_folder.MOVING).exists()


@pytest.mark.parametrize(
    ("name", "broken"),
    [("checkpoints", False), ("metrics.jsonl", False), ("metrics.jsonl", True), ("tokenizer", False)],
)
def test_a_restart_rejects_links_before_it_removes_anything(run, tmp_path, name, broken):
    elsewhere = tmp_path / "disk" / name
    elsewhere.parent.mkdir()
    (run / name).rename(elsewhere)
    (run / name).symlink_to(elsewhere)
    if broken:
        elsewhere.unlink()
    before, there = tree(run), tree(elsewhere.parent)
    with pytest.raises(ConfigError, match=rf"{run / name} is a link to {elsewhere}, where --restart removes nothing"):
        run_training(tiny.config(tmp_path), restart=True)
    assert (tree(run), tree(elsewhere.parent)) == (before, there)


def test_a_linked_run_may_be_restarted(run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    check_removable(tmp_path / "link")
    remove_run(tmp_path / "link")
    assert tree(run) == {"notes.txt": b"mine"}


def test_what_cannot_be_written_later_is_rejected_at_once(run, tmp_path):
    config = tiny.config(tmp_path)
    check_folder(run, config, 1)
    for name in FILES:
        shutil.move(run / name, tmp_path / "kept")
        (run / name).mkdir()
        with pytest.raises(ConfigError, match=f"{run / name} is a folder, and a run writes a file there"):
            check_folder(run, config, 1)
        (run / name).rmdir()
        shutil.move(tmp_path / "kept", run / name)
    for name in FOLDERS:
        shutil.rmtree(run / name)
        (run / name).write_text("")
        with pytest.raises(ConfigError, match=f"{run / name} is a file, and a run writes a folder there"):
            check_folder(run, config, 1)
        (run / name).unlink()
        (run / name).symlink_to(tmp_path / "absent")
        with pytest.raises(ConfigError, match=f"{run / name} is a link to {tmp_path / 'absent'}, which is no folder"):
            check_folder(run, config, 1)
        (run / name).unlink()


def test_room_is_looked_for_on_the_disk_of_the_checkpoints(run, tmp_path, monkeypatch):
    """Those that are there make room for new ones; what was set aside stays."""
    (run / "checkpoints" / "inside").rename(run / "checkpoints" / "12")
    shutil.copytree(run / "checkpoints" / "12", run / "checkpoints" / "14.set_aside")
    shutil.move(run / "checkpoints", tmp_path / "disk")
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    asked = []

    def disk_usage(path):
        asked.append(os.path.realpath(path))
        return type("Usage", (), {"free": 10})()

    monkeypatch.setattr(run_folder.shutil, "disk_usage", disk_usage)
    held = len("checkpoints")  # what the only file of a checkpoint holds
    with pytest.raises(ConfigError, match=rf"{run / 'checkpoints'}: 2 checkpoints .* {10 + held:,} are free"):
        check_folder(run, tiny.config(tmp_path), 1000)
    assert asked == [str(tmp_path / "disk")]
