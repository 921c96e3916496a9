"""Sources at their edges: byte order marks, names that are not UTF-8, paths that cannot be read, far apart weights."""

import json
import os
import sys

import numpy as np
import pytest

from kimi_jax.config import ConfigError, DataConfig, Source
from kimi_jax.data import pipeline
from kimi_jax.data.sources import DataError, Problems, read
from kimi_jax.files import unit_hash
from tests.data.conftest import model_config

MARK = b"\xef\xbb\xbf"


def documents(kind: str, path, **source) -> list:
    return list(read(Source(kind=kind, path=str(path), **source), Problems("raise")))


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(MARK + "é\ufeff".encode())
    (tmp_path / "b.txt").write_bytes(b"plain")
    assert [d.text for d in documents("text", tmp_path)] == ["é\ufeff", "plain"]
    assert [d.text for d in documents("text", tmp_path / "a.txt")] == ["é\ufeff"]


def test_a_file_of_a_mark_alone_is_empty(tmp_path):
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_bytes(MARK)
        problems = Problems()
        assert not list(read(Source(kind="text" if name == "a.txt" else "jsonl", path=str(tmp_path / name)), problems))
        assert problems.counts == {"empty document": 1}


def test_rows_of_concatenated_files_are_all_kept(tmp_path):
    """Each file may begin with a mark; inside a row it is text."""
    rows = ["first", "second", "\ufeffthird", "fourth"]
    lines = [json.dumps({"text": row}, ensure_ascii=False).encode() for row in rows]
    content = (
        MARK + lines[0] + b"\n" + MARK + lines[1] + b"\r\n" + lines[2] + b"\n" + MARK + b"\n" + MARK * 2 + lines[3]
    )
    (tmp_path / "a.jsonl").write_bytes(content)
    assert [d.text for d in documents("jsonl", tmp_path / "a.jsonl")] == rows


def test_the_place_of_a_broken_byte_counts_the_mark(tmp_path):
    for name, kind in (("a.txt", "text"), ("a.jsonl", "jsonl")):
        (tmp_path / name).write_bytes(MARK + b"ab\xff")
        with pytest.raises(DataError, match="at byte 5"):
            documents(kind, tmp_path / name)


NAMES = [
    b"a.txt",
    b"\x80.txt",
    b"caf\xe9.txt",
    "é.txt".encode(),
    b"line\nbreak.txt",
    "🙂.txt".encode(),
    b"\x1b[31m.txt",
]


def test_names_may_be_any_bytes(tmp_path):
    for name in NAMES:
        (tmp_path / os.fsdecode(name)).write_bytes(b"some text")
    found = documents("text", tmp_path)
    assert [os.fsencode(d.key) for d in found] == sorted(NAMES)  # the order of bytes is every locale's
    assert unit_hash("é.txt") == unit_hash("é.txt".encode().decode("ascii", "surrogateescape"))
    config = DataConfig(
        sequence_length=8, batch_size=2, sources=(Source(kind="text", path=str(tmp_path)),), validation_fraction=0.5
    )
    assert pipeline.load(config, model_config()).validation.num_documents in range(1, len(NAMES))


def test_messages_can_be_shown_whatever_a_name_holds(tmp_path):
    for name in NAMES:
        (tmp_path / os.fsdecode(name)).write_bytes(b"\xff")
    problems = Problems()
    assert not list(read(Source(kind="text", path=str(tmp_path)), problems))
    assert problems.summary().isprintable()
    assert {rf"{tmp_path}/caf\udce9.txt", rf"{tmp_path}/line\nbreak.txt"} <= {p.split(": ")[0] for p in problems.first}


def test_parquet_of_a_name_that_is_not_utf8(tmp_path):
    import pyarrow
    import pyarrow.parquet

    with open(tmp_path / "a.parquet", "wb") as file:
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), file)
    path = tmp_path / os.fsdecode(b"caf\xe9.parquet")
    (tmp_path / "a.parquet").rename(path)
    assert [d.text for d in documents("parquet", path)] == ["a", "b"]


def test_parquet_with_a_column_twice(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table([pyarrow.array(["a"])] * 2, names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: two columns 'text'; fix it"):
        documents("parquet", tmp_path / "a.parquet")


@pytest.mark.parametrize("flips", range(40))
def test_damaged_parquet_is_a_problem_or_text(tmp_path, flips):
    import pyarrow
    import pyarrow.parquet

    rows = [f"row {i} é" for i in range(50)]
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a.parquet")
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    generator = np.random.default_rng(flips)
    for place in generator.integers(4, len(content), 5):
        content[place] ^= int(generator.integers(1, 256))
    (tmp_path / "a.parquet").write_bytes(content)
    problems = Problems()
    found = list(read(Source(kind="parquet", path=str(tmp_path / "a.parquet")), problems))
    assert all(d.text for d in found) and all(line.isprintable() for line in problems.first)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("x" * 300, "File name too long; choose a shorter name"),
        ("x/" * 3000, "File name too long; choose a shorter name"),
        ("loop", "Too many levels of symbolic links; check the path"),
        ("file/below", "does not exist; fix the path of the text source"),
    ],
)
def test_paths_that_cannot_be_read_are_one_line(tmp_path, path, message):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=message) as error:
        documents("text", tmp_path / path)
    assert "\n" not in str(error.value)


def test_a_glob_may_be_too_long(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="File name too long; choose a shorter name"):
        documents("text", tmp_path, glob="x" * 300)


def test_a_pipe_does_not_wait(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"pipe: unreadable file \(not a regular file\)"):
        documents("text", tmp_path / "pipe")


def mixture(tmp_path, *weights: float) -> DataConfig:
    for name in ("a", "b", "held"):
        (tmp_path / name).mkdir(exist_ok=True)
        for number in range(3):
            (tmp_path / name / f"{number}.txt").write_text("text " * 5)
    sources = [
        Source(kind="text", path=str(tmp_path / name), weight=weight)
        for name, weight in zip("ab", weights, strict=True)
    ]
    held = Source(kind="text", path=str(tmp_path / "held"))
    return DataConfig(sequence_length=8, batch_size=2, sources=tuple(sources), validation=(held,))


def test_weights_far_apart_are_rejected_before_the_first_step(tmp_path):
    with pytest.raises(DataError, match=r"weights 1e-30, 1e\+30 of data\.sources are too far apart: .*closer together"):
        pipeline.load(mixture(tmp_path, 1e-30, 1e30), model_config())
    data = pipeline.load(mixture(tmp_path, 1e-6, 1.0), model_config())
    assert next(data.train_iterator(seed=2**32 - 1))["tokens"].shape == (2, 8)


@pytest.mark.parametrize("tokens", [0, -3])
def test_no_tokens_are_not_some(tmp_path, tokens):
    data = pipeline.load(mixture(tmp_path, 1.0, 1.0), model_config())
    with pytest.raises(ConfigError, match=f"max_tokens={tokens} must be at least 1"):
        data.validation_batches(max_tokens=tokens)


def test_rows_nested_to_the_limit_of_the_reader(tmp_path):
    rows = [b'{"text": "a"}', b'{"text": "b", "x": ' + b"[" * 10**6 + b"]" * 10**6 + b"}", b'{"text": "c"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(rows))
    problems = Problems()
    found = [d.text for d in read(Source(kind="jsonl", path=str(tmp_path / "a.jsonl")), problems)]
    assert found == ["a", "c"] and problems.counts == {"malformed JSON": 1}
    assert sys.getrecursionlimit() < 10**5
