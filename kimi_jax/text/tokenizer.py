"""Tokenizers: bytes, byte-level BPE trained on the run's own text, any `tokenizers` JSON, Kimi's tiktoken ranks.

All four have one interface (`Tokenizer`). Text is never read as a control token: a document that spells
`<|eos|>` or `<|open|>` is encoded as those characters. Control tokens come from `encode_segments` alone, out of the
segments that the caller, and not the text, marks as control.
"""

from __future__ import annotations

import abc
import base64
import codecs
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from kimi_jax.config import ConfigError, ModelConfig, TokenizerConfig
from kimi_jax.files import unit_hash

SETTINGS, RANKS, JSON = "tokenizer_config.json", "tiktoken.model", "tokenizer.json"  # files of a saved tokenizer
RELEASED = (RANKS, JSON)  # a released directory with a tokenizer has one of them

SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")  # ids 0, 1, 2 of the tokenizers that are made here

# Where `bpe` cuts text before it merges, chosen on the standard library at 4096 tokens: a word keeps its
# underscores and takes the punctuation, or the line break and indentation, before it; other punctuation takes those
# after it; digits go by three: "(self", "):\n        ", "\n        return", ".append", "123".
BPE_PATTERN = r"(?:\s*\n[ \t]*| )?[^\s\w]*[\p{L}_]+|\p{N}{1,3}| ?[^\s\w]+(?:\s*\n[ \t]*)?|\s*\n[ \t]*|[ \t]+|\s+"
BPE_TRAINING_CHARS = 16_000_000  # more text hardly moves the merges of a small vocabulary, and takes longer

# tokenization_kimi.py of the released checkpoints: pattern, special tokens by place after the ranks (those not
# named are reserved; K3 gives places of K2 and Kimi Linear other meanings), and the two cuts that keep tiktoken's
# regular expressions from overflowing their stack.
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
KIMI_SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    254: "[UNK]",
    255: "[PAD]",
}
K2_SPECIALS = KIMI_SPECIALS | {
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
}
K3_SPECIALS = KIMI_SPECIALS | {
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    65: "<osagent_mode>",
}
KIMI_NUM_SPECIALS = 256
KIMI_END_OF_MESSAGE = 2  # the place, in both families, of the token after which the released models stop
KIMI_BLOCK_CHARS = 400_000
KIMI_RUN = re.compile(r"\s{25001,}|\S{25001,}")


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


class TiktokenTokenizer(Tokenizer):
    """Kimi's tokenizer: a tiktoken rank file, and 256 special tokens after the ranks.

    Args:
      content: the rank file, a line a token: its bytes in base64, and its rank.
      bos_id, eos_id, pad_id: as in `Tokenizer`.
      family: names of control tokens by place after the ranks; the others are `<|reserved_token_ID|>`.
      names: the same by id, as a release's own settings have them; they stand instead of the family's.
      where: the file, for messages.

    Raises:
      ConfigError: the file is damaged, or ids of names are not among the 256 after its ranks.
    """

    kind = "tiktoken"

    def __init__(
        self,
        content: bytes,
        bos_id: int,
        eos_id: int,
        pad_id: int,
        family: Mapping[int, str] = K3_SPECIALS,
        names: Mapping[int, str] | None = None,
        where: str = "the rank file",
    ):
        super().__init__(bos_id, eos_id, pad_id)
        try:
            import tiktoken
        except ImportError as error:
            raise ConfigError(f"reading {where} needs tiktoken: pip install 'kimi-jax[tiktoken]'") from error
        ranks: dict[bytes, int] = {}
        for number, line in enumerate(content.splitlines(), 1):
            try:
                if line:
                    token, rank = line.split()
                    ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError as error:
                raise ConfigError(f"{where}:{number}: {line[:40]!r} is not base64 and a rank; fetch it anew") from error
        if sorted(ranks.values()) != list(range(len(ranks))) or any(
            bytes([value]) not in ranks for value in range(256)
        ):
            raise ConfigError(f"{where}: {len(ranks)} ranks must count from 0 and hold every byte; fetch the file anew")
        self._content = content
        ids = range(len(ranks), len(ranks) + KIMI_NUM_SPECIALS)
        if names is None:
            names = {ids[place]: name for place, name in family.items()}
        if strangers := sorted(set(names) - set(ids)):
            raise ConfigError(
                f"{where}: {len(ranks)} ranks leave the ids {ids[0]} to {ids[-1]} for control tokens, but "
                f"{strangers[0]} is to be {names[strangers[0]]!r}; fetch the file anew"
            )
        self._end_of_message = ids[KIMI_END_OF_MESSAGE]
        self.special_tokens = {names.get(i, f"<|reserved_token_{i}|>"): i for i in ids}
        if len(self.special_tokens) < KIMI_NUM_SPECIALS or "" in self.special_tokens:
            raise ConfigError(f"{where}: two control tokens have one name, or one has none; fetch {SETTINGS} anew")
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=self.special_tokens
        )
        self.token_bytes = sorted(ranks, key=ranks.__getitem__) + [b""] * KIMI_NUM_SPECIALS
        self.vocab_size = len(self.token_bytes)
        self._lengths = np.array([len(value) for value in self.token_bytes], np.int32)

    def encode_batch(self, texts):
        encoded = []
        for text in texts:
            parts = [self._encoding.encode_ordinary(part) for part in _kimi_parts(text)]
            ids = np.array([i for part in parts for i in part], np.int32)
            encoded.append((ids, self._lengths[ids]))
        return encoded

    @property
    def stop_ids(self):
        # K2's settings of generation stop at a message's end, its config.json at a document's; K3 has one id for both.
        return tuple(sorted({self.eos_id, self._end_of_message}))

    @property
    def files(self):
        return {RANKS: self._content}

    def _names(self):
        names = {str(i): {"content": name, "special": True} for name, i in self.special_tokens.items()}
        return {"added_tokens_decoder": names}


def _kimi_parts(text: str) -> Iterable[str]:
    """Blocks of 400 000 characters, cut again inside runs of (non-)space of more than 25 000."""
    for start in range(0, len(text), KIMI_BLOCK_CHARS):
        block = text[start : start + KIMI_BLOCK_CHARS]
        runs = (range(run.start() + 25_000, run.end(), 25_000) for run in KIMI_RUN.finditer(block))
        cuts = [0, *(cut for run in runs for cut in run), len(block)]
        yield from (block[a:b] for a, b in itertools.pairwise(cuts))


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


def make(config: TokenizerConfig, model: ModelConfig, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that a config asks for.

    Args:
      config: kind and file.
      model: `vocab_size` is the size of a trained `bpe`; the special ids are those of `tokenizers` and `tiktoken`.
      texts: training text; read for `bpe` only.

    Raises:
      ConfigError: the file is missing or malformed, or the tokenizer does not suit the model (`check`).
    """
    if config.kind == "bytes":
        tokenizer = ByteTokenizer()
    elif config.kind == "bpe":
        tokenizer = train_bpe(texts, model.vocab_size)
    else:
        ids = model.bos_token_id, model.eos_token_id, model.pad_token_id
        tokenizer = _from_file(config.kind, Path(config.path), *ids)
    check(tokenizer, model)
    return tokenizer


def load(folder: Path | str) -> Tokenizer:
    """The tokenizer of a folder: one that `save` wrote, or a released checkpoint.

    A release says which ids begin and end documents in its config.json, and how control tokens are called in
    tokenizer_config.json; where that says nothing, its family does.

    Raises:
      ConfigError: a file is missing or malformed.
    """
    folder = Path(folder)
    settings = _read_json(folder / SETTINGS)
    if "kind" in settings:
        kind, ids, missing = settings["kind"], settings, SETTINGS
    elif any((folder / name).is_file() for name in RELEASED):
        kind, missing = "tiktoken" if (folder / RANKS).is_file() else "tokenizers", "config.json"
        whole = _read_json(folder / missing)
        ids = {**whole.get("text_config", {}), **whole}
    else:
        raise ConfigError(f"{folder} is no saved tokenizer: it has no {RANKS}, no {JSON} and no {SETTINGS} of a run")
    if kind == "bytes":
        return ByteTokenizer()
    path = folder / (RANKS if kind == "tiktoken" else JSON)
    try:
        bos_id, eos_id = ids["bos_token_id"], ids["eos_token_id"]
        # K2's config.json leaves it out; the last id is its tokenizer's [PAD].
        pad_id = ids["vocab_size"] - 1 if ids.get("pad_token_id") is None else ids["pad_token_id"]
    except KeyError as error:
        raise ConfigError(f"{folder / missing} has no {error}, which the tokenizer needs; fetch it anew") from error
    return _from_file(kind, path, bos_id, eos_id, pad_id)


def _read_json(path: Path) -> dict:
    """A file's settings; none if there is no file."""
    try:
        content = json.loads(path.read_bytes()) if path.is_file() else {}
        if not isinstance(content, dict):
            raise ValueError("no settings by name")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path} ({error}); fetch it anew") from error
    return content


def _control_names(folder: Path) -> dict[str, Mapping[int, str]]:
    """How a folder's tokenizer_config.json calls control tokens, by id; else the family of its config.json does."""
    path = folder / SETTINGS
    try:
        found = _read_json(path).get("added_tokens_decoder", {})
        names = {int(i): str(token["content"]) for i, token in found.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: added_tokens_decoder does not give each id its content; fetch it anew") from error
    if names:
        return {"names": names}
    whole = _read_json(folder / "config.json")
    # Attention Residuals tell K3 from Kimi Linear, which has its model type and K2's names.
    is_k3 = not whole or whole.get("text_config", whole).get("attn_res_block_size") is not None
    return {"family": K3_SPECIALS if is_k3 else K2_SPECIALS}


def _from_file(kind: str, path: Path, bos_id: int, eos_id: int, pad_id: int) -> Tokenizer:
    try:
        content = path.read_bytes()
        if kind == "tiktoken":
            return TiktokenTokenizer(content, bos_id, eos_id, pad_id, where=str(path), **_control_names(path.parent))
        return JsonTokenizer(content.decode(), bos_id, eos_id, pad_id, kind)
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer {path} ({error.strerror}); mend its path") from error
    except ConfigError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path} is no tokenizer.json of the tokenizers library ({error})") from error


def check(tokenizer: Tokenizer, model: ModelConfig) -> None:
    """Refuses a tokenizer whose ids the model does not have or does not mean.

    Raises:
      ConfigError: an id lies outside the vocabulary, or a special id differs.
    """
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} is smaller than the {tokenizer.kind} tokenizer's "
            f"{tokenizer.vocab_size} ids; set it to at least {tokenizer.vocab_size}"
        )
    for name in ("bos", "eos", "pad"):
        ours, theirs = getattr(tokenizer, f"{name}_id"), getattr(model, f"{name}_token_id")
        if ours != theirs:
            raise ConfigError(
                f"model.{name}_token_id={theirs} is not the {tokenizer.kind} tokenizer's {ours}; set it to {ours}"
            )
