"""Tokenizers: bytes, byte-level BPE trained on the run's own text, any `tokenizers` JSON, Kimi's tiktoken ranks.

All four have one interface (`Tokenizer`). Text is never read as a control token: a document that spells
`<|eos|>` or `<|open|>` is encoded as those characters. Control tokens come from `encode_segments` alone, out of the
segments that the caller, and not the text, marks as control.
"""

from __future__ import annotations

import abc
import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import tokenizers

SETTINGS, RANKS, JSON = "tokenizer_config.json", "tiktoken.model", "tokenizer.json"  # files of a saved tokenizer


RELEASED = (RANKS, JSON)  # a released directory with a tokenizer has one of them


SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")  # ids 0, 1, 2 of the tokenizers that are made here


class Tokenizer(abc.ABC):
    """Text to ids and back.

    Attributes:
      vocab_size: one more than the largest id.
      bos_id, eos_id, pad_id: the ids that begin a document, end it, and fill rows.
      special_tokens: the control tokens, name -> id.
      token_bytes: the bytes of each id (none for special tokens), or None where ids are not byte strings.
    """

    kind: str
    vocab_size: int
    special_tokens: Mapping[str, int]
    token_bytes: list[bytes] | None

    def __init__(self, bos_id: int, eos_id: int, pad_id: int):
        self.bos_id, self.eos_id, self.pad_id = bos_id, eos_id, pad_id

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
        """The ids [n] int32 of a text, without special tokens."""
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
            pieces = cut.split(text) if is_control else [text]
            parts += [self.special_tokens[piece] if i % 2 else piece for i, piece in enumerate(pieces)]
        texts = iter(self.encode_batch([part for part in parts if isinstance(part, str)]))
        ids = [next(texts)[0] if isinstance(part, str) else np.array([part], np.int32) for part in parts]
        return np.concatenate([np.zeros(0, np.int32), *ids])

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids after which a model has nothing more to say."""
        return (self.eos_id,)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Special tokens have none; bytes that are not UTF-8 become U+FFFD."""
        return self.bytes_of(ids).decode("utf-8", "replace")

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids, where `token_bytes` has them; ids past `vocab_size` (spare rows of a model) have none."""
        table = self.token_bytes
        assert table is not None
        return b"".join(table[i] for i in ids if i < len(table))

    def stream(self) -> TextStream:
        """A decoder for ids that come one by one."""
        return TextStream(self)

    @property
    def files(self) -> dict[str, bytes]:
        """The files beside `tokenizer_config.json` that `save` writes, by name."""
        return {}

    def save(self, folder: Path | str) -> None:
        """Writes the tokenizer to a folder, for `load`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        settings = {**self._settings(), **self._names()}
        for name, content in {SETTINGS: json.dumps(settings).encode(), **self.files}.items():
            (folder / name).write_bytes(content)

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
    """A tokenizer of the `tokenizers` library, from its JSON."""

    def __init__(self, text: str, bos_id: int, eos_id: int, pad_id: int, kind: str = "tokenizers"):
        super().__init__(bos_id, eos_id, pad_id)
        self.kind = kind
        self._json = text
        self._tokenizer = tokenizers.Tokenizer.from_str(text)
        self._tokenizer.encode_special_tokens = True  # a special token that a text spells is text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = {token.content: i for i, token in added.items() if token.special}
        self.token_bytes = None
        if (json.loads(text).get("decoder") or {}).get("type") == "ByteLevel":
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
            for text, coded in zip(
                texts, self._tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True
            ):
                ids = np.array(coded.ids, np.int32)
                lengths = self._lengths[ids]
                # A normalizer or a prefix space can change the bytes; the offsets know how.
                exact = lengths.sum() == len(text.encode())
                result.append((ids, lengths if exact else self._by_offsets(text)[1]))
            return result
        return [self._by_offsets(text) for text in texts]

    def _by_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        coded = self._tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(coded.ids, np.int32)
        place = np.concatenate([[0], np.cumsum([len(char.encode()) for char in text])]).astype(np.int64)
        ends = np.array([end for _, end in coded.offsets], np.int64)
        if len(ends):
            ends = np.maximum.accumulate(ends)
            ends[-1] = len(text)  # what no token covers belongs to the one after it, at the end to the last
        return ids, np.diff(place[ends], prepend=0).astype(np.int32)

    def decode(self, ids):
        ids = [int(i) for i in ids]
        return super().decode(ids) if self.token_bytes is not None else self._tokenizer.decode(ids)

    @property
    def files(self):
        return {JSON: self._json.encode()}


def _byte_alphabet() -> dict[str, bytes]:
    """The character that stands for each byte in byte-level vocabularies: itself if it prints, else from U+0100."""
    prints = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in prints]
    return {chr(value): bytes([value]) for value in prints} | {
        chr(256 + place): bytes([value]) for place, value in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()
