"""Kimi: embedding, segments of stacked layers, output mix, norm, head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from kimi_jax.config import ModelConfig, Rules
from kimi_jax.model.cache import Cache, advance
from kimi_jax.model.init import normal
from kimi_jax.model.layer import AttnResidual, Layer, Places, RMSNorm
from kimi_jax.model.mla import Slots
from kimi_jax.model.param import Declaration, einsum, filled, named_params, param, shapes, with_arrays
from kimi_jax.model.rules import AdamW
from kimi_jax.model.scan import Walk
from kimi_jax.model.stacks import Segment, num_blocks, segments
from kimi_jax.ops.segments import document_ids
from kimi_jax.ops.segments import positions as positions_in_documents
from kimi_jax.parallel import vocab
from kimi_jax.parallel.spec import relay, spec_of

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
        return vocab.linear_cross_entropy(x, self.head.get_value(), targets, weights)

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

        h = vocab.lookup(self.embed.get_value(), tokens, jnp.dtype(config.dtype))
        if cache is not None:  # tokens past the capacity would overwrite others: better no answer than a wrong one
            h = jnp.where(cache.length + tokens.shape[1] <= cache.capacity, h, jnp.nan)
        bank = None
        if config.attn_res_block_size is not None:
            bank = jax.lax.broadcast(jnp.zeros_like(h), (num_blocks(config),))
        parts: dict[str, list[tuple[np.ndarray, jax.Array]]] = {}
        caches = []
        for index, (segment, stack) in enumerate(zip(segments(config), self.segments, strict=True)):
            cached = None if cache is None else cache.runs[index]
            walk = Walk(config, segment, Places(documents, positions), slots, (*ALWAYS, *collect))
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
    return with_arrays(Kimi(config), filled(declared(config), shapes(declared(config), rules), seed))


@lru_cache(maxsize=64)
def declared(config: ModelConfig) -> Mapping[str, Declaration]:
    """Dotted path of every parameter -> what it is: shape, dtype, axes, initialiser, optimizer rule, QK-Clip.

    In the order of `param.arrays`. Answers without building a model, once the first call has.

    >>> from kimi_jax.config import load_config
    >>> parameters = declared(load_config("k3").model)
    >>> sum(each.size for each in parameters.values())
    2779484476000
    >>> parameters["head"].axes, parameters["head"].shape
    (('embed', 'vocab'), (7168, 163840))
    """
    return MappingProxyType(
        {name: variable.get_metadata()["declared"] for name, variable in named_params(Kimi(config)).items()}
    )


def bias_layers(config: ModelConfig) -> dict[str, np.ndarray]:
    """Path of each stacked correction bias -> its layer numbers `[repeats, run length]`."""
    return {
        f"segments.{i}.runs.{j}.mlp.router_bias": segment.layers(j)
        for i, segment in enumerate(segments(config))
        for j in range(len(segment.runs))
        if not segment.dense
    }


def clip_rows(config: ModelConfig) -> dict[str, np.ndarray]:
    """Path of each parameter that QK-Clip scales -> rows of `max_logits` of its layers, `[repeats, run length]`."""
    return {
        name: np.searchsorted(config.mla_layers, segment.layers(j))
        for i, segment in enumerate(segments(config))
        for j in range(len(segment.runs))
        for name, each in declared(config).items()
        if each.clip is not None and name.startswith(f"segments.{i}.runs.{j}.")
    }


def _in_layer_order(parts: list[tuple[np.ndarray, jax.Array]]) -> jax.Array:
    """Joins stacked values `[repeats, run length, ..]` of several runs to `[layers, ..]`."""
    layers = np.concatenate([layers.reshape(-1) for layers, _ in parts])
    values = jnp.concatenate([value.reshape(-1, *value.shape[2:]) for _, value in parts])
    return values.at[np.argsort(layers)].get(out_sharding=jax.typeof(values).sharding)


def _check_inputs(config, tokens, segment_ids, positions, cache: Cache | None, collect: Sequence[str]) -> None:
    for name, value in (("tokens", tokens), ("segment_ids", segment_ids), ("positions", positions)):
        if value is not None and not (hasattr(value, "ndim") and hasattr(value, "dtype")):
            raise ValueError(f"{name} must be an array [batch, time], got {value!r:.60}; pass np.array([[11, 12, 13]])")
    if tokens.ndim != 2 or 0 in tokens.shape or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens must be integers [batch, time], got {tokens.dtype}{list(tokens.shape)}; "
            "one row of tokens is tokens[None]"
        )
    if isinstance(tokens, np.ndarray):  # what is on a device is not fetched to be looked at: there, wrong ids give NaN
        outside = (tokens < 0) | (tokens >= config.vocab_size)
        if outside.any():
            place = tuple(map(int, np.argwhere(outside)[0]))
            raise ValueError(f"tokens{list(place)} is {tokens[place]}, outside the vocabulary of {config.vocab_size}")
    if segment_ids is not None and segment_ids.shape != tokens.shape:
        raise ValueError(f"segment_ids {list(segment_ids.shape)} must have the shape of tokens {list(tokens.shape)}")
    if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"segment_ids must be integers, 0 for padding, got {segment_ids.dtype}; use .astype(np.int32)")
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
