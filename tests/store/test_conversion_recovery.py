"""Conversions and saves that are interrupted, damaged, doubled or met by a user's files; and verified afterwards."""

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

from kimi_jax import cli, files
from kimi_jax.config import ConfigError
from kimi_jax.store import pending as pending_module
from kimi_jax.store import safetensors_files, sliced
from kimi_jax.store.convert import convert
from kimi_jax.store.pending import RECORD, partial_of, pending
from kimi_jax.store.read import load_release
from kimi_jax.store.safetensors_files import CheckpointError
from kimi_jax.store.write import save_release
from tests.store.test_convert import files_of
from tests.store.test_hostile_release import release
from tests.store.test_release import mxfp4_directory


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return release(tmp_path_factory.mktemp("source") / "release")


@pytest.fixture(scope="module")
def converted(source):
    target = source.parent / "converted"
    convert(source, target)
    return target


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Two files, so that an export can stop between them."""
    home = tmp_path_factory.mktemp("packed")
    convert(mxfp4_directory(home / "release"), home / "converted")
    return home


class Stop(Exception):
    """A stop in the middle, as a kill leaves it on the disk."""


def stopped(monkeypatch, source: Path, target: Path, after: int, **options) -> Path:
    """What a conversion leaves that stops after so many chunks or files."""
    left = [after]

    def limited(write):
        def call(*args):
            left[0] -= 1
            if left[0] < 0:
                raise Stop
            return write(*args)

        return call

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(sliced, "write_chunk", limited(sliced.write_chunk))
        patch.setattr(safetensors_files, "write", limited(safetensors_files.write))
        convert(source, target, **options)
    return partial_of(target)


def chunks(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("params.*/*") if not path.name.startswith("."))


def cut_off(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def zeroed(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def gone(file: Path) -> None:
    file.unlink()


def grown(file: Path) -> None:
    with open(file, "ab") as handle:
        handle.write(b"x")


def a_link(file: Path) -> None:
    other = file.with_name("other")
    shutil.move(file, other)
    file.symlink_to(other)


DAMAGES = [cut_off, zeroed, flipped, emptied, gone, grown, a_link]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_chunk_is_written_again_on_resume(source, converted, tmp_path, monkeypatch, damage):
    partial = stopped(monkeypatch, source, tmp_path / "out", 60)
    done = chunks(partial)
    victim = max(done, key=lambda file: file.stat().st_size)
    damage(victim)
    (partial / "other").unlink(missing_ok=True)
    written = []
    plain = sliced.write_chunk
    monkeypatch.setattr(sliced, "write_chunk", lambda file, values: (written.append(file), plain(file, values))[1])
    convert(source, tmp_path / "out", verify=True)
    assert victim in written and not set(written) & (set(done) - {victim})
    if damage is a_link:
        (tmp_path / "out" / victim.relative_to(partial)).with_name("other").unlink()
    assert array_files(tmp_path / "out") == array_files(converted)


def array_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in chunks(folder)}


@pytest.mark.parametrize("damage", [cut_off, zeroed, flipped, gone])
def test_a_damaged_file_is_written_again_on_resume(packed, tmp_path, monkeypatch, damage):
    partial = stopped(monkeypatch, packed / "converted", tmp_path / "back", 1)
    damage(next(partial.glob("*.safetensors")))
    convert(packed / "converted", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(packed / "release")


@pytest.mark.parametrize(
    "tail", [b"\0" * 512, b'{"file": "checkp', b"\xff\xfe\n", b"[1]\n", b'{"file": 1}\n', b"null\n"]
)
def test_a_torn_record_costs_no_more_than_its_last_lines(source, tmp_path, monkeypatch, tail):
    partial = stopped(monkeypatch, source, tmp_path / "out", 60)
    lines = (partial / RECORD).read_bytes().splitlines(keepends=True)
    (partial / RECORD).write_bytes(b"".join(lines[:-3]) + tail)
    before = len(chunks(partial))
    written = []
    plain = sliced.write_chunk
    monkeypatch.setattr(sliced, "write_chunk", lambda file, values: (written.append(file), plain(file, values))[1])
    convert(source, tmp_path / "out", verify=True)
    assert len(written) == len(chunks(tmp_path / "out")) - before + 3
    assert not (tmp_path / "out" / RECORD).exists() and not list(tmp_path.glob("*.partial"))


def test_a_power_failure_before_the_first_line(source, tmp_path, monkeypatch):
    partial = stopped(monkeypatch, source, tmp_path / "out", 3)
    shutil.rmtree(partial)
    partial.mkdir()
    (partial / RECORD).write_bytes(b"")
    convert(source, tmp_path / "out", verify=True)


def test_every_chunk_is_flushed_before_it_has_its_name(source, tmp_path, monkeypatch):
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def renamed(a, b):
        if Path(b).parent.name.startswith("params."):
            assert events[-1] == "fsync", b
        events.append("replace")
        return replace(a, b)

    monkeypatch.setattr(os, "fsync", lambda number: (events.append("fsync"), fsync(number))[1])
    monkeypatch.setattr(os, "replace", renamed)
    convert(source, tmp_path / "out")
    assert len(events) > 200


def test_what_verification_found_wrong_is_not_resumed_from(source, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        plain = sliced.write_chunk

        def wrong(file, values):
            plain(file, values + 1 if file.parent.name == "params.norm.weight" else values)

        patch.setattr(sliced, "write_chunk", wrong)
        with pytest.raises(CheckpointError, match=r"1 tensors of .* differ:\n  model\.norm\.weight"):
            convert(source, tmp_path / "out", verify=True)
    assert not (tmp_path / "out").exists()
    convert(source, tmp_path / "out", verify=True)


# What is not ours.


def a_file(partial: Path) -> Path:
    partial.mkdir()
    (partial / "thesis.tex").write_text("mine")
    return partial / "thesis.tex"


def a_file_and_a_foreign_record(partial: Path) -> Path:
    a_file(partial)
    (partial / RECORD).write_text('{"something": "else"}\n')
    return partial / "thesis.tex"


def a_file_and_an_empty_record(partial: Path) -> Path:
    a_file(partial)
    (partial / RECORD).write_text("")
    return partial / "thesis.tex"


def a_folder(partial: Path) -> Path:
    (partial / "photos").mkdir(parents=True)
    (partial / "photos" / "1.jpg").write_text("mine")
    return partial / "photos" / "1.jpg"


def a_plain_file(partial: Path) -> Path:
    partial.write_text("mine")
    return partial


def linked(partial: Path) -> Path:
    partial.with_name("real").mkdir()
    (partial.with_name("real") / "thesis.tex").write_text("mine")
    partial.symlink_to(partial.with_name("real"))
    return partial.with_name("real") / "thesis.tex"


def dangling(partial: Path) -> Path:
    partial.symlink_to("nowhere")
    partial.with_name("kept").write_text("mine")
    return partial.with_name("kept")


def a_linked_record(partial: Path) -> Path:
    record = partial.with_name("record")
    record.write_text(json.dumps({pending_module.PLAN: "a" * 64}) + "\n")
    partial.mkdir()
    (partial / RECORD).symlink_to(record)
    (partial / "thesis.tex").write_text("mine")
    return partial / "thesis.tex"


THEIRS = [
    a_file,
    a_file_and_a_foreign_record,
    a_file_and_an_empty_record,
    a_folder,
    a_plain_file,
    linked,
    dangling,
    a_linked_record,
]


@pytest.mark.parametrize("make", THEIRS)
@pytest.mark.parametrize("command", ["import", "export", "save"])
def test_what_a_user_keeps_under_the_temporary_name_stays(source, converted, tmp_path, make, command):
    target = tmp_path / "out"
    kept = make(partial_of(target))
    before = files_of(tmp_path)
    with pytest.raises(CheckpointError, match=r"out\.partial .*(move or remove it)") as error:
        if command == "save":
            save_release(target, *load_release(source))
        else:
            convert(source if command == "import" else converted, target)
    assert "\n" not in str(error.value)
    assert "mine" in kept.read_text() and files_of(tmp_path) == before and not target.exists()


def test_an_empty_folder_under_the_temporary_name_is_used(source, tmp_path):
    partial_of(tmp_path / "out").mkdir()
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", verify=True)
    assert not list(tmp_path.glob("*.partial"))


def test_what_another_conversion_of_ours_left_is_replaced(source, converted, tmp_path, monkeypatch):
    stopped(monkeypatch, source, tmp_path / "out", 5)
    convert(converted, tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(source)
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(safetensors_files, "write", lambda *args: (_ for _ in ()).throw(Stop()))
        save_release(tmp_path / "saved", *load_release(source))
    assert partial_of(tmp_path / "saved").is_dir()
    save_release(tmp_path / "saved", *load_release(source))
    assert sorted(os.listdir(tmp_path / "saved")) == ["config.json", "model.safetensors"]


def test_a_second_conversion_into_one_target_is_rejected(source, converted, tmp_path):
    """While the first is running; it goes on undisturbed."""
    target = tmp_path / "out"
    with pending(target, ["first"], 0) as first:
        files.write(first.path / "a.txt", "whole")
        for call in (
            lambda: convert(source, target),
            lambda: convert(converted, target),
            lambda: save_release(target, *load_release(source)),
        ):
            with pytest.raises(CheckpointError, match=rf"being written by another process \(pid {os.getpid()} on "):
                call()
        assert (first.path / "a.txt").read_text() == "whole"
    assert files_of(target) == {"a.txt": b"whole"}


def test_a_lock_ends_with_its_process(source, tmp_path, monkeypatch):
    partial = stopped(monkeypatch, source, tmp_path / "out", 5)
    with open(partial / RECORD, "rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="being written by another process"):
            convert(source, tmp_path / "out")
    convert(source, tmp_path / "out", verify=True)


def test_a_file_system_without_locks_will_do(source, tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    convert(source, tmp_path / "out", verify=True)


@pytest.mark.parametrize("command", ["import", "export", "save"])
def test_a_full_disk_is_one_line_and_leaves_nothing_under_the_name(source, converted, tmp_path, monkeypatch, command):
    def full(file, *args):
        raise OSError(28, "No space left on device", str(file))

    target = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", lambda number: full(partial_of(target) / "x"))
        with pytest.raises(files.FileError, match="No space left on device; free some space") as error:
            if command == "save":
                save_release(target, *load_release(source))
            else:
                convert(source if command == "import" else converted, target)
    assert "\n" not in str(error.value) and not target.exists()
    if command == "save":
        save_release(target, *load_release(source))
    else:
        convert(source if command == "import" else converted, target, verify=True)


# Verification of what is there.


def test_verify_on_a_target_that_is_there_compares_and_writes_nothing(source, converted, tmp_path):
    convert(converted, tmp_path / "back")
    before = {path: path.stat().st_mtime_ns for path in (*converted.rglob("*"), *tmp_path.rglob("*"))}
    assert convert(source, converted, verify=True)["written"] == 0
    assert convert(converted, tmp_path / "back", verify=True)["written"] == 0
    assert {path: path.stat().st_mtime_ns for path in (*converted.rglob("*"), *tmp_path.rglob("*"))} == before
    for given, target in ((source, converted), (converted, tmp_path / "back")):
        with pytest.raises(CheckpointError, match="exists already"):
            convert(given, target)


@pytest.mark.parametrize("damage", [cut_off, zeroed, flipped, emptied, gone])
@pytest.mark.parametrize("part", ["a chunk", "a header", "config.json"])
def test_verify_finds_damage_in_a_conversion(source, converted, tmp_path, damage, part):
    shutil.copytree(converted, tmp_path / "copy")
    victim = {
        "a chunk": lambda: max(chunks(tmp_path / "copy"), key=lambda file: file.stat().st_size),
        "a header": lambda: tmp_path / "copy" / "assets" / "headers" / safetensors_files.SINGLE,
        "config.json": lambda: tmp_path / "copy" / "assets" / "files" / "config.json",
    }[part]()
    damage(victim)
    with pytest.raises((CheckpointError, ConfigError, files.FileError)) as error:
        convert(source, tmp_path / "copy", verify=True)
    assert str(tmp_path / "copy") in str(error.value) or str(source) in str(error.value)


@pytest.mark.parametrize("damage", [cut_off, zeroed, flipped, emptied, gone])
@pytest.mark.parametrize("name", ["config.json", safetensors_files.SINGLE])
def test_verify_finds_damage_in_an_export(source, converted, tmp_path, damage, name):
    shutil.copytree(source, tmp_path / "copy")
    assert convert(converted, tmp_path / "copy", verify=True)["written"] == 0
    damage(tmp_path / "copy" / name)
    with pytest.raises((CheckpointError, ConfigError, files.FileError)) as error:
        convert(converted, tmp_path / "copy", verify=True)
    assert str(tmp_path / "copy") in str(error.value)


def test_verify_against_something_else(source, converted, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    for given in (source, converted):
        with pytest.raises((CheckpointError, ConfigError), match=r"no checkpoint in .*mine|mine/config\.json"):
            convert(given, tmp_path / "mine", verify=True)
    other = release(tmp_path / "other", "k2_tiny")
    with pytest.raises((CheckpointError, ConfigError), match="differ"):
        convert(other, converted, verify=True)
    assert files_of(tmp_path / "mine") == {"thesis.tex": b"mine"}


def test_the_command_line_verifies(source, converted, capsys):
    cli.main(["convert", str(source), str(converted), "--verify"])
    assert f"Verified {converted}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped_with:
        cli.main(["convert", str(source), str(converted)])
    assert stopped_with.value.code == 1
    assert capsys.readouterr().err == f"error: {converted} exists already; choose a new directory or remove it\n"
