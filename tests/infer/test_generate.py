"""Generation: batches of unequal prompts, stop tokens, sampling, and its errors."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.config import ConfigError
from kimi_jax.infer.generate import _sample, decode, generate, stream
from kimi_jax.infer.sampling import Sampling
from kimi_jax.model.cache import init_cache
from kimi_jax.model.kimi import init
from kimi_jax.model.param import arrays, with_arrays
from kimi_jax.ops.quant.qtensor import QTensor
from tests import tiny


@pytest.fixture(scope="module")
def model():
    """Weights large enough that the likeliest token depends on the whole prompt."""
    model = init(tiny.MODEL, 3)
    return with_arrays(model, {name: value * 12 if value.ndim > 2 else value for name, value in arrays(model).items()})


PROMPTS = [[5], list(range(10, 80)), [7, 9, 200, 31], list(range(100, 164))]


@pytest.fixture(scope="module")
def greedy(model):
    return generate(model, PROMPTS, Sampling(max_new_tokens=12))


def test_greedy_equals_the_full_forward_pass(model, greedy):
    for prompt, out in zip(PROMPTS, greedy, strict=True):
        assert len(out) == 12
        row = np.zeros((1, 96), np.int32)
        both = [*prompt, *out]
        row[0, : len(both)] = both
        logits = jax.jit(type(model).__call__)(model, row, (np.arange(96)[None] < len(both)).astype(np.int32))
        for i, token in enumerate(out):
            at = np.asarray(logits)[0, len(prompt) + i - 1]
            assert at[token] >= at.max() - 1e-4  # equal up to rounding where two tokens tie
    assert len({tuple(out) for out in greedy}) > 1


def test_a_batch_equals_each_prompt_alone(model, greedy):
    for prompt, out in zip(PROMPTS, greedy, strict=True):
        assert generate(model, [prompt], Sampling(max_new_tokens=12)) == [out]


def test_experts_are_read_where_they_are():
    """A step needs a few of them: the loop over layers copies no layer's experts, packed or not."""
    moe = replace(tiny.MODEL.moe, num_experts=256, latent_size=64, hidden_size=64)
    config = replace(tiny.MODEL, num_layers=4, mla_layers=(3,), attn_res_block_size=None, moe=moe)
    model = init(config, 1)
    experts = {name: w for name, w in arrays(model).items() if w.ndim == 5 and "mlp" in name}
    packed = {name: QTensor.encode(w) for name, w in experts.items()}
    decoded = {name: w.decode(jnp.float32) for name, w in packed.items()}
    logits = []
    for values, bytes_a_weight in ((decoded, 4), (packed, 17 / 32)):
        model = with_arrays(model, arrays(model) | values)
        cache, token = init_cache(config, 2, 64), jnp.array([5, 7])
        step = decode.lower(model, cache, token).compile()
        one_layer = 3 * 256 * 64 * 64 * bytes_a_weight
        assert step.memory_analysis().temp_size_in_bytes < one_layer / 2
        logits.append(step(model, cache, token)[1])
    np.testing.assert_array_equal(*logits)


def test_stop_tokens_end_a_row_and_not_its_neighbours(model, greedy):
    stop = greedy[1][4]
    cut = generate(model, PROMPTS, Sampling(max_new_tokens=12, stop=(stop,)))
    for full, out in zip(greedy, cut, strict=True):
        assert out == (full[: full.index(stop)] if stop in full else full)
    steps = list(stream(model, PROMPTS[1:2], Sampling(max_new_tokens=12, stop=(stop,))))
    assert [token for (token,) in steps] == greedy[1][: greedy[1].index(stop)]


def test_sampling_is_reproducible_and_follows_top_p(model):
    drawn = Sampling(max_new_tokens=6, temperature=1.0, seed=1)
    assert generate(model, PROMPTS, drawn) == generate(model, PROMPTS, drawn)
    assert generate(model, PROMPTS, drawn) != generate(model, PROMPTS, replace(drawn, seed=2))


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    probs = np.array([0.05, 0.5, 0.15, 0.3])
    logits = jnp.log(jnp.tile(probs, (4000, 1)))
    drawn = np.asarray(_sample(logits, jax.random.key(0), temperature=1.0, top_p=0.7))
    assert set(drawn) == {1, 3}  # 0.5 alone is under 0.7
    np.testing.assert_allclose((drawn == 1).mean(), 0.5 / 0.8, atol=0.03)
    drawn = np.asarray(_sample(logits, jax.random.key(0), temperature=1.0, top_p=1.0))
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 4000, probs, atol=0.03)
    cold = np.asarray(_sample(logits, jax.random.key(0), temperature=0.05, top_p=1.0))
    assert (cold == 1).mean() > 0.99
    assert set(np.asarray(_sample(logits, jax.random.key(0), temperature=1.0, top_p=1e-6))) == {1}


@pytest.mark.parametrize(
    "prompts,options,message",
    [
        ([], {}, "there are no prompts"),
        ([[3], []], {}, "prompt 1 is empty; begin with the token bos_token_id=0"),
        ([[3, 260]], {}, "token 260 outside the vocabulary of 260"),
        ([[3, -1]], {}, "token -1 outside"),
        ([[3]], {"max_new_tokens": 0}, "max_new_tokens=0 must be a whole number, at least 1"),
        ([[3]], {"max_new_tokens": 2**20}, "more than max_position_embeddings=1048576"),
        ([[3]], {"temperature": -1}, "temperature=-1 must be a finite number, at least 0"),
        ([[3]], {"temperature": 1, "top_p": 0}, "top_p=0"),
    ],
)
def test_errors(model, prompts, options, message):
    with pytest.raises(ConfigError, match=message):
        generate(model, prompts, Sampling(**({"max_new_tokens": 3} | options)))
