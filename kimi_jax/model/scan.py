"""The layers of one stack: scans over groups and runs, with a backward pass that recomputes each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.config import ModelConfig
from kimi_jax.model.layer import Layer
from kimi_jax.model.stacks import Segment, starts_block


class Walk:
    """A segment's layers, one after the other: scans over its groups, and inside over each run's layers.

    The bank of block sums is only ever appended to, and what a layer does not see yet has no influence on it. So, to
    compute a layer again in the backward pass, the bank as it is in the end serves all layers, where differentiating
    the scan would keep a copy of it for each group.
    """

    def __init__(self, config: ModelConfig, segment: Segment, places, slots, names: Sequence[str]):
        self.segment, self.places, self.slots, self.names = segment, places, slots, names
        self.remat = config.remat == "full"

        def starts(layers: np.ndarray) -> np.ndarray:
            return np.vectorize(lambda layer: starts_block(config, layer), otypes=[bool])(layers)

        self.begins = jnp.asarray(starts(segment.starts))
        begun = np.cumsum(starts(np.arange(config.num_layers)), dtype=np.int32)
        self.counts = jnp.asarray(begun[segment.starts])
        self.fresh = [jnp.asarray(starts(segment.layers(run))) for run in range(len(segment.runs))]

    def __call__(self, h, bank, runs: list[Layer], caches) -> tuple[jax.Array, Any, tuple, list[dict]]:
        """(h, bank, caches, what layers report by run) after the segment."""
        if caches is None and self.remat:
            (h, bank), outs = self._recomputed(h, bank, runs, self.places)
        else:
            (h, bank), outs = self._forward(h, bank, runs, caches, self.places)
        return h, bank, tuple(out["cache"] for out in outs), [out["aux"] for out in outs]

    def _layer(self, h, bank, module: Layer, count, fresh, places, cache=None):
        h, cache, aux = module(h, bank, count, fresh, places, cache, self.slots)
        return h, {"cache": cache, "aux": {name: value for name, value in aux.items() if name in self.names}}

    def _forward(self, h, bank, runs, caches, places, *, keep_inputs: bool = False):
        def group(carry, per_group):
            (h, bank), (begins, count, per_run) = carry, per_group
            if bank is not None:  # a block that begins puts away the sum of the one before
                place = count - 1
                before = jax.lax.dynamic_index_in_dim(bank, place, keepdims=False)
                bank = jax.lax.dynamic_update_index_in_dim(bank, jnp.where(begins, h, before), place, 0)
                h = jnp.where(begins, 0, h)

            def layer(h, per_layer):
                module, fresh, cache = per_layer
                out, reports = self._layer(h, bank, module, count, fresh, places, cache)
                return out, reports | ({"input": h} if keep_inputs else {})

            outs = []
            for one_run in per_run:
                h, out = _scan(layer, h, one_run)
                outs.append(out)
            return (h, bank), outs

        per_run = list(zip(runs, self.fresh, [None] * len(runs) if caches is None else caches, strict=True))
        return _scan(group, (h, bank), (self.begins, self.counts, per_run))

    def _recomputed(self, h, bank, runs, places):
        """`_forward` without caches, whose backward pass computes each layer again from its input."""

        @jax.custom_vjp
        def walk(h, bank, runs, places):
            return self._forward(h, bank, runs, None, places)

        def forward(h, bank, runs, places):
            (h, bank), outs = self._forward(h, bank, runs, None, places, keep_inputs=True)
            inputs = [out.pop("input") for out in outs]
            return ((h, bank), outs), (inputs, bank, runs, places)

        walk.defvjp(forward, self._backward)
        return walk(h, bank, runs, places)

    def _backward(self, residuals, gradients):
        inputs, bank, runs, places = residuals
        (d_h, d_bank), d_outs = gradients
        if self.segment.repeats == 1 and any(run.length == 1 for run in self.segment.runs):
            # Outside of a loop XLA would find the same work done in the forward pass, and keep that instead.
            inputs, bank, runs, places = jax.lax.optimization_barrier((inputs, bank, runs, places))

        def group(carry, per_group):
            begins, count, per_run = per_group

            def layer(carry, per_layer):
                d_h, d_bank = carry
                module, fresh, h, d_aux = per_layer

                def again(h, bank, module):
                    h, out = self._layer(h, bank, module, count, fresh, places)
                    return h, {name: out["aux"][name] for name in d_aux}

                d_h, d_more, d_module = jax.vjp(again, h, bank, module)[1]((d_h, d_aux))
                return (d_h, jax.tree.map(lambda d, more: d + more.astype(d.dtype), d_bank, d_more)), d_module

            d_modules = []
            for one_run in reversed(per_run):
                carry, d_module = _scan(layer, carry, one_run, reverse=True)
                d_modules.insert(0, d_module)
            d_h, d_bank = carry
            if d_bank is not None:
                place = count - 1
                stored = jax.lax.dynamic_index_in_dim(d_bank, place, keepdims=False)
                left = jnp.where(begins, 0, stored)
                d_h = jnp.where(begins, stored.astype(d_h.dtype), d_h)
                d_bank = jax.lax.dynamic_update_index_in_dim(d_bank, left, place, 0)
            return (d_h, d_bank), d_modules

        d_aux = [{n: d for n, d in out["aux"].items() if d.dtype != jax.dtypes.float0} for out in d_outs]
        per_run = list(zip(runs, self.fresh, inputs, d_aux, strict=True))
        # Many layers add to the gradient of one block's sum: in bf16 the small ones would be lost.
        wide = jax.tree.map(lambda d: d.astype(jnp.promote_types(d.dtype, jnp.float32)), d_bank)
        (d_h, wide), d_modules = _scan(group, (d_h, wide), (self.begins, self.counts, per_run), reverse=True)
        return d_h, jax.tree.map(lambda d, like: d.astype(like.dtype), wide, d_bank), d_modules, None


def _scan(f, carry, xs, *, reverse: bool = False) -> tuple[Any, Any]:
    """`jax.lax.scan`, without a loop where there is one step: it would be traced and compiled for nothing."""
    if len(jax.tree.leaves(xs)[0]) > 1:
        return jax.lax.scan(f, carry, xs, reverse=reverse)
    carry, out = f(carry, jax.tree.map(lambda x: jnp.squeeze(x, 0), xs))
    return carry, jax.tree.map(lambda x: x[None], out)
