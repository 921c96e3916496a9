"""Sampling and prompts: what is accepted, what is rejected in one line, and what logits that are no numbers do."""

import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kimi_jax
from kimi_jax import cli
from kimi_jax.config import ConfigError
from kimi_jax.infer import generate as generation
from kimi_jax.infer.generate import _sample, checked_prompts, generate, stream, stream_text
from kimi_jax.infer.sampling import Sampling
from kimi_jax.model.kimi import init
from kimi_jax.model.param import arrays, with_arrays
from kimi_jax.text.tokenizer import ByteTokenizer
from tests import tiny
from tests.store.test_open import save_run


def one_line(error) -> str:
    message = str(error.value)
    assert "\n" not in message and len(message) < 250, message
    return message


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"temperature": float("nan")}, "temperature=nan must be a finite number, at least 0"),
        ({"temperature": float("inf")}, "temperature=inf must be a finite number"),
        ({"temperature": -0.5}, "temperature=-0.5 must be"),
        ({"temperature": "hot"}, "temperature='hot' must be"),
        ({"temperature": True}, "temperature=True must be"),
        ({"temperature": 10**400}, "must be a finite number"),
        ({"top_p": float("nan")}, "top_p=nan must be a number above 0 and at most 1"),
        ({"top_p": 0}, "top_p=0 must be"),
        ({"top_p": 1.01}, "top_p=1.01 must be"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be a whole number, at least 1"),
        ({"max_new_tokens": 2.0}, "max_new_tokens=2.0 must be"),
        ({"seed": 2**70}, "seed=1180591620717411303424 must be a whole number from 0 to"),
        ({"seed": -1}, "seed=-1 must be"),
        ({"seed": 2**32}, "seed=4294967296 must be"),
        ({"stop": 5}, r"stop=5 must be a tuple of token ids, e.g. stop=\(5,\)"),
        ({"stop": (1.5,)}, "a token of stop=1.5 must be a token id"),
        ({"stop": (-1,)}, "a token of stop=-1 must be"),
    ],
)
def test_settings_that_cannot_work_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        Sampling(**settings)
    assert len(one_line(error)) > len(message) / 2


@pytest.mark.parametrize("option", ["--temperature nan", f"--seed {2**70}", "--seed -1", "--top-p 2"])
def test_the_command_line_rejects_them_before_it_opens_anything(option, capsys):
    option = option.split()
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate", "--checkpoint", "nowhere", "--prompt", "a", *option])
    printed = capsys.readouterr()
    assert stopped.value.code == 1 and printed.out == ""
    assert printed.err.startswith(f"error: {option[0].removeprefix('--').replace('-', '_')}=")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("tokens", ["0", "-3"])
def test_an_evaluation_of_no_tokens_is_rejected(tokens, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["eval", "--checkpoint", "nowhere", "--max-tokens", tokens])
    assert stopped.value.code == 1
    assert capsys.readouterr().err == (
        f"error: max_tokens={tokens} must be at least 1; leave it out to read all of the text\n"
    )


CONFIG = tiny.MODEL


@pytest.mark.parametrize(
    "prompts,message",
    [
        ([[3, 1.5]], "prompt 0 has token 1.5, which is not an integer"),
        ([[3], [2.0, 4.0]], "prompt 1 has token 2.0, which is not an integer"),
        (np.ones((2, 3)), "prompt 0 has token 1.0, which is not an integer"),
        ([[3, True]], None),
        ([[True, False]], "prompt 0 has token True, which is not an integer"),
        ([[3, None]], "prompt 0 has token None, which is not an integer"),
        ([[3, 260]], "prompt 0 has token 260 outside the vocabulary of 260"),
        ([[3, 2**80]], f"prompt 0 has token {2**80} outside the vocabulary"),
        (np.array([[3, -1]]), "prompt 0 has token -1 outside"),
        (jnp.array([[3, 400]]), "prompt 0 has token 400 outside"),
        ("def f", "prompts='def f' is text, not token ids; encode it, or call stream_text"),
        (["def f"], "prompt 0 is text, 'def f', not token ids"),
        ([3, 4, 5], r"prompt 0, 3, is not a sequence of token ids, e.g. \[11, 12, 13\]"),
        (jnp.array([3, 4]), "prompt 0, .*3.*, is not a sequence of token ids"),
        ([[[3, 4]]], r"prompt 0, \[\[3, 4\]\], is not a sequence"),
        ([[[3, 4], [5]]], r"prompt 0, \[\[3, 4\], \[5\]\], is not a sequence"),
        (7, r"prompts=7 is not a list of prompts of token ids; write e.g. \[\[11, 12, 13\], \[14\]\]"),
        (jnp.array(7), "prompts=.*7.* is not a list of prompts"),
        (None, "prompts=None is not a list of prompts"),
        ([], "there are no prompts to continue"),
        (np.zeros((0, 4), np.int32), "there are no prompts to continue"),
        ([[3], []], "prompt 1 is empty; begin with the token bos_token_id=0"),
        ([[3] * 2**20], "max_new_tokens=200 and the longest prompt make 1048776 tokens, more than max_position_emb"),
    ],
)  # fmt: skip
def test_prompts_are_checked(prompts, message):
    if message is None:
        assert [row.tolist() for row in checked_prompts(CONFIG, prompts, Sampling())] == [[3, 1]]
        return
    with pytest.raises(ConfigError, match=message) as error:
        checked_prompts(CONFIG, prompts, Sampling())
    one_line(error)


@pytest.mark.parametrize(
    "prompts", [[[3, 4], [5, 6]], np.array([[3, 4], [5, 6]]), jnp.array([[3, 4], [5, 6]]), [np.array([3, 4]), (5, 6)]]
)
def test_prompts_of_every_kind_are_the_same(prompts):
    rows = checked_prompts(CONFIG, prompts, Sampling())
    assert [row.tolist() for row in rows] == [[3, 4], [5, 6]] and all(row.dtype == np.int32 for row in rows)


def test_checks_come_before_the_first_step():
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        stream(_shapes(), [[999]])  # never iterated over
    with pytest.raises(ConfigError, match="more than max_position_embeddings"):
        stream_text(_shapes(), ByteTokenizer(), "a", Sampling(max_new_tokens=2**21))


def _shapes():
    return generation.Kimi(CONFIG)


def drawn(logits, temperature, top_p=1.0, seed=0):
    return np.asarray(
        _sample(jnp.asarray(logits, jnp.float32), jax.random.key(seed), temperature=temperature, top_p=top_p)
    )


def test_as_temperature_goes_to_zero_the_result_goes_to_greedy():
    logits = np.random.default_rng(0).standard_normal((64, 33)) * 30
    greedy = drawn(logits, 0.0)
    np.testing.assert_array_equal(greedy, np.argmax(logits, axis=-1))
    for temperature in (1e-3, 1e-6, 1e-30, 1e-39, 1e-45, 1e-300, 5e-324):
        for top_p in (1.0, 0.9, 1e-6, 1e-300):
            np.testing.assert_array_equal(drawn(logits, temperature, top_p), greedy, err_msg=f"{temperature} {top_p}")
    assert (drawn(logits, 30.0) != greedy).mean() > 0.3
    counts = np.bincount(drawn(np.tile([[9.0, 0.0]], (4000, 1)), 1e30), minlength=2)
    assert abs(counts[0] / 4000 - 0.5) < 0.05  # and as it grows, to even chances


@pytest.mark.parametrize("temperature,top_p", [(0.0, 1.0), (0.7, 1.0), (0.7, 0.9)])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_give_no_token(temperature, top_p, value):
    logits = np.random.default_rng(0).standard_normal((4, 9))
    logits[2, 5] = value
    found = drawn(logits, temperature, top_p)
    assert found[2] == -1 and np.all(np.delete(found, 2) >= 0)


def test_nan_ends_generation_with_an_error(tmp_path, capsys):
    values = arrays(init(CONFIG, 0))
    broken = with_arrays(init(CONFIG, 0), values | {"norm.weight": values["norm.weight"].at[3].set(jnp.nan)})
    for settings in ({}, {"temperature": 0.8}):
        with pytest.raises(FloatingPointError) as error:
            generate(broken, [[3, 4], [5]], Sampling(max_new_tokens=3, **settings))
        message = one_line(error)
        assert message.startswith("prompt 0: the logits after 0 new tokens hold NaN or inf")
        assert "check the checkpoint" in message and "float32 overflows" in message
    save_run(tmp_path / "run", tiny.config(tmp_path), arrays(broken))
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate", "--checkpoint", str(tmp_path / "run"), "--prompt", "a", "--max-new-tokens", "3"])
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (1, "")
    assert printed.err.startswith("error: prompt 0: the logits after 0 new tokens") and printed.err.count("\n") == 1


def _answering(monkeypatch, tokens):
    """Next tokens from a list in place of a model's."""
    tokens = iter(tokens)
    monkeypatch.setattr(generation, "_sample", lambda *_, **__: np.array(next(tokens), np.int32))
    monkeypatch.setattr(generation, "prefill", lambda model, cache, *_: (cache, None))
    monkeypatch.setattr(generation, "decode", lambda model, cache, token: (cache, None))


def test_the_error_names_the_row_and_the_step(monkeypatch):
    """Only of rows that go on: what follows a row's end is nobody's business."""
    _answering(monkeypatch, [[7, 8, 9], [1, 8, 9], [-1, 8, -1]])
    steps = stream(_shapes(), [[3], [4], [5]], Sampling(stop=(1,), max_new_tokens=9))
    assert [next(steps), next(steps)] == [[7, 8, 9], [None, 8, 9]]
    with pytest.raises(FloatingPointError, match="prompt 2: the logits after 2 new tokens hold NaN or inf"):
        next(steps)


def test_a_text_stops_at_the_tokenizers_and_at_ones_own_ids(monkeypatch):
    coder = ByteTokenizer()
    ids = [int(i) for i in coder.encode("ab")]
    for ending, settings in ((coder.eos_id, Sampling()), (ids[0], Sampling(stop=(ids[0],)))):
        _answering(monkeypatch, [[i] for i in (*ids[::-1], ending, ids[0])])
        text = "".join(stream_text(_shapes(), coder, "x", replace(settings, max_new_tokens=9)))
        assert text == ("ba" if settings.stop == () else "b")


@pytest.mark.parametrize(
    "tokens,message",
    [
        (np.array([[3, 260]]), r"tokens\[0, 1\] is 260, outside the vocabulary of 260"),
        (np.array([[3], [-1]]), r"tokens\[1, 0\] is -1, outside the vocabulary"),
        (np.array([[3.0]]), r"tokens must be integers \[batch, time\], got float64\[1, 1\]"),
        (np.array([[3, 4]])[0, 1], r"tokens must be integers \[batch, time\], got int64\[\]"),
        (jnp.array([[3, 4]])[0, 1], r"tokens must be integers \[batch, time\], got int32\[\]"),
        (np.zeros((1, 0), np.int32), r"got int32\[1, 0\]"),
        ([[3, 4]], r"tokens must be an array \[batch, time\], got \[\[3, 4\]\]; pass np.array"),
        (5, r"tokens must be an array \[batch, time\], got 5; pass np.array"),
        ("text", r"tokens must be an array \[batch, time\], got 'text'"),
    ],
)
def test_tokens_of_a_call_are_checked(tokens, message):
    with pytest.raises(ValueError, match=message) as error:
        _shapes()(tokens)
    one_line(error)


def test_segment_ids_are_checked():
    tokens = np.array([[3, 4]])
    with pytest.raises(ValueError, match="segment_ids must be an array"):
        _shapes()(tokens, [[1, 1]])
    with pytest.raises(ValueError, match="segment_ids must be integers, 0 for padding, got float64"):
        _shapes()(tokens, np.ones((1, 2)))


def test_public_names_are_there_and_settings_need_no_jax():
    for name in kimi_jax.__all__:
        assert getattr(kimi_jax, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'kimi_jax' has no attribute 'hf'"):
        kimi_jax.hf  # noqa: B018
    program = (
        "import sys, kimi_jax, kimi_jax.config, kimi_jax.infer.sampling; print({'jax', 'flax'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"
