"""Compiles the real step of a config for a TPU slice that is not there: whether it fits, and how fast it can be.

Only shapes are used: the step is lowered for the slice's topology and compiled by libtpu on this host. The compiler
gives memory and collectives; FLOPs come from `flops`, speed limits from the chips' published constants.
"""

from __future__ import annotations

import math
import os
import re
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from kimi_jax import files
from kimi_jax.analysis import flops, hlo
from kimi_jax.config import Config, ConfigError
from kimi_jax.config import Mesh as MeshConfig
from kimi_jax.config.checks import LARGEST, shown
from kimi_jax.infer import generate as generation
from kimi_jax.model.cache import cache_shapes
from kimi_jax.model.kimi import Kimi, declared
from kimi_jax.model.param import shapes, with_arrays
from kimi_jax.parallel.mesh import make_mesh, on_mesh
from kimi_jax.parallel.processes import quiet_libtpu
from kimi_jax.parallel.spec import axes_of, placed, spec_for
from kimi_jax.train import heap
from kimi_jax.train.step import abstract_state, make_optimizer

Step = Literal["train", "prefill", "decode"]
GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """Published figures of one chip, and what libtpu's compiler sees of it."""

    source: str
    """Page of docs.cloud.google.com/tpu/docs with the figures."""
    flops: float
    """Peak bf16 FLOP/s."""
    hbm: int
    """HBM bytes of one device that the compiler lets a program use: less than the page says."""
    hbm_bandwidth: float
    """Bytes/s."""
    link_bandwidth: float
    """Bytes/s of one ICI link in one direction: the page's figure for a chip over its links (and directions)."""
    shapes: tuple[str, ...]
    """Slices one can rent; the compiler takes others too."""
    devices: int = 1
    """JAX devices a chip; they share what it has."""


_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")
_SQUARES = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")

CHIPS = {
    # 2400 Gbit/s over 6 links. On v4 hardware both cores are one device; libtpu compiles for cores alone.
    "v4": Chip("v4", 275e12, int(15.25 * GIB), 1228e9, 50e9, _CUBES, devices=2),
    "v5e": Chip("v5e", 197e12, int(15.75 * GIB), 819e9, 50e9, _SQUARES),  # 400 GB/s both ways over 4 links
    "v5p": Chip("v5p", 459e12, int(95.74 * GIB), 2765e9, 100e9, (*_CUBES, "16x16x24")),  # 1200 GB/s over 6
    "v6e": Chip("v6e", 918e12, int(31.25 * GIB), 1640e9, 100e9, _SQUARES),  # 800 GB/s over 4
    "tpu7x": Chip("tpu7x", 2307e12, int(94.75 * GIB), 7380e9, 100e9, _CUBES, devices=2),  # 1200 GB/s over 6
}
MOST_CHIPS = 2**16
"""Of all slices together: more than anyone has."""
ON_CHIP_LINKS = 6
"""The two devices of a tpu7x chip are joined as by six links (page tpu7x)."""


@dataclass(frozen=True)
class Topology:
    name: str
    """As libtpu names it, e.g. v5p:8x8x8."""
    slices: int
    """Such slices, joined by the data-center network."""

    @property
    def chip(self) -> Chip:
        return CHIPS[self.name.split(":")[0]]


def parse_topology(name: str) -> Topology:
    """Reads `v5p:8x8x8`, or `v5p:8x8x8@2` for two such slices.

    >>> parse_topology("v5p:8x8x8@2")
    Topology(name='v5p:8x8x8', slices=2)
    """
    match = re.fullmatch(r"(\w{1,8}):(\d{1,5}(?:x\d{1,5}){1,2})(?:@(\d{1,5}))?", name)
    if match is None or match[1] not in CHIPS:
        raise ConfigError(_unknown(name))
    chips, slices = math.prod(map(int, match[2].split("x"))), int(match[3] or 1)
    if not 1 <= chips * slices <= MOST_CHIPS:  # libtpu would build each of them
        raise ConfigError(_unknown(name))
    return Topology(f"{match[1]}:{match[2]}", slices)


def topologies() -> list[str]:
    """The slices one can rent, a line for each kind of chip; `@N` after a name stands for N slices."""
    return [f"{kind}: " + ", ".join(f"{kind}:{shape}" for shape in chip.shapes) for kind, chip in CHIPS.items()]


def _unknown(name: str) -> str:
    known = "; ".join(
        f"{kind}:{chip.shapes[0]}, {kind}:{chip.shapes[1]} to {chip.shapes[-1]}" for kind, chip in CHIPS.items()
    )
    return f"no TPU topology {shown(name)}; use {known}, or @N after it for N slices; `--topology list` prints them all"


def prepare() -> None:
    """Settings that libtpu and JAX read when first used: compile on a host without a TPU, and say nothing about it."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no device is opened, so two may compile at once
    quiet_libtpu()
    jax.config.update("jax_platforms", "cpu")
    # Few arenas for the compiler's threads, for what one has freed serves its own threads alone.
    heap.tune(arena_max=4, trim_threshold=128 * 2**20)


def devices(topology: Topology) -> list[Any]:
    """The devices of a slice, as the compiler sees them.

    Raises:
        ConfigError: libtpu is not installed, or it does not know the topology.
    """
    from jax.experimental import topologies

    try:
        import libtpu  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "compiling for TPUs needs libtpu, which works without one: pip install 'kimi-jax[aot]'"
        ) from error
    prepare()
    options = {} if topology.slices == 1 else {"num_slices": topology.slices}
    try:
        return list(topologies.get_topology_desc(topology.name, "tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        raise ConfigError(f"{_unknown(topology.name)}; libtpu: {_brief(error)}") from error


def slice_mesh(config: MeshConfig, topology: Topology, found: Sequence[Any]) -> jax.sharding.Mesh | None:
    """The mesh over all devices of a slice, or of several; see `make_mesh`."""
    if config.size != len(found):
        raise ConfigError(
            f"a mesh of {_sizes(config)} = {config.size} devices does not fill the {len(found)} of "
            f"{topology.slices} x {topology.name}; set --mesh.fsdp and others so that the product is {len(found)}"
        )
    return make_mesh(config, found)


def report(config: Config, topology: str, step: Step = "train", *, rows: int | None = None) -> dict[str, Any]:
    """Compiles a step for a slice.

    Args:
        config: its mesh must fill the slice.
        topology: e.g. `v5p:8x8x8`, see `parse_topology`.
        step: `train` is the function that `train.run` jits; `prefill` and `decode` those of `generate`, over rows of
            `data.sequence_length` tokens.
        rows: of a prefill or decode; by default one for each device of the batch's mesh axes.

    Returns:
        What the JSON file holds: sizes in bytes for one device, whole-step FLOPs, times in seconds.

    Raises:
        ConfigError: what the user can fix, among them what the compiler rejects for reasons other than memory.
    """
    where = parse_topology(topology)
    if rows is not None and not 1 <= rows <= LARGEST:
        raise ConfigError(f"rows={rows} of a {step} must be from 1 to {LARGEST:,}; set --rows to one of them")
    found = devices(where)
    mesh = slice_mesh(config.mesh, where, found)
    began = time.perf_counter()
    with on_mesh(mesh), tempfile.TemporaryDirectory() as folder:
        lowered, sizes, counted = _lowered(config, mesh, step, rows)
        lowered_after = time.perf_counter() - began
        error = None
        try:
            lowered.compile(compiler_options={"xla_dump_to": folder})
        except jax.errors.JaxRuntimeError as raised:
            if "RESOURCE_EXHAUSTED" not in str(raised):
                ragged = "agged all-to-all" in str(raised) or "HasLimitedIciRouting" in str(raised)
                fix = "this slice has no ragged all-to-all; set --model.moe.transport a2a" if ragged else ""
                fix = fix or "choose another topology, mesh or model"
                raise ConfigError(f"libtpu rejects the {step} step for {topology}: {_brief(raised)}; {fix}") from raised
            error = str(raised)
        compiled_after = time.perf_counter() - began - lowered_after
        assignment, usage, program = hlo.dumped(Path(folder))
    total, chip = hlo.hbm_total(usage), where.chip
    axes = {} if mesh is None else dict(mesh.shape)
    moved = hlo.collectives(program, axes)
    rest = total - sum(sizes.values())
    work = flops.total(counted)
    result: dict[str, Any] = {
        "config": config.name,
        "topology": topology,
        "step": step,
        "mesh": config.mesh.shape,
        "devices": len(found),
        "chips": len(found) // chip.devices,
        "fits": error is None,
        "memory": sizes
        | {"activations and temporaries": max(rest, 0), "peak": total, "capacity": chip.hbm}
        | {"error": error},
        "largest_buffers": [asdict(buffer) for buffer in hlo.largest_buffers(assignment, program, 3)],
        "flops": {name: each._asdict() for name, each in counted.items()},
        "collectives": _table(moved),
        "host": {
            "lower_seconds": lowered_after,
            "compile_seconds": compiled_after,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        },
    }
    result["roofline"] = roofline(
        chip,
        len(found),
        work,
        _least_traffic(config, step, axes, sizes),
        sum(c.total / bandwidth(c, mesh, chip) for c in moved),
    )
    result["advice"] = [] if error is None else advice(config, step, result["memory"])
    return result


def roofline(chip: Chip, num_devices: int, work: flops.Work, hbm_bytes: int, ici_seconds: float) -> dict[str, float]:
    """Least time of a step: the largest of compute, memory and network, which may all overlap.

    Compute is the FLOPs that a device runs, at peak bf16 rate; memory the bytes that must pass at least;
    network the collectives one after another, each over all links that its mesh axes have.
    """
    terms = {
        "compute_seconds": work.run / (num_devices * chip.flops / chip.devices),
        "hbm_seconds": hbm_bytes / (chip.hbm_bandwidth / chip.devices),
        "ici_seconds": ici_seconds,
    }
    least = max(terms.values())
    peak = num_devices * chip.flops / chip.devices
    return terms | {
        "step_seconds": least,
        "mfu_bound": work.model / (least * peak),
        "peak_flops_per_chip": chip.flops,
        "hbm_bytes_per_second_per_chip": chip.hbm_bandwidth,
        "ici_bytes_per_second_per_link": chip.link_bandwidth,
    }


def bandwidth(each: hlo.Collective, mesh: jax.sharding.Mesh | None, chip: Chip) -> float:
    """Bytes/s that a device can receive at most in a collective: two links for each torus dimension along which its
    devices differ, shared by the devices of a chip. Infinite between slices, whose network is not modelled."""
    if mesh is None or not each.axes:
        return math.inf
    first = tuple(slice(None) if axis in each.axes else 0 for axis in mesh.axis_names)
    group = np.array(mesh.devices[first], dtype=object).reshape(-1)
    if len({getattr(d, "slice_index", 0) for d in group}) > 1:
        return math.inf
    coords = np.array([d.coords for d in group])
    dimensions = int((coords != coords[0]).any(0).sum())
    if dimensions == 0:
        return ON_CHIP_LINKS * chip.link_bandwidth
    return 2 * dimensions * chip.link_bandwidth / chip.devices


def advice(config: Config, step: Step, memory: dict[str, Any]) -> list[str]:
    """What to change, the largest part of memory first."""
    kept = sum(memory.get(part, 0) for part in ("parameters", "optimizer", "gradients"))
    changes = []
    if memory["activations and temporaries"] > memory["capacity"] - kept > 0:
        if step == "train" and config.model.remat == "none":
            changes.append('set model.remat="full": layers are computed again instead of kept')
        ways = math.prod(getattr(config.mesh, axis) for axis in config.rules.batch)
        part = config.data.batch_size // config.train.accumulation
        if step == "train" and part > ways:
            best = config.data.batch_size // ways
            changes.append(f"raise train.accumulation from {config.train.accumulation} to as much as {best}")
        elif step == "train":
            changes.append("cut rows over more devices of one: raise mesh.seq or mesh.tensor")
        else:
            changes.append("fewer rows at a time, or a shorter data.sequence_length")
    if kept > memory["capacity"] / 2:
        changes.append(
            "cut the state over more devices: a larger slice, with mesh.fsdp or mesh.expert raised by as much"
        )
        if config.model.param_dtype != "bfloat16":
            changes.append('set model.param_dtype="bfloat16", which halves what is stored')
    return changes or ["a larger slice, or more of mesh.fsdp and mesh.expert in place of mesh.data"]


def show(result: dict[str, Any], console: Console | None = None) -> None:
    """Prints a report."""
    if console is None:
        console = Console(highlight=False, soft_wrap=True)
    memory, line, host = result["memory"], result["roofline"], result["host"]
    mesh = " x ".join(f"{axis} {size}" for axis, size in result["mesh"].items() if size > 1) or "one device"
    console.print(
        f"{result['config']}, {result['step']} step on {result['topology']}: {result['chips']:,} chips, "
        f"{result['devices']:,} devices, mesh {mesh}"
    )
    table = Table("HBM of one device", "GiB", "bytes", box=None, header_style="bold", pad_edge=False)
    for name, size in memory.items():
        if name != "error":
            table.add_row(name, f"{size / GIB:.2f}", f"{size:,}")
    _print(console, table)
    table = Table("FLOPs of a step", "model", "run", box=None, header_style="bold", pad_edge=False)
    total = {kind: sum(each[kind] for each in result["flops"].values()) for kind in ("model", "run")}
    for name, each in (result["flops"] | {"total": total}).items():
        table.add_row(name, f"{each['model']:.3e}", f"{each['run']:.3e}")
    _print(console, table)
    table = Table("collective", "axes", "times", "GiB received", box=None, header_style="bold", pad_edge=False)
    for row in result["collectives"]:
        times = f"{row['count']:,}" + ("" if row["known"] else " or more")
        table.add_row(row["kind"], ", ".join(row["axes"]), times, f"{row['bytes'] / GIB:.3f}")
    _print(console, table)
    console.print(
        f"At least {line['step_seconds']:.3f} s a step: compute {line['compute_seconds']:.3f}, memory "
        f"{line['hbm_seconds']:.3f}, network {line['ici_seconds']:.3f} s; MFU at most {line['mfu_bound']:.1%}"
    )
    console.print(
        f"A chip has {line['peak_flops_per_chip'] / 1e12:g} TFLOP/s in bf16, "
        f"{line['hbm_bytes_per_second_per_chip'] / 1e9:g} GB/s of HBM and "
        f"{line['ici_bytes_per_second_per_link'] / 1e9:g} GB/s a link and direction."
    )
    console.print(
        f"Host: {host['lower_seconds']:.0f} s to lower, {host['compile_seconds']:.0f} s to compile, "
        f"{host['peak_bytes'] / GIB:.1f} GiB of memory"
    )
    if result["fits"]:
        console.print(f"Fits: {memory['peak'] / GIB:.2f} of {memory['capacity'] / GIB:.2f} GiB.")
        return
    console.print(f"Does not fit: {memory['peak'] / GIB:.2f} of {memory['capacity'] / GIB:.2f} GiB. Largest buffers:")
    for buffer in result["largest_buffers"]:
        console.print(f"  {buffer['bytes'] / GIB:.2f} GiB  {buffer['shape']}  {buffer['name']}", markup=False)
    console.print("To change: " + "; ".join(result["advice"]))


def save(result: dict[str, Any], path: Path) -> None:
    files.write_json(path, result)


def _brief(error: Exception) -> str:
    """The beginning of a compiler's message, in one line."""
    return " ".join(str(error).split())[:500]


def _lowered(config: Config, mesh, step: Step, rows: int | None):
    """(the lowered step, bytes of its arguments on one device by kind, FLOPs by component)."""
    length = config.data.sequence_length
    if step == "train":
        from kimi_jax.train.step import training_step

        state = abstract_state(config, make_optimizer(config))
        batch = _batch(config, mesh, config.data.batch_size, length)
        sizes = {
            "parameters": device_bytes(state.params),
            "optimizer": device_bytes(state.opt),
            "gradients": device_bytes(state.params, at_least=4 if config.train.accumulation > 1 else 0),
            "batch": device_bytes(batch),
        }
        return training_step(config).lower(state, batch), sizes, flops.train(config)
    config = replace(config, rules=generation.generation_rules(config.rules))
    rows = rows or math.prod(getattr(config.mesh, axis) for axis in config.rules.batch)
    params = shapes(declared(config.model), config.rules)
    model = with_arrays(Kimi(config.model), params)
    cache = cache_shapes(config.model, rows, length, config.rules)
    sizes = {"parameters": device_bytes(params), "cache": device_bytes(cache)}
    if step == "prefill":
        batch = _batch(config, mesh, rows, length)
        lowered = generation.prefill.lower(model, cache, batch["tokens"], batch["segment_ids"])
        return lowered, sizes, flops.prefill(config.model, rows, length)
    token = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=placed(mesh, config.rules, ("batch",)))
    return generation.decode.lower(model, cache, token), sizes, flops.decode(config.model, rows, length)


def _batch(config: Config, mesh, rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch as `data` makes it, as shapes."""
    sharding = placed(mesh, config.rules, ("batch", "time"))
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "segment_ids": jnp.int32, "num_bytes": jnp.int32}
    return {
        name: jax.ShapeDtypeStruct((rows, length), dtype, sharding=sharding)
        for name, dtype in (dtypes | {"loss_weights": jnp.float32}).items()
    }


def device_bytes(tree, *, at_least: int = 0) -> int:
    """Bytes of a tree of arrays or shapes on one device, `at_least` so many for a number."""

    def size(x) -> int:
        local = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        return math.prod(local) * max(x.dtype.itemsize, at_least)

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))


def _least_traffic(config: Config, step: Step, axes: dict[str, int], sizes: dict[str, int]) -> int:
    """Bytes that must pass a device's HBM at least: weights in the compute dtype, as whole as products take them,
    once for each pass of each micro-batch; then the state once in and once out, or the cache once."""
    gathered = replace(config.rules, embed=(), rank=(), gate_rank=(), expert_latent=())
    width = jnp.dtype(config.model.dtype).itemsize
    weights = 0
    for name, each in declared(config.model).items():
        if name == "embed":
            continue
        parts = spec_for(gathered, each.axes, axes)
        ways = math.prod(axes[axis] for part in parts for axis in axes_of(part))
        weights += width * each.size // ways
    if step != "train":
        return weights + sizes["cache"]
    passes = 3 + (config.model.remat == "full")  # forward, again, and two products backward
    state = 2 * (sizes["parameters"] + sizes["optimizer"]) + 2 * sizes["gradients"]
    return config.train.accumulation * passes * weights + state


def _table(moved: list[hlo.Collective]) -> list[dict[str, Any]]:
    """Sums over equal kinds and axes."""
    rows: dict[tuple, dict[str, Any]] = {}
    for each in moved:
        row = rows.setdefault(
            (each.kind, each.axes),
            {"kind": each.kind, "axes": list(each.axes), "count": 0, "bytes": 0, "known": True},
        )
        row["count"] += each.count
        row["bytes"] += each.total
        row["known"] &= each.known
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def _sizes(config: MeshConfig) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in config.shape.items())


def _print(console: Console, table: Table) -> None:
    for column in table.columns[1:]:
        column.justify = "right"
    console.print(table)
