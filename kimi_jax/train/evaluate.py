"""A run's checkpoint, opened for use: evaluation on any text, and generation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from kimi_jax.config import Config, ConfigError, Source
from kimi_jax.data import pipeline
from kimi_jax.model.kimi import Kimi
from kimi_jax.model.param import arrays
from kimi_jax.store import open as pretrained
from kimi_jax.text.tokenizer import Tokenizer
from kimi_jax.train.loop import batch_sharding, evaluation_step, sample_text
from kimi_jax.train.loop import evaluate as evaluate_batches


def load(path: str | Path, step: int | None = None) -> tuple[Kimi, Config, Tokenizer]:
    """Opens the checkpoint of a run, whatever mesh wrote it, on the current one: model, config and tokenizer.

    The config is that of the checkpoint's step: with the experts' formats, where the run had reached them. Routed
    experts that are stored packed stay so.

    Args:
        path: folder of a run, of its checkpoints, of a converted model, or a released directory.
        step: which checkpoint; the newest by default.

    Raises:
        CheckpointError, ConfigError: there is none, or its arrays are not those of its config; it has no tokenizer.
    """
    model, config, tokenizer = pretrained.load(path, step, packed=True)
    if tokenizer is None:
        raise ConfigError(f"{path} has no tokenizer; put the release's tiktoken.model or tokenizer.json there")
    return model, config, tokenizer


def evaluate(
    path: str | Path, step: int | None = None, source: Source | None = None, max_tokens: int | None = None
) -> dict[str, float]:
    """Bits per byte of a checkpoint on `source`, or on the run's own validation text; see `train.evaluate`."""
    model, config, tokenizer = load(path, step)
    if source is None:
        batches = pipeline.load(config.data, config.model, tokenizer).validation_batches(max_tokens=max_tokens)
    else:
        batches, problems = pipeline.eval_batches([source], tokenizer, config.data, max_tokens=max_tokens)
        if problems.counts:
            print(problems.summary(), file=sys.stderr)
    return evaluate_batches(evaluation_step(config), arrays(model), batches, cut=batch_sharding(config))


def generate(
    path: str | Path,
    prompt: str,
    *,
    step: int | None = None,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> Iterator[str]:
    """Continues `prompt` with a checkpoint; yields text as it is made."""
    model, config, tokenizer = load(path, step)
    return sample_text(
        model,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        key=jax.random.key(seed),
        rules=config.rules,
    )
