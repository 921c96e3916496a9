"""From the layer pattern to stacked segments: which layers share one `lax.scan`.

A *run* is a row of layers with one kind of mixer, a *group* the runs up to and including an MLA layer, a *segment*
the same group repeated. No group crosses a block boundary of Attention Residuals or a change of MLP kind; a segment
may begin many blocks. Compile time grows with the number of distinct segments, not with layers: 93 layers of K3 are
4 segments.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kimi_jax.config import ModelConfig

Mixer = Literal["kda", "mla"]


@dataclass(frozen=True)
class Run:
    mixer: Mixer
    length: int


@dataclass(frozen=True)
class Segment:
    start: int
    """First layer."""
    repeats: int
    runs: tuple[Run, ...]
    dense: bool
    """Dense MLP in place of experts."""

    @property
    def group_size(self) -> int:
        return sum(run.length for run in self.runs)

    @property
    def num_layers(self) -> int:
        return self.repeats * self.group_size

    @property
    def starts(self) -> np.ndarray:
        """First layer of each group, `[repeats]`."""
        return self.start + self.group_size * np.arange(self.repeats)

    def layers(self, run: int) -> np.ndarray:
        """Layer numbers of a run, `[repeats, run length]`: the layers of its stacked parameters."""
        before = sum(r.length for r in self.runs[:run])
        return self.starts[:, None] + before + np.arange(self.runs[run].length)


def starts_block(config: ModelConfig, layer: int) -> bool:
    """Whether the layer begins a block of Attention Residuals (the paper's block boundaries)."""
    return config.attn_res_block_size is not None and layer % config.attn_res_block_size == 0


def num_blocks(config: ModelConfig) -> int:
    """Blocks of Attention Residuals, the last one perhaps shorter; 0 without them."""
    return sum(starts_block(config, layer) for layer in range(config.num_layers))


def segments(config: ModelConfig) -> tuple[Segment, ...]:
    """The model's layers as stacked segments, in order."""
    mixers: list[Mixer] = ["mla" if layer in config.mla_layers else "kda" for layer in range(config.num_layers)]
    groups: list[Segment] = []
    first = 0
    for layer in range(config.num_layers):
        last = layer + 1 == config.num_layers
        zone_ends = last or starts_block(config, layer + 1) or layer + 1 == config.num_dense_layers
        if zone_ends or mixers[layer] == "mla":
            runs = tuple(Run(m, len(list(row))) for m, row in itertools.groupby(mixers[first : layer + 1]))
            groups.append(Segment(first, 1, runs, first < config.num_dense_layers))
            first = layer + 1
    merged: list[Segment] = []
    for group in groups:
        before = merged[-1] if merged else None
        if before is not None and (before.runs, before.dense) == (group.runs, group.dense):
            merged[-1] = Segment(before.start, before.repeats + 1, before.runs, before.dense)
        else:
            merged.append(group)
    return tuple(merged)
