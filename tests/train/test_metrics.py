"""`metrics.jsonl`, whatever was done to it: good records are kept, the others are skipped, counted and reported."""

import json
import math
import sys
from pathlib import Path

import pytest

from kimi_jax.config import ConfigError
from kimi_jax.files import FileError
from kimi_jax.train import metrics
from kimi_jax.train.loop import run_training
from tests import tiny

GOOD = [{"step": step, "kind": "train", "bits_per_byte": 8 / step, "loss": 0.1 + 0.2 * step} for step in range(1, 6)]
BAD = [
    b"garbage",
    b"\0" * 4096,
    b'{"step": 3, "kind": "tr\xff\xfe"}',
    b"{}",
    b"[]",
    b"null",
    b"7",
    b'"step"',
    b'{"kind": "train"}',
    b'{"step": 3}',
    b'{"step": "3", "kind": "train"}',
    b'{"step": 3.5, "kind": "train"}',
    b'{"step": true, "kind": "train"}',
    b'{"step": -1, "kind": "train"}',
    b'{"step": 100000000000000000000, "kind": "train"}',
    b'{"step": null, "kind": "train"}',
    b'{"step": 3, "kind": null}',
    b'{"step": 3, "kind": "train"',
    b"[" * 100_000,
]


def lines(records: list[dict]) -> list[bytes]:
    return [json.dumps(record).encode() for record in records]


@pytest.fixture
def damaged(tmp_path) -> Path:
    """A file with each bad line between good ones."""
    path, good = tmp_path / "metrics.jsonl", lines(GOOD)
    mixed = [good[0], *BAD[:9], b"", good[1], *BAD[9:], *good[2:]]
    path.write_bytes(b"\n".join(mixed) + b"\n")
    return path


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", [0, 2, 5])
def test_a_bad_line_anywhere_is_skipped_and_counted(tmp_path, capsys, bad, place):
    path, good = tmp_path / "metrics.jsonl", lines(GOOD)
    path.write_bytes(b"\n".join([*good[:place], bad, *good[place:]]) + b"\n")
    assert metrics.load(path) == (GOOD, 1)
    assert metrics.read(path) == GOOD
    assert capsys.readouterr().err == f"{path}: skipped 1 damaged line; 5 are whole\n"


def test_what_is_whole_reads_as_it_was(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    assert metrics.read(path) == []
    path.write_bytes(b"\n".join(lines(GOOD)) + b'\n\n{"step": 6, "kind": "tra')  # killed while it wrote
    assert metrics.load(path) == (GOOD, 0) and metrics.read(path) == GOOD
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_zeros_that_a_power_failure_left(tmp_path, end):
    path, good = tmp_path / "metrics.jsonl", lines(GOOD)
    path.write_bytes(b"\n".join(good) + b"\n" + b"\0" * 1000 + end)
    assert metrics.load(path) == (GOOD, 1)
    path.write_bytes(good[0] + b"\n" + b"\0" * 1000 + b"\n".join(good[1:]) + b"\n")  # in front of a record
    assert metrics.load(path) == (GOOD, 1)


def test_resuming_keeps_every_good_record(damaged):
    log = metrics.Metrics(damaged.parent, first_step=4)
    log.write(5, "train", loss=math.nan, tokens=7)
    log.close()
    assert metrics.load(damaged) == ([*GOOD[:4], {"step": 5, "kind": "train", "loss": None, "tokens": 7}], 0)
    assert [path.name for path in damaged.parent.iterdir()] == ["metrics.jsonl"]


def test_a_plot_of_a_damaged_file(damaged, capsys):
    with damaged.open("ab") as file:
        file.write(b'{"step": 5, "kind": "train", "bits_per_byte": "much", "grad_norm": [1], "max_logit": {}}\n')
    metrics.plot(damaged, damaged.with_name("curves.png"))
    assert damaged.with_name("curves.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().err == f"{damaged}: skipped {len(BAD)} damaged lines; 6 are whole\n"


def test_a_run_reports_damage_before_anything_else_is_checked(tmp_path, capsys):
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_bytes(b"garbage\n")
    with pytest.raises(ConfigError, match="sample_tokens=1000000000 after a prompt"):
        run_training(tiny.config(tmp_path, sample_tokens=10**9))
    assert f"{folder / 'metrics.jsonl'}: skipped 1 damaged line; 0 are whole" in capsys.readouterr().out


def test_a_full_disk_ends_a_run_with_one_line(tmp_path):
    log = metrics.Metrics(tmp_path, first_step=0)
    log.close()
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log._file = (tmp_path / "metrics.jsonl").open("a", encoding="utf-8")
    with pytest.raises(FileError, match=rf"^cannot write {log.path}: No space left on device; free some space"):
        log.write(1, "train", loss=1.0)
    log.close()


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    monkeypatch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(FileError, match=f"cannot read {path}: Permission denied; change its permissions"):
        metrics.read(path)


def test_tensorboard_that_is_not_installed_is_missed_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"needs the extra: pip install 'kimi-jax\[tensorboard\]'"):
        run_training(tiny.config(tmp_path, tensorboard=True))
    assert not (tmp_path / "runs").exists()
