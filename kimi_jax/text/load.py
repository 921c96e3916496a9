"""Opens or makes the tokenizer of a folder, a release or a config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from kimi_jax import files
from kimi_jax.config import ConfigError, ModelConfig, TokenizerConfig
from kimi_jax.config.checks import shown
from kimi_jax.text.bpe import train_bpe
from kimi_jax.text.kimi import K2_SPECIALS, K3_SPECIALS, TiktokenTokenizer
from kimi_jax.text.tokenizer import JSON, MOST_IDS, RANKS, RELEASED, SETTINGS, ByteTokenizer, JsonTokenizer, Tokenizer

KINDS = get_args(get_type_hints(TokenizerConfig)["kind"])


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
    tokenizer_config.json; where that says nothing, its family does. Several ids that end documents are all `stop_ids`.

    Raises:
      ConfigError: a file is missing, or what it says cannot be.
      FileError: a file cannot be read, or is no JSON.
    """
    folder = Path(folder)
    settings = _settings(folder / SETTINGS)
    if "kind" in settings:
        kind, ids, source = settings["kind"], settings, folder / SETTINGS
        if kind not in KINDS:
            raise ConfigError(f"{source} has kind={shown(kind)} where one of {', '.join(KINDS)} is due; restore it")
    elif any((folder / name).is_file() for name in RELEASED):
        kind, source = "tiktoken" if (folder / RANKS).is_file() else "tokenizers", folder / "config.json"
        ids = _text_settings(source)
    else:
        raise ConfigError(
            f"{folder} is no saved tokenizer: it has no {RANKS}, no {JSON} and no {SETTINGS} of a run; put one there"
        )
    if kind == "bytes":
        return ByteTokenizer()
    path = folder / (RANKS if kind == "tiktoken" else JSON)
    if missing := [name for name in ("bos_token_id", "eos_token_id") if name not in ids]:
        raise ConfigError(f"{source} has no {missing[0]!r}, which the tokenizer needs; fetch it again")
    bos_id, eos_ids = _id(source, ids, "bos_token_id"), _ids(source, ids, "eos_token_id")
    # K2's config.json leaves it out; the last id is its tokenizer's [PAD].
    last = ids.get("pad_token_id") is None
    pad_id = _id(source, ids, "vocab_size", least=1) - 1 if last else _id(source, ids, "pad_token_id")
    return _from_file(kind, path, bos_id, eos_ids, pad_id)


def _id(path: Path, settings: dict, name: str, *, least: int = 0) -> int:
    value = settings.get(name)
    if type(value) is not int or not least <= value < MOST_IDS:
        raise ConfigError(
            f"{path} has {name}={shown(value)} where an integer from {least} to {MOST_IDS - 1:,} is due; fetch it again"
        )
    return value


def _ids(path: Path, settings: dict, name: str) -> list[int]:
    """One id, or several in a list."""
    found = settings[name]
    if not isinstance(found, list):
        return [_id(path, settings, name)]
    if not 0 < len(found) <= 256:
        raise ConfigError(f"{path} has {len(found):,} ids in {name} where 1 to 256 are due; fetch it again")
    return [_id(path, {f"{name}[{place}]": value}, f"{name}[{place}]") for place, value in enumerate(found)]


def _settings(path: Path) -> dict[str, Any]:
    """A file's settings; none if there is no file."""
    return files.read_json(path) if path.is_file() else {}


def _text_settings(path: Path) -> dict[str, Any]:
    """Those of a release's config.json that speak of text."""
    whole = _settings(path)
    text = whole.get("text_config") or {}
    if not isinstance(text, dict):
        raise ConfigError(f"{path} has text_config={shown(text)} where an object is due; fetch it again")
    return {**text, **whole}


def _control_names(folder: Path) -> dict[str, Mapping[int, str]]:
    """How a folder's tokenizer_config.json calls control tokens, by id; else the family of its config.json does."""
    path = folder / SETTINGS
    found = _settings(path).get("added_tokens_decoder", {})
    try:
        names = {int(i): token["content"] for i, token in found.items()}
        whole = all(isinstance(name, str) for name in names.values())
    except (ValueError, TypeError, KeyError, AttributeError):
        names, whole = {}, False
    if not whole:
        raise ConfigError(f"{path}: added_tokens_decoder does not give each id its content; fetch it again")
    if names:
        return {"names": names}
    settings = _text_settings(folder / "config.json")
    # Attention Residuals tell K3 from Kimi Linear, which has its model type and K2's names.
    is_k3 = not settings or settings.get("attn_res_block_size") is not None
    return {"family": K3_SPECIALS if is_k3 else K2_SPECIALS}


def _from_file(kind: str, path: Path, bos_id: int, eos_id: int | Sequence[int], pad_id: int) -> Tokenizer:
    try:
        if path.exists() and not path.is_file():
            raise OSError("not a regular file")  # a folder, or a pipe that would wait for ever
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(str(files.problem(error, path, "read the tokenizer"))) from error
    if kind == "tiktoken":
        return TiktokenTokenizer(content, bos_id, eos_id, pad_id, where=str(path), **_control_names(path.parent))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is no tokenizer.json of the tokenizers library (not UTF-8: {error.reason} at byte {error.start}); "
            "fetch the file again"
        ) from error
    return JsonTokenizer(text, bos_id, eos_id, pad_id, kind, where=str(path))


def check_tokenizer(tokenizer: Tokenizer, model: ModelConfig) -> None:
    """Rejects a tokenizer whose ids the model does not have or does not mean.

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
