"""Opens or makes the tokenizer of a folder, a release or a config."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from kimi_jax.config import ConfigError, ModelConfig, TokenizerConfig
from kimi_jax.text.bpe import train_bpe
from kimi_jax.text.kimi import K2_SPECIALS, K3_SPECIALS, TiktokenTokenizer
from kimi_jax.text.tokenizer import JSON, RANKS, RELEASED, SETTINGS, ByteTokenizer, JsonTokenizer, Tokenizer


def make_tokenizer(config: TokenizerConfig, model: ModelConfig, texts: Iterable[str]) -> Tokenizer:
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
    check_tokenizer(tokenizer, model)
    return tokenizer


def load_tokenizer(folder: Path | str) -> Tokenizer:
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


def check_tokenizer(tokenizer: Tokenizer, model: ModelConfig) -> None:
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
