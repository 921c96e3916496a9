"""The optimizer on eight devices: the same numbers, the parameters' shardings, and nothing gathered."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax.config import OptimConfig
from kimi_jax.model.init import zeros
from kimi_jax.model.param import Declaration
from kimi_jax.model.rules import AdamW, Balanced, Muon, QKClip
from kimi_jax.optim.build import build, update_rms
from kimi_jax.optim.muon import scale_by_muon
from tests.conftest import rel_to_rms

PER_HEAD, TO_HEADS, FROM_HEADS = Muon((-3,), (-1,)), Muon((-3,), (-2, -1)), Muon((-3, -2), (-1,))
MATRIX = Muon((-2,), (-1,))
AXES = {"embed": ("fsdp", "expert"), "heads": ("tensor",), "vocab": ("tensor",), "mlp": ("tensor",)}
AXES |= {"experts": ("expert",), "expert_latent": ("fsdp",)}
# As K3 has them, [repeats, run, ...]: five or six layers, three experts a device on `expert 8`, and three heads a
# device on `tensor 4`, so that no stack is a multiple of the devices that trade it.
LEAVES: dict[str, tuple[tuple[int, ...], str, Any]] = {
    "embed": ((24, 16), "vocab embed", AdamW(decay=True)),
    "l.norm": ((2, 3, 16), "-", AdamW(decay=False)),
    "l.bias": ((2, 3, 24), "-", Balanced()),
    "l.w_q": ((2, 3, 16, 12, 6), "embed heads -", PER_HEAD),
    "l.w_q_b": ((5, 1, 10, 12, 6), "- heads -", PER_HEAD),
    "l.w_g": ((2, 3, 16, 12, 6), "embed heads -", TO_HEADS),
    "l.w_o": ((2, 3, 12, 6, 16), "heads - embed", FROM_HEADS),
    "l.w_beta": ((2, 3, 16, 12), "embed heads", MATRIX),
    "l.w_f_a": ((2, 3, 16, 6), "embed -", MATRIX),
    "l.mlp": ((1, 1, 16, 40), "embed mlp", MATRIX),
    "l.experts_up": ((1, 3, 24, 16, 8), "experts expert_latent mlp", MATRIX),
    "l.experts_down": ((1, 3, 24, 8, 16), "experts mlp expert_latent", MATRIX),
}
CLIPS = {"l.w_q_b": (QKClip(((4, 0.5), (2, 1.0))), np.array([[4], [0], [2], [1], [3]]))}
RULES = {path: rule for path, (_, _, rule) in LEAVES.items() if isinstance(rule, Muon)}
DECLARED = {
    path: Declaration(
        shape, np.dtype("float32"), tuple(names.split()), zeros, rule, CLIPS[path][0] if path in CLIPS else None
    )
    for path, (shape, names, rule) in LEAVES.items()
}
SMALL = 3000  # bytes of a step: every kind of block is walked
MESHES = {
    "data8": {"data": 8},
    "fsdp8": {"fsdp": 8},
    "expert8": {"expert": 8},
    "tensor4_data2": {"tensor": 4, "data": 2},
    "fsdp2_expert4": {"fsdp": 2, "expert": 4},
    "expert2_tensor2_seq2": {"expert": 2, "tensor": 2, "seq": 2},
    "seq4_data2": {"seq": 4, "data": 2},
}


def make_mesh(name: str):
    sizes = MESHES[name]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))


def spec(path: str, mesh) -> P:
    shape, names, _ = LEAVES[path]
    entries = [tuple(a for a in AXES.get(n, ()) if a in mesh.axis_names) for n in names.split()]
    return P(*[None] * (len(shape) - len(entries)), *[e[0] if len(e) == 1 else e or None for e in entries])


def place(tree, mesh):
    return {path: jax.device_put(v, NamedSharding(mesh, spec(path, mesh))) for path, v in tree.items()}


def tree(seed: int, dtype=jnp.float32) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {path: jnp.asarray(rng.standard_normal(leaf[0]), dtype) for path, leaf in LEAVES.items()}


def make(step_bytes: int):
    return build(
        OptimConfig(learning_rate=3e-3, warmup_fraction=0.2),
        DECLARED,
        steps=10,
        mla_rows={path: rows for path, (_, rows) in CLIPS.items()},
        step_bytes=step_bytes,
    )


def three_updates(optimizer, params, grads, max_logits):
    @jax.jit
    def step(params, state, grads, accept):
        updates, state = optimizer.update(grads, state, params, max_logits=max_logits, accept=accept)
        moved: Any = optax.apply_updates(params, updates)
        params = {path: jnp.where(accept, moved[path], params[path]) for path in params}
        return params, state, update_rms(updates, DECLARED)  # type: ignore[arg-type]

    state, rms = optimizer.init(params), {}
    for grad, accept in zip(grads, (True, False, True), strict=True):  # the second step is skipped
        params, state, rms = step(params, state, grad, jnp.asarray(accept))
    return params, state, rms


LOGITS = np.random.default_rng(9).uniform(50, 400, (5, 12)).astype(np.float32)
STEP_BYTES = {name: SMALL if i % 2 else 2**28 for i, name in enumerate(MESHES)}
WIDE = ("fsdp8", "tensor4_data2", "fsdp2_expert4", "expert2_tensor2_seq2")


@pytest.fixture(scope="module")
def expected():
    """Three updates without a mesh, each kind of block in one batch."""
    done = {}

    def get(dtype):
        if dtype not in done:
            grads = [tree(i, dtype) for i in (1, 2, 3)]
            done[dtype] = three_updates(make(2**28), tree(0, dtype), grads, jnp.asarray(LOGITS))
        return done[dtype]

    return get


def check_mesh(name: str, dtype, expected, tolerance: float):
    mesh = make_mesh(name)
    with jax.set_mesh(mesh):
        heads = "tensor" if name == "tensor4_data2" else None  # split on one mesh, replicated on the others
        logits = jax.device_put(jnp.asarray(LOGITS), NamedSharding(mesh, P(None, heads)))
        params, grads = place(tree(0, dtype), mesh), [place(tree(i, dtype), mesh) for i in (1, 2, 3)]
        got = three_updates(make(STEP_BYTES[name]), params, grads, logits)
    moved = 0.0
    for (path, actual), wanted in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        where = jax.tree_util.keystr(path, simple=True, separator=".")
        assert actual.dtype == wanted.dtype, where
        assert rel_to_rms(actual, wanted) < tolerance, where
        owner = [leaf for leaf in LEAVES if where.endswith(leaf)]
        moved += len(owner)
        assert jax.typeof(actual).sharding.spec == (spec(owner[0], mesh) if owner else P()), where
    assert moved == len(LEAVES) + len(RULES) + 2 * 2  # parameters, momentum, two moments of each AdamW leaf


@pytest.mark.parametrize("name", MESHES)
def test_three_updates_equal_those_without_a_mesh(name, expected):
    """Sums over a block run in another order: a few units of 6e-8, which the iteration enlarges up to 3.44^5 times
    for small singular values and about tenfold for typical ones."""
    check_mesh(name, jnp.float32, expected(jnp.float32), 5e-5)


@pytest.mark.parametrize("name", WIDE)
def test_three_updates_in_float64(name, expected, x64):
    check_mesh(name, jnp.float64, expected(jnp.float64), 1e-10)


def test_state_is_sharded_like_its_parameters():
    """From arrays on a mesh and from shapes alone, jitted or not; scalars are replicated."""
    mesh = make_mesh("fsdp2_expert4")
    with jax.set_mesh(mesh):
        params = place(tree(0), mesh)
        shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding), params)
        for state in (
            make(SMALL).init(params),
            jax.jit(make(SMALL).init)(params),
            jax.eval_shape(make(SMALL).init, shapes),
        ):
            for path, leaf in jax.tree_util.tree_leaves_with_path(state):
                where = jax.tree_util.keystr(path, simple=True, separator=".")
                owner = [name for name in LEAVES if where.endswith(name)]
                if owner:
                    assert leaf.sharding.spec == spec(owner[0], mesh), where
                else:
                    assert leaf.shape == (), where


def computations(hlo: str) -> dict[str, str]:
    """Name -> text of every computation of a compiled module."""
    return {m[1]: m[2] for m in re.finditer(r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", hlo, re.M | re.S)}


def collectives(hlo: str) -> tuple[list[str], list[str]]:
    """Kinds of collectives (outside, inside) of the innermost loops: Newton-Schulz iterations."""
    texts = computations(hlo)
    kind = re.compile(r" (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\(")

    def reached(name, seen):
        if name not in seen and name in texts:
            seen.add(name)
            for callee in re.findall(r"%([\w.\-]+)", texts[name]):
                reached(callee, seen)
        return seen

    loops = {body: reached(body, set()) for text in texts.values() for body in re.findall(r"body=%?([\w.\-]+)", text)}
    inner = [names for names in loops.values() if not any(" while(" in texts[name] for name in names)]
    assert inner and all(
        any(" dot(" in texts[name] or "custom-call" in texts[name] for name in names) for names in inner
    )
    inside = set().union(*inner)
    found = [(name in inside, kind.findall(text)) for name, text in texts.items()]
    return [k for inner, kinds in found if not inner for k in kinds], [
        k for inner, kinds in found if inner for k in kinds
    ]


@pytest.mark.parametrize("step_bytes", [2**28, SMALL])
@pytest.mark.parametrize(
    ("name", "trades"),
    # Kinds of blocks with a split side: q + f_a, g + o, beta, mlp and experts; experts are whole on expert 8, q and f_a
    # on tensor 4, and where heads are split too, q and f_a are two kinds.
    [("fsdp8", 5), ("expert8", 4), ("tensor4_data2", 4), ("expert2_tensor2_seq2", 6)],
)
def test_no_collective_inside_the_iteration(name, trades, step_bytes):
    """Two all-to-alls for each kind of block with a split side, of which the walk may make several loops."""
    mesh, muon = make_mesh(name), scale_by_muon(RULES, step_bytes=step_bytes)
    with jax.set_mesh(mesh):
        grads = place({path: value for path, value in tree(0).items() if path in RULES}, mesh)
        compiled = jax.jit(muon.update).lower(grads, jax.eval_shape(muon.init, grads)).compile()
    outside, inside = collectives(compiled.as_text() or "")
    assert inside == []
    assert set(outside) == {"all-to-all"}
    if step_bytes == SMALL:
        assert len(outside) >= 2 * trades
    else:
        assert len(outside) == 2 * trades


@pytest.mark.parametrize("name", ["tensor4_data2", "data8"])
def test_whole_heads_need_no_collective(name):
    mesh, muon = make_mesh(name), scale_by_muon({"l.w_q": PER_HEAD})
    with jax.set_mesh(mesh):
        grads = place({"l.w_q": tree(0)["l.w_q"]}, mesh)
        compiled = jax.jit(muon.update).lower(grads, jax.eval_shape(muon.init, grads)).compile()
    assert collectives(compiled.as_text() or "") == ([], [])


def test_memory_of_a_large_leaf_is_that_of_a_step():
    """16 MiB of experts walked 1 MiB at a time: directions and momentum take the donated buffers, skippable or not."""
    jax.config.update("jax_disable_most_optimizations", False)
    shape = {"w": jax.ShapeDtypeStruct((4, 4, 4, 256, 256), jnp.float32)}

    def temporary(step_bytes):
        muon = scale_by_muon({"w": MATRIX}, step_bytes=step_bytes)
        step = jax.jit(lambda g, s, ok: muon.update(g, s, accept=ok), donate_argnums=(0, 1))
        args = shape, jax.eval_shape(muon.init, shape), jax.ShapeDtypeStruct((), jnp.bool)
        memory: Any = step.lower(*args).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= 2 * 16 * 2**20
        return memory.temp_size_in_bytes

    assert temporary(2**20) < 6 * 2**20  # about a third of one copy
    assert temporary(2**28) > 2 * 16 * 2**20  # all at once
