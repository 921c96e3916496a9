"""Each step draws with random numbers of its own."""

from kimi_jax.infer.generate import generate
from kimi_jax.infer.sampling import Sampling
from kimi_jax.model.kimi import init
from tests import tiny

COMPILE_QUICKLY = True


def test_steps_of_nearly_uniform_logits_draw_different_tokens():
    (tokens,) = generate(init(tiny.MODEL, 3), [[5, 6]], Sampling(temperature=5.0, max_new_tokens=12, seed=1))
    assert len(set(tokens)) > 8, tokens  # of 260 tokens, 12 draws repeat one now and then
