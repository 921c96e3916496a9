"""The lock of a run's folder: one holder at a time, whoever dies, wherever the folder is mounted."""

import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_jax.config import ConfigError
from kimi_jax.train import lock
from kimi_jax.train.lock import LOCK, locked
from kimi_jax.train.loop import run_training
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]
DEAD = 2**22 + 1
"""No process has this id: Linux ends at 2^22."""


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def left_by(folder: Path, **holder) -> Path:
    """The lock file as a holder that was killed leaves it: this process by default."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LOCK).write_text(json.dumps(lock._own() | holder))
    return folder


def test_the_second_holder_is_rejected_and_told_who_the_first_is(tmp_path):
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    with locked(folder):
        before, content = descriptors(), (folder / LOCK).read_text()
        with pytest.raises(ConfigError) as rejected, locked(folder):
            raise AssertionError
        message = str(rejected.value)
        assert f"process {os.getpid()} on host {socket.gethostname()}" in message and "\n" not in message
        assert str(folder / LOCK) in message and "choose another --name" in message
        assert descriptors() == before and (folder / LOCK).read_text() == content
    assert list(folder.iterdir()) == []
    with locked(folder):
        assert json.loads((folder / LOCK).read_text())["pid"] == os.getpid()


def test_a_second_start_of_a_run_changes_nothing(tmp_path):
    config = tiny.config(tmp_path)
    folder = tmp_path / "runs" / "run"
    with locked(folder):
        (folder / "metrics.jsonl").write_text("mine")
        for restart in (False, True):
            with pytest.raises(ConfigError, match=rf"is in use by process {os.getpid()} on host"):
                run_training(config, restart=restart)
        assert sorted(path.name for path in folder.iterdir()) == [LOCK, "metrics.jsonl"]


def test_a_killed_holder_has_no_lock(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.programs.hold_lock", str(tmp_path)]
    holder = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match=f"process {holder.pid} on host"), locked(tmp_path):
            raise AssertionError
    finally:
        holder.kill()
        holder.communicate()
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == holder.pid
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(
    "holder",
    [
        {"pid": 1},  # this kernel says that nobody holds it, whoever has that number now
        {"boot": "another"},
        {"host": "another"},  # a container that had this kernel
    ],
)
def test_what_a_dead_holder_left_is_taken_over(tmp_path, holder):
    with locked(left_by(tmp_path, **holder)):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"{", b"[]", b'{"pid": "x", "host": 3}', b"\xff"])
def test_a_damaged_lock_file_is_taken_over(tmp_path, content):
    if content.startswith(b'{"pid"'):
        content = json.dumps({"pid": "x", "host": socket.gethostname()}).encode()
    (tmp_path / LOCK).write_bytes(content)
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_the_lock_of_another_machine_is_rejected_unless_its_job_was_started_again(tmp_path, monkeypatch):
    for name in lock.JOBS:
        monkeypatch.delenv(name, raising=False)
    folder = left_by(tmp_path, host="far", boot="another", pid=17)
    with pytest.raises(ConfigError, match=rf"process 17 on host far .*remove {folder / LOCK}"), locked(folder):
        raise AssertionError
    assert json.loads((folder / LOCK).read_text())["host"] == "far"
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    left_by(tmp_path, host="far", boot="another", job="SLURM_JOB_ID=4")
    with pytest.raises(ConfigError, match="on host far"), locked(folder):
        raise AssertionError
    left_by(tmp_path, host="far", boot="another", job="SLURM_JOB_ID=5")
    with locked(folder):
        assert json.loads((folder / LOCK).read_text())["job"] == "SLURM_JOB_ID=5"


def test_a_file_system_without_locks_goes_by_the_process(tmp_path, monkeypatch):
    def flock(number, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.raises(ConfigError, match=f"process {os.getppid()} on host"),
        locked(left_by(tmp_path, pid=os.getppid())),
    ):
        raise AssertionError
    for holder in ({"pid": DEAD}, {"pid": os.getppid(), "boot": "another"}, {"pid": -1}, {"pid": None}):
        with locked(left_by(tmp_path, **holder)):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    with pytest.raises(ConfigError, match="on host far"), locked(left_by(tmp_path, host="far", boot="another")):
        raise AssertionError


def test_a_lock_file_removed_while_it_is_waited_for_is_not_held(tmp_path, monkeypatch):
    """Opened just before its holder removed it: what is locked then is a file that nobody else will find."""
    opened, flock = [], fcntl.flock

    def late(number, operation):
        opened.append(number)
        if len(opened) == 1:
            (tmp_path / LOCK).unlink()
        flock(number, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    before = descriptors()
    with locked(tmp_path):
        assert len(opened) == 2
        assert os.path.samestat(os.stat(tmp_path / LOCK), os.fstat(opened[-1]))
    assert descriptors() == before


def test_the_lock_ends_with_an_error_and_what_it_made_goes(tmp_path):
    folder, before = tmp_path / "a" / "b", descriptors()
    with pytest.raises(RuntimeError, match="inside"), locked(folder):
        raise RuntimeError("inside")
    assert not (tmp_path / "a").exists() and descriptors() == before
    (tmp_path / "a").mkdir()
    with locked(folder):
        (folder / "kept").write_text("")
    assert [path.name for path in folder.iterdir()] == ["kept"]
    folder = tmp_path / "empty"
    folder.mkdir()  # by the user
    with locked(folder):
        pass
    assert folder.is_dir()


def test_a_folder_renamed_meanwhile_takes_its_lock_along(tmp_path):
    """The lock of a run that has since taken the name is not removed."""
    with locked(tmp_path / "a"):
        (tmp_path / "a").rename(tmp_path / "b")
        other = left_by(tmp_path / "a", pid=DEAD) / LOCK
    assert other.is_file()


@pytest.mark.parametrize("name", ["file/below", "x" * 300, "/proc/none"])
def test_a_folder_that_cannot_be_made_is_named(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to .*; choose another --train.runs-dir") as rejected:
        run_training(tiny.with_train(tiny.config(tmp_path), runs_dir=str(tmp_path / name)))
    assert "\n" not in str(rejected.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "file"]
