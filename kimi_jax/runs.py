"""A run's checkpoint, opened for use: evaluation on any text, and generation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from kimi_jax import checkpoint
from kimi_jax.config import Config, Source, from_dict
from kimi_jax.data import pipeline
from kimi_jax.data import tokenizer as tokenizers
from kimi_jax.data.tokenizer import Tokenizer
from kimi_jax.layers.param import arrays, place, with_arrays
from kimi_jax.model import Kimi
from kimi_jax.train import batch_sharding, evaluation_step, sample_text
from kimi_jax.train import evaluate as evaluate_batches


def load(path: str | Path, step: int | None = None) -> tuple[Kimi, Config, Tokenizer]:
    """Opens the checkpoint of a run, whatever mesh wrote it, on the current one: model, config and tokenizer.

    Args:
        path: folder of the run, or its `checkpoints` folder.
        step: which checkpoint; the newest by default.

    Raises:
        ConfigError: there is none, or its arrays are not those of its config.
    """
    folder = checkpoint.find(path)
    with checkpoint.opened(folder) as checkpoints:
        config = from_dict(Config, checkpoints.metadata(step)["config"])
        template = place(Kimi(config.model), config.rules)
        params = checkpoints.restore({"params": arrays(template)}, step)["params"]
    return with_arrays(template, params), config, tokenizers.load(folder.parent / "tokenizer")


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
