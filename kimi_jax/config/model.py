"""Settings of the model: what decides its parameters and its mathematics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from kimi_jax.config.checks import FLOAT32, LARGEST, check, check_finite, check_positive, check_types, shown

Dtype = Literal["float32", "bfloat16", "float64"]
MOST_LAYERS = 10_000
MOST_EXPERTS = 2**16
"""More than any model has, and few enough that a list of them costs nothing."""


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
        check_types(self)
        check_positive(self, "num_heads", "head_dim", "conv_size", "chunk_size")
        bound = self.gate_lower_bound
        check(
            bound is None or -FLOAT32[1] <= bound <= -FLOAT32[0],
            f"gate_lower_bound={bound} must be negative, or None for the softplus gate; change it",
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
        check_types(self)
        check_positive(self, "original_max_position_embeddings")
        check_finite(self, "theta", "beta_slow")
        check_finite(self, "mscale", zero=True)
        check(self.theta > 1, f"theta={self.theta} must be above 1; set it to e.g. 10000")
        check(
            1 <= self.factor <= FLOAT32[1],
            f"factor={self.factor} must be at least 1 (no stretch) and finite; set it to 1 or more",
        )
        check(
            self.beta_slow <= self.beta_fast <= FLOAT32[1],
            f"beta_fast={self.beta_fast} must be at least beta_slow={self.beta_slow} and finite; raise it",
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
        check_types(self)
        check_positive(self, "num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        check(
            self.q_lora_rank is None or 1 <= self.q_lora_rank <= LARGEST,
            f"q_lora_rank={self.q_lora_rank} must be at least 1 and at most {LARGEST:,}, or None; change it",
        )
        check(
            self.rope is None or self.qk_rope_head_dim % 2 == 0,
            f"qk_rope_head_dim={self.qk_rope_head_dim} must be even with rope, which turns pairs; raise it by 1",
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
        check_types(self)
        check_positive(self, "experts_per_token", "hidden_size")
        check_positive(self, "num_experts", most=MOST_EXPERTS)
        check(
            self.experts_per_token < self.num_experts,
            f"experts_per_token={self.experts_per_token} must be smaller than num_experts={self.num_experts}, for "
            "balancing needs the best expert that was not chosen; lower it",
        )
        check(
            0 <= self.num_shared_experts <= MOST_EXPERTS,
            f"num_shared_experts={self.num_shared_experts} must not be negative, or above {MOST_EXPERTS:,}; change it",
        )
        check(
            self.latent_size is None or 1 <= self.latent_size <= LARGEST,
            f"latent_size={self.latent_size} must be at least 1 and at most {LARGEST:,}, or None; change it",
        )
        check_finite(self, "routed_scaling_factor")
        check_finite(self, "aux_loss_alpha", zero=True)
        check(not self.latent_norm or self.latent_size is not None, "latent_norm=True needs a latent_size; set it")


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
    release: Annotated[str | None, tyro.conf.Fixed, tyro.conf.Suppress] = field(default=None, compare=False, repr=False)
    """config.json of the release that this was read from, as text, so that saving it keeps keys that nothing here uses.
    No setting: two configs that differ in it alone are equal."""

    def __post_init__(self):
        check_types(self)
        check_positive(self, "vocab_size", "hidden_size", "dense_hidden_size", "max_position_embeddings")
        check_positive(self, "num_layers", most=MOST_LAYERS)
        check_finite(self, "rms_norm_eps")
        check_finite(self, "initializer_range", zero=True)
        for name in ("situ_beta", "situ_linear_beta"):
            if getattr(self, name) is not None:
                check_finite(self, name)
        check(
            all(0 <= layer < self.num_layers for layer in self.mla_layers)
            and list(self.mla_layers) == sorted(set(self.mla_layers)),
            lambda: (
                f"mla_layers={shown(self.mla_layers)} must be rising layer numbers from 0 to {self.num_layers - 1}; "
                "change them"
            ),
        )
        check(
            self.kda is not None or len(self.mla_layers) == self.num_layers,
            lambda: (
                f"kda=None, but mla_layers={shown(self.mla_layers)} leave KDA layers among "
                f"num_layers={self.num_layers}; set kda"
            ),
        )
        check(
            0 <= self.num_dense_layers <= self.num_layers,
            f"num_dense_layers={self.num_dense_layers} must lie between 0 and num_layers={self.num_layers}; change it",
        )
        size = self.attn_res_block_size
        check(
            size is None or 1 <= size <= LARGEST,
            f"attn_res_block_size={size} must be at least 1, or None, and at most {LARGEST:,}; change it",
        )
        check(
            self.situ_linear_beta is None or self.situ_beta is not None,
            f"situ_linear_beta={self.situ_linear_beta} needs situ_beta; set both, or neither for SwiGLU",
        )
        if self.moe.weight_format or self.moe.activation_format:
            check_groups(self, {})
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            check(
                0 <= value < self.vocab_size,
                f"{name}={value} is outside the vocabulary of {self.vocab_size}; change it",
            )

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if layer not in self.mla_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(range(self.num_dense_layers, self.num_layers))


def check_groups(model: ModelConfig, ways: dict[str, int]) -> None:
    """Rejects widths of routed experts that do not divide into groups of 32 on each of so many devices."""
    z, f = model.moe.latent_size, model.moe.hidden_size
    latent = ("hidden_size", model.hidden_size) if z is None else ("moe.latent_size", z)
    for (name, width), axis in ((latent, "expert_latent"), (("moe.hidden_size", f), "expert_mlp")):
        parts = ways.get(axis, 1)
        check(
            width % (32 * parts) == 0,
            f"model.{name}={width}, the inputs of routed experts, does not divide into groups of 32 with one scale each"
            + (f" on {parts} devices; make it a multiple of {32 * parts}, or change rules.{axis}" if parts > 1 else "")
            + ("" if parts > 1 else "; make it a multiple of 32, or leave qat_from_step and the experts' formats None"),
        )
