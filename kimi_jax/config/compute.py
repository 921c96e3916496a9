"""Settings of where and how a run is computed: mesh axes, rules, and TPU slices."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from kimi_jax.config.checks import LARGEST, check, check_positive, check_types
from kimi_jax.config.model import Dtype

MeshAxis = Literal["data", "fsdp", "expert", "tensor", "seq"]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices along each axis of the mesh; their product is the number of devices of the run."""

    data: int = 1
    """Replicas of everything, each with its rows of the batch: for slices joined by a slow network."""
    fsdp: int = 1
    """Rows of the batch; parameters, gradients and optimizer state are sharded over it and gathered layer by layer."""
    expert: int = 1
    """As fsdp, and routed experts stay on their rank: rows travel instead."""
    tensor: int = 1
    """Heads and MLP widths."""
    seq: int = 1
    """Spans of each row."""

    def __post_init__(self):
        check_types(self)
        check_positive(self, "data", "fsdp", "expert", "tensor", "seq")

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis, outermost first."""
        return dataclasses.asdict(self)

    @property
    def size(self) -> int:
        return math.prod(self.shape.values())


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Which mesh axes each logical axis is sharded over: one mapping for parameters and activations.

    Logical axes that are not named here (head_dim, conv, width, latent, rank_out, router) are never sharded.
    """

    batch: tuple[MeshAxis, ...] = ("data", "fsdp", "expert")
    """Rows of a batch."""
    time: tuple[MeshAxis, ...] = ("seq",)
    """Tokens of a row."""
    embed: tuple[MeshAxis, ...] = ("fsdp", "expert")
    """Model width of weights (of activations it is replicated)."""
    rank: tuple[MeshAxis, ...] = ("fsdp", "expert")
    """Inputs of the low-rank projections of MLA."""
    gate_rank: tuple[MeshAxis, ...] = ("fsdp",)
    """Inputs of the low-rank gates of KDA, which are as narrow as a head."""
    heads: tuple[MeshAxis, ...] = ("tensor",)
    mlp: tuple[MeshAxis, ...] = ("tensor",)
    """Width of dense MLPs and shared experts."""
    vocab: tuple[MeshAxis, ...] = ("tensor",)
    experts: tuple[MeshAxis, ...] = ("expert",)
    expert_latent: tuple[MeshAxis, ...] = ("fsdp",)
    """Input width of routed experts."""
    expert_mlp: tuple[MeshAxis, ...] = ("tensor",)
    """Width inside a routed expert."""

    def __post_init__(self):
        check_types(self)
        for name in (f.name for f in dataclasses.fields(self)):
            axes = getattr(self, name)
            check(len(set(axes)) == len(axes), f"Rules.{name}={axes} names a mesh axis twice; leave one out")
        for name in ("time", "experts"):
            axes = getattr(self, name)
            check(len(axes) <= 1, f"Rules.{name}={axes} names {len(axes)} mesh axes; keep one of them, or none")
        tokens = self.batch + self.time
        for name in ("embed", "rank", "gate_rank", "experts", "expert_latent"):
            axes = getattr(self, name)
            check(
                set(axes) <= set(tokens),
                f"Rules.{name}={axes} must be among the mesh axes of batch and time, {tokens}, for a weight is "
                "gathered where tokens differ; change one of them",
            )
        for name in ("heads", "mlp", "vocab", "expert_mlp"):
            axes = getattr(self, name)
            check(
                not set(axes) & set(tokens),
                f"Rules.{name}={axes} must not share a mesh axis with batch and time, {tokens}; change one of them",
            )


@dataclass(frozen=True, kw_only=True)
class Slice:
    """What a config changes for a TPU slice, by the name that `kimi-jax aot --topology` takes."""

    topology: str
    mesh: Mesh
    batch_size: int | None = None
    """Rows of a step on this slice; None for those of `data`."""
    accumulation: int | None = None
    """Micro-batches of a step on this slice; None for those of `train`."""
    rules: Rules | None = None
    """None for those of the config."""
    param_dtype: Dtype | None = None
    """In which parameters are stored on this slice; None for that of `model`."""

    def __post_init__(self):
        check_types(self)
        for name in ("batch_size", "accumulation"):
            value = getattr(self, name)
            check(
                value is None or 1 <= value <= LARGEST,
                f"Slice.{name}={value} must be at least 1, or None, and at most {LARGEST:,}; change it",
            )
