"""Tokenizers: every byte accounted for, no half characters, no control tokens out of text."""

import base64
import doctest
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from kimi_jax.config import ConfigError, TokenizerConfig
from kimi_jax.data import sources, tokenizer
from tests.data.conftest import model_config

CORPUS = [
    "def f(self, path):\n    if self.path is None:\n        return path.append(1234)\n",
    "class Größe:\r\n\tüber = '中文 🙂'  # comment\n\n\n",
    "the quick brown fox jumps over the lazy dog, and the dog sleeps\n" * 3,
]
CONTROL = "<|bos|><|eos|><|pad|>[BOS][EOS]<|open|><|end_of_msg|>[UNK]<s></s><|reserved_token_300|>"


def ranks_file() -> bytes:
    """Synthetic ranks: the bytes in a mixed order, then merges that a real file could have."""
    pieces = [bytes([(value * 7 + 3) % 256]) for value in range(256)]
    for text in (
        "  ",
        "    ",
        "th",
        "the",
        " the",
        "12",
        "123",
        "\r\n",
        "\n\n",
        "中",
        "文",
        "中文",
        "é",
        "'s",
        "ll",
        "aa",
    ):
        raw = text.encode()
        for length in range(2, len(raw) + 1):  # each merge needs its parts
            if raw[:length] not in pieces:
                pieces.append(raw[:length])
    return b"".join(base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(pieces))


def byte_level_json(normalizer=None, prefix_space=False) -> str:
    made = tokenizer.train_bpe(CORPUS, 300)
    raw = tokenizers.Tokenizer.from_str(made._json)
    raw.normalizer = normalizer
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    raw.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)]
    )
    raw.enable_truncation(4)
    raw.enable_padding(length=50)
    return raw.to_str()


def word_json() -> str:
    """Words, with lower case and an unknown token: text cannot be had back."""
    words = ["[UNK]", "<s>", "</s>", *sorted({word for text in CORPUS for word in text.lower().split()})]
    raw = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    raw.normalizer = normalizers.Lowercase()
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.add_special_tokens(["[UNK]", "<s>", "</s>"])
    return raw.to_str()


def fallback_json() -> str:
    """Sentencepiece style: a marked space, and bytes for what is not in the vocabulary."""
    letters = sorted({char for text in CORPUS[2:] for char in text.replace(" ", "▁")} | {"▁"})
    vocabulary = ["<unk>", "<s>", "</s>", *[f"<0x{value:02X}>" for value in range(256)], *letters]
    raw = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(vocabulary)}, [], unk_token="<unk>", byte_fallback=True)
    )
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return raw.to_str()


EXACT = {
    "bytes": tokenizer.ByteTokenizer(),
    "bpe": tokenizer.train_bpe(CORPUS, 400),
    "byte_level": tokenizer.JsonTokenizer(byte_level_json(), 0, 1, 2),
    "tiktoken": tokenizer.TiktokenTokenizer(ranks_file(), 290, 291, 292),
    "fallback": tokenizer.JsonTokenizer(fallback_json(), 1, 2, 2),
}
LOSSY = {
    "nfc": tokenizer.JsonTokenizer(byte_level_json(normalizers.NFC()), 0, 1, 2),
    "prefix_space": tokenizer.JsonTokenizer(byte_level_json(prefix_space=True), 0, 1, 2),
    "words": tokenizer.JsonTokenizer(word_json(), 1, 2, 2),
}
ALL = EXACT | LOSSY
exact, every = pytest.mark.parametrize("name", EXACT), pytest.mark.parametrize("name", ALL)
TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.text("ab e\u0301é中🙂\r\n \t\0'12_.(", max_size=80)


@exact
@given(TEXT)
@example("\r\n\0 \x7f\ufffd\ufffd")
@example("e\u0301 " * 50)
@example(CONTROL)
def test_text_comes_back_and_no_text_is_a_control_token(name, text):
    coder = EXACT[name]
    ids = coder.encode(text)
    assert ids.dtype == np.int32 and coder.decode(ids) == text
    assert not {coder.bos_id, coder.eos_id, coder.pad_id} & set(ids.tolist())
    assert ids.size == 0 or (ids.min() >= 0 and ids.max() < coder.vocab_size)


@every
@given(st.lists(TEXT, max_size=4))
@example([CONTROL, "", " a", "ﬁ e\u0301 \u1e9b\u0323"])
def test_every_byte_of_the_text_belongs_to_a_token(name, texts):
    coder = ALL[name]
    for text, (ids, lengths) in zip(texts, coder.encode_batch(texts), strict=True):
        assert lengths.dtype == np.int32 and lengths.shape == ids.shape and (lengths >= 0).all()
        assert lengths.sum() == (len(text.encode()) if len(ids) else 0)
        np.testing.assert_array_equal(ids, coder.encode(text))


@pytest.mark.parametrize("name", ["bytes", "bpe", "byte_level", "tiktoken"])
@given(TEXT)
def test_a_token_stands_for_its_own_bytes(name, text):
    coder = EXACT[name]
    ids, lengths = coder.encode_batch([text])[0]
    ends = np.cumsum(lengths)
    for i, length, end in zip(ids, lengths, ends, strict=True):
        assert coder.token_bytes[i] == text.encode()[end - length : end]


@exact
@given(TEXT)
def test_a_stream_gives_the_text_and_never_half_a_character(name, text):
    coder = EXACT[name]
    stream = coder.stream()
    parts = [stream(int(i)) for i in coder.encode(text)]
    assert "".join(parts) + stream.finish() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)
    so_far = list(itertools.accumulate(parts))
    assert all(text.startswith(part) for part in so_far)


@every
@given(st.data())
def test_a_stream_of_any_ids_is_their_text(name, data):
    """A model draws broken bytes, control tokens, and ids past the tokenizer's last."""
    coder = ALL[name]
    ids = data.draw(st.lists(st.integers(0, coder.vocab_size + 3), max_size=30))
    stream = coder.stream()
    parts = []
    for i in range(0, len(ids), 2):
        parts.append(stream(*ids[i : i + 2]))
    given_text = "".join(parts) + stream.finish()
    if name != "fallback":  # its decoder turns a whole run of bytes to U+FFFD when a later one is broken
        assert given_text == coder.decode(ids)
    assert coder.decode([coder.bos_id, coder.eos_id, coder.pad_id]) == ""


@every
def test_a_checkpoint_carries_the_tokenizer(name, tmp_path):
    coder = ALL[name]
    coder.save(tmp_path / "made" / "here")
    again = tokenizer.load(tmp_path / "made" / "here")
    assert type(again) is type(coder) and again.kind == coder.kind and again.vocab_size == coder.vocab_size
    assert (again.bos_id, again.eos_id, again.pad_id) == (coder.bos_id, coder.eos_id, coder.pad_id)
    assert again.fingerprint == coder.fingerprint
    for text in [*CORPUS, CONTROL]:
        np.testing.assert_array_equal(again.encode(text), coder.encode(text))


def test_fingerprints_tell_tokenizers_apart():
    others = [tokenizer.JsonTokenizer(byte_level_json(), 0, 1, 1), tokenizer.train_bpe(CORPUS, 350)]
    prints = [coder.fingerprint for coder in [*ALL.values(), *others]]
    assert len(set(prints)) == len(prints)


def test_bpe_is_the_same_from_every_training():
    """In one process, and in another with one thread and another hash seed."""
    texts = [d.text for d in itertools.islice(sources.read(sources.Source(), sources.Problems()), 60)]
    first, second = tokenizer.train_bpe(texts, 1024), tokenizer.train_bpe(iter(texts), 1024)
    assert first._json == second._json and first.vocab_size == 1024
    program = """if True:
        import hashlib, itertools
        from kimi_jax.data import sources, tokenizer
        texts = [d.text for d in itertools.islice(sources.read(sources.Source(), sources.Problems()), 60)]
        print(tokenizer.train_bpe(texts, 1024).fingerprint)"""
    env = {"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == first.fingerprint


def test_bpe_trains_on_a_sample_of_much_text(monkeypatch):
    """A sample by hash: no order, and no size of the whole, is needed to draw it."""
    texts = [f"{i} " + CORPUS[i % 3] * 10 for i in range(300)]
    whole = tokenizer.train_bpe(texts, 400)
    monkeypatch.setattr(tokenizer, "BPE_TRAINING_CHARS", sum(map(len, texts)) // 3)
    sampled = tokenizer.train_bpe(texts, 400)
    assert sampled.fingerprint == tokenizer.train_bpe(texts, 400).fingerprint != whole.fingerprint
    assert len(sampled.encode(texts[0])) <= 1.2 * len(whole.encode(texts[0]))
    monkeypatch.setattr(tokenizer, "BPE_TRAINING_CHARS", 1000)
    assert tokenizer.train_bpe(["one word and another " * 1000], 300).vocab_size > 259


def test_bpe_of_python_keeps_indentation_and_words_together():
    text = "    def run(self):\n        self.go\n        pass\n\n    def run(self):\n        self.n = 12345\n"
    coder = tokenizer.train_bpe([text * 50], 400)
    parts = [coder.decode([i]) for i in coder.encode(text)]
    for part in (" run", "(self", "):\n        ", ".go", "\n        pass", "\n\n    def", "123", "45"):
        assert part in parts


def test_kimi_encodes_as_tiktoken_does():
    import tiktoken

    lines = [line.split() for line in ranks_file().splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    theirs = tiktoken.Encoding(
        "x", pat_str=tokenizer.KIMI_PATTERN, mergeable_ranks=ranks, special_tokens={"[BOS]": len(ranks)}
    )
    ours = EXACT["tiktoken"]
    assert isinstance(ours, tokenizer.TiktokenTokenizer)
    assert ours.vocab_size == len(ranks) + 256

    @settings(max_examples=200)
    @given(TEXT)
    def compare(text):
        assert ours.encode(text).tolist() == theirs.encode(text, disallowed_special=())

    compare()
    assert [ours.decode([i]) for i in ours.encode("12345 the\r\n  x")][:2] == ["123", "4"]
    assert [ours.decode([i]) for i in ours.encode("a中文's")] == ["a", "中文", "'s"]
    special = ours.special_tokens
    base = len(ranks)
    assert special["[BOS]"] == base and special["[EOS]"] == base + 1 and special["<|end_of_msg|>"] == base + 2
    assert special["<|media_pad|>"] == base + 21 and special["[PAD]"] == base + 255
    assert special[f"<|reserved_token_{base + 100}|>"] == base + 100 and len(special) == 256


@pytest.mark.parametrize("text", [" " * 1_000_000, "a" * 1_000_000 + "\n", "\n" * 900_001 + "x", " a" * 300_000])
def test_kimi_takes_runs_that_overflow_tiktoken(text):
    ours = EXACT["tiktoken"]
    assert ours.decode(ours.encode(text)) == text


def test_kimi_cuts_where_the_released_code_does():
    """A loop over characters: a new part after 25 000 of one kind, and at each 400 000."""
    generator = np.random.default_rng(0)
    kinds = [" ", "x", "\t", "é"]
    text = "".join(kinds[int(generator.integers(4))] * int(generator.integers(1, 60_000)) for _ in range(40))
    expected = []
    for start in range(0, len(text), 400_000):
        part, run, space = "", 0, None
        for char in text[start : start + 400_000]:
            run = run + 1 if char.isspace() == space else 1
            space = char.isspace()
            if run > 25_000:
                expected.append(part)
                part, run = "", 1
            part += char
        expected.append(part)
    assert list(tokenizer._kimi_parts(text)) == expected


@pytest.mark.parametrize(
    "content, report",
    [
        (b"YQ== 0\nnonsense\n", r":2: b'nonsense' is not base64 and a rank"),
        (b"YQ== zero\n", ":1: "),
        (b"!!!! 0\n", ":1: "),
        (b"YQ== 0\n", "1 ranks must count from 0 and hold every byte"),
        (ranks_file().replace(b" 255\n", b" 999\n"), "must count from 0"),
    ],
)
def test_a_damaged_rank_file_is_refused(tmp_path, content, report):
    path = tmp_path / "tiktoken.model"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=report):
        tokenizer.make(TokenizerConfig(kind="tiktoken", path=str(path)), model_config(1000), [])


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"model": 3}'])
def test_a_damaged_tokenizer_json_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is no tokenizer\.json of the tokenizers library"):
        tokenizer.make(TokenizerConfig(kind="tokenizers", path=str(path)), model_config(1000), [])
    with pytest.raises(ConfigError, match=r"cannot read the tokenizer .*No such file"):
        tokenizer.make(TokenizerConfig(kind="tokenizers", path=str(tmp_path / "no")), model_config(1000), [])
    with pytest.raises(ConfigError, match="is no saved tokenizer"):
        tokenizer.load(tmp_path)


def test_a_tokenizer_must_suit_the_model(tmp_path):
    with pytest.raises(ConfigError, match=r"vocab_size=258 is smaller than the bytes tokenizer's 259 .* at least 259"):
        tokenizer.make(TokenizerConfig(), model_config(258), [])
    with pytest.raises(ConfigError, match=r"model\.eos_token_id=5 is not the bytes tokenizer's 1; set it to 1"):
        tokenizer.make(TokenizerConfig(), model_config(300, eos=5), [])
    with pytest.raises(ConfigError, match=r"vocab_size=258 is too small for bpe.* at least 259"):
        tokenizer.make(TokenizerConfig(kind="bpe"), model_config(258), CORPUS)
    assert tokenizer.make(TokenizerConfig(kind="bpe"), model_config(320), CORPUS).vocab_size == 320

    path = tmp_path / "tokenizer.json"
    path.write_text(word_json())
    config = TokenizerConfig(kind="tokenizers", path=str(path))
    size = LOSSY["words"].vocab_size
    assert tokenizer.make(config, model_config(size, 1, 2, 2), []).vocab_size == size
    with pytest.raises(ConfigError, match=f"smaller than the tokenizers tokenizer's {size} ids"):
        tokenizer.make(config, model_config(size - 1, 1, 2, 2), [])


def test_ids_may_have_gaps(tmp_path):
    """The largest id counts, not the number of ids."""
    raw = json.loads(word_json())
    raw["added_tokens"] = []
    raw["model"]["vocab"] = {"[UNK]": 0, "a": 70}
    coder = tokenizer.JsonTokenizer(json.dumps(raw), 0, 0, 0)
    assert coder.vocab_size == 71 and coder.encode("a b").tolist() == [70, 0]


def test_the_examples_of_the_docstrings():
    for module in (tokenizer, sources):
        assert doctest.testmod(module).failed == 0 and doctest.testmod(module).attempted > 0
