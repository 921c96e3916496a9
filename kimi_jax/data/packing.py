"""Encoded documents, split into pieces that fit a row, and rows packed from pieces.

A document of tokens x_1 ... x_n is read as begin, x_1 ... x_n and predicted as x_1 ... x_n, end. These n + 1
(token, target) pairs are split into pieces of at most `sequence_length`; the token that begins a piece is the
target that ended the one before. So each target belongs to exactly one piece. Pieces become rows by best fit,
each with a segment id of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from hashlib import blake2b

import grain
import numpy as np

from kimi_jax.data.sources import Document
from kimi_jax.text.tokenizer import Tokenizer

BINS = 64  # rows that best fit chooses from; an epoch ends with one such set that is not full
ENCODE_CHARS = 1 << 20  # text handed to the tokenizer at a time, so that its threads have work


class Pieces:
    """Encoded documents in memory, and random access to their pieces (a grain data source).

    It takes 2 bytes per token for vocabularies up to 65536 ids, else 4, and 1 byte per token for its source bytes.
    Pieces of prompt alone are left out: they carry no loss, and nothing of them reaches the next piece.

    Attributes:
      num_documents, num_tokens, num_bytes: targets with loss (the ends of documents count as tokens), and
        the bytes of text they stand for.
    """

    def __init__(self, documents: Iterable[Document], tokenizer: Tokenizer, sequence_length: int):
        ids, sizes, lengths, prompts = [], [], [], []
        self.num_bytes = 0
        for document_ids, document_sizes, prompt, text_bytes in _encode(documents, tokenizer):
            # Text that a tokenizer gives no id for (some drop blank text) is counted at the end of its document.
            rest = text_bytes - int(document_sizes[prompt:].sum())
            ids += [[tokenizer.bos_id], document_ids, [tokenizer.eos_id]]
            sizes += [[0], document_sizes, [rest]]
            lengths.append(len(document_ids) + 1)
            prompts.append(prompt)
            self.num_bytes += text_bytes
        self._ids = _concatenate(ids, np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32)
        self._sizes = _concatenate(sizes, np.uint8)
        pairs, prompt = np.array(lengths, np.int64), np.array(prompts, np.int64)
        self.num_documents = len(lengths)
        self.num_tokens = int((pairs - prompt).sum())

        count = -(-pairs // sequence_length)
        document = np.repeat(np.arange(len(lengths)), count)
        start = (np.arange(len(document)) - np.repeat(np.cumsum(count) - count, count)) * sequence_length
        length = np.minimum(pairs[document] - start, sequence_length)
        loss_from = np.maximum(prompt[document] - start, 0)  # place in the piece of its first target with loss
        keep = loss_from < length
        first = np.cumsum(pairs + 1) - (pairs + 1)  # of each document in the flat ids
        self._begin, self._length, self._loss_from = (first[document] + start)[keep], length[keep], loss_from[keep]

    def __len__(self) -> int:
        return len(self._begin)

    def __getitem__(self, index) -> np.ndarray:
        """Piece `index` [n, 4] int32: token, target, 1 if the target carries loss, bytes of a target with loss."""
        begin, length = int(self._begin[index]), int(self._length[index])
        loss = np.arange(length) >= self._loss_from[index]
        stop = begin + length
        columns = self._ids[begin:stop], self._ids[begin + 1 : stop + 1], loss, self._sizes[begin + 1 : stop + 1] * loss
        return np.stack(columns, axis=1, dtype=np.int32, casting="unsafe")

    def __repr__(self) -> str:
        return f"Pieces({self.num_documents} documents, {self.num_tokens} tokens, {len(self)} pieces)"

    @property
    def num_targets(self) -> np.ndarray:
        """Targets with loss of each piece, int64."""
        return self._length - self._loss_from

    @property
    def fingerprint(self) -> bytes:
        """A hash of the documents and their pieces."""
        digest = blake2b(digest_size=16)
        for array in (self._ids, self._sizes, self._begin, self._length, self._loss_from):
            digest.update(f"{array.dtype}{len(array)}".encode() + np.ascontiguousarray(array).data)
        return digest.digest()


def _encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray, int, int]]:
    """Of each document: ids, their source bytes, the number of ids of the prompt, the bytes of the text."""
    waiting: list[Document] = []
    size = 0

    def flush():
        coded = tokenizer.encode_batch([text for d in waiting for text in (d.prompt, d.text)])
        for document, prompt, text in zip(waiting, coded[::2], coded[1::2], strict=True):
            ids, sizes = (np.concatenate(parts) for parts in zip(prompt, text, strict=True))
            yield ids, sizes, len(prompt[0]), len(document.text.encode())
        waiting.clear()

    for document in documents:
        waiting.append(document)
        size += len(document.text) + len(document.prompt)
        if size >= ENCODE_CHARS:
            yield from flush()
            size = 0
    yield from flush()


def _concatenate(arrays: list, dtype) -> np.ndarray:
    """One flat array, of `dtype` if all values fit it and of int32 otherwise."""
    flat = np.concatenate([np.asarray(a, np.int32) for a in arrays]) if arrays else np.zeros(0, np.int32)
    return flat.astype(dtype) if flat.size == 0 or flat.max() <= np.iinfo(dtype).max else flat


def rows(pieces: grain.MapDataset, sequence_length: int, *, seed: int) -> grain.IterDataset:
    """Packs pieces into rows of `sequence_length`, in an order shuffled within every `BINS` rows.

    Args:
      pieces: elements [n, 4] as `Pieces` gives them.
      sequence_length: pairs of a row.
      seed: of the order of rows.
    """
    read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # pieces are slices of memory
    stream = pieces.map(lambda piece: {"pairs": piece}).to_iter_dataset(read)
    return grain.experimental.BestFitPackIterDataset(
        stream, length_struct={"pairs": sequence_length}, num_packing_bins=BINS, seed=seed
    )


def batches(stream: grain.IterDataset, batch_size: int, pad_id: int) -> grain.IterDataset:
    """Batches of packed rows; a last one that is short is filled up with rows of padding.

    Returns:
      Dicts of [batch_size, sequence_length] arrays: `tokens`, `targets`, `segment_ids` and `num_bytes` int32,
      `loss_weights` float32. Where `segment_ids` is 0, the ids are `pad_id` and weights and bytes 0.
    """
    fill = functools.partial(grain.experimental.batch_and_pad, batch_size=batch_size)

    def unpack(packed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        segment_ids = packed["pairs_segment_ids"]
        token, target, loss, size = np.moveaxis(packed["pairs"], -1, 0)
        return {
            "tokens": np.where(segment_ids > 0, token, pad_id).astype(np.int32),
            "targets": np.where(segment_ids > 0, target, pad_id).astype(np.int32),
            "segment_ids": segment_ids,
            "loss_weights": loss.astype(np.float32),
            "num_bytes": np.ascontiguousarray(size),
        }

    return stream.batch(batch_size, batch_fn=fill).map(unpack)
