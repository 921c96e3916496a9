"""Samples that a run could not make at its end are rejected at its beginning."""

from dataclasses import replace

import pytest
import tokenizers

from kimi_jax.config import ConfigError, TokenizerConfig
from kimi_jax.text.tokenizer import ByteTokenizer, JsonTokenizer
from kimi_jax.train.loop import run_training
from kimi_jax.train.sample import check_sample
from tests import tiny


def words(**options) -> str:
    """A tokenizer.json that knows three words."""
    vocabulary = {"<|bos|>": 0, "<|eos|>": 1, "<|pad|>": 2, "the": 3, "number": 4, "is": 5}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, **options))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made.to_str()


@pytest.fixture
def config(tmp_path):
    """A run whose model has 32 positions."""
    return tiny.with_model(tiny.config(tmp_path), max_position_embeddings=32)


@pytest.mark.parametrize(("tokens", "prompt"), [(27, "the "), (31, ""), (0, "the "), (30, "t")])
def test_samples_that_fit(config, tokens, prompt):
    check_sample(tiny.with_train(config, sample_tokens=tokens, sample_prompt=prompt), ByteTokenizer())


@pytest.mark.parametrize(
    ("tokens", "prompt", "message"),
    [
        (28, "the ", r"sample_tokens=28 after a prompt of 5 tokens .*max_position_embeddings=32; set it to at most 27"),
        (32, "", r"sample_tokens=32 after a prompt of 1 tokens .*at most 31"),
        (1, "x" * 99, r"sample_tokens=1 after a prompt of 100 tokens .*at most 0"),
    ],
)
def test_samples_that_are_rejected_before_the_first_step(config, tmp_path, tokens, prompt, message):
    with pytest.raises(ConfigError, match=message) as rejected:
        run_training(tiny.with_train(config, sample_tokens=tokens, sample_prompt=prompt))
    assert "\n" not in str(rejected.value)
    assert not (tmp_path / "runs").exists()


def test_prompts_that_a_tokenizer_does_not_know(config):
    asks = tiny.with_train(config, sample_prompt="unheard of")
    with pytest.raises(ConfigError, match=r"'unheard of' cannot be read by the tokenizers tokenizer: .*UNK.*choose"):
        check_sample(asks, JsonTokenizer(words(), 0, 1, 2))
    with pytest.raises(ConfigError, match="'  ' has no tokens in the tokenizers tokenizer; choose another prompt"):
        check_sample(tiny.with_train(config, sample_prompt="  "), JsonTokenizer(words(), 0, 1, 2))


def test_a_rejected_sample_removes_nothing(config, tmp_path):
    """Also with --restart, and whatever the tokenizer is."""
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    (folder / "sample.txt").write_text("of the run before")
    (tmp_path / "tokenizer.json").write_text(words(unk_token="is"))
    tokens = TokenizerConfig(kind="tokenizers", path=str(tmp_path / "tokenizer.json"))
    config = tiny.with_train(replace(config, data=replace(config.data, tokenizer=tokens)), sample_tokens=99)
    with pytest.raises(ConfigError, match="sample_tokens=99 after a prompt of 2 tokens"):
        run_training(config, restart=True)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"sample.txt": "of the run before"}
