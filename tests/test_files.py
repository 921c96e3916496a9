"""Writing whole files, reading JSON, and what the operating system refuses."""

import doctest
import errno
import os

import pytest

from kimi_jax import files
from kimi_jax.files import FileError


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    file = tmp_path / "new" / "a.txt"
    files.write(file, "old")

    class Stop(Exception):
        pass

    with pytest.raises(Stop), files.writing(file) as out:
        out.write(b"half")
        raise Stop
    assert file.read_text() == "old" and os.listdir(file.parent) == ["a.txt"]


def test_a_file_has_its_name_only_after_it_is_flushed(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (events.append("fsync"), fsync(number))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("replace"), replace(a, b))[1])
    files.write(tmp_path / "a", b"x")
    assert events == ["fsync", "replace", "fsync"]  # the data, the name, the folder


def test_what_a_killed_writer_left_is_used_again(tmp_path):
    (tmp_path / ".a.partial").write_bytes(b"torn" * 100)
    files.write(tmp_path / "a", b"whole")
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == b"whole"


def test_a_full_disk_is_one_line(tmp_path):
    message = r"^cannot write .*/a: No space left on device; free some space or choose another disk$"
    with pytest.raises(FileError, match=message), files.writing(tmp_path / "a"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "fix"),
    [("file/below", "a part of the path is a file"), ("x" * 300, "choose a shorter name")],
)
def test_paths_that_cannot_be_written(tmp_path, name, fix):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=fix):
        files.write(tmp_path / name, b"")
    assert os.listdir(tmp_path) == ["file"]


def test_text_is_utf8_without_its_mark(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": "\xc3\xa9"}')
    assert files.read_json(tmp_path / "a.json") == {"a": "é"}
    files.write(tmp_path / "b", "é")
    assert (tmp_path / "b").read_bytes() == b"\xc3\xa9"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 1_000_000, "nested too deeply"),
        (b"null", "holds null where a JSON object is due"),
        (b"[1]", "holds list where"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_json_that_cannot_be_read_is_one_line_with_its_file(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(FileError) as error:
        files.read_json(tmp_path / "a.json")
    assert message in str(error.value) and str(tmp_path / "a.json") in str(error.value)
    assert "\n" not in str(error.value)


def test_room_is_asked_of_the_nearest_folder_that_exists(tmp_path):
    files.check_room(tmp_path / "a" / "b", 1)
    with pytest.raises(FileError, match=r"a/b needs 1,152,921,504,606,846,976 bytes and the disk has [\d,]+ free"):
        files.check_room(tmp_path / "a" / "b", 2**60)


def test_checksums(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert files.file_checksum(tmp_path / "a") == files.checksum(b"abc") == "78af5f94892f3950"  # xxhsum -H3
    assert files.checksum(b"abd") != files.checksum(b"abc")


def test_names_that_are_not_utf8_have_a_hash():
    assert 0 <= files.unit_hash(os.fsdecode(b"caf\xe9.txt")) < 1


def test_examples():
    assert doctest.testmod(files).failed == 0
