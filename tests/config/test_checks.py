"""Checks of settings: bounds of every number, messages of bounded length, and no work in proportion to a value."""

import dataclasses
import doctest
import time
import typing

import pytest

from kimi_jax.config import ConfigError, Mesh, RoPEConfig, Slice, checks, load_config, run
from kimi_jax.config.checks import shown

BASE = load_config("k2_tiny")
PARTS = [
    *(BASE, BASE.model, BASE.model.mla, BASE.model.moe, BASE.optim, BASE.data, BASE.data.sources[0], BASE.train),
    *(BASE.data.tokenizer, BASE.mesh, BASE.rules, load_config("k3_tiny").model.kda),
    *(RoPEConfig(theta=1e4), Slice(topology="v5e:2x2", mesh=Mesh(fsdp=4))),
]
FIELDS = [
    (part, field.name, kind)
    for part in PARTS
    for field in dataclasses.fields(part)
    for kind in (int, float)
    if kind in (typing.get_args(hint := typing.get_type_hints(type(part))[field.name]) or (hint,))
    and typing.get_origin(hint) is not tuple
]
NONE = {int: [-(2**63), -1, 2**63 - 1, 2**63, 10**30, 10**5000, -(10**5000)]}
NONE[float] = [float("nan"), float("inf"), float("-inf"), 1e39, 10**5000, -(10**5000)]


@pytest.mark.parametrize(("part", "name", "kind"), FIELDS, ids=[f"{type(p).__name__}.{n}" for p, n, _ in FIELDS])
def test_every_number_has_bounds(part, name, kind):
    """What an array of its type cannot hold, and what Python does not even spell out, is no value of a setting."""
    for value in NONE[kind]:
        if name == "eval_tokens" and value == 2**63 - 1:
            continue  # a count on the host
        with pytest.raises(ConfigError) as error:
            dataclasses.replace(part, **{name: value})
        assert name in str(error.value) and len(str(error.value)) < 500 and "\n" not in str(error.value)


def test_all_parts_of_a_config_are_above():
    kinds = {type(part) for part in PARTS}
    for kind in kinds:
        for hint in typing.get_type_hints(kind).values():
            inside = [hint, *typing.get_args(hint)]
            assert {each for each in inside if dataclasses.is_dataclass(each)} <= kinds
    assert len(FIELDS) > 60


def test_a_message_does_not_grow_with_the_value():
    assert len(shown("x" * 10**6)) < 250 and len(shown(tuple(range(10**5)))) < 250
    endless: list = []
    endless.append(endless)
    assert shown(endless) == "[[...]]" and shown([10**5000]) == "a list" and shown("a\nb") == r"'a\nb'"
    with pytest.raises(ConfigError, match=r"mla_layers=\(1, 0, 1, 0.*\(30,000 characters\) must be rising"):
        dataclasses.replace(BASE.model, mla_layers=(1, 0) * 5000)


def test_a_check_that_passes_costs_nothing():
    """The divisors of a batch of a thousand million rows are many."""
    data = dataclasses.replace(BASE.data, batch_size=10**9, sequence_length=2)
    began = time.perf_counter()
    config = dataclasses.replace(BASE, data=data)
    with pytest.raises(ConfigError, match=r"accumulation to one of \[1, 2, 4, 5, 8, 10, 16, 20\]"):
        dataclasses.replace(config, train=dataclasses.replace(BASE.train, accumulation=7))
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize("module", [checks, run])
def test_examples(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
