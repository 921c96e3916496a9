"""Bits per byte of a model on text."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kimi_jax.config import ConfigError, Source
from kimi_jax.data import pipeline
from kimi_jax.model.param import arrays
from kimi_jax.parallel.batch import batch_sharding, to_devices
from kimi_jax.store.open import needed_tokenizer, open_model
from kimi_jax.train.step import Batch, evaluation_step


def evaluate_checkpoint(
    path: str | Path, step: int | None = None, source: Source | None = None, max_tokens: int | None = None
) -> dict[str, float]:
    """Bits per byte of a checkpoint on `source`, or on the run's own validation text; see `evaluate_batches`.

    Raises:
        ConfigError: `max_tokens` is below 1, or there is no tokenizer; besides what `open_model` raises.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"max_tokens={max_tokens} must be at least 1; leave it out to read all of the text")
    opened = open_model(path, step=step, packed=True)
    model, config, tokenizer = opened.model, opened.config, needed_tokenizer(path, opened)
    if source is None:
        batches = pipeline.load(config.data, config.model, tokenizer).validation_batches(max_tokens=max_tokens)
    else:
        batches, problems = pipeline.eval_batches([source], tokenizer, config.data, max_tokens=max_tokens)
        if problems.counts:
            print(problems.summary(), file=sys.stderr)
    return evaluate_batches(evaluation_step(config), arrays(model), batches, cut=batch_sharding(config))


def evaluate_batches(step, params: dict, batches: Iterable[Batch], stop=None, cut=None) -> dict[str, float]:
    """Sums an evaluation step over batches: `loss` in nats a token, `bits_per_byte`, `tokens`, `bytes`.

    With several processes, each has all batches and hands its own rows to its devices. `cut` is `batch_sharding`.
    """
    sums, num_bytes = [], 0
    for batch in batches:
        if stop is not None and stop.agreed():
            break  # the caller stops too, and throws the numbers away
        num_bytes += int(np.sum(batch["num_bytes"] * (batch["loss_weights"] > 0)))
        batch = {key: value for key, value in batch.items() if key != "num_bytes"}
        sums.append(step(params, to_devices(batch, cut)))
    nats, tokens = (float(sum(np.float64(part[i]) for part in sums)) for i in (0, 1))
    bits = nats / math.log(2) / max(num_bytes, 1)
    return {"loss": nats / max(tokens, 1), "bits_per_byte": bits, "tokens": tokens, "bytes": num_bytes}
