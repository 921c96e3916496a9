"""A byte-level BPE trained on the run's own text."""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from kimi_jax.config import ConfigError
from kimi_jax.files import unit_hash
from kimi_jax.text.tokenizer import SPECIALS, JsonTokenizer

# Where `bpe` cuts text before it merges, chosen on the standard library at 4096 tokens: a word keeps its
# underscores and takes the punctuation, or the line break and indentation, before it; other punctuation takes those
# after it; digits go by three: "(self", "):\n        ", "\n        return", ".append", "123".
BPE_PATTERN = r"(?:\s*\n[ \t]*| )?[^\s\w]*[\p{L}_]+|\p{N}{1,3}| ?[^\s\w]+(?:\s*\n[ \t]*)?|\s*\n[ \t]*|[ \t]+|\s+"


BPE_TRAINING_CHARS = 16_000_000  # more text hardly moves the merges of a small vocabulary, and takes longer


def train_bpe(texts: Iterable[str], vocab_size: int) -> JsonTokenizer:
    """Trains a byte-level BPE. The same texts in the same order give the same tokenizer.

    Args:
      texts: training text; of more than 16 million characters, a sample of the texts by their hash.
      vocab_size: ids in all, with 3 special tokens (`<|bos|>`, `<|eos|>`, `<|pad|>`: 0, 1, 2) and 256 bytes. Few
        texts can give fewer.

    Raises:
      ConfigError: the vocabulary does not hold the bytes.
    """
    least = len(SPECIALS) + 256
    if vocab_size < least:
        raise ConfigError(f"vocab_size={vocab_size} is too small for bpe; set model.vocab_size to at least {least}")
    kept: list[tuple[float, str]] = []
    share, size = 1.0, 0
    for text in texts:
        text = text[:BPE_TRAINING_CHARS]
        if (place := unit_hash(text)) < share:
            kept.append((place, text))
            size += len(text)
        while size > BPE_TRAINING_CHARS and len(kept) > 1:
            share /= 2
            kept = [(place, text) for place, text in kept if place < share]
            size = sum(len(text) for _, text in kept)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(tokenizers.Regex(BPE_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for _, text in kept), trainer)
    return JsonTokenizer(tokenizer.to_str(), 0, 1, 2, kind="bpe")
