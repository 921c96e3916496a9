"""What is known of a config's parameters without a model: it is what the model then has."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kimi_jax.analysis import flops, sizes
from kimi_jax.config import ConfigError, Mesh, Rules, load_config
from kimi_jax.model import kimi
from kimi_jax.model.init import log_uniform, normal, uniform, zeros
from kimi_jax.model.kimi import Kimi, bias_layers, clip_rows, declared, init
from kimi_jax.model.param import arrays, partitions, shapes
from kimi_jax.model.rules import AdamW, Balanced, Muon
from kimi_jax.parallel.mesh import abstract_mesh
from kimi_jax.store import names
from tests import tiny

NAMES = ["k3", "kimi_linear_48b", "k2_1t", "k3_tiny", "k2_tiny", "kimi_linear_tiny"]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_the_model_has(name):
    config = load_config(name).model
    found, expected = declared(config), arrays(Kimi(config))
    assert list(found) == list(expected)
    for path, each in found.items():
        assert (each.shape, each.dtype) == (expected[path].shape, expected[path].dtype), path
        assert len(each.stack) == (2 if path.startswith("segments.") else 0), path
        assert each.stack + each.shape[len(each.stack) :] == each.shape
        assert each.size == math.prod(each.shape)
    stored = {path for tensor in names.tensors(config) for path in tensor.params}
    assert stored == found.keys()


def test_it_holds_what_each_parameter_declared():
    found = declared(replace(tiny.MODEL, param_dtype="bfloat16"))
    assert found["embed"].init is normal(tiny.MODEL.initializer_range) and found["embed"].rule == AdamW(decay=True)
    assert found["embed"].axes == ("vocab", "embed") and found["embed"].dtype == "bfloat16"
    bias = found["segments.1.runs.0.mlp.router_bias"]
    assert (bias.shape, bias.dtype, bias.init, bias.rule) == ((1, 1, 4), np.float32, zeros, Balanced())
    query = found["segments.1.runs.0.attention.w_q_b"]
    assert query.rule == Muon(rows=(-3,), cols=(-1,)) and query.clip.parts == ((4, 0.5), (4, 1.0))
    assert set(clip_rows(tiny.MODEL)) == {path for path, each in found.items() if each.clip is not None}
    assert set(bias_layers(tiny.MODEL)) == {path for path, each in found.items() if each.rule == Balanced()}


def test_equal_initialisers_are_one_function():
    assert normal(0.02) is normal(0.02) and normal(0.02) is not normal(0.03)
    assert uniform(0.5) is uniform(0.5) and log_uniform(1, 16) is log_uniform(1, 16)
    rng = np.random.default_rng
    assert np.std(normal(0.02)(rng(0), (4000,))) == pytest.approx(0.02, rel=0.05)
    assert np.std(normal(3.0)(rng(0), (4000,))) == pytest.approx(3.0, rel=0.05)


def test_answers_build_no_model(monkeypatch):
    """After the first one: sizes, FLOPs, the optimizer, specs and released names come from the declarations."""
    from kimi_jax.train.step import make_optimizer

    whole = load_config("k3")
    config = whole.model
    assert declared(config) is declared(load_config("k3").model)
    monkeypatch.setattr(kimi, "Kimi", None)
    monkeypatch.setattr(Kimi, "__init__", None)
    assert sum(each.size for each in declared(config).values()) == sizes.counts(config).total == 2_779_484_476_000
    assert flops.newton_schulz(config) > 0
    make_optimizer(whole)
    assert "gamma^0.5" in sizes.optimizer_table(whole)
    assert next(iter(names.tensors(config))).shape == (163840, 7168)


def test_no_caller_can_change_it():
    with pytest.raises(TypeError, match="does not support item assignment"):
        declared(tiny.MODEL)["embed"] = None  # type: ignore[index]


def test_shapes_carry_the_mesh():
    config = tiny.MODEL
    assert all(like.sharding is None for like in shapes(declared(config)).values())
    with jax.sharding.use_abstract_mesh(abstract_mesh(Mesh(fsdp=2, expert=2, tensor=2))):
        found = shapes(declared(config), Rules())
        specs = partitions(declared(config), Rules(), {"fsdp": 2, "expert": 2, "tensor": 2})
        assert {path: like.sharding.spec for path, like in found.items()} == specs
    assert specs["embed"] == P("tensor", ("fsdp", "expert"))
    assert specs["segments.1.runs.0.mlp.w_gate"] == P(None, None, "expert", "fsdp", "tensor")
    with pytest.raises(ConfigError, match=r"vocab=260 does not divide over mesh tensor 3"):
        partitions(declared(config), Rules(), {"tensor": 3})


def test_values_are_those_of_the_declared_initialisers():
    found = arrays(init(tiny.MODEL, 5))
    for path, each in declared(tiny.MODEL).items():
        assert (found[path].shape, found[path].dtype) == (each.shape, each.dtype)
        if each.init is zeros:
            assert not np.any(found[path]), path
