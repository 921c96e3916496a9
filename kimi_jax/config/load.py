"""Every setting of a run, as nested frozen dataclasses.

A config file in `configs/` builds one `Config`; the command line overrides its fields. Checks that need only
the numbers themselves are made when a dataclass is built (`__post_init__`), so an impossible model cannot
exist; checks that need data or a disk are made by `kimi_jax.train` before the first step.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import math
import re
import types
import typing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

T = TypeVar("T")
Dtype = Literal["float32", "bfloat16", "float64"]
MeshAxis = Literal["data", "fsdp", "expert", "tensor", "seq"]


class ConfigError(Exception):
    """A setting that cannot work. The message carries the numbers and the mend.

    Not a ValueError: the command line's parser would put those into a box of its own.
    """


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def _positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _check(value >= 1, f"{type(config).__name__}.{name}={value} must be at least 1; set it to 1 or more")


def _finite(config: object, *names: str, zero: bool = False) -> None:
    for name in names:
        value = getattr(config, name)
        ok = math.isfinite(value) and (value >= 0 if zero else value > 0)
        _check(ok, f"{type(config).__name__}.{name}={value} must be {'at least 0' if zero else 'above 0'} and finite")


def _typed(config: object) -> None:
    """Values out of a `.py` file pass no parser: refuse what the annotations do not allow."""
    hints = typing.get_type_hints(type(config))
    for name, hint in hints.items():
        value = getattr(config, name)
        union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        allowed = typing.get_args(hint) if union else (hint,)
        _check(
            any(_fits(value, kind) for kind in allowed),
            f"{type(config).__name__}.{name}={value!r} must be {' or '.join(map(_kind_name, allowed))}",
        )


def _fits(value: object, kind: object) -> bool:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return value in typing.get_args(kind)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, typing.get_args(kind)[0]) for item in value)
    if kind in (int, float):
        return not isinstance(value, bool) and isinstance(value, int if kind is int else int | float)
    return isinstance(value, kind)  # type: ignore[arg-type]


def _kind_name(kind: object) -> str:
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    return kind.__name__ if isinstance(kind, type) and typing.get_origin(kind) is None else str(kind)


@dataclass(frozen=True, kw_only=True)
class KDAConfig:
    """Kimi Delta Attention (Kimi Linear report, section 3; K3 report, section 2)."""

    num_heads: int
    head_dim: int
    """Width of keys and of values, per head."""
    conv_size: int = 4
    """Taps of the causal short convolution on q, k and v."""
    gate_lower_bound: float | None = None
    """K3: g = bound * sigmoid(exp(A_log) u), bound = -5. None (Kimi Linear): g = -exp(A_log) softplus(u)."""
    full_rank_gate: bool = False
    """K3: the output gate is one matrix. False (Kimi Linear): rank head_dim."""
    chunk_size: int = 64

    def __post_init__(self):
        _typed(self)
        _positive(self, "num_heads", "head_dim", "conv_size", "chunk_size")
        bound = self.gate_lower_bound
        _check(
            bound is None or -math.inf < bound < 0,
            f"gate_lower_bound={bound} must be negative, or None for the softplus gate",
        )


@dataclass(frozen=True, kw_only=True)
class RoPEConfig:
    """Rotary positions with YaRN's stretch of the context (arXiv 2309.00071), as K2 and DeepSeek-V3 have them."""

    theta: float
    """Base of the frequencies."""
    factor: float = 1.0
    """How much longer than `original_max_position_embeddings` the context is; 1 is plain RoPE."""
    original_max_position_embeddings: int = 4096
    """Context before the stretch."""
    beta_fast: float = 32.0
    """Pairs that turn more often than this in the original context keep their frequency."""
    beta_slow: float = 1.0
    """Pairs that turn less often than this have it divided by `factor`; between the two, a ramp."""
    mscale: float = 1.0
    """Attention logits are scaled by (0.1 mscale ln(factor) + 1)^2; 0 for none (`mscale_all_dim`)."""

    def __post_init__(self):
        _typed(self)
        _positive(self, "original_max_position_embeddings")
        _finite(self, "theta", "beta_slow")
        _finite(self, "mscale", zero=True)
        _check(self.theta > 1, f"theta={self.theta} must be above 1")
        _check(1 <= self.factor < math.inf, f"factor={self.factor} must be at least 1 (no stretch) and finite")
        _check(
            self.beta_slow <= self.beta_fast < math.inf,
            f"beta_fast={self.beta_fast} must be at least beta_slow={self.beta_slow} and finite",
        )


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention, without positions (NoPE) or with rotary ones."""

    num_heads: int
    q_lora_rank: int | None
    """Rank of the query projection; None for one plain matrix (Kimi Linear)."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """Width of the key part shared by all heads. Without `rope` it is not rotated, but takes part."""
    v_head_dim: int
    output_gate: bool = False
    rope: RoPEConfig | None = None
    """Rotary positions on the `qk_rope_head_dim` part (K2); None for none (K3, Kimi Linear)."""

    def __post_init__(self):
        _typed(self)
        _positive(self, "num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        _check(
            self.q_lora_rank is None or self.q_lora_rank >= 1,
            f"q_lora_rank={self.q_lora_rank} must be at least 1",
        )
        _check(
            self.rope is None or self.qk_rope_head_dim % 2 == 0,
            f"qk_rope_head_dim={self.qk_rope_head_dim} must be even with rope: channels turn in pairs",
        )

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts; with `latent_size` the routed experts live in a narrower space (Stable LatentMoE)."""

    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    hidden_size: int
    """Width inside one expert (`moe_intermediate_size`)."""
    latent_size: int | None = None
    latent_norm: bool = False
    """RMSNorm on the weighted sum of expert outputs, before the projection back to the model's width."""
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    aux_loss_alpha: float = 0.0
    """Weight of the balance loss of each document in training (DeepSeek-V3's sequence-wise loss; K2 1e-3). 0: none."""
    balance: Literal["exact", "none"] = "exact"
    """Over a mesh's expert axis. exact: ranks borrow experts so that each computes the same number of rows (MoonEP).
    none: an expert runs on the rank that holds it, and buffers are as large as the worst routing."""
    transport: Literal["gather", "a2a", "ragged"] | None = None
    """How rows travel over the expert axis: all-gather; dense all-to-all in rounds; `lax.ragged_all_to_all`.
    None: ragged on TPU and GPU, gather elsewhere."""
    weight_format: Literal["mxfp4"] | None = None
    """What the routed experts' weights are rounded to in every product, the gradient passing straight through. None:
    as stored. See `TrainConfig.qat_from_step`."""
    activation_format: Literal["mxfp8"] | None = None
    """What the inputs of the routed experts' products are rounded to, likewise."""

    def __post_init__(self):
        _typed(self)
        _positive(self, "num_experts", "experts_per_token", "hidden_size")
        _check(
            self.experts_per_token < self.num_experts,
            f"experts_per_token={self.experts_per_token} must be smaller than num_experts={self.num_experts}: "
            "balancing needs the best expert that was not chosen",
        )
        _check(self.num_shared_experts >= 0, f"num_shared_experts={self.num_shared_experts} must not be negative")
        _check(self.latent_size is None or self.latent_size >= 1, f"latent_size={self.latent_size} must be at least 1")
        _finite(self, "routed_scaling_factor")
        _finite(self, "aux_loss_alpha", zero=True)
        _check(not self.latent_norm or self.latent_size is not None, "latent_norm=True needs a latent_size")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model of the family. K3, Kimi Linear and K2 differ in these values only."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    mla_layers: tuple[int, ...]
    """0-based layers with Gated MLA; every other layer is KDA."""
    num_dense_layers: int
    """The first layers, which have a dense MLP of `dense_hidden_size` in place of experts."""
    dense_hidden_size: int
    kda: KDAConfig | None
    """None for a model without KDA layers (K2)."""
    mla: MLAConfig
    moe: MoEConfig
    situ_beta: float | None = None
    """SiTU-GLU cap on the gate branch; None for SwiGLU."""
    situ_linear_beta: float | None = None
    """SiTU-GLU cap on the up branch; None leaves it uncapped."""
    attn_res_block_size: int | None = None
    """Layers in a block of Attention Residuals; None for standard residual connections."""
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    dtype: Dtype = "float32"
    """Compute dtype. What must be exact (gates, state, router, softmax, norms, loss) is at least float32."""
    param_dtype: Dtype = "float32"
    remat: Literal["none", "full"] = "none"
    """full: the backward pass recomputes each layer from its input."""
    max_position_embeddings: int = 1048576
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2

    def __post_init__(self):
        _typed(self)
        _positive(self, "vocab_size", "hidden_size", "num_layers", "dense_hidden_size", "max_position_embeddings")
        _finite(self, "rms_norm_eps")
        _finite(self, "initializer_range", zero=True)
        for name in ("situ_beta", "situ_linear_beta"):
            if getattr(self, name) is not None:
                _finite(self, name)
        _check(
            all(0 <= layer < self.num_layers for layer in self.mla_layers)
            and list(self.mla_layers) == sorted(set(self.mla_layers)),
            f"mla_layers={self.mla_layers} must be rising layer numbers from 0 to {self.num_layers - 1}",
        )
        _check(
            self.kda is not None or len(self.mla_layers) == self.num_layers,
            f"kda=None, but mla_layers={self.mla_layers} leave KDA layers among num_layers={self.num_layers}; set kda",
        )
        _check(
            0 <= self.num_dense_layers <= self.num_layers,
            f"num_dense_layers={self.num_dense_layers} must lie between 0 and num_layers={self.num_layers}",
        )
        size = self.attn_res_block_size
        _check(size is None or size >= 1, f"attn_res_block_size={size} must be at least 1, or None")
        _check(
            self.situ_linear_beta is None or self.situ_beta is not None,
            f"situ_linear_beta={self.situ_linear_beta} needs situ_beta; set both, or neither for SwiGLU",
        )
        if self.moe.weight_format or self.moe.activation_format:
            _check_groups(self, {})
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            _check(0 <= value < self.vocab_size, f"{name}={value} is outside the vocabulary of {self.vocab_size}")

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if layer not in self.mla_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(range(self.num_dense_layers, self.num_layers))


def _check_groups(model: ModelConfig, ways: dict[str, int]) -> None:
    """Refuses widths of routed experts that do not divide into groups of 32 on each of so many devices."""
    z, f = model.moe.latent_size, model.moe.hidden_size
    latent = ("hidden_size", model.hidden_size) if z is None else ("moe.latent_size", z)
    for (name, width), axis in ((latent, "expert_latent"), (("moe.hidden_size", f), "expert_mlp")):
        parts = ways.get(axis, 1)
        _check(
            width % (32 * parts) == 0,
            f"model.{name}={width}, the inputs of routed experts, does not divide into groups of 32 with one scale each"
            + (f" on {parts} devices; make it a multiple of {32 * parts}, or change rules.{axis}" if parts > 1 else "")
            + ("" if parts > 1 else "; make it a multiple of 32, or leave qat_from_step and the experts' formats None"),
        )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Per-Head Muon for matrices, AdamW for the rest, QK-Clip, and expert balancing."""

    learning_rate: float
    """Peak rate, for Muon and AdamW alike (Muon's update is scaled to AdamW's RMS)."""
    warmup_fraction: float = 0.01
    """Part of all steps with a linearly rising rate; a cosine to zero follows."""
    weight_decay: float = 0.1
    momentum: float = 0.95
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    qk_clip: float = 100.0
    """Largest attention logit a head may have before its query and key weights are scaled down."""
    balance: Literal["quantile", "sign"] = "quantile"
    """How the router's correction bias moves: Quantile Balancing (K3), or a fixed step by the sign (earlier models)."""
    balance_rate: float = 1e-3
    """The fixed step of `balance="sign"`."""

    def __post_init__(self):
        _typed(self)
        _finite(self, "learning_rate", "qk_clip", "balance_rate")
        _finite(self, "weight_decay", zero=True)
        _check(0 <= self.warmup_fraction < 1, f"warmup_fraction={self.warmup_fraction} must lie in [0, 1)")
        for name in ("momentum", "adam_b1", "adam_b2"):
            value = getattr(self, name)
            _check(0 <= value < 1, f"{name}={value} must lie in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where text comes from. `kind="stdlib"` is the source code of the running Python's standard library."""

    kind: Literal["stdlib", "text", "jsonl", "parquet"] = "stdlib"
    """stdlib, text: one document a file; a single text file is cut instead, its end being for validation.
    jsonl, parquet: one document a row."""
    path: str = ""
    """A file, or a folder of which the files that match `glob` are read, hidden ones left out."""
    glob: str = ""
    """Empty: all files for text, else those with the ending `.jsonl` or `.parquet`."""
    text_field: str = "text"
    """Field (jsonl) or column (parquet) with the text."""
    prompt_field: str | None = None
    """Field whose text comes before `text_field`'s, is seen by the model and carries no loss."""
    weight: float = 1.0
    """Share of this source in the tokens of a mixture; shares are relative."""

    def __post_init__(self):
        _typed(self)
        _check(self.kind == "stdlib" or bool(self.path), f'a source of kind "{self.kind}" needs a path')
        _check(
            self.weight > 0,
            f"weight={self.weight} of a source must be positive; leave the source out instead",
        )


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """bytes: 256 bytes and specials. bpe: byte-level BPE trained on the training text when the run begins.
    tokenizers: a `tokenizer.json`. tiktoken: a rank file with Kimi's special tokens."""

    kind: Literal["bytes", "bpe", "tokenizers", "tiktoken"] = "bytes"
    path: str = ""
    """The file, for `tokenizers` and `tiktoken`."""

    def __post_init__(self):
        _typed(self)
        needs = self.kind in ("tokenizers", "tiktoken")
        _check(
            bool(self.path) == needs,
            f'tokenizer kind "{self.kind}" ' + ("needs a path" if needs else "takes no path"),
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    sequence_length: int
    """Tokens of a row; documents are split to it and packed into it."""
    batch_size: int
    """Rows of one optimizer step, over all its micro-batches."""
    sources: tuple[Source, ...] = (Source(),)
    validation: tuple[Source, ...] = ()
    """Validation text; empty: `validation_fraction` of the training documents."""
    validation_fraction: float = 0.02
    """Chance of a document to be set apart, by a hash of its relative path (files) or its text (rows)."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    on_error: Literal["skip", "raise"] = "skip"
    """What a malformed line, an unreadable file or a missing field does; it is reported and counted either way."""

    def __post_init__(self):
        _typed(self)
        _positive(self, "batch_size")
        _check(
            self.sequence_length >= 2,
            f"sequence_length={self.sequence_length} leaves nothing to predict from; set it to at least 2",
        )
        _check(len(self.sources) >= 1, "data.sources is empty; name at least one source")
        _check(
            bool(self.validation) or 0 < self.validation_fraction < 1,
            f"validation_fraction={self.validation_fraction} must lie in (0, 1) when no validation source is given",
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: int
    seed: int = 0
    init_from: str = ""
    """Folder whose parameters a new run begins with: of a run, of a converted model, or a released directory. Empty:
    random ones."""
    accumulation: int = 1
    """Micro-batches of one step; gradients are weighted by their token counts."""
    eval_every: int = 100
    eval_tokens: int = 200_000
    """Validation tokens of an evaluation during training; the last one reads all of them."""
    checkpoint_every: int = 100
    keep_last: int = 2
    """Newest checkpoints kept."""
    keep_every: int | None = None
    """Checkpoints at multiples of this step are never deleted."""
    spike_threshold: float = 2.0
    """A loss (nats a token) this far above the running median skips the step; off during warmup."""
    max_skips: int = 10
    """Skipped steps in a row after which the run stops."""
    qat_from_step: int | None = None
    """From this step on, routed experts have MXFP4 weights and MXFP8 activations (quantization-aware training), so that
    the packed export computes what was trained. None: never."""
    tensorboard: bool = False
    runs_dir: str = "runs"
    sample_prompt: str = ""
    sample_tokens: int = 200

    def __post_init__(self):
        _typed(self)
        _positive(
            self,
            "steps",
            "accumulation",
            "eval_every",
            "eval_tokens",
            "checkpoint_every",
            "keep_last",
            "max_skips",
        )
        _check(
            self.keep_every is None or self.keep_every >= 1,
            f"keep_every={self.keep_every} must be at least 1, or None",
        )
        start = self.qat_from_step
        _check(
            start is None or 0 <= start < self.steps,
            f"qat_from_step={start} must lie between 0 and steps={self.steps} - 1, or be None for no such steps",
        )
        _finite(self, "spike_threshold")
        for name in ("seed", "sample_tokens"):
            value = getattr(self, name)
            _check(value >= 0, f"{name}={value} must not be negative")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices along each axis of the mesh; their product is the number of devices of the run."""

    data: int = 1
    """Replicas of everything, each with its rows of the batch: for slices joined by a slow network."""
    fsdp: int = 1
    """Rows of the batch; parameters, gradients and optimizer state are cut over it and gathered layer by layer."""
    expert: int = 1
    """As fsdp, and routed experts stay on their rank: rows travel instead."""
    tensor: int = 1
    """Heads and MLP widths."""
    seq: int = 1
    """Spans of each row."""

    def __post_init__(self):
        _typed(self)
        _positive(self, "data", "fsdp", "expert", "tensor", "seq")

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis, outermost first."""
        return dataclasses.asdict(self)

    @property
    def size(self) -> int:
        return math.prod(self.shape.values())


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Which mesh axes each logical axis is cut over: one mapping for parameters and activations.

    Logical axes that are not named here (head_dim, conv, width, latent, rank_out, router) are never cut.
    """

    batch: tuple[MeshAxis, ...] = ("data", "fsdp", "expert")
    """Rows of a batch."""
    time: tuple[MeshAxis, ...] = ("seq",)
    """Tokens of a row."""
    embed: tuple[MeshAxis, ...] = ("fsdp", "expert")
    """Model width of weights (of activations it is whole)."""
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
        _typed(self)
        for name in (f.name for f in dataclasses.fields(self)):
            axes = getattr(self, name)
            _check(len(set(axes)) == len(axes), f"Rules.{name}={axes} names a mesh axis twice")
        for name in ("time", "experts"):
            axes = getattr(self, name)
            _check(len(axes) <= 1, f"Rules.{name}={axes} names {len(axes)} mesh axes; keep one of them, or none")
        tokens = self.batch + self.time
        for name in ("embed", "rank", "gate_rank", "experts", "expert_latent"):
            axes = getattr(self, name)
            _check(
                set(axes) <= set(tokens),
                f"Rules.{name}={axes} must be among the mesh axes of batch and time, {tokens}: a weight is gathered "
                "where tokens differ",
            )
        for name in ("heads", "mlp", "vocab", "expert_mlp"):
            axes = getattr(self, name)
            _check(
                not set(axes) & set(tokens),
                f"Rules.{name}={axes} must not share a mesh axis with batch and time, {tokens}",
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
        _typed(self)
        for name in ("batch_size", "accumulation"):
            value = getattr(self, name)
            _check(value is None or value >= 1, f"Slice.{name}={value} must be at least 1, or None")


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str
    """Folder of the run under `train.runs_dir`."""
    model: ModelConfig
    optim: OptimConfig
    data: DataConfig
    train: TrainConfig
    mesh: Mesh = field(default_factory=Mesh)
    rules: Rules = field(default_factory=Rules)
    slices: tuple[Slice, ...] = ()
    """Meshes for named TPU slices; `kimi-jax aot` compiles for them."""

    def __post_init__(self):
        _typed(self)
        rows, parts = self.data.batch_size, self.train.accumulation
        _check(
            rows % parts == 0,
            f"batch_size={rows} does not divide into accumulation={parts} micro-batches; "
            f"set train.accumulation to one of {[n for n in range(1, rows + 1) if rows % n == 0]}",
        )
        _check(
            self.data.sequence_length <= self.model.max_position_embeddings,
            f"sequence_length={self.data.sequence_length} is over the model's "
            f"max_position_embeddings={self.model.max_position_embeddings}",
        )
        used = {axis for name in vars(self.rules) for axis in getattr(self.rules, name)}
        for axis, size in self.mesh.shape.items():
            _check(
                size == 1 or axis in used,
                f"mesh.{axis}={size}, but no rule cuts anything over {axis}: its devices would all do the same; set it "
                f"to 1, or name {axis} in one of rules.{', '.join(vars(self.rules))}",
            )
        if self.train.qat_from_step is not None or self.model.moe.weight_format or self.model.moe.activation_format:
            sizes = self.mesh.shape
            cut = {name: math.prod(sizes[a] for a in getattr(self.rules, name)) for name in vars(self.rules)}
            _check_groups(self.model, cut)
        plain = Path(self.name).name == self.name and self.name not in ("", "..") and "\0" not in self.name
        _check(plain, f"name={self.name!r} must be the plain name of a folder, e.g. 'k3_tiny'")


def on_slice(config: Config, topology: str) -> Config:
    """The config with what it changes for a TPU slice of this name, if it names it."""
    for known in config.slices:
        if known.topology == topology:
            rows = known.batch_size or config.data.batch_size
            return replace(
                config,
                mesh=known.mesh,
                rules=known.rules or config.rules,
                model=replace(config.model, param_dtype=known.param_dtype or config.model.param_dtype),
                data=replace(config.data, batch_size=rows),
                train=replace(config.train, accumulation=known.accumulation or config.train.accumulation),
            )
    return config


def at_step(config: Config, step: int) -> Config:
    """The config as it is from a step on: with the experts' formats, once `train.qat_from_step` is reached."""
    start = config.train.qat_from_step
    if start is None or step < start:
        return config
    moe = replace(config.model.moe, weight_format="mxfp4", activation_format="mxfp8")
    return replace(config, model=replace(config.model, moe=moe))


def to_dict(config) -> dict:
    """The config as plain nested dicts, lists and scalars: what `config.json` holds."""
    return dataclasses.asdict(config)


def from_dict(cls: type[T], values: dict) -> T:
    """The inverse of `to_dict`, also after a trip through JSON."""
    hints = typing.get_type_hints(cls)
    unknown = sorted(values.keys() - hints.keys())
    _check(not unknown, f"{cls.__name__} has no field {', '.join(unknown)}: written by another version of kimi_jax?")
    return cls(**{name: _revived(hints[name], value) for name, value in values.items()})


def _revived(hint, value):
    if typing.get_origin(hint) in (types.UnionType, typing.Union) and isinstance(value, dict):
        hint = next(kind for kind in typing.get_args(hint) if dataclasses.is_dataclass(kind))
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return from_dict(hint, value)  # type: ignore[arg-type]
    if typing.get_origin(hint) is tuple:
        return tuple(_revived(typing.get_args(hint)[0], item) for item in value)
    return value


def shipped_configs() -> dict[str, Path]:
    """Name -> file of the configs that come with the package, in a checkout and in an installed wheel alike."""
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "configs", here.parent / "configs"):
        if (folder / "k3_tiny.py").is_file():
            return {path.stem: path for path in sorted(folder.glob("*.py"))}
    raise ConfigError(f"no configs beside {here}; the installation is incomplete, install kimi_jax again")


def _unknown_field(path: Path, error: TypeError) -> Exception:
    """A plain message for a misspelt field in a config file; the error itself for anything else."""
    found = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    kind = globals().get(found[1]) if found else None
    if found is None or not dataclasses.is_dataclass(kind):
        return error
    near = difflib.get_close_matches(found[2], [f.name for f in dataclasses.fields(kind)], n=1)
    mend = f"did you mean {near[0]}?" if near else f"it has {', '.join(f.name for f in dataclasses.fields(kind))}"
    return ConfigError(f"{path}: {found[1]} has no field {found[2]!r}; {mend}")


def load_config(name: str) -> Config:
    """Returns the `config` of a shipped config's name or of a path to a `.py` file.

    Raises:
        ConfigError: the name is unknown (with the nearest ones), or the file has no `config`.
    """
    if name.endswith(".py"):
        path = Path(name)
        _check(path.is_file(), f"no config file {name}")
    else:
        known = shipped_configs()
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        mend = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
        _check(name in known, f"no config named {name!r} ({mend}); a path to a .py file works too")
        path = known[name]
    spec = importlib.util.spec_from_file_location(f"_kimi_jax_config_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except TypeError as error:
        raise _unknown_field(path, error) from error
    config = getattr(module, "config", None)
    _check(
        isinstance(config, Config),
        f"{path} must define `config`, a kimi_jax.config.Config; it has {type(config).__name__}",
    )
    assert isinstance(config, Config)
    return config
