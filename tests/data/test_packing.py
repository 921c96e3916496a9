"""Pieces and rows: every target of every document exactly once, against a slow oracle."""

import collections

import grain
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kimi_jax.data import packing
from kimi_jax.data.sources import Document
from kimi_jax.text.tokenizer import ByteTokenizer, Tokenizer

BYTES = ByteTokenizer()
DOCUMENTS = st.lists(
    st.builds(Document, st.text("aé🙂\n", min_size=1, max_size=12), st.text("pq", max_size=9)), max_size=12
)


def oracle(documents, length, tokenizer: Tokenizer = BYTES) -> list[list[tuple[int, int, int, int]]]:
    """Pieces of (token, target, carries loss, bytes), by a loop over pairs."""
    pieces = []
    for document in documents:
        (prompt, _), (text, sizes) = tokenizer.encode_batch([document.prompt, document.text])
        ids = [tokenizer.bos_id, *prompt, *text, tokenizer.eos_id]
        size = [0] * len(prompt) + [*sizes, len(document.text.encode()) - sum(sizes)]
        pairs = [(ids[i], ids[i + 1], int(i >= len(prompt)), int(size[i])) for i in range(len(ids) - 1)]
        cut = [pairs[i : i + length] for i in range(0, len(pairs), length)]
        pieces += [piece for piece in cut if any(pair[2] for pair in piece)]
    return pieces


def runs(batches) -> list[list[tuple[int, int, int, int]]]:
    """The maximal runs of one segment id >= 1 in all rows of all batches, as pieces."""
    found = []
    for batch in batches:
        for row in range(len(batch["tokens"])):
            last = 0
            for t, segment in enumerate(batch["segment_ids"][row]):
                if segment and segment != last:
                    found.append([])
                if segment:
                    names = ("tokens", "targets", "loss_weights", "num_bytes")
                    found[-1].append(tuple(int(batch[name][row, t]) for name in names))
                last = segment
    return found


@given(DOCUMENTS, st.integers(2, 9))
@example([], 4)
@example([Document("a" * n) for n in (1, 2, 3, 4, 5, 7, 8, 9)], 4)
@example([Document("a", "p" * n) for n in (0, 1, 2, 3, 4, 5, 8)], 4)
def test_pieces_are_those_of_the_oracle(documents, length):
    pieces = packing.Pieces(documents, BYTES, length)
    expected = oracle(documents, length)
    assert [[tuple(pair) for pair in piece.tolist()] for piece in (pieces[i] for i in range(len(pieces)))] == expected
    assert all(pieces[i].dtype == np.int32 for i in range(len(pieces)))
    targets = [pair for piece in expected for pair in piece if pair[2]]
    assert pieces.num_tokens == len(targets) == pieces.num_targets.sum()
    assert pieces.num_bytes == sum(pair[3] for pair in targets) == sum(len(d.text.encode()) for d in documents)
    assert pieces.num_documents == len(documents)


@given(DOCUMENTS.filter(len), st.integers(2, 9), st.integers(1, 5), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_rows_hold_every_piece_once(documents, length, batch_size, seed):
    pieces = packing.Pieces(documents, BYTES, length)
    packed = packing.rows(grain.MapDataset.source(pieces).shuffle(seed=seed), length, seed=seed)
    batches = list(packing.batches(packed, batch_size, BYTES.pad_id))
    count = collections.Counter(map(tuple, runs(batches)))
    assert count == collections.Counter(map(tuple, oracle(documents, length)))
    for batch in batches:
        kinds = {name: (value.shape, value.dtype.name) for name, value in batch.items()}
        whole = ((batch_size, length), "int32")
        assert kinds == dict.fromkeys(("tokens", "targets", "segment_ids", "num_bytes"), whole) | {
            "loss_weights": ((batch_size, length), "float32")
        }
        padding = batch["segment_ids"] == 0
        assert (batch["tokens"][padding] == BYTES.pad_id).all() and (batch["targets"][padding] == BYTES.pad_id).all()
        assert not batch["loss_weights"][padding].any() and not batch["num_bytes"][padding].any()
        for row in batch["segment_ids"]:  # 1, 1, 2, 2, ..., 0, 0
            real = np.count_nonzero(row)
            assert not row[real:].any() and set(np.diff(row[:real], prepend=0)) <= {0, 1} and (real == 0 or row[0] == 1)


def test_the_next_piece_starts_with_the_last_target():
    pieces = packing.Pieces([Document("abcdefghij")], BYTES, 4)
    a, b, c = (pieces[i] for i in range(3))
    assert [len(a), len(b), len(c)] == [4, 4, 3]
    assert a[0, 0] == BYTES.bos_id and c[-1, 1] == BYTES.eos_id
    assert a[-1, 1] == b[0, 0] and b[-1, 1] == c[0, 0]


def test_rows_are_full_where_pieces_allow():
    """4 % of padding at most on pieces of mixed lengths; a full piece has a row of its own."""
    generator = np.random.default_rng(0)
    documents = [Document("a" * int(n)) for n in generator.integers(1, 400, 2000)]
    pieces = packing.Pieces(documents, BYTES, 128)
    packed = packing.rows(grain.MapDataset.source(pieces).shuffle(seed=0), 128, seed=0)
    filled = np.concatenate([batch["segment_ids"] > 0 for batch in packing.batches(packed, 1, 2)])
    assert filled.mean() > 0.96


def test_wide_values_are_not_wrapped():
    """Ids over 65535, and tokens of more than 255 bytes."""

    class Wide(ByteTokenizer):
        vocab_size = 200_000

        def encode_batch(self, texts):
            return [(np.array([199_999], np.int32), np.array([len(t.encode())], np.int32)) for t in texts]

    pieces = packing.Pieces([Document("a" * 70_000)], Wide(), 8)
    # It gives an empty prompt one id, too.
    assert pieces[0].tolist() == [[0, 199_999, 0, 0], [199_999, 199_999, 1, 70_000], [199_999, 1, 1, 0]]
    assert pieces.num_bytes == 70_000


def test_text_without_ids_still_counts():
    class Blank(ByteTokenizer):
        def encode_batch(self, texts):
            return [(np.zeros(0, np.int32), np.zeros(0, np.int32)) for _ in texts]

    pieces = packing.Pieces([Document("   ")], Blank(), 8)
    assert pieces[0].tolist() == [[0, 1, 1, 3]] and pieces.num_bytes == 3


def test_documents_are_encoded_in_blocks_without_a_seam(monkeypatch):
    documents = [Document(chr(97 + i % 26) * (i % 7 + 1), "p" * (i % 3)) for i in range(100)]
    whole = packing.Pieces(iter(documents), BYTES, 5)
    monkeypatch.setattr(packing, "ENCODE_CHARS", 10)
    blocks = packing.Pieces(iter(documents), BYTES, 5)
    assert whole.fingerprint == blocks.fingerprint


@pytest.mark.parametrize("change", [dict(text="ab!"), dict(prompt="q"), dict(text="ab ")])
def test_the_fingerprint_sees_a_change(change):
    base = [Document("x"), Document("abc", "p"), Document("y")]
    changed = [base[0], Document(**{"text": "abc", "prompt": "p"} | change), base[2]]
    prints = [packing.Pieces(documents, BYTES, 4).fingerprint for documents in (base, base, changed)]
    assert prints[0] == prints[1] != prints[2]
    moved = [Document("ab"), Document("c")]
    joined = [Document("a"), Document("bc")]
    assert packing.Pieces(moved, BYTES, 4).fingerprint != packing.Pieces(joined, BYTES, 4).fingerprint
