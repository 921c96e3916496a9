"""Tokenizer files that are damaged, hostile or unusual: rejected in one line that names the file, or read."""

import base64
import json
import os
import time
import tracemalloc

import numpy as np
import pytest

from kimi_jax.config import ConfigError, TokenizerConfig
from kimi_jax.files import FileError
from kimi_jax.text import kimi, tokenizer
from kimi_jax.text.load import load_tokenizer, make_tokenizer
from tests.data.conftest import model_config
from tests.text.test_tokenizer import NUM_RANKS, byte_level_json, ranks_file, release, word_json

MARK = b"\xef\xbb\xbf"
DEEP = b'{"a": ' + b"[" * 10**6 + b"]" * 10**6 + b"}"


@pytest.mark.parametrize("value", [[1, 2], [2, 1], [2], [2, 1, 2]])
def test_several_ids_that_end_documents_all_stop(value, tmp_path):
    (tmp_path / "tokenizer.json").write_text(word_json())
    settings = {"bos_token_id": 1, "eos_token_id": value, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    coder = load_tokenizer(tmp_path)
    assert coder.eos_id == value[0] and coder.stop_ids == tuple(dict.fromkeys(value))
    coder.save(tmp_path / "run")
    again = load_tokenizer(tmp_path / "run")
    assert again.eos_id == coder.eos_id and again.stop_ids == coder.stop_ids
    assert again.fingerprint == coder.fingerprint
    (tmp_path / "config.json").write_text(json.dumps(settings | {"eos_token_id": value[0]}))
    assert load_tokenizer(tmp_path).fingerprint == coder.fingerprint  # they decide no ids of text


def test_kimi_stops_at_the_end_of_a_message_too(tmp_path):
    coder = load_tokenizer(release(tmp_path, {"eos_token_id": [NUM_RANKS + 9, NUM_RANKS + 1]}))
    assert coder.eos_id == NUM_RANKS + 9 and coder.stop_ids == (NUM_RANKS + 1, NUM_RANKS + 2, NUM_RANKS + 9)
    coder.save(tmp_path / "run")
    assert load_tokenizer(tmp_path / "run").stop_ids == coder.stop_ids


def test_a_byte_order_mark_changes_nothing(tmp_path):
    plain = load_tokenizer(release(tmp_path / "plain", {"eos_token_id": NUM_RANKS + 2}, {}))
    marked = release(tmp_path / "marked", {"eos_token_id": NUM_RANKS + 2}, {}, MARK + ranks_file())
    for name in ("config.json", "tokenizer_config.json"):
        (marked / name).write_bytes(MARK + (marked / name).read_bytes())
    assert load_tokenizer(marked).fingerprint == plain.fingerprint
    path = tmp_path / "tokenizer.json"
    found = []
    for mark in (b"", MARK):
        path.write_bytes(mark + word_json().encode())
        found.append(make_tokenizer(TokenizerConfig(kind="tokenizers", path=str(path)), model_config(99, 1, 2, 2), []))
    assert found[0].fingerprint == found[1].fingerprint


WRONG_IDS = [-1, 2**22, 4 * 10**9, 10**30, 1.0, 1e400, True, "1", None, {}, [], [[1]], [1, -1], [1, None], [1] * 1000]


@pytest.mark.parametrize("value", WRONG_IDS, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id", "pad_token_id", "vocab_size"])
@pytest.mark.parametrize("saved", [False, True])
def test_ids_that_are_none_are_rejected_with_their_file(name, value, saved, tmp_path):
    if name == "pad_token_id" and value is None:
        return  # it may be left out
    (tmp_path / "tokenizer.json").write_text(word_json())
    ids = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 9} | ({"kind": "tokenizers"} if saved else {})
    path = tmp_path / ("tokenizer_config.json" if saved else "config.json")
    path.write_text(json.dumps(ids | {name: value}))
    with pytest.raises(ConfigError) as error:
        load_tokenizer(tmp_path)
    message = str(error.value)
    assert message.startswith(f"{path} has ") and name in message and message.endswith("; fetch it again")
    assert len(message) < 600 and "\n" not in message


@pytest.mark.parametrize("text", [5, "x", [1]])
def test_a_release_whose_text_settings_are_none(text, tmp_path):
    folder = release(tmp_path, {"text_config": text, "eos_token_id": 3})
    with pytest.raises(ConfigError, match=r"config\.json has text_config=.* where an object is due; fetch it again"):
        load_tokenizer(folder)


@pytest.mark.parametrize("kind", ["words", 5, None, [], "sentencepiece"])
def test_a_saved_tokenizer_of_no_known_kind(kind, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"kind": kind}))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json has kind=.* where one of bytes, bpe, "):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [DEEP, b"null", b"{", b"\xff\xfe{\0}\0", b"[" * 10**6, b"NaN", b""])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_json_that_cannot_be_read_is_named(name, content, tmp_path):
    folder = release(tmp_path, {"eos_token_id": NUM_RANKS + 2}, {})
    (folder / name).write_bytes(content)
    if content == DEEP and json_takes(content):
        return
    with pytest.raises(FileError) as error:
        load_tokenizer(folder)
    assert str(folder / name) in str(error.value) and "\n" not in str(error.value)


def json_takes(content: bytes) -> bool:
    try:
        json.loads(content)
    except RecursionError:
        return False
    return True


def with_id(number: int, added: bool) -> str:
    raw = json.loads(word_json())
    if added:
        raw["added_tokens"][0]["id"] = number
        del raw["model"]["vocab"]["[UNK]"]
    else:
        raw["model"]["vocab"]["the"] = number
    return json.dumps(raw)


@pytest.mark.parametrize("number", [2**22, 4 * 10**9, 2**32 - 1])
def test_a_large_id_costs_nothing_and_is_named(number):
    began = time.perf_counter()
    tracemalloc.start()
    with pytest.raises(
        ConfigError, match=rf"x\.json: its largest id, of 'the', is {number}, and must be from 0 to 4,19"
    ):
        tokenizer.JsonTokenizer(with_id(number, False), 0, 0, 0, where="x.json")
    assert tracemalloc.get_traced_memory()[1] < 10**7 and time.perf_counter() - began < 1
    tracemalloc.stop()
    assert tokenizer.JsonTokenizer(with_id(2**22 - 1, False), 0, 0, 0).vocab_size == 2**22


@pytest.mark.parametrize(
    "content",
    [
        word_json().replace('"[UNK]"', '"\\ud800"').encode(),
        DEEP,
        b"[" * 10**6,
        with_id(-1, False).encode(),
        with_id(10**30, False).encode(),
        with_id(4 * 10**9, False).encode(),
        json.dumps(json.loads(word_json()) | {"decoder": [1]}).encode(),
        json.dumps(json.loads(word_json()) | {"normalizer": {"type": "Nothing"}}).encode(),
        json.dumps(
            json.loads(word_json())
            | {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}}
        ).encode(),
        byte_level_json().replace('"continuing_subword_prefix":null', '"continuing_subword_prefix":"é"').encode(),
        f"[{word_json()}]".encode(),
        word_json().encode()[:-1],
        word_json().encode() + b"x",
        b"\0" * 100,
    ],
)
def test_a_tokenizer_json_that_is_none_is_rejected_with_its_file(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        make_tokenizer(TokenizerConfig(kind="tokenizers", path=str(path)), model_config(1000, 1, 2, 2), [])
    assert str(path) in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize("seed", range(100))
def test_a_damaged_tokenizer_json_works_or_is_rejected(seed):
    """Never an error of the library's own, neither when it is read nor at the first text."""
    generator = np.random.default_rng(seed)
    text = [word_json(), byte_level_json()][seed % 2]
    places = generator.integers(0, len(text), 3)
    chars = list(text)
    for place in places:
        chars[place] = chr(int(generator.integers(32, 127)))
    try:
        coder = tokenizer.JsonTokenizer("".join(chars), 0, 1, 2)
        coder.decode(coder.encode("the dog é 123"))
    except ConfigError as error:
        assert "\n" not in str(error)


def test_an_error_at_the_first_text_names_the_file(tmp_path):
    """Words without one for the unknown."""
    raw = json.loads(word_json())
    del raw["model"]["vocab"]["[UNK]"]
    raw["added_tokens"] = []
    coder = tokenizer.JsonTokenizer(json.dumps(raw), 0, 1, 2, where="x.json")
    with pytest.raises(ConfigError, match=r"the tokenizers library cannot encode text with x\.json \(.*fetch the file"):
        coder.encode("unknown")


LINES = ranks_file().splitlines()


@pytest.mark.parametrize(
    ("content", "report"),
    [
        (b"\n".join([*LINES[:-1], LINES[-1].split()[0] + b" 10000000000"]), "and not have 10000000000; fetch the file"),
        (b"\n".join([*LINES[:-1], LINES[-1].split()[0] + b" -1"]), "and not have -1; fetch the file again"),
        (b"\n".join([*LINES, b"YQ== " + b"9" * 5000]), "is not base64 and a rank; fetch it again"),
        (b"\n".join([*LINES, LINES[0]]) + b" 5", "is not base64 and a rank; fetch it again"),
        (b"\n".join([*LINES, base64.b64encode(b"new") + b" 0"]), "ranks must count from 0 and hold every byte; fetch"),
        (b"\xff\xfe" + b"\0".join(LINES), "is not base64 and a rank; fetch it again"),
        (b"", "0 ranks must count from 0"),
    ],
)
def test_ranks_that_are_none_are_rejected(content, report):
    with pytest.raises(ConfigError, match=report) as error:
        kimi.TiktokenTokenizer(content, 0, 1, 2, where="x.model")
    assert str(error.value).startswith("x.model:") and len(str(error.value)) < 300


@pytest.mark.parametrize(
    "decoder",
    [
        {str(NUM_RANKS): {"content": None}},
        {str(NUM_RANKS): {"content": 5}},
        {"1" * 5000: {"content": "x"}},
        {"1.5": {"content": "x"}},
        {str(10**30): {"content": "x"}},
        {"-1": {"content": "x"}},
        {str(NUM_RANKS): {"content": "\ud800"}},
        None,
        5,
    ],
)
def test_names_of_control_tokens_that_are_none(decoder, tmp_path):
    folder = release(tmp_path, {"eos_token_id": NUM_RANKS + 2}, {"added_tokens_decoder": decoder})
    with pytest.raises(ConfigError, match=f"{tmp_path}.*again") as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize("name", ["tokenizer.json", "tiktoken.model"])
def test_a_pipe_or_folder_does_not_wait(name, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    kind = "tokenizers" if name == "tokenizer.json" else "tiktoken"
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match=r"cannot read the tokenizer .*: not a regular file; check the path"):
            make_tokenizer(TokenizerConfig(kind=kind, path=str(path)), model_config(1000), [])


@pytest.mark.parametrize("path", ["x" * 300, "x/" * 3000, "file/below"])
def test_paths_that_cannot_be_read(path, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot read the tokenizer "):
        make_tokenizer(TokenizerConfig(kind="tokenizers", path=str(tmp_path / path)), model_config(1000), [])


@pytest.mark.parametrize("text", ["half \ud800", "\udcc3\udca9"])
def test_text_without_utf8_is_rejected(text):
    for coder in (tokenizer.ByteTokenizer(), tokenizer.JsonTokenizer(byte_level_json(), 0, 1, 2)):
        with pytest.raises(ConfigError, match="has half a surrogate pair at character"):
            coder.encode(text)
        with pytest.raises(ConfigError, match="has half a surrogate pair at character"):
            coder.encode_segments([("fine", False), (text, False)])


def test_a_negative_id_does_not_count_from_the_end():
    for coder in (tokenizer.ByteTokenizer(), tokenizer.JsonTokenizer(word_json(), 1, 2, 2)):
        with pytest.raises(ConfigError, match="id -1 of a token must not be negative"):
            coder.decode([3, -1])
        with pytest.raises(TypeError):
            coder.decode([1.5])


def test_a_tokenizer_is_saved_as_whole_files_and_its_settings_last(tmp_path, monkeypatch):
    coder = kimi.TiktokenTokenizer(ranks_file(), NUM_RANKS, NUM_RANKS + 2, NUM_RANKS + 255)
    written = []
    write = tokenizer.files.write
    monkeypatch.setattr(
        tokenizer.files, "write", lambda path, content: (written.append(path.name), write(path, content))
    )
    coder.save(tmp_path / "a")
    assert written == ["tiktoken.model", "tokenizer_config.json"] and sorted(os.listdir(tmp_path / "a")) == written
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"cannot write .*a part of the path is a file"):
        coder.save(tmp_path / "file" / "a")
