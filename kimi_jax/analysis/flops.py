"""Floating-point operations of a step, by formula and by component.

The compiler's own count sees the body of a scan once, and 6 N D is wrong here: of 896 experts a token meets 16, KDA
costs the same at every length and MLA does not. A multiply-add counts two. Counted are matrix products, the short
convolutions and the mixes of Attention Residuals; norms, activations and softmax are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kimi_jax.config import Config, ModelConfig
from kimi_jax.model.kimi import declared
from kimi_jax.model.stacks import starts_block
from kimi_jax.ops.attention import KEY_BLOCK, QUERY_BLOCK
from kimi_jax.optim.build import table
from kimi_jax.parallel.context import query_runs

NEWTON_SCHULZ_STEPS = 5


class Work(NamedTuple):
    """FLOPs of one component in one step, over all its layers and all devices."""

    model: int
    """What the mathematics asks for: KDA as the plain recurrence, MLA over the keys that a query sees. MFU's count."""
    run: int
    """What the code does: KDA in chunks, attention over masked keys too, and what the backward pass computes again."""

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return Work(self.model + other.model, self.run + other.run)

    def times(self, model: int, run: int) -> Work:
        return Work(model * self.model, run * self.run)


def total(parts: dict[str, Work]) -> Work:
    """The sum over components."""
    return sum(parts.values(), Work(0, 0))


def forward(model: ModelConfig, rows: int, length: int, *, spans: int = 1) -> dict[str, Work]:
    """FLOPs of logits for `rows` rows of `length` tokens, each row one document and cut into `spans` over devices.

    Attention of all spans is counted as of the device that does most, for which the others wait: all have as many
    pairs of queries and keys, but those at the ends of a row expand the most latents.

    >>> from kimi_jax.config import load_config
    >>> work = total(forward(load_config("k3").model, rows=1, length=8192))
    >>> round(work.model / 8192 / 1e9)  # per token; 2 * 104.19 B active parameters are 208
    215
    """
    of_device = [attended(length // spans, query_runs(length // spans, i, spans), length) for i in range(spans)]
    cells, slots = (spans * max(counts) for counts in zip(*of_device, strict=True))
    pairs = Work(length * (length + 1) // 2, cells)
    return _components(model, rows, length, pairs, slots=slots, absorbed=False, outputs=length, spans=spans)


def train(config: Config) -> dict[str, Work]:
    """FLOPs of one optimizer step: forward, backward (twice the forward), what is computed again, Newton-Schulz.

    `run` counts a layer's forward once more with `remat="full"`, and the backward pass of KDA and of attention
    computes chunks, keys, values and scores again in any case; of a layer's last product the compiler may drop the
    repetition, so it is an upper bound. Newton-Schulz has no `model` part: MFU by convention leaves the optimizer out.
    """
    model, data = config.model, config.data
    again = model.remat == "full"
    parts = {}
    for name, work in forward(model, data.batch_size, data.sequence_length, spans=config.mesh.seq).items():
        if name == "MLA attention":
            # Backward: scores again, and two products for each of the gradients of scores and of values.
            k, v = model.mla.qk_head_dim, model.mla.v_head_dim
            run = work.run * (1 + again) + work.run * (3 * k + 2 * v) // (k + v)
            parts[name] = Work(3 * work.model, run)
        else:
            inside = name in ("KDA recurrence", "MLA expansion")
            parts[name] = work.times(3, 3 if name == "head" else 3 + again + inside)
    return parts | {"Newton-Schulz": Work(0, newton_schulz(model))}


def prefill(model: ModelConfig, rows: int, length: int, capacity: int | None = None) -> dict[str, Work]:
    """FLOPs of reading prompts of `length` tokens into a cache of `capacity` slots, and the next token's logits."""
    cells, slots = attended(length, [0], capacity or length)
    pairs = Work(length * (length + 1) // 2, cells)
    return _components(model, rows, length, pairs, slots=slots, absorbed=_absorbs(model, length), outputs=1)


def decode(model: ModelConfig, rows: int, length: int, capacity: int | None = None) -> dict[str, Work]:
    """FLOPs of one more token a row, the `length`-th, over a cache of `capacity` slots."""
    cells, slots = attended(1, [length - 1], capacity or length)
    pairs = Work(length, cells)
    return _components(model, rows, 1, pairs, slots=slots, absorbed=_absorbs(model, 1), outputs=1)


def attended(queries: int, starts: Sequence[int], slots: int) -> tuple[int, int]:
    """(pairs of query and key, keys) that `ops.attention` computes for queries in equal runs from these slots on.

    Whole blocks of keys up to the last query's, each with the blocks of queries of each run from the first that sees
    it.
    """
    run = queries // len(starts)
    q_block, k_block = min(QUERY_BLOCK, run), min(KEY_BLOCK, slots)
    q_count, k_count = -(-run // q_block), -(-slots // k_block)
    reached = min(k_count, -(-(max(starts) + run) // k_block))
    unseen = (max(0, (j * k_block - start) // q_block) for start in starts for j in range(reached))
    blocks = sum(q_count - min(q_count, before) for before in unseen)
    return blocks * q_block * k_block, reached * k_block


def newton_schulz(model: ModelConfig) -> int:
    """FLOPs of orthogonalising every Muon block once.

    An iteration on a matrix of m x n, m the smaller side, makes A = X X^T, A A and (b A + c A A) X: 4 m^2 n + 2 m^3.
    """
    rows = table(declared(model))
    sides = [(row.blocks, min(row.block), max(row.block)) for row in rows if row.block is not None]
    return NEWTON_SCHULZ_STEPS * sum(blocks * (4 * m * m * n + 2 * m**3) for blocks, m, n in sides)


def chunked_recurrence(length: int, size: int, k: int, v: int) -> int:
    """FLOPs of `ops.kda` in chunks of `size`, for one head and one row.

    A chunk of c places (c the next power of two) costs
        2 c k (c - 1)          scores and A: at each doubling m, c / 2m products of [2m, k] and [k, m]
        2 c (c^2 - 1) / 3      the inverse: at each doubling two products of m x m matrices a pair
        6 c k v + 4 c^2 v      state in and out, inverse and scores times values
    The plain recurrence needs 6 k v a token.
    """
    size = min(size, length)
    c = 1 << (size - 1).bit_length()
    chunk = 2 * c * k * (c - 1) + 2 * c * (c * c - 1) // 3 + 6 * c * k * v + 4 * c * c * v
    return -(-length // size) * chunk


def _absorbs(model: ModelConfig, length: int) -> bool:
    """As `layers.mla`: whether few enough queries read a cache for absorbed weights to be cheaper."""
    c = model.mla
    absorbed, expanded = 2 * c.kv_lora_rank + c.qk_rope_head_dim, c.qk_head_dim + c.v_head_dim
    return length * (absorbed - expanded) < c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)


def _components(
    model: ModelConfig,
    rows: int,
    length: int,
    pairs: Work,
    *,
    slots: int,
    absorbed: bool,
    outputs: int,
    spans: int = 1,
) -> dict[str, Work]:
    """One forward pass. `pairs` of query and key a row and head; `slots` whose keys and values are expanded;
    `outputs` tokens a row that get logits; `spans` of a row on different devices."""
    d, tokens = model.hidden_size, rows * length
    kda, mla, moe = model.kda, model.mla, model.moe
    num_kda, num_mla = len(model.kda_layers), len(model.mla_layers)
    num_moe, num_dense = len(model.moe_layers), model.num_dense_layers

    def dense(layers: int, numbers: int, count: int = tokens) -> Work:
        """Products of `count` vectors with matrices of `numbers` entries in all."""
        return Work(*[2 * layers * count * numbers] * 2)

    parts = {}
    if kda is not None:
        h, k = kda.num_heads, kda.head_dim
        gate = d * h * k if kda.full_rank_gate else d * k + k * h * k
        recurrence = 6 * k * k * length
        if length == 1:
            chunked = recurrence
        elif spans == 1:
            chunked = chunked_recurrence(length, kda.chunk_size, k, k)
        else:  # the map of the state [k, k] besides, and then the outputs that the span's first state adds
            chunked = spans * chunked_recurrence(length // spans, kda.chunk_size, k, 2 * k) + 2 * k * k * length
        parts["KDA projections"] = dense(num_kda, 4 * d * h * k + d * k + k * h * k + d * h + gate)
        parts["KDA convolution"] = dense(num_kda, 3 * h * k * kda.conv_size)
        parts["KDA recurrence"] = Work(recurrence, chunked).times(num_kda * rows * h, num_kda * rows * h)

    h, r, rope, v = mla.num_heads, mla.kv_lora_rank, mla.qk_rope_head_dim, mla.v_head_dim
    query = d * h * mla.qk_head_dim
    if mla.q_lora_rank is not None:
        query = mla.q_lora_rank * (d + h * mla.qk_head_dim)
    shared = query + d * (r + rope) + h * v * d + (d * h * v if mla.output_gate else 0)
    expansion = r * h * (mla.qk_nope_head_dim + v)
    width = 2 * r + rope if absorbed else mla.qk_head_dim + v
    # A row's keys and values are expanded once and for all, or the query and the output are, for each token.
    expanded = Work(length, length if absorbed else slots)
    parts["MLA projections"] = dense(num_mla, shared)
    parts["MLA expansion"] = expanded.times(*[2 * num_mla * rows * expansion] * 2)
    parts["MLA attention"] = pairs.times(*[2 * num_mla * rows * h * width] * 2)

    if model.attn_res_block_size is not None:
        parts["attention residuals"] = dense(1, 2 * d * _mixed_sources(model))
    parts["dense MLP"] = dense(num_dense, 3 * d * model.dense_hidden_size)
    z = moe.latent_size or d
    latent = 0 if moe.latent_size is None else 2 * d * z
    parts["router"] = dense(num_moe, d * moe.num_experts)
    parts["latent projections"] = dense(num_moe, latent)
    parts["routed experts"] = dense(num_moe, moe.experts_per_token * 3 * z * moe.hidden_size)
    parts["shared experts"] = dense(num_moe, 3 * d * moe.num_shared_experts * moe.hidden_size)
    parts["head"] = dense(1, d * model.vocab_size, rows * outputs)
    return {name: work for name, work in parts.items() if work.run}


def _mixed_sources(model: ModelConfig) -> int:
    """Sources of all mixes of a token: two a layer and one at the end, each over the bank and the running sum."""
    bank, sources = 0, 0
    for layer in range(model.num_layers):
        bank += starts_block(model, layer)
        sources += 2 * (bank + 1)
    return sources + bank + 1
