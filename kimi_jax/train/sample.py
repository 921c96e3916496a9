"""The sample that a run writes at its end, and what is wrong with it before the run begins."""

from __future__ import annotations

import jax

from kimi_jax.config import Config, ConfigError
from kimi_jax.infer.generate import stream_text
from kimi_jax.infer.sampling import SEEDS, Sampling
from kimi_jax.model.kimi import Kimi
from kimi_jax.model.param import with_arrays
from kimi_jax.text.tokenizer import Tokenizer


def check_sample(config: Config, tokenizer: Tokenizer) -> None:
    """Checks that `train.sample_prompt` can be read and continued by `train.sample_tokens`.

    Raises:
        ConfigError: the prompt has no tokens, or prompt and continuation are longer than the model's positions.
    """
    prompt, count, most = config.train.sample_prompt, config.train.sample_tokens, config.model.max_position_embeddings
    if count == 0:
        return
    try:
        tokens = len(tokenizer.encode(prompt))
    except Exception as error:  # the tokenizers library raises plain Exception for what its vocabulary lacks
        raise ConfigError(
            f"train.sample_prompt={prompt!r} cannot be read by the {tokenizer.kind} tokenizer: {error}; choose another "
            "prompt, or set train.sample_tokens to 0 for no sample"
        ) from error
    if prompt and not tokens:
        raise ConfigError(
            f"train.sample_prompt={prompt!r} has no tokens in the {tokenizer.kind} tokenizer; choose another prompt, "
            "or set train.sample_tokens to 0 for no sample"
        )
    if 1 + tokens + count > most:
        raise ConfigError(
            f"train.sample_tokens={count} after a prompt of {1 + tokens} tokens is over the model's "
            f"max_position_embeddings={most}; set it to at most {max(0, most - 1 - tokens)}"
        )


def sample(config: Config, tokenizer: Tokenizer, params: dict[str, jax.Array]) -> str:
    """The prompt and its continuation, the same for the same parameters and `train.seed`."""
    model = with_arrays(Kimi(config.model), params)
    seed, tokens = config.train.seed % SEEDS, config.train.sample_tokens
    drawn = Sampling(temperature=0.8, top_p=0.95, max_new_tokens=tokens, seed=seed)
    pieces = stream_text(model, tokenizer, config.train.sample_prompt, drawn, rules=config.rules)
    try:
        text = "".join(pieces)
    except FloatingPointError as error:  # training is done, and its results count
        text = f"[no sample: {error}]"
    return config.train.sample_prompt + text + "\n"
