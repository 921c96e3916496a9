"""What a config is, told without allocating it: components, shapes, counts, memory, optimizer rules."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from kimi_jax.config import Config, ModelConfig
from kimi_jax.model.cache import KDACache, MLACache, init_cache
from kimi_jax.model.kimi import declared
from kimi_jax.model.stacks import segments
from kimi_jax.optim.build import table
from kimi_jax.parallel.batch import batch_sharding
from kimi_jax.parallel.mesh import abstract_mesh
from kimi_jax.parallel.spec import axes_of
from kimi_jax.store import names as released_names
from kimi_jax.store.checkpoint import host_bytes
from kimi_jax.train.step import abstract_state, make_optimizer

ROUTED = ("mlp.w_gate", "mlp.w_up", "mlp.w_down")
"""Parameters of routed experts, of which a token meets `experts_per_token`."""


@dataclass(frozen=True)
class Component:
    group: str
    name: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    """Of one layer."""
    layers: int

    @property
    def count(self) -> int:
        return self.layers * math.prod(self.shape)


@dataclass(frozen=True)
class Counts:
    total: int
    """Parameters of the model."""
    stored: int
    """Numbers in the released checkpoint's text tensors, where K3 pads A_log."""
    active: int
    """Parameters that take part in one token, the head included and the embedding's table not."""
    kda_state_bytes: int
    """KDA state of one sequence."""
    mla_bytes_per_token: int
    """MLA cache of one token, over all layers."""


def components(config: ModelConfig) -> list[Component]:
    """Every parameter, layers of one kind together."""
    merged: dict[tuple[str, str, tuple, tuple], int] = {}
    for name, each in declared(config).items():
        group = "model"
        if name.startswith("segments."):
            _, i, _, j, name = name.split(".", 4)
            segment = segments(config)[int(i)]
            mlp = "dense MLP" if segment.dense else "experts"
            mixer = segment.runs[int(j)].mixer.upper()
            group = {"attention": mixer, "mlp": mlp}.get(name.split(".")[0], "norms and mixes")
        key = (group, name, each.axes, each.shape[len(each.stack) :])
        merged[key] = merged.get(key, 0) + math.prod(each.stack)
    return sorted(
        (Component(*key, layers) for key, layers in merged.items()), key=lambda part: _ORDER.index(part.group)
    )


_ORDER = ["model", "KDA", "MLA", "norms and mixes", "dense MLP", "experts"]


def counts(config: ModelConfig) -> Counts:
    """Exact sizes, from shapes alone."""
    parts = components(config)
    total = sum(part.count for part in parts)
    routed = sum(part.count for part in parts if part.group == "experts" and part.name in ROUTED)
    embed = config.vocab_size * config.hidden_size
    cache = jax.eval_shape(lambda: init_cache(config, 1, 1))
    runs = [run for segment in cache.runs for run in segment]
    return Counts(
        total=total,
        stored=sum(math.prod(tensor.shape) for tensor in released_names.tensors(config)),
        active=total - embed - routed + routed * config.moe.experts_per_token // config.moe.num_experts,
        kda_state_bytes=host_bytes([run.state for run in runs if isinstance(run, KDACache)]),
        mla_bytes_per_token=host_bytes([run.latent for run in runs if isinstance(run, MLACache)]),
    )


def report(config: Config) -> str:
    """The text of `kimi-jax inspect NAME`."""
    model = config.model
    lines = _shapes(model)
    found = counts(model)
    pattern = "".join("M" if layer in model.mla_layers else "K" for layer in range(model.num_layers))
    summary = [
        f"layers: {model.num_layers} = {len(model.kda_layers)} KDA + {len(model.mla_layers)} MLA, {pattern}",
        f"text parameters: {found.total:,}; {found.stored:,} as the release stores them",
        f"active: {found.active:,} ({_billions(found.active)}) a token, head included; "
        f"{_billions(found.active + model.vocab_size * model.hidden_size)} with the embedding's table",
        f"KDA state: {found.kda_state_bytes:,} bytes a sequence ({_exact(model)})",
        f"MLA cache: {found.mla_bytes_per_token:,} bytes a token ({model.dtype})",
    ]
    return lines + "\n" + "\n".join(summary)


def _shapes(model: ModelConfig) -> str:
    """A row for each parameter, layers of one kind together."""
    lines = Table(box=None, header_style="bold", pad_edge=False)
    for title, justify in (("component", "left"), ("parameter", "left"), ("shape", "left"), ("layers", "right")):
        lines.add_column(title, justify=justify)  # type: ignore[arg-type]
    lines.add_column("parameters", justify="right")
    last = None
    for part in components(model):
        shape = " ".join(f"{axis}={size}" for axis, size in zip(part.axes, part.shape, strict=True))
        group = part.group if part.group != last else ""
        lines.add_row(group, part.name, shape, str(part.layers), f"{part.count:,}")
        last = part.group
    return _text(lines)


def optimizer_table(config: Config) -> str:
    """The text of `kimi-jax inspect NAME --optim`: the rule of every parameter."""
    lines = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("parameter", "shape", "rule", "block", "blocks", "QK-Clip"):
        lines.add_column(title, justify="right" if title == "blocks" else "left")
    for row in table(declared(config.model)):
        block = "" if row.block is None else f"{row.block[0]} x {row.block[1]}"
        clip = "" if row.clip is None else ", ".join(f"{width}: gamma^{power:g}" for width, power in row.clip.parts)
        shape = " x ".join(map(str, row.shape))
        lines.add_row(row.path, shape, row.rule, block, f"{row.blocks:,}" if row.blocks else "", clip)
    return _text(lines)


def dry_run(config: Config) -> str:
    """The text of `kimi-jax train NAME --dry-run`: shapes, memory, tokens and steps; nothing is allocated.

    Raises:
        ConfigError: the config's mesh does not divide the model or the batch.
    """
    train, data = config.train, config.data
    rows = data.batch_size // train.accumulation
    tokens = data.batch_size * data.sequence_length
    cut = _per_device(config)  # first: it refuses
    whole = abstract_state(config, make_optimizer(config))
    params, optimizer = host_bytes(whole.params), host_bytes(whole.opt)
    found = counts(config.model)
    lines = [
        _shapes(config.model),
        f"model: {found.total:,} parameters, {found.active:,} active a token",
        f"batch: {data.batch_size} rows x {data.sequence_length} tokens = {tokens:,} tokens a step, "
        f"in {train.accumulation} micro-batches of {rows} rows",
        f"steps: {train.steps:,}, {train.steps * tokens:,} tokens",
        f"memory: {_memory(config, params, optimizer, 1)}",
        *cut,
        f"disk: {_size(params + optimizer)} a checkpoint, {train.keep_last + 1} at a time",
        f"folder: {train.runs_dir}/{config.name}",
    ]
    return "\n".join(lines)


def _per_device(config: Config) -> list[str]:
    """The same memory on each device of the config's mesh, if it has one."""
    if config.mesh.size == 1:
        return []
    with jax.sharding.use_abstract_mesh(abstract_mesh(config.mesh)):
        state = abstract_state(config, make_optimizer(config))
        cut = batch_sharding(config)
    params, optimizer = (
        sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(part))
        for part in (state.params, state.opt)
    )
    assert cut is not None
    ways = math.prod(config.mesh.shape[axis] for part in cut.spec for axis in axes_of(part))
    shape = " x ".join(f"{axis} {size}" for axis, size in config.mesh.shape.items() if size > 1)
    return [f"mesh: {shape} = {config.mesh.size} devices; on each {_memory(config, params, optimizer, ways)}"]


def _memory(config: Config, params: int, optimizer: int, ways: int) -> str:
    rows = config.data.batch_size // config.train.accumulation
    return (
        f"parameters {_size(params)}, optimizer {_size(optimizer)}, gradients {_size(params)}, "
        f"residual stream {_size(_residual_bytes(config, rows) // ways)}"
    )


def _residual_bytes(config: Config, rows: int) -> int:
    """One hidden state a layer and token: what the backward pass keeps at least, even when it recomputes layers."""
    model = config.model
    numbers = model.num_layers * rows * config.data.sequence_length * model.hidden_size
    return numbers * jnp.dtype(model.dtype).itemsize


def _exact(config: ModelConfig) -> str:
    return jnp.promote_types(config.dtype, jnp.float32).name


def _billions(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def _size(num_bytes: int) -> str:
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:,.1f} {unit}"


def _text(lines: Table) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None, force_jupyter=False)
    console.print(lines)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]
