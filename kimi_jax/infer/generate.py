"""Generation: one prefill of the prompts, then one jitted step a token, with a cache of fixed size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from kimi_jax.config import ConfigError, Rules
from kimi_jax.model.cache import Cache, init_cache
from kimi_jax.model.kimi import Kimi
from kimi_jax.model.param import arrays, declarations, with_arrays
from kimi_jax.ops.experts import Stacked
from kimi_jax.ops.quant.qtensor import QTensor
from kimi_jax.parallel.batch import to_devices
from kimi_jax.parallel.mesh import current_mesh, platform
from kimi_jax.parallel.spec import placed, relay
from kimi_jax.store.open import open_with_tokenizer
from kimi_jax.text.tokenizer import Tokenizer

BUCKET = 64
"""Prompts and caches are padded to multiples of this, so that few lengths are compiled."""


def generate(
    model: Kimi,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: Sequence[int] = (),
    key: jax.Array | None = None,
    rules: Rules | None = None,
) -> list[list[int]]:
    """Continues each prompt; the same result as each prompt alone.

    Args:
        model: parameters and config.
        prompts: token ids, of any and different lengths of at least one.
        max_new_tokens: most tokens to add to a prompt.
        temperature: 0 takes the likeliest token; else tokens are drawn from softmax(logits / temperature).
        top_p: draws from the likeliest tokens whose probabilities first reach this sum.
        stop: ids that end a continuation; the stop token is not part of it.
        key: source of randomness, needed when temperature > 0.
        rules: how rows are cut over the current mesh, if there is one.

    Returns:
        The new token ids of each prompt.

    Raises:
        ConfigError: an empty prompt, a token outside the vocabulary, or an impossible setting.
    """
    out: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        stop=stop,
        key=key,
        rules=rules,
    ):
        for row, token in zip(out, tokens, strict=True):
            if token is not None:
                row.append(token)
    return out


def stream(
    model: Kimi,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: Sequence[int] = (),
    key: jax.Array | None = None,
    rules: Rules | None = None,
) -> Iterator[list[int | None]]:
    """`generate`, step by step: yields the next token of each prompt, None for the finished ones."""
    _check(model, prompts, max_new_tokens, temperature, top_p, key)
    key = jax.random.key(0) if key is None else key
    sample = partial(_sample, temperature=temperature, top_p=top_p)
    length = _rounded(max(len(prompt) for prompt in prompts))
    mesh, rules = current_mesh(), generation_rules(rules or Rules())
    rows, row = (placed(mesh, rules, names) for names in (("batch", "slots"), ("batch",)))
    ways = 1 if row is None else row.num_devices // row.shard_shape((row.num_devices,))[0]
    tokens = np.zeros((-(-len(prompts) // ways) * ways, length), np.int32)  # rows of padding fill up the mesh
    segment_ids = np.zeros_like(tokens)
    for number, prompt in enumerate(prompts):
        # Padding goes in front, so that all rows write the same cache slot at each step.
        tokens[number, length - len(prompt) :] = prompt
        segment_ids[number, length - len(prompt) :] = 1
    cache = init_cache(model.config, len(tokens), length + _rounded(max_new_tokens), rules)
    cache, logits = prefill(model, cache, *to_devices({"tokens": tokens, "segment_ids": segment_ids}, rows).values())
    done = np.zeros(len(prompts), bool)
    for step in range(max_new_tokens):
        token = np.asarray(sample(logits, jax.random.fold_in(key, step)))
        done |= np.isin(token[: len(prompts)], list(stop))
        if done.all():
            return
        yield [None if finished else int(t) for t, finished in zip(token, done, strict=False)]
        if step + 1 < max_new_tokens:
            cache, logits = decode(model, cache, to_devices({"token": token}, row)["token"])


def generation_rules(rules: Rules) -> Rules:
    """Steps of one token cannot be cut over time: devices that would share a row take rows of their own."""
    return replace(rules, batch=(*rules.batch, *rules.time), time=())


@partial(jax.jit, donate_argnums=1)
def prefill(model: Kimi, cache: Cache, tokens: jax.Array, segment_ids: jax.Array) -> tuple[Cache, jax.Array]:
    """Reads prompts `[b, t]` -> the cache after them and the logits `[b, vocab]` of the token that follows."""
    x, aux = _experts_in_place(model).hidden(tokens, segment_ids, cache=cache)
    return aux["cache"], model.logits(x[:, -1])


@partial(jax.jit, donate_argnums=1)
def decode(model: Kimi, cache: Cache, token: jax.Array) -> tuple[Cache, jax.Array]:
    """Reads one token a row, `[b]` -> the cache after it and the logits `[b, vocab]` of the next."""
    x, aux = _experts_in_place(model).hidden(token[:, None], cache=cache)
    return aux["cache"], model.logits(x[:, -1])


def _experts_in_place(model: Kimi) -> Kimi:
    """The model with experts that its loops over layers do not copy, on one CPU: a step takes a fifth of the time."""
    if platform() != "cpu" or not jax.sharding.get_abstract_mesh().empty:
        return model
    values = arrays(model)
    for name, declared in declarations(model).items():
        w = values[name]
        if declared.axes[0] == "experts" and (model.config.moe.weight_format is None or isinstance(w, QTensor)):
            values[name] = Stacked.of(w, w.ndim - len(declared.axes))  # type: ignore[assignment]
    return with_arrays(model, values)


@partial(jax.jit, static_argnames=("temperature", "top_p"))
def _sample(logits: jax.Array, key: jax.Array, *, temperature: float, top_p: float) -> jax.Array:
    """Next tokens `[b]` from logits `[b, vocab]`, on every device."""
    logits = relay(logits, P(None, None))
    if temperature == 0:
        return jnp.argmax(logits, axis=-1)
    logits = logits / temperature
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


def _check(model: Kimi, prompts, max_new_tokens: int, temperature: float, top_p: float, key) -> None:
    config = model.config
    if not prompts:
        raise ConfigError("no prompts to continue")
    for number, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ConfigError(f"prompt {number} is empty; begin with the token bos_token_id={config.bos_token_id}")
        for token in prompt:
            if not 0 <= token < config.vocab_size:
                raise ConfigError(f"prompt {number} has token {token} outside the vocabulary of {config.vocab_size}")
    longest = max(len(prompt) for prompt in prompts) + max_new_tokens
    if max_new_tokens < 1 or longest > config.max_position_embeddings:
        raise ConfigError(
            f"max_new_tokens={max_new_tokens} must be at least 1, and prompt and continuation ({longest} tokens) "
            f"within max_position_embeddings={config.max_position_embeddings}"
        )
    if temperature < 0 or not 0 < top_p <= 1:
        raise ConfigError(f"temperature={temperature} must not be negative and top_p={top_p} lie in (0, 1]")
    if temperature > 0 and key is None:
        raise ConfigError(f"temperature={temperature} draws tokens and needs a key, e.g. key=jax.random.key(0)")


def continue_text(
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
    model, config, tokenizer = open_with_tokenizer(path, step)
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


def sample_text(model: Kimi, tokenizer: Tokenizer, prompt: str, **options) -> Iterator[str]:
    """Continues a text; yields what follows as it becomes whole characters."""
    tokens = [tokenizer.bos_id, *map(int, tokenizer.encode(prompt))]
    text = tokenizer.stream()
    for (token,) in stream(model, [tokens], stop=tokenizer.stop_ids, **options):
        if token is not None:
            yield text(token)
    yield text.finish()
