"""Tokenizers: bytes, byte-level BPE trained on the run's own text, any `tokenizers` JSON, Kimi's tiktoken ranks.

All four have one interface (`Tokenizer`). Text is never read as a control token: a document that spells
`<|eos|>` or `<|open|>` is encoded as those characters. Control tokens come from `encode_segments` alone, out of the
segments that the caller, and not the text, marks as control.
"""

from __future__ import annotations

import abc
import codecs
import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from kimi_jax import files
from kimi_jax.config import ConfigError
from kimi_jax.config.checks import LONGEST, SURROGATE, shown

SETTINGS, RANKS, JSON = "tokenizer_config.json", "tiktoken.model", "tokenizer.json"  # files of a saved tokenizer


RELEASED = (RANKS, JSON)  # a released directory with a tokenizer has one of them


SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")  # ids 0, 1, 2 of the tokenizers that are made here


MOST_IDS = 2**22  # of a vocabulary; tables have a place for each, and no tokenizer has a tenth as many


class Tokenizer(abc.ABC):
    """Text to ids and back.

    Attributes:
      vocab_size: one more than the largest id.
      bos_id, eos_id, pad_id: the ids that begin a document, end it, and fill rows.
      eos_ids: all ids that end a document, of which `eos_id` is the first; most tokenizers have one.
      special_tokens: the control tokens, name -> id.
      token_bytes: the bytes of each id (none for special tokens), or None where ids are not byte strings.
    """

    kind: str
    vocab_size: int
    special_tokens: Mapping[str, int]
    token_bytes: list[bytes] | None

    def __init__(self, bos_id: int, eos_id: int | Sequence[int], pad_id: int):
        self.eos_ids = (eos_id,) if isinstance(eos_id, int) else tuple(dict.fromkeys(eos_id))
        self.bos_id, self.eos_id, self.pad_id = bos_id, self.eos_ids[0], pad_id

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encodes texts, without special tokens.

        Args:
          texts: any text of Unicode characters.

        Returns:
          For each text its ids [n] int32, and [n] int32 the bytes of the text's UTF-8 that each id stands for.
          The bytes sum to the length of the UTF-8, except where a tokenizer gives no id at all.
        """

    def encode(self, text: str) -> np.ndarray:
        """The ids [n] int32 of a text, without special tokens.

        Raises:
          ConfigError: the text has no UTF-8, being what a command line in another encoding becomes.
        """
        _check_text(text)
        return self.encode_batch([text])[0][0]

    def encode_segments(self, segments: Iterable[tuple[str, bool]]) -> np.ndarray:
        """Encodes a conversation: text that anyone may have written, between control tokens that only we write.

        Args:
          segments: (text, is_control) in their order, each encoded on its own. In a control segment the names of
            `special_tokens` are those tokens, and what is between them is text; elsewhere all is text.

        Returns:
          Ids [n] int32.

        >>> ByteTokenizer().encode_segments([("<|bos|>", True), ("<|eos|>", False)])[:4].tolist()
        [0, 63, 127, 104]
        """
        names = sorted(self.special_tokens, key=len, reverse=True)
        cut = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "(?!)")
        parts: list[int | str] = []
        for text, is_control in segments:
            _check_text(text)
            pieces = cut.split(text) if is_control else [text]
            parts += [self.special_tokens[piece] if i % 2 else piece for i, piece in enumerate(pieces)]
        texts = iter(self.encode_batch([part for part in parts if isinstance(part, str)]))
        ids = [next(texts)[0] if isinstance(part, str) else np.array([part], np.int32) for part in parts]
        return np.concatenate([np.zeros(0, np.int32), *ids])

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids after which a model has nothing more to say."""
        return self.eos_ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Special tokens have none; bytes that are not UTF-8 become U+FFFD."""
        return self.bytes_of(ids).decode("utf-8", "replace")

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids, where `token_bytes` has them; ids past `vocab_size` (spare rows of a model) have none."""
        table = self.token_bytes
        assert table is not None
        return b"".join(table[i] for i in _checked(ids) if i < len(table))

    def stream(self) -> TextStream:
        """A decoder for ids that come one by one."""
        return TextStream(self)

    @property
    def files(self) -> dict[str, bytes]:
        """The files beside `tokenizer_config.json` that `save` writes, by name."""
        return {}

    def save(self, folder: Path | str) -> None:
        """Writes the tokenizer to a folder, for `load_tokenizer`; last the settings, without which it is none.

        Raises:
          FileError: the folder cannot be written.
        """
        settings = {**self._settings(), **self._names()}
        if len(self.eos_ids) > 1:
            settings["eos_token_id"] = list(self.eos_ids)  # as releases have it
        for name, content in {**self.files, SETTINGS: json.dumps(settings).encode()}.items():
            files.write(Path(folder) / name, content)

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides the ids of text."""
        digest = blake2b(json.dumps(self._settings()).encode(), digest_size=16)
        for name, content in sorted(self.files.items()):
            digest.update(name.encode() + len(content).to_bytes(8, "big") + content)
        return digest.hexdigest()

    def _settings(self) -> dict:
        return {"kind": self.kind} | {f"{n}_token_id": getattr(self, f"{n}_id") for n in ("bos", "eos", "pad")}

    def _names(self) -> dict:
        """What `save` writes of control tokens, if their names are in no file."""
        return {}


def _check_text(text: str) -> None:
    if found := SURROGATE.search(text):
        raise ConfigError(
            f"text {shown(text)} has half a surrogate pair at character {found.start()}, which has no UTF-8; write it "
            "in UTF-8"
        )


def _checked(ids: Iterable[int]) -> list[int]:
    """Ids as integers of Python.

    Raises:
      ConfigError: one is negative, which would count from the end.
    """
    checked = [operator.index(i) for i in ids]
    if checked and min(checked) < 0:
        raise ConfigError(f"id {min(checked)} of a token must not be negative; leave it out")
    return checked


class TextStream:
    """Turns ids that come one by one into text, and never gives half a character.

    What was given and what `finish` returns make up `decode` of all ids. (Where ids are not byte strings, a decoder
    may still change its mind about text before broken bytes; what was given stays.)

    >>> stream = ByteTokenizer().stream()
    >>> [stream(id + 3) for id in "é!".encode()], stream.finish()
    (['', 'é', '!'], '')
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []
        self._given = 0

    def __call__(self, *ids: int) -> str:
        """The text that these ids complete; often empty."""
        if self._tokenizer.token_bytes is not None:
            return self._bytes.decode(self._tokenizer.bytes_of(ids))
        self._ids += ids
        # A character of which bytes are missing decodes to U+FFFD: hold those back until more follows.
        return self._give(self._tokenizer.decode(self._ids).rstrip("\ufffd"))

    def finish(self) -> str:
        """The rest, once no id follows."""
        if self._tokenizer.token_bytes is not None:
            return self._bytes.decode(b"", final=True)
        return self._give(self._tokenizer.decode(self._ids))

    def _give(self, text: str) -> str:
        new = text[self._given :]
        self._given += len(new)
        return new


class ByteTokenizer(Tokenizer):
    """Ids 0, 1, 2 for begin, end and padding, then the 256 bytes."""

    kind = "bytes"

    def __init__(self):
        super().__init__(0, 1, 2)
        self.special_tokens = {name: i for i, name in enumerate(SPECIALS)}
        self.token_bytes = [b""] * len(SPECIALS) + [bytes([value]) for value in range(256)]
        self.vocab_size = len(self.token_bytes)

    def encode_batch(self, texts):
        encoded = []
        for text in texts:
            ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32) + len(SPECIALS)
            encoded.append((ids, np.ones_like(ids)))
        return encoded


class JsonTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, from its JSON.

    Args:
      text: the JSON.
      bos_id, eos_id, pad_id: as in `Tokenizer`; several ids that end a document as a sequence.
      kind: `tokenizers`, or `bpe` for one that was trained here.
      where: the file, for messages.

    Raises:
      ConfigError: the library does not take the JSON, or an id is too large.
    """

    def __init__(
        self,
        text: str,
        bos_id: int,
        eos_id: int | Sequence[int],
        pad_id: int,
        kind: str = "tokenizers",
        where: str = "the JSON",
    ):
        super().__init__(bos_id, eos_id, pad_id)
        self.kind = kind
        self._json, self._where = text, where
        with _from_library(f"{where} is no tokenizer.json of the tokenizers library"):
            raw = files.parse_json(text, where)
            _check_merges(raw.get("model"))
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        self._tokenizer.encode_special_tokens = True  # a special token that a text spells is text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if not 0 < self.vocab_size <= MOST_IDS:
            largest = max(vocabulary, key=vocabulary.__getitem__, default="")
            raise ConfigError(
                f"{where}: its largest id, of {shown(largest)}, is {self.vocab_size - 1}, and must be from 0 to "
                f"{MOST_IDS - 1:,}; fetch the file again"
            )
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = {token.content: i for i, token in added.items() if token.special}
        self.token_bytes = None
        decoder = raw.get("decoder")
        if isinstance(decoder, dict) and decoder.get("type") == "ByteLevel":
            table = [b""] * self.vocab_size
            for token, i in vocabulary.items():
                if i not in added:
                    table[i] = b"".join(_BYTE_OF.get(char, char.encode()) for char in token)
                elif not added[i].special:
                    table[i] = token.encode()
            self.token_bytes = table
            self._lengths = np.array([len(value) for value in table], np.int32)

    def encode_batch(self, texts):
        texts, result = list(texts), []
        if self.token_bytes is not None:
            with _from_library(f"the tokenizers library cannot encode text with {self._where}"):
                encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for text, coded in zip(texts, encodings, strict=True):
                ids = self._ids(coded)
                lengths = self._lengths[ids]
                # A normalizer or a prefix space can change the bytes; the offsets know how.
                exact = lengths.sum() == len(text.encode())
                result.append((ids, lengths if exact else self._by_offsets(text)[1]))
            return result
        return [self._by_offsets(text) for text in texts]

    def _by_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        with _from_library(f"the tokenizers library cannot encode text with {self._where}"):
            coded = self._tokenizer.encode(text, add_special_tokens=False)
        ids = self._ids(coded)
        place = np.concatenate([[0], np.cumsum([len(char.encode()) for char in text])]).astype(np.int64)
        ends = np.array([end for _, end in coded.offsets], np.int64)
        if len(ends):
            ends = np.minimum(np.maximum.accumulate(ends), len(text))  # some normalizers count past the end
            ends[-1] = len(text)  # what no token covers belongs to the one after it, at the end to the last
        return ids, np.diff(place[ends], prepend=0).astype(np.int32)

    def _ids(self, coded: tokenizers.Encoding) -> np.ndarray:
        ids = np.array(coded.ids, np.int64)
        if ids.max(initial=0) >= self.vocab_size:
            raise ConfigError(f"{self._where} gives id {ids.max()}, which it has no token for; fetch the file again")
        return ids.astype(np.int32)

    def decode(self, ids):
        ids = _checked(ids)
        return super().decode(ids) if self.token_bytes is not None else self._tokenizer.decode(ids)

    @property
    def files(self):
        return {JSON: self._json.encode()}


@contextmanager
def _from_library(what: str) -> Iterator[None]:
    """What the tokenizers library finds wrong with a file, in one line."""
    try:
        yield
    except BaseException as error:  # it raises plain Exception, and panics, which are none, for what its file holds
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        said = " ".join(str(error).split())
        raise ConfigError(f"{what} ({said[:LONGEST]}); fetch the file again") from error


def _check_merges(model: Any) -> None:
    """Raises ValueError for merges that end the whole process in the library: without the prefix that it cuts off."""
    prefix, merges = (
        model.get(n) if isinstance(model, dict) else None for n in ("continuing_subword_prefix", "merges")
    )
    if not isinstance(prefix, str) or not isinstance(merges, list):
        return
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not (isinstance(parts, list) and parts and str(parts[-1]).startswith(prefix)):
            raise ValueError(f"the merge {shown(merge)} lacks continuing_subword_prefix={shown(prefix)}")


def _byte_alphabet() -> dict[str, bytes]:
    """The character that stands for each byte in byte-level vocabularies: itself if it prints, else from U+0100."""
    prints = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in prints]
    return {chr(value): bytes([value]) for value in prints} | {
        chr(256 + place): bytes([value]) for place, value in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()
