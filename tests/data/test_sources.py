"""Sources: what is read, in which order, on which side, and how faults are reported."""

import json
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax.config import Source
from kimi_jax.data.sources import DataError, Document, Problems, read, side, unit_hash


def texts(source: Source, problems: Problems | None = None) -> list[str]:
    return [document.text for document in read(source, problems or Problems("raise"))]


# Each: lines of a .jsonl file, the texts that remain, and per fault its line and a word of its report.
GOOD = b'{"text": "good"}'
FAULTS = [
    (b"{nonsense", "malformed JSON"),
    (b"[1, 2]", "list where an object is due"),
    (b"[" * 100_000, "malformed JSON"),
    (b'{"text": ' + b"9" * 5000 + b"}", "malformed JSON"),
    (b'{"other": "x"}', "no field 'text'"),
    (b'{"text": null}', "no field 'text'"),
    (b'{"text": 3}', "it is a int"),
    (b'{"text": ["a"]}', "it is a list"),
    (b'{"text": ""}', "empty document"),
    (b'{"text": "\xe9"}', "not UTF-8"),
    (rb'{"text": "half \ud800"}', "not UTF-8"),
    (b'{"text": "a\x00b"}', "malformed JSON"),
    (b'{"text": "tru', "malformed JSON"),
    (b"\xff\xfe{", "not UTF-8"),
]


@pytest.mark.parametrize("line, report", FAULTS)
@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_bad_line_is_reported_with_file_and_line_and_costs_only_itself(tmp_path, line, report, place):
    lines = [GOOD, GOOD]
    lines.insert(place - 1, line)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    problems = Problems()
    assert texts(Source(kind="jsonl", path=str(path)), problems) == ["good", "good"]
    assert problems.counts.total() == 1
    assert problems.first[0].startswith(f"{path}:{place}: ") and report in problems.first[0]
    assert problems.summary().startswith("skipped 1 document: 1 ")
    with pytest.raises(DataError, match=rf"a\.jsonl:{place}: .*data\.on_error"):
        texts(Source(kind="jsonl", path=str(path)))


def test_all_faults_are_counted_and_the_first_few_told_in_one_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([GOOD, *[line for line, _ in FAULTS]] * 3))
    problems = Problems()
    assert texts(Source(kind="jsonl", path=str(path)), problems) == ["good"] * 3
    assert problems.counts.total() == 3 * len(FAULTS)
    assert len(problems.first) == 5 and "\n" not in problems.summary()
    assert f"skipped {3 * len(FAULTS)} documents: " in problems.summary()


def test_good_lines_of_every_kind_are_kept_to_the_byte(tmp_path):
    rows = ["plain", "CRLF\r\nkept", "NUL \0 kept", "é 中文 🙂", "x" * 5_000_000, " ", "\ufeffBOM", "line\u2028sep"]
    lines = [json.dumps({"text": row, "more": [1]}, ensure_ascii=i % 2 == 0).encode() for i, row in enumerate(rows)]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines[:4]) + b"\n\n  \n" + b"\n".join(lines[4:]))
    assert texts(Source(kind="jsonl", path=str(path))) == rows


def test_prompts_are_read_and_must_be_there(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "answer", "ask": "question"}\n{"text": "alone"}\n{"text": "b", "ask": ""}\n')
    problems = Problems()
    documents = list(read(Source(kind="jsonl", path=str(path), prompt_field="ask"), problems))
    assert [(d.prompt, d.text) for d in documents] == [("question", "answer"), ("", "b")]
    assert problems.first == [f"{path}:2: no field 'ask'"]


def test_the_same_text_after_another_prompt_is_another_key(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "bc", "ask": "a"}\n{"text": "c", "ask": "ab"}\n')
    first, second = read(Source(kind="jsonl", path=str(path), prompt_field="ask"), Problems("raise"))
    assert first.key != second.key


def test_folder_of_text(tmp_path):
    (tmp_path / "b" / ".hidden").mkdir(parents=True)
    (tmp_path / "b" / "z.txt").write_bytes("CRLF\r\n\0 é".encode())
    (tmp_path / "b" / ".hidden" / "h.txt").write_text("hidden")
    (tmp_path / "b" / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a.md").write_text("other")
    problems = Problems()
    source = Source(kind="text", path=str(tmp_path), glob="**/*.txt")
    documents = list(read(source, problems))
    assert [(d.key, d.text) for d in documents] == [("a.txt", "first"), ("b/z.txt", "CRLF\r\n\0 é")]
    assert problems.counts == {"not UTF-8": 1, "empty document": 1, "unreadable file": 1}
    assert any("latin.txt: not UTF-8 (" in line and "at byte 3)" in line for line in problems.first)
    assert texts(Source(kind="text", path=str(tmp_path)), Problems()) == ["other", "first", "CRLF\r\n\0 é"]
    for name in ("b/latin.txt", "empty.txt", "gone.txt"):
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            texts(Source(kind="text", path=str(tmp_path), glob=name))


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_what_is_not_there_is_an_error_at_once(tmp_path, kind):
    with pytest.raises(DataError, match=r"nowhere does not exist"):
        texts(Source(kind=kind, path=str(tmp_path / "nowhere")), Problems("skip"))
    with pytest.raises(DataError, match=r"no file under .* matches glob="):
        texts(Source(kind=kind, path=str(tmp_path)), Problems("skip"))


@pytest.fixture
def parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    def write(columns: dict, **options) -> Path:
        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
        return path

    return write


def test_parquet_rows(parquet):
    rows = [f"row {i} é\0" for i in range(1000)]
    path = parquet({"n": list(range(1000)), "body": rows, "ask": ["q"] * 1000}, row_group_size=300)
    source = Source(kind="parquet", path=str(path), text_field="body", prompt_field="ask")
    documents = list(read(source, Problems("raise")))
    assert [d.text for d in documents] == rows and {d.prompt for d in documents} == {"q"}


def test_parquet_string_types(parquet):
    import pyarrow as pa

    for kind in (pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        assert texts(Source(kind="parquet", path=str(parquet({"text": pa.array(["a", "b"]).cast(kind)})))) == ["a", "b"]


def test_parquet_faults(parquet):
    import pyarrow as pa

    bad = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
    path = parquet({"text": pa.chunked_array([pa.array(["a", None, ""]), bad, pa.array(["b"])])})
    problems = Problems()
    assert texts(Source(kind="parquet", path=str(path)), problems) == ["a", "b"]
    assert [line.split(":")[1] for line in problems.first] == ["2", "3", "4"]
    assert problems.counts == {"no field 'text'": 1, "empty document": 1, "not UTF-8": 1}

    problems = Problems()
    assert texts(Source(kind="parquet", path=str(parquet({"text": [1, 2]}))), problems) == []
    assert problems.counts == {"field 'text' is not text": 2}

    problems = Problems()
    assert texts(Source(kind="parquet", path=str(parquet({"body": ["a"]}))), problems) == []
    assert "no column 'text' (it has body)" in problems.first[0]

    problems = Problems()
    assert texts(Source(kind="parquet", path=str(parquet({"text": pa.array([], pa.string())}))), problems) == []
    assert problems.counts == {"empty document": 1}


def test_parquet_that_is_cut_or_damaged(parquet):
    path = parquet({"text": [f"{i} " * 2000 for i in range(64)]}, row_group_size=16, compression="gzip")
    whole = path.read_bytes()
    damaged = whole[:6000] + b"\xa5" * 9000 + whole[15_000:]
    for broken in (whole[: len(whole) // 2], whole[:-1], b"", b"PAR1", damaged):
        path.write_bytes(broken)
        problems = Problems()
        texts(Source(kind="parquet", path=str(path)), problems)
        assert problems.counts == {"unreadable file": 1} and "a.parquet" in problems.first[0]
        with pytest.raises(DataError, match="unreadable file"):
            texts(Source(kind="parquet", path=str(path)))


def test_parquet_without_pyarrow_names_the_extra(parquet, monkeypatch):
    path = parquet({"text": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'kimi-jax\[parquet\]'"):
        texts(Source(kind="parquet", path=str(path)))


def test_the_standard_library_is_read_whole_in_one_order():
    first, second = (list(read(Source(), Problems("raise"))) for _ in range(2))
    assert first == second
    keys = [str(d.key) for d in first]
    assert keys == sorted(keys) and {"ast.py", "json/decoder.py", "typing.py"} <= set(keys)
    assert not any(set(key.split("/")) & {"test", "tests", "site-packages", "__pycache__"} for key in keys)
    root = Path(sysconfig.get_paths()["stdlib"])
    assert all((root / str(d.key)).read_bytes() == d.text.encode() for d in first)
    assert 8e6 < sum(len(d.text) for d in first) < 30e6


def test_the_split_is_pinned():
    """A hash that changes would mix training text into the validation of runs that go on."""
    assert unit_hash("ast.py") == 0x447E6B562833 / 2**48  # printf ast.py | b2sum -l 48
    keys = [f"{i}.py" for i in range(5000)]
    assert sum(unit_hash(key) < 0.1 for key in keys) / 5000 == pytest.approx(0.1, abs=0.02)


@given(st.lists(st.text(min_size=1), max_size=30), st.floats(0.01, 0.99))
def test_sides_part_the_documents(keys, fraction):
    documents = [Document(key, key=key) for key in keys]
    train, held = (list(side(documents, fraction, held_out=value)) for value in (False, True))
    assert sorted(d.text for d in train + held) == sorted(keys)
    assert not {d.key for d in train} & {d.key for d in held}
    alone = [d for d in documents if list(side([d], fraction, held_out=True))]
    assert held == alone, "a document's side must not depend on the others"


@given(st.text(min_size=1), st.floats(0.01, 0.99))
def test_a_single_text_file_is_cut_and_loses_nothing(text, fraction):
    train, held = (list(side([Document(text)], fraction, held_out=value)) for value in (False, True))
    assert "".join(d.text for d in train + held) == text


def test_a_single_text_file_is_cut_at_a_line(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"".join(b"line %d\r\n" % i for i in range(100)))
    documents = list(read(Source(kind="text", path=str(path)), Problems("raise")))
    (train,), (held,) = (list(side(documents, 0.1, held_out=value)) for value in (False, True))
    assert train.text.endswith("\r\n") and held.text.startswith("line ") and 5 < held.text.count("\r\n") < 15
