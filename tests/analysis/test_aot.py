"""Compiling for TPU slices on a host without one: what fits, what does not, and what is refused."""

import json
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from kimi_jax import cli
from kimi_jax.analysis import aot, flops, hlo
from kimi_jax.config import ConfigError, Mesh, Slice, load_config, on_slice
from kimi_jax.model.kimi import Kimi
from kimi_jax.model.param import arrays, with_arrays
from kimi_jax.parallel.mesh import abstract_mesh
from kimi_jax.train.step import abstract_state, make_optimizer, make_step

try:
    import libtpu  # noqa: F401

    missing = False
except ImportError:
    missing = True
pytestmark = pytest.mark.usefixtures("optimised")
needs_libtpu = pytest.mark.skipif(missing, reason="libtpu is not installed: pip install -e '.[aot]'")

TINY = replace(load_config("k3_tiny"), mesh=Mesh(fsdp=2, expert=2))
# One layer of each mixer and of each MLP: compiling for TPUs is slow.
SHORT = replace(TINY, model=replace(TINY.model, num_layers=2, mla_layers=(1,)))
K3 = replace(load_config("k3"), mesh=Mesh(fsdp=4, expert=128))


@needs_libtpu
def test_k3_tiny_for_v5e(tmp_path, monkeypatch, capsys):
    """The step that `train.run` jits: memory adds up, and each loop's collectives are counted."""
    path = tmp_path / "report.json"
    options = ["--topology", "v5e:2x2", "--mesh.fsdp", "2", "--mesh.expert", "2", "--out", str(path)]
    cli.main(["aot", "k3_tiny", *options, "--model.num-layers", "2", "--model.mla-layers", "1"])
    result, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert result["fits"] and result["devices"] == result["chips"] == 4
    memory = result["memory"]
    params = sum(value.size for value in arrays(Kimi(SHORT.model)).values())
    assert params * 4 / 4 < memory["parameters"] < params * 4 / 3  # cut over all four, but for vectors and the router
    assert memory["gradients"] == memory["parameters"] < memory["optimizer"] < 2 * memory["parameters"]
    assert memory["batch"] == 5 * 4 * 16 * 256 / 4
    parts = [size for name, size in memory.items() if name not in ("peak", "capacity", "error")]
    assert sum(parts) == memory["peak"] < memory["capacity"] == aot.CHIPS["v5e"].hbm
    moved = {(row["kind"], tuple(row["axes"])): row for row in result["collectives"]}
    # Borrowed experts come in as many rounds as the routing needs.
    assert {kind for (kind, _), row in moved.items() if not row["known"]} <= {"ragged-all-to-all"}
    assert all(row["bytes"] > 0 for row in moved.values())
    # Weights are gathered over one axis after the other, forward and backward, once a layer at least; their gradients
    # are scattered.
    for axis in ("fsdp", "expert"):
        assert moved["all-gather", (axis,)]["count"] > 2 * 2 * 5
        assert moved["reduce-scatter", (axis,)]["bytes"] > 0
    work = flops.total(flops.train(SHORT))
    assert sum(each["run"] for each in result["flops"].values()) == work.run
    line = result["roofline"]
    assert line["compute_seconds"] == pytest.approx(work.run / (4 * 197e12))
    assert 0 < line["mfu_bound"] < work.model / work.run
    assert "Fits:" in printed and "all-gather" in printed and "GiB of memory" in printed


@pytest.fixture
def a_product(monkeypatch):
    """A program of one product in place of a step."""

    def lowered(size, config, mesh, step, rows):
        x = jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=NamedSharding(mesh, P(("fsdp", "expert"))))
        y = jax.ShapeDtypeStruct((size, size), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
        sizes = {"parameters": 2 * size * size, "optimizer": 0, "gradients": 0, "batch": size * size // 2}
        return jax.jit(lambda x, y: jnp.tanh(x @ y) @ y).lower(x, y), sizes, flops.train(config)

    return lambda size: monkeypatch.setattr(aot, "_lowered", partial(lowered, size))


@needs_libtpu
def test_what_does_not_fit_names_its_buffers(a_product, tmp_path, capsys):
    a_product(98304)  # 18 GiB an array, 4.5 GiB its part
    path = tmp_path / "report.json"
    options = ["--topology", "v5e:2x2", "--mesh.fsdp", "2", "--mesh.expert", "2", "--out", str(path)]
    with pytest.raises(SystemExit) as left:
        cli.main(["aot", "k3_tiny", *options])
    assert left.value.code == 1
    result, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert not result["fits"] and "RESOURCE_EXHAUSTED" in result["memory"]["error"]
    assert result["memory"]["peak"] >= (98304**2 + 2 * 98304**2 // 4) * 2
    biggest, second, third = result["largest_buffers"]
    assert (biggest["bytes"], biggest["shape"]) == (2 * 98304**2, "bf16[98304,98304]")
    assert second["bytes"] == third["bytes"] == 2 * 98304**2 // 4
    assert "Does not fit" in printed and "18.00 GiB  bf16[98304,98304]" in printed and "To change:" in printed


@needs_libtpu
def test_what_fits_is_counted_to_the_byte(a_product):
    """The first argument, the output and the product between, a quarter each, and the second argument."""
    a_product(4096)
    result = aot.report(TINY, "v5e:2x2")
    whole = 4096 * 4096 * 2
    assert result["fits"] and result["collectives"] == []
    assert 1.5 * whole <= result["memory"]["peak"] < 1.8 * whole


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "mesh", "message"),
    [
        ("v9:2x2", Mesh(), "no TPU topology 'v9:2x2'; use v4:2x2x1"),
        ("v5e", Mesh(), "v5e:2x2, v5e:2x4"),
        ("v5e:3x3", Mesh(), "libtpu: INVALID_ARGUMENT"),
        ("v5e:2x2@0", Mesh(), "no TPU topology"),
        ("v5e:2x2", Mesh(fsdp=2), "fsdp 2 .* = 2 devices does not fill the 4 of 1 x v5e:2x2"),
        ("v5e:2x2@2", Mesh(fsdp=8), "mesh.data=1 does not divide over 2 slices"),
    ],
)
def test_refusals(topology, mesh, message):
    with pytest.raises(ConfigError, match=message):
        aot.report(replace(TINY, mesh=mesh), topology)


def test_without_libtpu_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(ConfigError, match=r"pip install 'kimi-jax\[aot\]'"):
        aot.report(TINY, "v5e:2x2")


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "count"), [("v4:2x2x1", 8), ("tpu7x:2x2x1", 8), ("v5p:2x2x1@2", 8), ("v5e:4x4", 16), ("v6e:2x4", 8)]
)
def test_meshes_lie_on_slices(name, count):
    """All devices once; of several slices, `data` alone reaches from one to another."""
    where = aot.parse_topology(name)
    found = aot.devices(where)
    config = Mesh(data=2, fsdp=len(found) // 4, tensor=2)
    mesh = aot.slice_mesh(config, where, found)
    assert mesh is not None and mesh.axis_names == ("data", "fsdp", "tensor")
    assert len(set(mesh.devices.flat)) == len(found) == count
    if where.slices == 2:
        assert [{d.slice_index for d in half.flat} for half in mesh.devices] == [{0}, {1}]
        across = hlo.Collective("all-reduce", ("data",), 2, 8, 1, True, "")
        assert aot.bandwidth(across, mesh, where.chip) == float("inf")
    inside = hlo.Collective("all-gather", ("tensor",), 2, 8, 1, True, "")
    link = where.chip.link_bandwidth
    on_chip = where.chip.devices == 2
    assert aot.bandwidth(inside, mesh, where.chip) == (6 * link if on_chip else 2 * link)


@needs_libtpu
@pytest.mark.parametrize("kind", sorted(aot.CHIPS))
def test_listed_slices_exist(kind):
    for shape in aot.CHIPS[kind].shapes[:6]:
        found = aot.devices(aot.parse_topology(f"{kind}:{shape}"))
        chips = 1
        for side in shape.split("x"):
            chips *= int(side)
        assert len(found) == chips * aot.CHIPS[kind].devices


def test_a_slice_brings_its_mesh():
    config = replace(TINY, slices=(Slice(topology="v5p:8x8x8", mesh=Mesh(fsdp=512), param_dtype="bfloat16"),))
    placed = on_slice(config, "v5p:8x8x8")
    assert placed.mesh == Mesh(fsdp=512) and placed.model.param_dtype == "bfloat16"
    assert placed.data == config.data and placed.train == config.train
    assert on_slice(config, "v5p:4x4x4") == config


def test_roofline_is_the_largest_term():
    chip = aot.CHIPS["v5p"]
    work = flops.Work(int(459e12), int(2 * 459e12))
    line = aot.roofline(chip, 2, work, hbm_bytes=2765 * 10**8, ici_seconds=0.5)
    assert (line["compute_seconds"], line["hbm_seconds"], line["ici_seconds"]) == (1, pytest.approx(0.1), 0.5)
    assert (line["step_seconds"], line["mfu_bound"]) == (1, 0.5)
    slow = aot.roofline(chip, 2, work, hbm_bytes=0, ici_seconds=4)
    assert (slow["step_seconds"], slow["mfu_bound"]) == (4, 0.125)


def test_advice_follows_what_is_large():
    memory = {"parameters": 10, "optimizer": 10, "gradients": 10, "activations and temporaries": 100, "capacity": 100}
    text = " ".join(aot.advice(TINY, "train", memory))
    assert 'model.remat="full"' in text and "train.accumulation from 1 to as much as 4" in text
    memory |= {"parameters": 50, "activations and temporaries": 1}
    assert "model.param_dtype" in " ".join(aot.advice(TINY, "train", memory))


def test_the_full_k3_on_512_chips():
    """2.78 T parameters as types alone: forward and loss, and the optimizer, whose results lie as its state does."""
    mesh = abstract_mesh(K3.mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        optimizer = make_optimizer(K3)
        state = abstract_state(K3, optimizer)
        batch = aot._batch(K3, mesh, K3.data.batch_size // K3.train.accumulation, K3.data.sequence_length)

        def loss(params, batch):
            model = with_arrays(Kimi(K3.model), params)
            x, aux = model.hidden(batch["tokens"], batch["segment_ids"])
            return x, model.loss(x, batch["targets"], batch["loss_weights"]), aux["max_logits"]

        x, (nats, _), max_logits = jax.eval_shape(loss, state.params, batch)
        grads = {
            name: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=p.sharding) for name, p in state.params.items()
        }
        updates, opt = jax.eval_shape(
            lambda *args: optimizer.update(*args[:3], max_logits=args[3]), grads, state.opt, state.params, max_logits
        )
    assert x.shape == (512, 8192, 7168) and x.sharding.spec[0] == ("fsdp", "expert") and nats.shape == ()
    for before, after in zip(jax.tree.leaves((state.params, state.opt)), jax.tree.leaves((updates, opt)), strict=True):
        assert (before.shape, before.sharding.spec) == (after.shape, after.sharding.spec)
    total = sum(value.size for value in state.params.values())
    assert total == 2_779_484_476_000
    assert aot.device_bytes(state.params) < 1.01 * total * 4 / 512


@pytest.mark.slow
def test_the_full_k3_step_on_512_chips():
    """As above with the backward pass: minutes of tracing."""
    mesh = abstract_mesh(K3.mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        optimizer = make_optimizer(K3)
        state = abstract_state(K3, optimizer)
        batch = aot._batch(K3, mesh, K3.data.batch_size, K3.data.sequence_length)
        new, metrics = jax.eval_shape(make_step(K3, optimizer), state, batch)
    assert metrics["expert_load"].shape == (92, 896)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
        assert (before.shape, before.sharding.spec) == (after.shape, after.sharding.spec)


def test_a_report_prints():
    result = {
        "config": "k3",
        "topology": "v5p:8x8x8",
        "step": "train",
        "mesh": {"data": 1, "fsdp": 512},
        "devices": 512,
        "chips": 512,
        "fits": True,
        "memory": {"parameters": 2**30, "peak": 2**31, "capacity": 2**32, "error": None},
        "flops": {"head": {"model": 3, "run": 4}},
        "collectives": [{"kind": "all-gather", "axes": ["fsdp"], "count": 7, "bytes": 2**29, "known": False}],
        "roofline": aot.roofline(aot.CHIPS["v5p"], 512, flops.Work(3, 4), 1, 0.0),
        "host": {"lower_seconds": 1, "compile_seconds": 2, "peak_bytes": 2**30},
    }
    console = Console(record=True, width=200)
    aot.show(result, console)
    text = console.export_text()
    for part in (
        "512 chips, 512 devices, mesh fsdp 512",
        "7 or more",
        "0.500",
        "Fits: 2.00 of 4.00 GiB",
        "459 TFLOP/s",
    ):
        assert part in text, (part, text)
