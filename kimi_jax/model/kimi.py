"""Kimi: embedding, segments of stacked layers, output mix, norm, head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from kimi_jax.config import ModelConfig, Rules
from kimi_jax.model.cache import Cache, advance
from kimi_jax.model.layer import AttnResidual, Layer, Places, RMSNorm
from kimi_jax.model.mla import Slots
from kimi_jax.model.param import AdamW, declarations, einsum, materialise, normal, param, place
from kimi_jax.model.stacks import Segment, num_blocks, segments, starts_block
from kimi_jax.ops.segments import document_ids
from kimi_jax.ops.segments import positions as positions_in_documents
from kimi_jax.parallel import dense
from kimi_jax.parallel.mesh import relay, spec_of

ALWAYS = ("max_logits", "load", "histogram", "balance_loss")
"""What every call reports; the rest of a layer's intermediates by request."""
INTERMEDIATES = (
    "attn_in",
    "attn_out",
    "mlp_in",
    "mlp_out",
    "h",
    "router_scores",
    "topk_idx",
    "topk_weight",
    "blocks",
    "final_in",
)


class Stack(nnx.Module):
    """One segment: its runs, each with parameters stacked `[repeats, run length, ..]`."""

    def __init__(self, config: ModelConfig, segment: Segment):
        self.runs = nnx.List(
            [Layer(config, run.mixer, segment.dense, (segment.repeats, run.length)) for run in segment.runs]
        )


class Kimi(nnx.Module):
    """A model of the Kimi family.

    `Kimi(config)` declares parameters and allocates nothing; `init(config, seed)` fills them. The model is a pytree:
    pass it through plain `jax.jit`, `jax.grad` and `optax`.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        dtype, init = jnp.dtype(config.param_dtype), normal(config.initializer_range)
        shape = (config.vocab_size, config.hidden_size)
        self.embed = param(shape, "vocab embed", init, AdamW(decay=True), dtype=dtype)
        self.segments = nnx.List([Stack(config, segment) for segment in segments(config)])
        if config.attn_res_block_size is not None:
            self.output_mix = AttnResidual(config)
        self.norm = RMSNorm(config)
        self.head = param(shape[::-1], "embed vocab", init, AdamW(decay=True), dtype=dtype)

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """Logits `[b, t, vocab]` of the next token, at least f32, for tokens `[b, t]`.

        Args:
            tokens: `[b, t]` integers below `vocab_size`.
            segment_ids: `[b, t]` int32. 0 is padding; each maximal run of one id >= 1 is a document of its own.
        """
        return self.forward(tokens, segment_ids)[0]

    def forward(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        *,
        positions: jax.Array | None = None,
        cache: Cache | None = None,
        collect: Sequence[str] = (),
    ) -> tuple[jax.Array, dict]:
        """Logits and what else a call gives.

        Args:
            tokens, segment_ids: as in `__call__`. With a cache, the row's first document continues the cached one.
            positions: `[b, t]` integers for rotary positions; by default tokens are counted from 0 in each document,
                padding left out, and those in the cache before.
            cache: from `init_cache` or an earlier call. Tokens past its capacity make the logits NaN.
            collect: names out of `INTERMEDIATES` to return besides.

        Returns:
            Logits `[b, t, vocab]`, and a dict with, in layer order, `max_logits [mla layers, h]`,
            `load [moe layers, e]`, `histogram [moe layers, e, bins]`, `balance_loss [moe layers]` if the config has
            one; the collected intermediates; and `cache`, the cache after these tokens, where one came in.
        """
        x, aux = self.hidden(tokens, segment_ids, positions=positions, cache=cache, collect=collect)
        return self.logits(x), aux

    def logits(self, x: jax.Array) -> jax.Array:
        """Hidden states `[.., d]` as `hidden` gives them -> logits `[.., vocab]`, at least f32."""
        letters, exact = "bt"[: x.ndim - 1], jnp.promote_types(x.dtype, jnp.float32)
        return einsum(f"{letters}d,dv->{letters}v", x, self.head, preferred_element_type=exact)

    def loss(self, x: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Hidden states `[b, t, d]` -> (summed weight * nll of the targets `[b, t]`, summed weights)."""
        return dense.linear_cross_entropy(x, self.head.get_value(), targets, weights)

    def hidden(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        *,
        positions: jax.Array | None = None,
        cache: Cache | None = None,
        collect: Sequence[str] = (),
    ) -> tuple[jax.Array, dict]:
        """`forward` without the head: normalised hidden states `[b, t, d]` in the compute dtype."""
        config = self.config
        _check_inputs(config, tokens, segment_ids, positions, cache, collect)
        rows, time = spec_of(tokens)
        if cache is not None and time is not None:
            raise ValueError(f"a cache holds whole rows, but tokens are cut over mesh axis {time!r}; set mesh.seq=1")
        if segment_ids is None and time is not None:
            segment_ids = jnp.ones_like(tokens)
        # Where documents begin is told by the whole row; the numbers are few.
        segment_ids = None if segment_ids is None else relay(segment_ids, P(rows, None))
        documents = None if segment_ids is None else document_ids(segment_ids)
        if positions is not None:
            positions = relay(positions, P(rows, None))
        elif config.mla.rope is not None:
            positions = positions_in_documents(jnp.ones_like(tokens) if segment_ids is None else segment_ids)
            if cache is not None:  # the row's first document goes on
                held = jnp.sum(cache.visible, axis=1, keepdims=True, dtype=positions.dtype)
                positions += held if documents is None else jnp.where(documents == 1, held, 0)
        slots = None
        if cache is not None:
            numbered = jnp.ones_like(tokens, jnp.int32) if documents is None else documents
            held = jax.lax.dynamic_update_slice_in_dim(cache.visible.astype(jnp.int32), numbered, cache.length, 1)
            slots = Slots(numbered, held, cache.length)

        h = dense.lookup(self.embed.get_value(), tokens, jnp.dtype(config.dtype))
        if cache is not None:  # tokens past the capacity would overwrite others: better no answer than a wrong one
            h = jnp.where(cache.length + tokens.shape[1] <= cache.capacity, h, jnp.nan)
        bank = None
        if config.attn_res_block_size is not None:
            bank = jax.lax.broadcast(jnp.zeros_like(h), (num_blocks(config),))
        parts: dict[str, list[tuple[np.ndarray, jax.Array]]] = {}
        caches = []
        for index, (segment, stack) in enumerate(zip(segments(config), self.segments, strict=True)):
            cached = None if cache is None else cache.runs[index]
            walk = _Walk(config, segment, Places(documents, positions), slots, (*ALWAYS, *collect))
            h, bank, cached, aux = walk(h, bank, list(stack.runs), cached)
            caches.append(cached)
            for run, values in enumerate(aux):
                for name, value in values.items():
                    parts.setdefault(name, []).append((segment.layers(run), value))

        out: dict = {name: _in_layer_order(part) for name, part in parts.items()}
        out.setdefault("max_logits", jnp.zeros((0, config.mla.num_heads)))
        if bank is not None:
            if "blocks" in collect:
                out["blocks"] = bank
            h = self.output_mix(bank, h)
        if "final_in" in collect:
            out["final_in"] = h
        if cache is not None:
            assert slots is not None
            out["cache"] = advance(cache, tuple(caches), slots.queries)
        return self.norm(h), out


def init(config: ModelConfig, seed: int = 0, rules: Rules | None = None) -> Kimi:
    """A model with initial parameters, on the current mesh if there is one; a function of config and seed alone."""
    return materialise(place(Kimi(config), rules or Rules()), seed)


def bias_layers(config: ModelConfig) -> dict[str, np.ndarray]:
    """Path of each stacked correction bias -> its layer numbers `[repeats, run length]`."""
    return {
        f"segments.{i}.runs.{j}.mlp.router_bias": segment.layers(j)
        for i, segment in enumerate(segments(config))
        for j in range(len(segment.runs))
        if not segment.dense
    }


def clip_rows(model: Kimi) -> dict[str, np.ndarray]:
    """Path of each parameter that QK-Clip scales -> rows of `max_logits` of its layers, `[repeats, run length]`."""
    mla = model.config.mla_layers
    return {
        name: np.searchsorted(mla, segment.layers(j))
        for i, segment in enumerate(segments(model.config))
        for j in range(len(segment.runs))
        for name, declared in declarations(model).items()
        if declared.clip is not None and name.startswith(f"segments.{i}.runs.{j}.")
    }


class _Walk:
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


def _in_layer_order(parts: list[tuple[np.ndarray, jax.Array]]) -> jax.Array:
    """Joins stacked values `[repeats, run length, ..]` of several runs to `[layers, ..]`."""
    layers = np.concatenate([layers.reshape(-1) for layers, _ in parts])
    values = jnp.concatenate([value.reshape(-1, *value.shape[2:]) for _, value in parts])
    return values.at[np.argsort(layers)].get(out_sharding=jax.typeof(values).sharding)


def _check_inputs(config, tokens, segment_ids, positions, cache: Cache | None, collect: Sequence[str]) -> None:
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers [batch, time], got {tokens.dtype}{list(tokens.shape)}")
    if segment_ids is not None and segment_ids.shape != tokens.shape:
        raise ValueError(f"segment_ids {list(segment_ids.shape)} must have the shape of tokens {list(tokens.shape)}")
    if positions is not None and config.mla.rope is None:
        raise ValueError("positions were given to a model without them; set model.mla.rope, or leave them out")
    if positions is not None and (positions.shape != tokens.shape or not jnp.issubdtype(positions.dtype, jnp.integer)):
        raise ValueError(
            f"positions must be integers of the shape of tokens {list(tokens.shape)}, "
            f"got {positions.dtype}{list(positions.shape)}"
        )
    unknown = sorted(set(collect) - set(INTERMEDIATES))
    if unknown:
        raise ValueError(f"cannot collect {unknown}; there are {', '.join(INTERMEDIATES)}")
    if cache is not None:
        rows, capacity = cache.visible.shape
        if rows != tokens.shape[0] or tokens.shape[1] > capacity:
            raise ValueError(
                f"tokens {list(tokens.shape)} do not fit a cache of {rows} rows and {capacity} slots; "
                f"make one with init_cache(config, {tokens.shape[0]}, at least {tokens.shape[1]})"
            )
