"""Settings of a run: optimizer, data, training, and all of them together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from kimi_jax.config.checks import (
    FLOAT32,
    LARGEST,
    LONGEST,
    check,
    check_finite,
    check_path,
    check_positive,
    check_text,
    check_types,
    shown,
)
from kimi_jax.config.compute import Mesh, Rules, Slice
from kimi_jax.config.model import ModelConfig, check_groups


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Per-Head Muon for matrices, AdamW for the rest, QK-Clip, and expert balancing."""

    learning_rate: float
    """Peak rate, for Muon and AdamW alike (Muon's update is scaled to AdamW's RMS)."""
    warmup_fraction: float = 0.01
    """Part of all steps with a linearly rising rate; a cosine to zero follows."""
    schedule_from: int = 0
    """Step at which warmup and cosine begin. To train a finished run further: its last step, with more train.steps;
    learning_rate and warmup_fraction may then change too."""
    weight_decay: float = 0.1
    momentum: float = 0.95
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    qk_clip: float = 100.0
    """Largest attention logit a head may have before its query and key weights are scaled down."""
    balance: Literal["quantile", "sign"] = "quantile"
    """How the router's correction bias moves: Quantile Balancing (K3), or a fixed step by the sign (earlier models)."""
    balance_rate: float = 1e-3
    """The fixed step of `balance="sign"`."""

    def __post_init__(self):
        check_types(self)
        check_finite(self, "learning_rate", "qk_clip", "balance_rate")
        check_finite(self, "weight_decay", zero=True)
        check(0 <= self.warmup_fraction < 1, f"warmup_fraction={self.warmup_fraction} must lie in [0, 1); change it")
        check(
            0 <= self.schedule_from <= LARGEST,
            f"schedule_from={self.schedule_from} must lie between 0 and {LARGEST:,}; change it",
        )
        for name in ("momentum", "adam_b1", "adam_b2"):
            value = getattr(self, name)
            check(0 <= value < 1, f"{name}={value} must lie in [0, 1); change it")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where text comes from. `kind="stdlib"` is the source code of the running Python's standard library."""

    kind: Literal["stdlib", "text", "jsonl", "parquet"] = "stdlib"
    """stdlib, text: one document per file; a single text file is split instead, its end being for validation.
    jsonl, parquet: one document per row."""
    path: str = ""
    """A file, or a folder of which the files that match `glob` are read, hidden ones left out."""
    glob: str = ""
    """Empty: all files for text, else those with the ending `.jsonl` or `.parquet`."""
    text_field: str = "text"
    """Field (jsonl) or column (parquet) with the text."""
    prompt_field: str | None = None
    """Field whose text comes before `text_field`'s, is seen by the model and carries no loss."""
    weight: float = 1.0
    """Share of this source in the tokens of a mixture; shares are relative."""

    def __post_init__(self):
        check_types(self)
        check_path(self, "path", "glob")
        check_text(self, "text_field", "prompt_field")
        check(self.kind == "stdlib" or bool(self.path), f'a source of kind "{self.kind}" needs a path; set path')
        parts = self.glob.split("/")
        check(
            not self.glob
            or not ({"", ".."} & set(parts) or set(parts) == {"."} or any("**" in p and p != "**" for p in parts)),
            f"glob={shown(self.glob)} must name files below the source's folder, with ** alone between slashes; "
            'write it like "**/*.txt"',
        )
        check(
            self.prompt_field != self.text_field,
            f"prompt_field={shown(self.prompt_field)} is the text_field too; name another field, or None",
        )
        least, most = FLOAT32
        check(
            least <= self.weight <= most,
            f"weight={self.weight} of a source must be positive; leave the source out instead, or set it to a finite "
            "number",
        )


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """bytes: 256 bytes and specials. bpe: byte-level BPE trained on the training text when the run begins.
    tokenizers: a `tokenizer.json`. tiktoken: a rank file with Kimi's special tokens."""

    kind: Literal["bytes", "bpe", "tokenizers", "tiktoken"] = "bytes"
    path: str = ""
    """The file, for `tokenizers` and `tiktoken`."""

    def __post_init__(self):
        check_types(self)
        check_path(self, "path")
        needs = self.kind in ("tokenizers", "tiktoken")
        check(
            bool(self.path) == needs,
            f'tokenizer kind "{self.kind}" '
            + ("needs a path; set path" if needs else f"takes no path; leave out path={shown(self.path)}"),
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    sequence_length: int
    """Tokens of a row; documents are split to it and packed into it."""
    batch_size: int
    """Rows of one optimizer step, over all its micro-batches."""
    sources: tuple[Source, ...] = (Source(),)
    validation: tuple[Source, ...] = ()
    """Validation text; empty: `validation_fraction` of the training documents."""
    validation_fraction: float = 0.02
    """Chance of a document to be set apart, by a hash of its relative path (files) or its text (rows)."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    on_error: Literal["skip", "raise"] = "skip"
    """What a malformed line, an unreadable file or a missing field does; it is reported and counted either way."""

    def __post_init__(self):
        check_types(self)
        check_positive(self, "batch_size", "sequence_length")
        check(
            self.sequence_length >= 2,
            f"sequence_length={self.sequence_length} leaves nothing to predict from; set it to at least 2",
        )
        tokens = self.batch_size * self.sequence_length
        check(
            tokens <= LARGEST,
            f"batch_size={self.batch_size} x sequence_length={self.sequence_length} = {tokens:,} tokens per step must "
            f"be at most {LARGEST:,}; lower one of them",
        )
        check(len(self.sources) >= 1, "data.sources is empty; name at least one source")
        check(
            0 < self.validation_fraction < 1 or (bool(self.validation) and self.validation_fraction == 0),
            f"validation_fraction={self.validation_fraction} must lie in (0, 1) when no validation source is given; "
            "change it, or set data.validation",
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: int
    seed: int = 0
    init_from: str = ""
    """Folder whose parameters a new run begins with: of a run, of a converted model, or a released directory. Empty:
    random ones."""
    accumulation: int = 1
    """Micro-batches of one step; gradients are weighted by their token counts."""
    eval_every: int = 100
    eval_tokens: int = 200_000
    """Validation tokens of an evaluation during training; the last one reads all of them."""
    checkpoint_every: int = 100
    keep_last: int = 2
    """Newest checkpoints kept."""
    keep_every: int | None = None
    """Checkpoints at multiples of this step are never deleted."""
    spike_threshold: float = 2.0
    """A loss (nats per token) this far above the running median skips the step; off during warmup."""
    max_skips: int = 10
    """Skipped steps in a row after which the run stops."""
    qat_from_step: int | None = None
    """From this step on, routed experts have MXFP4 weights and MXFP8 activations (quantization-aware training), so that
    the packed export computes what was trained. None: never."""
    tensorboard: bool = False
    runs_dir: str = "runs"
    sample_prompt: str = ""
    sample_tokens: int = 200

    def __post_init__(self):
        check_types(self)
        check_positive(
            self,
            "steps",
            "accumulation",
            "eval_every",
            "checkpoint_every",
            "keep_last",
            "max_skips",
        )
        check_positive(self, "eval_tokens", most=2**63 - 1)
        check_path(self, "init_from", "runs_dir")
        check_text(self, "sample_prompt")
        check(
            self.keep_every is None or 1 <= self.keep_every <= LARGEST,
            f"keep_every={self.keep_every} must be at least 1, or None, and at most {LARGEST:,}; change it",
        )
        start = self.qat_from_step
        check(
            start is None or 0 <= start < self.steps,
            f"qat_from_step={start} must lie between 0 and steps={self.steps} - 1, or None for never; change it",
        )
        check_finite(self, "spike_threshold")
        # JAX takes larger seeds too, and leaves out their upper bits: 2**32 would draw what 0 draws.
        for name, most in (("seed", 2**32 - 1), ("sample_tokens", LARGEST)):
            value = getattr(self, name)
            check(0 <= value <= most, f"{name}={value} must not be negative, or above {most:,}; change it")


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str
    """Folder of the run under `train.runs_dir`."""
    model: ModelConfig
    optim: OptimConfig
    data: DataConfig
    train: TrainConfig
    mesh: Mesh = field(default_factory=Mesh)
    rules: Rules = field(default_factory=Rules)
    slices: tuple[Slice, ...] = ()
    """Meshes for named TPU slices; `kimi-jax aot` compiles for them."""

    def __post_init__(self):
        check_types(self)
        rows, parts = self.data.batch_size, self.train.accumulation
        check(
            rows % parts == 0,
            lambda: (
                f"batch_size={rows} does not divide into accumulation={parts} micro-batches; "
                f"set train.accumulation to one of {near_divisors(rows, parts)}"
            ),
        )
        check(
            self.data.sequence_length <= self.model.max_position_embeddings,
            f"sequence_length={self.data.sequence_length} is over the model's "
            f"max_position_embeddings={self.model.max_position_embeddings}; lower it to that",
        )
        begin, steps = self.optim.schedule_from, self.train.steps
        check(begin < steps, f"optim.schedule_from={begin} must be below train.steps={steps}; raise train.steps")
        used = {axis for name in vars(self.rules) for axis in getattr(self.rules, name)}
        for axis, size in self.mesh.shape.items():
            check(
                size == 1 or axis in used,
                f"mesh.{axis}={size}, but no rule cuts anything over {axis}, so its devices would all do the same; set "
                f"it to 1, or name {axis} in one of rules.{', '.join(vars(self.rules))}",
            )
        if self.train.qat_from_step is not None or self.model.moe.weight_format or self.model.moe.activation_format:
            sizes = self.mesh.shape
            cut = {name: math.prod(sizes[a] for a in getattr(self.rules, name)) for name in vars(self.rules)}
            check_groups(self.model, cut)
        plain = Path(self.name).name == self.name and self.name not in ("", "..") and "\0" not in self.name
        check(
            plain and len(self.name.encode("utf-8", "replace")) <= LONGEST,
            f"name={shown(self.name)} must be the plain name of a folder, e.g. 'k3_tiny', of at most {LONGEST} bytes; "
            "choose another",
        )
        check_path(self, "name")


def near_divisors(number: int, wanted: int, most: int = 8) -> list[int]:
    """The divisors of a number that are nearest to the one that was wanted, rising.

    >>> near_divisors(12, 5), len(near_divisors(720720, 1))
    ([1, 2, 3, 4, 6, 12], 8)
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    found = {*small, *(number // n for n in small)}
    return sorted(sorted(found, key=lambda n: abs(n - wanted))[:most])


def on_slice(config: Config, topology: str) -> Config:
    """The config with what it changes for a TPU slice of this name, if it names it."""
    for known in config.slices:
        if known.topology == topology:
            rows = known.batch_size or config.data.batch_size
            return replace(
                config,
                mesh=known.mesh,
                rules=known.rules or config.rules,
                model=replace(config.model, param_dtype=known.param_dtype or config.model.param_dtype),
                data=replace(config.data, batch_size=rows),
                train=replace(config.train, accumulation=known.accumulation or config.train.accumulation),
            )
    return config


def at_step(config: Config, step: int) -> Config:
    """The config as it is from a step on: with the experts' formats, once `train.qat_from_step` is reached."""
    start = config.train.qat_from_step
    if start is None or step < start:
        return config
    moe = replace(config.model.moe, weight_format="mxfp4", activation_format="mxfp8")
    return replace(config, model=replace(config.model, moe=moe))
