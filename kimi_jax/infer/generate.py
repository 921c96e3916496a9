"""Generation: one prefill of the prompts, then one jitted step per token, with a cache of fixed size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from kimi_jax.config import ConfigError, ModelConfig, Rules
from kimi_jax.infer.sampling import Sampling
from kimi_jax.model.cache import Cache, init_cache
from kimi_jax.model.kimi import Kimi, declared
from kimi_jax.model.param import arrays, with_arrays
from kimi_jax.ops.experts import Stacked
from kimi_jax.ops.quant.qtensor import QTensor
from kimi_jax.parallel.batch import to_devices
from kimi_jax.parallel.mesh import current_mesh, platform
from kimi_jax.parallel.spec import placed, relay
from kimi_jax.text.tokenizer import Tokenizer

BUCKET = 64
"""Prompts and caches are padded to multiples of this, so that few lengths are compiled."""

Prompts = Sequence[Sequence[int]] | np.ndarray | jax.Array
"""Token ids: any sequence of sequences of integers, or an integer array `[prompts, tokens]`."""


def generate(
    model: Kimi, prompts: Prompts, sampling: Sampling | None = None, *, rules: Rules | None = None
) -> list[list[int]]:
    """Continues each prompt; the same result as each prompt alone.

    Args:
        model: parameters and config.
        prompts: token ids, of any and different lengths of at least one.
        sampling: temperature, number of tokens, stop ids and so on; greedy by default.
        rules: how rows are sharded over the current mesh, if there is one.

    Returns:
        The new token ids of each prompt.

    Raises:
        ConfigError: an empty prompt, a token outside the vocabulary, more tokens than the model has positions.
        FloatingPointError: the model's logits are not finite.
    """
    steps = list(stream(model, prompts, sampling, rules=rules))
    return [[step[row] for step in steps if step[row] is not None] for row in range(len(prompts))]  # type: ignore[misc]


def stream(
    model: Kimi, prompts: Prompts, sampling: Sampling | None = None, *, rules: Rules | None = None
) -> Iterator[list[int | None]]:
    """`generate`, step by step: yields the next token of each prompt, None for the finished ones."""
    sampling = sampling or Sampling()
    return _steps(model, checked_prompts(model.config, prompts, sampling), sampling, rules or Rules())


def stream_text(
    model: Kimi, tokenizer: Tokenizer, prompt: str, sampling: Sampling, *, rules: Rules | None = None
) -> Iterator[str]:
    """Continues a text up to a stop id of the tokenizer; yields what follows as it becomes whole characters."""
    tokens = [tokenizer.bos_id, *map(int, tokenizer.encode(prompt))]
    steps = stream(model, [tokens], replace(sampling, stop=(*sampling.stop, *tokenizer.stop_ids)), rules=rules)

    def pieces() -> Iterator[str]:
        text = tokenizer.stream()
        for (token,) in steps:
            if token is not None:
                yield text(token)
        yield text.finish()

    return pieces()


def checked_prompts(config: ModelConfig, prompts: Prompts, sampling: Sampling) -> list[np.ndarray]:
    """The prompts as arrays `[tokens]` of int32.

    Raises:
        ConfigError: they are none that a model of this config can continue so far.
    """
    example = "write e.g. [[11, 12, 13], [14]]"
    if isinstance(prompts, str | bytes):
        raise ConfigError(f"prompts={_short(prompts)} is text, not token ids; encode it, or call stream_text")
    if hasattr(prompts, "__array__"):
        prompts = np.asarray(prompts)
    if not (isinstance(prompts, Sequence) or (isinstance(prompts, np.ndarray) and prompts.ndim)):
        raise ConfigError(f"prompts={_short(prompts)} is not a list of prompts of token ids; {example}")
    if len(prompts) == 0:
        raise ConfigError(f"there are no prompts to continue; {example}")
    rows = [_checked_prompt(number, prompt, config) for number, prompt in enumerate(prompts)]
    longest = max(len(row) for row in rows) + sampling.max_new_tokens
    if longest > config.max_position_embeddings:
        raise ConfigError(
            f"max_new_tokens={sampling.max_new_tokens} and the longest prompt make {longest} tokens, more than "
            f"max_position_embeddings={config.max_position_embeddings}; ask for fewer, or shorten the prompt"
        )
    return rows


def _checked_prompt(number: int, prompt: Any, config: ModelConfig) -> np.ndarray:
    if isinstance(prompt, str | bytes):
        raise ConfigError(f"prompt {number} is text, {_short(prompt)}, not token ids; encode it, or call stream_text")
    try:
        row = np.asarray(prompt)
    except ValueError:  # sequences of different lengths inside
        row = np.empty((0, 0))
    if row.ndim != 1:
        raise ConfigError(f"prompt {number}, {_short(prompt)}, is not a sequence of token ids, e.g. [11, 12, 13]")
    if row.size == 0:
        raise ConfigError(f"prompt {number} is empty; begin with the token bos_token_id={config.bos_token_id}")
    if not np.issubdtype(row.dtype, np.integer):
        for token in prompt if isinstance(prompt, list | tuple) else row.tolist():
            if not isinstance(token, int | np.integer) or isinstance(token, bool):
                raise ConfigError(f"prompt {number} has token {_short(token)}, which is not an integer")
    outside = (row < 0) | (row >= config.vocab_size)
    if outside.any():
        token = row[np.argmax(outside)]
        raise ConfigError(f"prompt {number} has token {token} outside the vocabulary of {config.vocab_size}")
    return row.astype(np.int32)


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _steps(model: Kimi, prompts: list[np.ndarray], sampling: Sampling, rules: Rules) -> Iterator[list[int | None]]:
    """The loop of `stream`."""
    key = jax.random.key(sampling.seed)
    sample = partial(_sample, temperature=float(sampling.temperature), top_p=float(sampling.top_p))
    length = _rounded(max(len(prompt) for prompt in prompts))
    mesh, rules = current_mesh(), generation_rules(rules)
    rows, row = (placed(mesh, rules, names) for names in (("batch", "slots"), ("batch",)))
    ways = 1 if row is None else row.num_devices // row.shard_shape((row.num_devices,))[0]
    tokens = np.zeros((-(-len(prompts) // ways) * ways, length), np.int32)  # rows of padding fill up the mesh
    segment_ids = np.zeros_like(tokens)
    for number, prompt in enumerate(prompts):
        # Padding goes in front, so that all rows write the same cache slot at each step.
        tokens[number, length - len(prompt) :] = prompt
        segment_ids[number, length - len(prompt) :] = 1
    cache = init_cache(model.config, len(tokens), length + _rounded(sampling.max_new_tokens), rules)
    cache, logits = prefill(model, cache, *to_devices({"tokens": tokens, "segment_ids": segment_ids}, rows).values())
    done = np.zeros(len(prompts), bool)
    for step in range(sampling.max_new_tokens):
        token = np.asarray(sample(logits, jax.random.fold_in(key, step)))
        bad = (token[: len(prompts)] < 0) & ~done
        if bad.any():
            raise FloatingPointError(
                f"prompt {np.argmax(bad)}: the logits after {step} new tokens hold NaN or inf, so there is no next "
                f"token; either parameters are NaN or inf (check the checkpoint), or {model.config.dtype} overflows "
                "(compute in float32)"
            )
        done |= np.isin(token[: len(prompts)], sampling.stop)
        if done.all():
            return
        yield [None if finished else int(t) for t, finished in zip(token, done, strict=False)]
        if step + 1 < sampling.max_new_tokens:
            cache, logits = decode(model, cache, to_devices({"token": np.maximum(token, 0)}, row)["token"])


def generation_rules(rules: Rules) -> Rules:
    """Steps of one token cannot be sharded over time: devices that would share a row take rows of their own."""
    return replace(rules, batch=(*rules.batch, *rules.time), time=())


@partial(jax.jit, donate_argnums=1)
def prefill(model: Kimi, cache: Cache, tokens: jax.Array, segment_ids: jax.Array) -> tuple[Cache, jax.Array]:
    """Reads prompts `[b, t]` -> the cache after them and the logits `[b, vocab]` of the token that follows."""
    x, aux = _experts_in_place(model).hidden(tokens, segment_ids, cache=cache)
    return aux["cache"], model.logits(x[:, -1])


@partial(jax.jit, donate_argnums=1)
def decode(model: Kimi, cache: Cache, token: jax.Array) -> tuple[Cache, jax.Array]:
    """Reads one token per row, `[b]` -> the cache after it and the logits `[b, vocab]` of the next."""
    x, aux = _experts_in_place(model).hidden(token[:, None], cache=cache)
    return aux["cache"], model.logits(x[:, -1])


def _experts_in_place(model: Kimi) -> Kimi:
    """The model with experts that its loops over layers do not copy, on one CPU: a step takes a fifth of the time."""
    if platform() != "cpu" or not jax.sharding.get_abstract_mesh().empty:
        return model
    values = arrays(model)
    for name, each in declared(model.config).items():
        w = values[name]
        if each.axes[0] == "experts" and (model.config.moe.weight_format is None or isinstance(w, QTensor)):
            values[name] = Stacked.of(w, len(each.stack))  # type: ignore[assignment]
    return with_arrays(model, values)


@partial(jax.jit, static_argnames=("temperature", "top_p"))
def _sample(logits: jax.Array, key: jax.Array, *, temperature: float, top_p: float) -> jax.Array:
    """Next tokens `[b]` from logits `[b, vocab]`, on every device; -1 where logits are not finite."""
    logits = relay(logits, P(None, None))
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    return jnp.where(finite, _drawn(logits, key, temperature, top_p), -1)


def _drawn(logits: jax.Array, key: jax.Array, temperature: float, top_p: float) -> jax.Array:
    if temperature == 0:
        return jnp.argmax(logits, axis=-1)
    # The largest is 0 at every temperature, also at one that is 0 in float32, where 0 / 0 would be NaN.
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    logits = jnp.where(below == 0, 0, below / temperature)
    if top_p < 1:
        order = jnp.argsort(-logits, axis=-1)
        probs = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs
        kept = jnp.where(before < top_p, jnp.take_along_axis(logits, order, axis=-1), -jnp.inf)
        choice = jax.random.categorical(key, kept, axis=-1)
        return jnp.take_along_axis(order, choice[:, None], axis=-1)[:, 0]
    return jax.random.categorical(key, logits, axis=-1)


def _rounded(length: int) -> int:
    return -(-length // BUCKET) * BUCKET
