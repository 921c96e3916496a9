"""Each layer on every mesh beside one device: outputs, gradients of inputs and weights, and how they are sharded.

Whole steps are in `test_meshes.py`, the optimizer in `tests/optim/test_sharded.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax.config import ModelConfig, Rules
from kimi_jax.model.kda import KDA
from kimi_jax.model.kimi import Kimi
from kimi_jax.model.layer import AttnResidual
from kimi_jax.model.mla import MLA
from kimi_jax.model.mlp import MLP
from kimi_jax.model.moe import MoE
from kimi_jax.model.param import arrays, named_params, partitions, with_arrays
from kimi_jax.ops.segments import document_ids, positions
from kimi_jax.parallel import vocab
from kimi_jax.parallel.mesh import make_mesh
from kimi_jax.parallel.spec import spec_for, spec_of
from tests.conftest import rel_to_max
from tests.parity import K2, K3, KIMI_LINEAR, MESHES, batches, case_config

RULES = Rules()
ROWS, TIME = ("batch", "time", "width"), ("batch", "time")


class Inputs(NamedTuple):
    """A packed batch as layers get it: x as it is sharded, documents and positions of whole rows."""

    x: Any
    tokens: Any
    targets: Any
    weights: Any
    documents: Any
    positions: Any


class Case(NamedTuple):
    """A layer: (module, inputs) -> a differentiable output, and what else it gives, by name."""

    config: ModelConfig
    build: Callable[[ModelConfig], nnx.Module]
    call: Callable[[Any, Inputs], tuple[Any, dict[str, Any]]]
    aux: dict[str, tuple[str, ...]]
    """Logical axes of each; () is replicated."""


def kda(layer, given):
    return layer(given.x, given.documents, None)[0], {}


def mla(layer, given):
    y, _, max_logits = layer(given.x, given.documents, None, None, given.positions)
    return y, {"max_logits": max_logits}


def moe(layer, given):
    y, aux = layer(given.x, given.documents)
    return y + jnp.sum(aux.get("balance_loss", 0.0)), aux


def embed_and_head(model, given):
    x = vocab.lookup(model.embed.get_value(), given.tokens, given.x.dtype) + given.x
    loss, weight = model.loss(x, given.targets, given.weights)
    return (x, loss), {"weight": weight, "logits": model.logits(x)}


def bank_mix(layer, given):
    bank = jnp.stack([given.x, jnp.cos(given.x), jnp.sin(given.x)])
    return layer(bank, given.x * 2, jnp.int32(2), jnp.asarray(False)), {}


ROUTED = {
    **dict.fromkeys(("router_scores", "topk_idx", "topk_weight"), ROWS),
    **dict.fromkeys(("load", "histogram"), ()),
}
EMBED = Kimi(replace(K3, num_layers=1, mla_layers=(0,), attn_res_block_size=None))
CASES = {
    "kda": Case(K3, partial(KDA, stack=()), kda, {}),
    "mla": Case(K3, partial(MLA, stack=()), mla, {"max_logits": ("heads",)}),
    "moe": Case(K3, partial(MoE, stack=()), moe, ROUTED),
    "embed and head": Case(EMBED.config, Kimi, embed_and_head, {"weight": (), "logits": ("batch", "time", "vocab")}),
    "dense": Case(K3, lambda c: MLP(c, c.dense_hidden_size, ()), lambda layer, given: (layer(given.x), {}), {}),
    "attention residual": Case(K3, AttnResidual, bank_mix, {}),
    # What else the families have.
    "kda, low-rank gates": Case(KIMI_LINEAR, partial(KDA, stack=()), kda, {}),
    "mla, full query": Case(KIMI_LINEAR, partial(MLA, stack=()), mla, {"max_logits": ("heads",)}),
    "mla, rotary": Case(K2, partial(MLA, stack=()), mla, {"max_logits": ("heads",)}),
    "moe, balance loss": Case(K2, partial(MoE, stack=()), moe, ROUTED | {"balance_loss": ()}),
    "moe, all to all": Case(
        replace(K3, moe=replace(K3.moe, transport="a2a", balance="none")), partial(MoE, stack=()), moe, ROUTED
    ),
}
ON_ALL = ("kda", "mla", "moe", "embed and head")
MIXED = ("tensor 4 data 2", "seq 4 data 2", "fsdp 2 expert 4", "expert 2 tensor 2 seq 2")
PAIRS = [
    *((name, mesh) for name in ON_ALL for mesh in MESHES),
    *((name, mesh) for name in ("dense", "kda, low-rank gates", "moe, balance loss") for mesh in MIXED[:3]),
    *((name, mesh) for name in ("attention residual", "mla, rotary") for mesh in ("seq 4 data 2", "fsdp 8")),
    *(("mla, full query", mesh) for mesh in ("tensor 4 data 2", "fsdp 8")),
    *(("moe, all to all", mesh) for mesh in ("expert 8", "expert 2 tensor 2 seq 2")),
]


@cache
def values(name: str) -> dict[str, np.ndarray]:
    """Weights that tell: every one matters, and no two experts tie."""
    case, rng = CASES[name], np.random.default_rng(3)
    made = {}
    for path, shape in arrays(case.build(case.config)).items():
        noise = rng.standard_normal(shape.shape, np.float32) * np.float32(0.3)
        made[path] = 1 + noise if "norm" in path else noise
    return made


@cache
def inputs() -> Inputs:
    config = case_config("k3", MESHES["data 8"])
    batch, rng = batches(config)[0], np.random.default_rng(4)
    x = rng.standard_normal((*batch["tokens"].shape, K3.hidden_size), np.float32)
    ids = batch["segment_ids"]
    places = (np.asarray(f(jnp.asarray(ids))) for f in (document_ids, positions))
    return Inputs(x, batch["tokens"], batch["targets"], batch["loss_weights"], *places)


def with_gradients(case: Case, params, given: Inputs, cotangent):
    """(output, gradients of weights and of x, what else)."""

    def run(params, x):
        return case.call(with_arrays(case.build(case.config), params), given._replace(x=x))

    y, pull, aux = jax.vjp(run, params, given.x, has_aux=True)
    return y, pull(cotangent), aux


def cotangent_of(name: str):
    rng, given = np.random.default_rng(5), inputs()
    y = rng.standard_normal(given.x.shape, np.float32)
    return (y, np.float32(0.1)) if name == "embed and head" else y


@cache
def reference(name: str):
    run = jax.jit(partial(with_gradients, CASES[name]))
    return jax.tree.map(np.asarray, run(values(name), inputs(), cotangent_of(name)))


@pytest.mark.parametrize(("name", "mesh_name"), PAIRS, ids=lambda part: part.replace(" ", ""))
def test_a_layer_on_a_mesh_is_that_on_one_device(name, mesh_name):
    """In f32: sums over tokens and widths run in another order, a few roundings of 6e-8, which the norm of a short
    query or key enlarges."""
    case, mesh = CASES[name], make_mesh(MESHES[mesh_name])
    assert mesh is not None
    sizes = dict(mesh.shape)

    def sharding(*axes):
        return NamedSharding(mesh, spec_for(RULES, axes, sizes))

    with jax.set_mesh(mesh):
        module = case.build(case.config)
        declared = {path: weight.get_metadata()["declared"] for path, weight in named_params(module).items()}
        cut = partitions(declared, RULES, sizes)
        params = {path: jax.device_put(w, NamedSharding(mesh, cut[path])) for path, w in values(name).items()}
        tokens, rows = sharding(*TIME), sharding("batch", "width")
        places = Inputs(sharding(*ROWS), tokens, tokens, tokens, rows, rows)
        cotangent = cotangent_of(name)
        where = (places.x, sharding()) if isinstance(cotangent, tuple) else places.x
        run = jax.jit(partial(with_gradients, case))
        got = run(params, jax.device_put(inputs(), places), jax.device_put(cotangent, where))
    y, (d_params, d_x), aux = got
    assert {path: spec_of(d) for path, d in d_params.items()} == cut
    hidden = places.x.spec
    assert spec_of(d_x) == hidden
    assert jax.tree.leaves(jax.tree.map(spec_of, y), is_leaf=lambda s: isinstance(s, P))[0] == hidden
    assert {key: spec_of(value) for key, value in aux.items()} == {
        key: spec_for(RULES, axes or ("width",) * aux[key].ndim, sizes) for key, axes in case.aux.items()
    }
    for actual, expected in zip(jax.tree.leaves(got), jax.tree.leaves(reference(name)), strict=True):
        if np.issubdtype(expected.dtype, np.integer):
            np.testing.assert_array_equal(actual, expected)
        else:
            assert rel_to_max(actual, expected) < 1e-4
