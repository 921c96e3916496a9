"""The streams: epochs, mixtures, resumption at every step, validation, refusals."""

import collections
import dataclasses
import hashlib
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kimi_jax.config import ConfigError, DataConfig, Source, TokenizerConfig
from kimi_jax.data import packing, pipeline
from kimi_jax.data.sources import DataError
from kimi_jax.text.tokenizer import ByteTokenizer
from tests.data.conftest import model_config
from tests.data.test_packing import runs

LENGTH = 24


def write_jsonl(path: Path, texts, prompts=None) -> Source:
    prompts = prompts or [""] * len(texts)
    path.write_text("".join(json.dumps({"text": t, "ask": p}) + "\n" for t, p in zip(texts, prompts, strict=True)))
    return Source(kind="jsonl", path=str(path), prompt_field="ask")


def texts_of(name: str, count: int, longest: int) -> list[str]:
    """Texts of which no two are equal, of all lengths."""
    return [f"{name}{i}:" + "é-" * (i * 7 % longest) for i in range(count)]


@pytest.fixture
def corpus(tmp_path):
    """One source, and a mixture of three of unlike sizes, lengths and weights; one has prompts."""
    one = write_jsonl(tmp_path / "one.jsonl", texts_of("one", 60, 30))
    small = write_jsonl(tmp_path / "small.jsonl", texts_of("small", 9, 5))
    asked = write_jsonl(tmp_path / "asked.jsonl", texts_of("asked", 30, 9), ["why " * (i % 9) for i in range(30)])
    held = write_jsonl(tmp_path / "held.jsonl", texts_of("held", 20, 40), ["? " * (i % 3) for i in range(20)])
    plain = DataConfig(sequence_length=LENGTH, batch_size=3, sources=(one,), validation=(held,))
    weights = [dataclasses.replace(s, weight=w) for s, w in ((one, 5.0), (small, 1.0), (asked, 2.0))]
    return {"one": plain, "mixture": dataclasses.replace(plain, sources=tuple(weights))}


def load(config: DataConfig) -> pipeline.Data:
    return pipeline.load(config, model_config())


def take(iterator, count: int) -> list[dict[str, np.ndarray]]:
    return list(itertools.islice(iterator, count))


def same(a, b) -> bool:
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all((x[k] == y[k]).all() for k in x) for x, y in zip(a, b, strict=True)
    )


def epochs(data: pipeline.Data, count: int, seed: int = 0) -> list[list]:
    """Pieces of the first epochs, in order, told apart by the stream's own state (batches of one row)."""
    data = dataclasses.replace(data, config=dataclasses.replace(data.config, batch_size=1))
    iterator, found = data.train_iterator(seed=seed), [[] for _ in range(count)]
    while True:
        batch = next(iterator)
        epoch = iterator.get_state()["epoch"]
        if epoch == count:
            return found
        found[epoch] += runs([batch])


def pieces_of(pieces: packing.Pieces) -> collections.Counter:
    return collections.Counter(tuple(map(tuple, pieces[i].tolist())) for i in range(len(pieces)))


def count(pieces) -> collections.Counter:
    return collections.Counter(map(tuple, pieces))


def test_an_epoch_holds_every_token_once_in_another_order_each_time(corpus):
    data = load(corpus["one"])
    first, second, third = epochs(data, 3)
    assert count(first) == count(second) == count(third) == pieces_of(data.train[0])
    assert first != second != third != first
    assert epochs(data, 1, seed=1)[0] != first == epochs(load(corpus["one"]), 1)[0]
    assert epochs(data, 1, seed=-1)[0] != first


class CharTokenizer(ByteTokenizer):
    """An id for each character, so that texts of unlike characters make pieces that can be told apart."""

    vocab_size = 1 << 16

    def __init__(self):
        super().__init__()
        self.vocab_size = CharTokenizer.vocab_size

    def encode_batch(self, texts):
        ids = [np.array([ord(char) for char in text], np.int32) for text in texts]
        return [(i, np.full_like(i, 3)) for i in ids]


def test_a_mixture_keeps_its_shares_and_repeats_nothing_early(tmp_path):
    fresh = map(chr, itertools.count(0x1000))

    def source(name: str, weight: float, lengths, prompts=None) -> Source:
        make = ["".join(itertools.islice(fresh, n)) for n in lengths]
        ask = ["".join(itertools.islice(fresh, n)) for n in prompts or [0] * len(lengths)]
        return dataclasses.replace(write_jsonl(tmp_path / name, make, ask), weight=weight)

    sources = (
        source("long", 5.0, [1 + i * 7 % 90 for i in range(80)]),
        source("few", 1.0, [1, 2, 3, 4, 5, 6, 7]),
        source("asked", 2.0, [1 + i % 11 for i in range(60)], [i * 5 % 40 for i in range(60)]),
        source("rare", 0.3, [20] * 12),
    )
    config = DataConfig(sequence_length=LENGTH, batch_size=3, sources=sources, validation=sources[1:2])
    data = pipeline.load(config, model_config(1 << 16), CharTokenizer())
    pieces = [pieces_of(each) for each in data.train]
    assert all(max(each.values()) == 1 for each in pieces)
    weights = np.array([source.weight for source in sources]) / sum(source.weight for source in sources)
    largest = int(np.argmax([each.num_tokens for each in data.train] / weights))
    seen = [collections.Counter() for _ in sources]
    for epoch in epochs(data, 6):
        mine = [collections.Counter(p for p in map(tuple, epoch) if p in each) for each in pieces]
        assert sum(each.total() for each in mine) == len(epoch)
        assert mine[largest] == pieces[largest], "the source that is largest for its weight is read once"
        for all_seen, now, each in zip(seen, mine, pieces, strict=True):
            all_seen += now
            times = [all_seen[piece] for piece in each]
            assert max(times) - min(times) <= 1, "a piece came back before its source was through"
    tokens = np.array([sum(pair[2] for piece in each.elements() for pair in piece) for each in seen])
    np.testing.assert_allclose(tokens / tokens.sum(), weights, rtol=0.05)


@pytest.mark.parametrize("name, whole_epochs", [("one", 2), ("mixture", 1)])
def test_the_stream_goes_on_from_every_step(corpus, name, whole_epochs):
    """Epochs and their ends; each state goes through JSON to an iterator that never saw the rest."""
    data = load(corpus[name])
    iterator = data.train_iterator(seed=3)
    states, batches, beyond = [json.dumps(iterator.get_state())], [], 0
    while beyond < 5:
        batches.append(next(iterator))
        states.append(json.dumps(iterator.get_state()))
        beyond += json.loads(states[-1])["epoch"] == whole_epochs
    batches += take(iterator, 8)
    assert len(states) > 60
    resumed = load(corpus[name])
    for step, state in enumerate(states):
        again = resumed.train_iterator(seed=3)
        again.set_state(json.loads(state))
        assert json.dumps(again.get_state()) == state
        assert same(take(again, 2), batches[step : step + 2]), f"step {step}"
        assert len(state) < 300
    again.set_state(json.loads(states[5]))  # an iterator that has run on can be set back
    assert same(take(again, 8), batches[5:13])


def digest(batches) -> str:
    state = hashlib.sha256()
    for batch in batches:
        for name in sorted(batch):
            state.update(batch[name].tobytes())
    return state.hexdigest()


def test_the_stream_goes_on_in_a_new_process(corpus, tmp_path):
    config = dataclasses.replace(corpus["mixture"], tokenizer=TokenizerConfig(kind="bpe"))
    data = pipeline.load(config, model_config(300))
    data.tokenizer.save(tmp_path / "tokenizer")
    iterator = data.train_iterator(seed=5)
    take(iterator, 17)
    state = json.dumps(iterator.get_state())
    program = f"""if True:
        import json, itertools
        from kimi_jax.config import DataConfig, Source, TokenizerConfig
        from kimi_jax.data import pipeline
        from kimi_jax.text.load import load_tokenizer
        from tests.data.conftest import model_config
        from tests.data.test_pipeline import digest
        data = pipeline.load({config!r}, model_config(300), load_tokenizer({str(tmp_path / "tokenizer")!r}))
        iterator = data.train_iterator(seed=5)
        iterator.set_state(json.loads({state!r}))
        print(digest(itertools.islice(iterator, 30)), data.fingerprint)"""
    env = {"PYTHONHASHSEED": "11", "PYTHONPATH": ":".join(p for p in sys.path if p), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [digest(take(iterator, 30)), data.fingerprint]


def test_processes_share_each_batch(corpus):
    config = dataclasses.replace(corpus["mixture"], batch_size=6)
    data = load(config)
    whole = data.train_iterator(seed=0)
    parts = [data.train_iterator(seed=0, shard=(i, 3)) for i in range(3)]
    for step in range(40):
        if step == 20:  # a state of three processes goes on in one
            whole = data.train_iterator(seed=0)
            whole.set_state(parts[1].get_state())
        expected, got = next(whole), [next(part) for part in parts]
        assert all(batch["tokens"].shape == (2, LENGTH) for batch in got)
        assert same([{k: np.concatenate([b[k] for b in got]) for k in expected}], [expected])
    assert parts[0].get_state() == whole.get_state()
    with pytest.raises(DataError, match="batch_size=6 does not divide over 4 processes"):
        data.train_iterator(seed=0, shard=(0, 4))


def test_validation_is_every_token_once_and_the_same_each_time(corpus):
    data = load(corpus["one"])
    batches = list(data.validation_batches())
    assert same(batches, list(data.validation_batches())) and same(
        batches, list(load(corpus["one"]).validation_batches())
    )
    assert count(runs(batches)) == pieces_of(data.validation)
    assert all(batch["tokens"].shape == (3, LENGTH) for batch in batches)
    held = "".join(texts_of("held", 20, 40)).encode()
    assert data.validation_bytes() == held
    assert sum(int(batch["num_bytes"].sum()) for batch in batches) == len(held) == data.validation.num_bytes


@pytest.mark.parametrize("most", [1, 50, 200, 10**9])
def test_a_short_validation_is_part_of_the_long_one(corpus, most):
    data = load(corpus["one"])
    short = count(runs(data.validation_batches(max_tokens=most)))
    tokens = sum(pair[2] for piece in short.elements() for pair in piece)
    assert short <= pieces_of(data.validation)
    assert len(short) == 1 if most == 1 else min(most, data.validation.num_tokens) - LENGTH < tokens <= most


def test_a_fraction_is_set_apart_for_validation(corpus):
    config = dataclasses.replace(corpus["mixture"], validation=(), validation_fraction=0.3)
    data = load(config)
    number = data.validation.num_documents
    assert number + sum(p.num_documents for p in data.train) == 99 and 15 < number < 45
    held = data.validation_bytes().decode()
    assert len(held.encode()) == data.validation.num_bytes
    train = {b for piece in epochs(data, 1)[0] for b in ["".join(chr(p[1]) for p in piece)]}
    trained = "".join(ByteTokenizer().decode([p[1] for p in piece]) for piece in epochs(data, 1)[0])
    assert train and all(name in trained or name in held for name in ("one0:", "small0:", "asked0:"))
    for name in ("one", "small", "asked"):
        inside = [f"{name}{i}:" in held for i in range(9)]
        assert not any(f"{name}{i}:" in trained for i in range(9) if inside[i])


def test_eval_reads_any_source(corpus, tmp_path):
    data = load(corpus["one"])
    source = Source(kind="text", path=str(tmp_path), glob="one.jsonl")
    batches, problems = pipeline.eval_batches([source], data.tokenizer, data.config)
    assert sum(int(b["num_bytes"].sum()) for b in batches) == len((tmp_path / "one.jsonl").read_bytes())
    assert not problems.counts
    held, _ = pipeline.eval_batches(data.config.validation, data.tokenizer, data.config, max_tokens=100)
    assert same(list(held), list(data.validation_batches(max_tokens=100)))
    (tmp_path / "none.txt").write_text("")
    with pytest.raises(DataError, match=r"no document in .*none\.txt \(skipped 1 document: 1 empty document"):
        pipeline.eval_batches([Source(kind="text", path=str(tmp_path / "none.txt"))], data.tokenizer, data.config)


def test_the_fingerprint_is_of_what_is_read_and_not_of_where_it_lies(corpus, tmp_path):
    config = corpus["mixture"]
    prints = {load(config).fingerprint}

    def changed(**change) -> str:
        return load(dataclasses.replace(config, **change)).fingerprint

    first, *rest = config.sources
    (tmp_path / "moved").mkdir()
    shutil.copy(first.path, tmp_path / "moved" / "other.jsonl")
    assert changed(sources=(dataclasses.replace(first, path=str(tmp_path / "moved" / "other.jsonl")), *rest)) in prints
    for change in (
        dict(sources=(dataclasses.replace(first, weight=5.5), *rest)),
        dict(sources=(*rest, first)),
        dict(sources=tuple(rest)),
        dict(sequence_length=LENGTH + 1),
        dict(batch_size=4),
        dict(validation=(), validation_fraction=0.3),
        dict(validation=(first,)),
    ):
        prints.add(changed(**change))
    bpe = pipeline.load(dataclasses.replace(config, tokenizer=TokenizerConfig(kind="bpe")), model_config(300))
    prints.add(bpe.fingerprint)
    path = Path(first.path)
    path.write_text(path.read_text().replace("one7:", "one7;"))
    prints.add(load(config).fingerprint)
    assert len(prints) == 10


def test_a_corpus_that_cannot_train_is_refused_before_it_does(tmp_path, corpus):
    source = corpus["one"].sources[0]
    base = DataConfig(sequence_length=8, batch_size=2, sources=(source,))
    with pytest.raises(ConfigError, match="sequence_length=1 leaves nothing to predict from; set it to at least 2"):
        dataclasses.replace(base, sequence_length=1)
    with pytest.raises(ConfigError, match="vocab_size=200 is smaller"):
        pipeline.load(base, model_config(200))
    with pytest.raises(ConfigError, match="vocab_size=258 is smaller"):
        pipeline.load(base, model_config(258), ByteTokenizer())
    with pytest.raises(DataError, match="does not exist"):
        load(dataclasses.replace(base, sources=(source, Source(kind="text", path=str(tmp_path / "no")))))
    with pytest.raises(DataError, match="does not exist"):
        load(dataclasses.replace(base, validation=(Source(kind="text", path=str(tmp_path / "no")),)))
    bad = tmp_path / "bad.jsonl"
    bad.write_text("nonsense\n{}\n")
    with pytest.raises(
        DataError, match=r"jsonl source .* has no training documents \(skipped 2 documents: .*bad\.jsonl:1"
    ):
        load(dataclasses.replace(base, sources=(source, Source(kind="jsonl", path=str(bad)))))
    with pytest.raises(DataError, match=r"bad\.jsonl:1: malformed JSON"):
        load(dataclasses.replace(base, sources=(Source(kind="jsonl", path=str(bad)),), on_error="raise"))
    with pytest.raises(DataError, match=r"fix data\.validation"):
        load(dataclasses.replace(base, validation=(Source(kind="jsonl", path=str(bad)),)))
    lone = write_jsonl(tmp_path / "lone.jsonl", ["only one"])
    with pytest.raises(
        DataError, match=r"no validation document among 1 for training; raise data\.validation_fraction"
    ):
        load(dataclasses.replace(base, sources=(lone,)))


def test_problems_of_both_sides_are_told_once(tmp_path, corpus):
    lines = Path(corpus["one"].sources[0].path).read_text()
    for name in ("train", "held"):
        (tmp_path / f"{name}.jsonl").write_text("nonsense\n" + lines)
    source, held = (Source(kind="jsonl", path=str(tmp_path / f"{name}.jsonl")) for name in ("train", "held"))
    split = load(DataConfig(sequence_length=8, batch_size=2, sources=(source,), validation_fraction=0.3))
    assert split.problems.counts == {"malformed JSON": 1}
    given = load(DataConfig(sequence_length=8, batch_size=2, sources=(source,), validation=(held,)))
    assert given.problems.counts == {"malformed JSON": 2}
    first, second = given.summary().splitlines()
    assert first.startswith("60 training documents, 0.00 MB, ") and "60 validation documents" in first
    assert second.startswith("skipped 2 documents: 2 malformed JSON; first: ") and "held.jsonl:1" in second


def test_a_single_text_file_trains(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {i}\n" for i in range(500)))
    source = Source(kind="text", path=str(path))
    data = load(DataConfig(sequence_length=32, batch_size=4, sources=(source,), validation_fraction=0.1))
    assert path.read_bytes().endswith(data.validation_bytes()) and data.validation_bytes().startswith(b"line ")
    assert data.train[0].num_bytes + data.validation.num_bytes == path.stat().st_size


def test_the_standard_library_trains_out_of_the_box():
    data = load(DataConfig(sequence_length=512, batch_size=8))
    assert data.problems.summary() == ""
    share = data.validation.num_bytes / (data.validation.num_bytes + data.train[0].num_bytes)
    assert 0.002 < share < 0.1
    batches = take(data.train_iterator(seed=0), 200)
    assert np.mean([batch["segment_ids"] > 0 for batch in batches]) > 0.95
    decoded = data.tokenizer.decode(batches[0]["tokens"].ravel())
    assert "self" in decoded and "def " in decoded
