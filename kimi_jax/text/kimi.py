"""Kimi's tokenizer: tiktoken ranks, and the control tokens of K2 and K3."""

from __future__ import annotations

import base64
import codecs
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kimi_jax.config import ConfigError
from kimi_jax.config.checks import SURROGATE, shown
from kimi_jax.text.tokenizer import MOST_IDS, RANKS, SETTINGS, Tokenizer

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


class TiktokenTokenizer(Tokenizer):
    """Kimi's tokenizer: a tiktoken rank file, and 256 special tokens after the ranks.

    Args:
      content: the rank file, one line per token: its bytes in base64, and its rank.
      bos_id, eos_id, pad_id: as in `Tokenizer`; several ids that end a document as a sequence.
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
        eos_id: int | Sequence[int],
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
        content = content.removeprefix(codecs.BOM_UTF8)
        ranks: dict[bytes, int] = {}
        for number, line in enumerate(content.splitlines(), 1):
            try:
                if line:
                    token, rank = line.split()
                    ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError as error:
                raise ConfigError(
                    f"{where}:{number}: {line[:40]!r} is not base64 and a rank; fetch it again"
                ) from error
        if sorted(ranks.values()) != list(range(len(ranks))) or any(
            bytes([value]) not in ranks for value in range(256)
        ):
            stray = next((rank for rank in ranks.values() if not 0 <= rank < len(ranks)), None)
            raise ConfigError(
                f"{where}: {len(ranks)} ranks must count from 0 and hold every byte"
                f"{'' if stray is None else f', and not have {stray}'}; fetch the file again"
            )
        if len(ranks) + KIMI_NUM_SPECIALS > MOST_IDS:
            raise ConfigError(f"{where}: {len(ranks):,} ranks are more than {MOST_IDS:,}; fetch the file again")
        self._content = content
        ids = range(len(ranks), len(ranks) + KIMI_NUM_SPECIALS)
        if names is None:
            names = {ids[place]: name for place, name in family.items()}
        if strangers := sorted(set(names) - set(ids)):
            raise ConfigError(
                f"{where}: {len(ranks)} ranks leave the ids {ids[0]} to {ids[-1]} for control tokens, but "
                f"{strangers[0]} is to be {shown(names[strangers[0]])}; fetch the file again"
            )
        self._end_of_message = ids[KIMI_END_OF_MESSAGE]
        self.special_tokens = {names.get(i, f"<|reserved_token_{i}|>"): i for i in ids}
        if len(self.special_tokens) < KIMI_NUM_SPECIALS or "" in self.special_tokens:
            raise ConfigError(f"{where}: two control tokens have one name, or one has none; fetch {SETTINGS} again")
        if strange := next(filter(SURROGATE.search, self.special_tokens), None):
            raise ConfigError(f"{where}: control token {shown(strange)} is not UTF-8; fetch {SETTINGS} again")
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
        return tuple(sorted({*self.eos_ids, self._end_of_message}))

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
