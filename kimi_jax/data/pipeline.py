"""From a `DataConfig` to batches: the corpus, its two sides, and streams whose state is a few integers.

    documents -> tokenizer -> pieces -> shuffle -> mixture -> best-fit rows -> batches

The corpus is read and tokenised once, when a run begins; after that a batch costs a few slices of memory, and
the state of the stream is exactly what has been handed out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import grain
import numpy as np

from kimi_jax.config import ConfigError, DataConfig, ModelConfig, Source
from kimi_jax.data import packing
from kimi_jax.data.sources import DataError, Document, Problems, read, side
from kimi_jax.text.load import check_tokenizer, make_tokenizer
from kimi_jax.text.tokenizer import Tokenizer

MOST_PIECES = 2**48
"""Of an epoch; a run that sees them all is longer than anyone waits."""


@dataclass(frozen=True)
class Data:
    """A corpus ready to train on. Made by `load`."""

    config: DataConfig
    tokenizer: Tokenizer
    train: tuple[packing.Pieces, ...]
    """One for each source."""
    validation: packing.Pieces
    problems: Problems
    """What was skipped, on both sides."""

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides the stream of batches: text, tokenizer, split, weights, shapes.

        Folders and file names are not part of it, except where they set a file apart for validation.
        """
        settings = self.config.sequence_length, self.config.batch_size, [s.weight for s in self.config.sources]
        digest = blake2b(f"{settings} {self.tokenizer.fingerprint}".encode(), digest_size=16)
        for pieces in (*self.train, self.validation):
            digest.update(pieces.fingerprint)
        return digest.hexdigest()

    def train_iterator(self, *, seed: int, shard: tuple[int, int] = (0, 1)) -> grain.DatasetIterator:
        """Endless training batches (`packing.batches` has their form), in another order each epoch.

        An epoch of one source predicts each of its tokens exactly once. In a mixture, weights are shares of
        tokens, and an epoch is the pass that reads the source that is largest for its weight exactly once; the
        others continue from one epoch to the next, so that each of them, too, repeats nothing before it has been
        read whole. Rows do not reach over the end of an epoch, batches do.

        `get_state()` is plain JSON, and `set_state` of it, in a new process too, gives the batches that follow.

        Args:
          seed: any integer; decides every order.
          shard: (index, count): this process gets the `index`-th part of the rows of each batch. The state is
            the same in all of them.

        Raises:
          DataError: `count` does not divide the batch.
        """
        index, count = shard
        rows = self.config.batch_size // count
        if rows * count != self.config.batch_size:
            raise DataError(
                f"batch_size={self.config.batch_size} does not divide over {count} processes; set it to a multiple"
            )
        weights = [source.weight for source in self.config.sources]
        epochs = _Epochs(_epochs(self.train, weights, self.config.sequence_length, seed))
        stream = packing.batches(epochs, self.config.batch_size, self.tokenizer.pad_id)
        if count > 1:
            stream = stream.map(lambda b: {k: v[index * rows : (index + 1) * rows] for k, v in b.items()})
        return iter(stream)

    def validation_batches(self, *, max_tokens: int | None = None) -> Iterable[dict[str, np.ndarray]]:
        """The validation tokens, each exactly once, in batches that are the same every time.

        Args:
          max_tokens: stop before this many tokens (but not before the first piece); the same random sample of
            pieces every time.
        """
        return _once(self.validation, self.tokenizer, self.config, max_tokens)

    def validation_bytes(self) -> bytes:
        """The text of the validation documents (not their prompts), one after the other, read again."""
        return "".join(d.text for d in _documents(self.config, Problems(), held_out=True)).encode()

    def summary(self) -> str:
        """What there is to read, and in a second line what was skipped."""
        lines = [
            f"{pieces.num_documents:,} {name} documents, {pieces.num_bytes / 1e6:.2f} MB, {pieces.num_tokens:,} tokens"
            for name, pieces in [*(("training", p) for p in self.train), ("validation", self.validation)]
        ]
        return "\n".join(["; ".join(lines), self.problems.summary()]).strip()


def load(config: DataConfig, model: ModelConfig, tokenizer: Tokenizer | None = None) -> Data:
    """Reads and tokenises a corpus.

    Args:
      config: what to read.
      model: its vocabulary, which the tokenizer must suit.
      tokenizer: the one of the checkpoint that training resumes from; None makes the one of the config.

    Raises:
      ConfigError: the tokenizer does not suit the model.
      DataError: a path is missing, a source or a side of the split has no documents, or a document is malformed
        and `on_error` is "raise".
    """
    if tokenizer is None:
        texts = (d.text for s in config.sources for d in _documents(config, Problems(), s, held_out=False))
        tokenizer = make_tokenizer(config.tokenizer, model, texts)
    else:
        check_tokenizer(tokenizer, model)
    problems = Problems(config.on_error)
    train = tuple(
        packing.Pieces(_documents(config, problems, source, held_out=False), tokenizer, config.sequence_length)
        for source in config.sources
    )
    skipped = Problems() if not config.validation else problems  # a split reads the same files again
    validation = packing.Pieces(_documents(config, skipped, held_out=True), tokenizer, config.sequence_length)
    note = f" ({problems.summary()})" if problems.counts else ""
    for source, pieces in zip(config.sources, train, strict=True):
        if not len(pieces):
            raise DataError(f"the {source.kind} source {source.path} has no training documents{note}; fix the source")
    _pieces_per_epoch(train, [source.weight for source in config.sources])  # raises before the first step
    if not len(validation):
        fix = (
            "fix data.validation"
            if config.validation
            else f"raise data.validation_fraction={config.validation_fraction}, or name data.validation"
        )
        raise DataError(f"no validation document among {sum(p.num_documents for p in train)} for training; {fix}{note}")
    return Data(config, tokenizer, train, validation, problems)


def eval_batches(
    sources: Sequence[Source], tokenizer: Tokenizer, config: DataConfig, *, max_tokens: int | None = None
) -> tuple[Iterable[dict[str, np.ndarray]], Problems]:
    """All tokens of some sources, each exactly once, in batches as `Data.validation_batches` gives them.

    Args:
      sources: read in full, whatever their weight.
      tokenizer: of the model.
      config: `sequence_length`, `batch_size` and `on_error` are read.
      max_tokens: as in `Data.validation_batches`.

    Returns:
      The batches, and what was skipped.

    Raises:
      DataError: as `load`.
    """
    problems = Problems(config.on_error)
    documents = itertools.chain.from_iterable(read(source, problems) for source in sources)
    pieces = packing.Pieces(documents, tokenizer, config.sequence_length)
    if not len(pieces):
        note = f" ({problems.summary()})" if problems.counts else ""
        raise DataError(f"no document in {', '.join(s.path or s.kind for s in sources)}{note}; fix the source")
    return _once(pieces, tokenizer, config, max_tokens), problems


def _documents(
    config: DataConfig, problems: Problems, source: Source | None = None, *, held_out: bool
) -> Iterator[Document]:
    """One side of one source, or of all."""
    if held_out and config.validation:
        yield from itertools.chain.from_iterable(read(source, problems) for source in config.validation)
        return
    for each in config.sources if source is None else [source]:
        documents = read(each, problems)
        yield from documents if config.validation else side(documents, config.validation_fraction, held_out=held_out)


def _once(
    pieces: packing.Pieces, tokenizer: Tokenizer, config: DataConfig, max_tokens: int | None
) -> grain.IterDataset:
    order = np.random.default_rng(0).permutation(len(pieces))
    if max_tokens is not None:
        if max_tokens < 1:
            raise ConfigError(f"max_tokens={max_tokens} must be at least 1; set it to 1 or more, or None for all")
        tokens = np.cumsum(pieces.num_targets[order])
        order = order[: max(1, int(np.searchsorted(tokens, max_tokens, side="right")))]
    picked = grain.MapDataset.source(order.tolist()).map(pieces.__getitem__)
    packed = packing.rows(picked, config.sequence_length, seed=0)
    return packing.batches(packed, config.batch_size, tokenizer.pad_id)


class _Shares(grain.transforms.DatasetSelectionMap):
    """One epoch of a mixture: `counts[i]` pieces of source i, continuing from the epoch before, in random order."""

    def __init__(self, counts: np.ndarray, epoch: int, seed: int):
        self._counts, self._epoch, self._seed = counts, epoch, seed
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[int, int]:
        place = grain.experimental.index_shuffle(index, max_index=len(self) - 1, seed=self._seed, rounds=4)
        source = int(np.searchsorted(self._ends, place, side="right"))
        before = int(self._ends[source] - self._counts[source])
        return source, self._epoch * int(self._counts[source]) + place - before


def _epochs(
    sources: Sequence[packing.Pieces], weights: Sequence[float], sequence_length: int, seed: int
) -> Callable[[int], grain.IterDataset]:
    """Returns what makes the rows of an epoch by its number."""

    def derived(*numbers: int) -> int:
        return int(np.random.SeedSequence([seed % 2**64, *numbers]).generate_state(1)[0])

    counts = _pieces_per_epoch(sources, weights)
    endless = [grain.MapDataset.source(pieces).shuffle(seed=derived(0, i)).repeat() for i, pieces in enumerate(sources)]

    def epoch_rows(epoch: int) -> grain.IterDataset:
        shares = _Shares(counts, epoch, derived(1, epoch))
        mixture = grain.MapDataset.select_from_datasets(endless, selection_map=shares)
        return packing.rows(mixture, sequence_length, seed=derived(2, epoch))

    return epoch_rows


def _pieces_per_epoch(sources: Sequence[packing.Pieces], weights: Sequence[float]) -> np.ndarray:
    """Pieces of each source: its tokens are to its weight as those of the source that is read once.

    Raises:
      DataError: the weights are so far apart that there is no counting them.
    """
    tokens = np.array([pieces.num_tokens for pieces in sources], np.float64)
    share = np.array(weights, np.float64) / np.sum(weights)
    with np.errstate(all="ignore"):  # found out below
        passes = np.max(tokens / share) * share / tokens
        counts = np.maximum(np.rint(passes * [len(pieces) for pieces in sources]), 1)
    if not counts.sum() < MOST_PIECES:
        raise DataError(
            f"weights {', '.join(map(str, weights))} of data.sources are too far apart: an epoch would have "
            f"{counts.sum():.3g} pieces; bring them closer together"
        )
    return counts.astype(np.int64)


class _Epochs(grain.IterDataset):
    """The rows of epoch 0, then of epoch 1, and so on."""

    def __init__(self, epoch_rows: Callable[[int], grain.IterDataset]):
        super().__init__()
        self._epoch_rows = epoch_rows

    def __iter__(self) -> grain.DatasetIterator:
        return _EpochsIterator(self._epoch_rows)


class _EpochsIterator(grain.DatasetIterator):
    def __init__(self, epoch_rows: Callable[[int], grain.IterDataset]):
        super().__init__()
        self._epoch_rows = epoch_rows
        self._start(0)

    def _start(self, epoch: int) -> None:
        self._epoch, self._rows = epoch, iter(self._epoch_rows(epoch))

    def __next__(self):
        row = next(self._rows, None)
        if row is None:
            self._start(self._epoch + 1)
            row = next(self._rows)
        return row

    def get_state(self) -> dict:
        return {"epoch": self._epoch, "rows": self._rows.get_state()}

    def set_state(self, state: dict) -> None:
        self._start(state["epoch"])
        self._rows.set_state(state["rows"])
