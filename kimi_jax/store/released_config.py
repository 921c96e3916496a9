"""config.json of released checkpoints in and out: `ModelConfig` in the words of K3, Kimi Linear and K2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from kimi_jax.config import ConfigError, KDAConfig, MLAConfig, ModelConfig, MoEConfig, RoPEConfig
from kimi_jax.ops.quant.bits import GROUP
from kimi_jax.ops.quant.blocks import BLOCK
from kimi_jax.store.safetensors_files import CheckpointError

CONFIG = "config.json"
MLA_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Keys that we call the same."""


def is_nested(config: ModelConfig) -> bool:
    """K3's layout. Attention Residuals are what only K3 has; the model types of both releases are the same."""
    return config.attn_res_block_size is not None


def is_k2(config: ModelConfig) -> bool:
    """K2's layout. Of the family only K2 has rotary positions."""
    return config.mla.rope is not None


def read_config(path: str | Path) -> ModelConfig:
    """The model that a released config.json describes.

    Raises:
        ConfigError: a missing key, or a value that this family's code does not implement, with the key.
    """
    file = Path(path) / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{path} has no {CONFIG}")
    try:
        whole = json.loads(file.read_text())
        text = whole.get("text_config", whole)
        rotary = "n_routed_experts" in text  # K2, and nobody else in the family
        names, fixed = (_K2_NAMES, _K2_FIXED) if rotary else ({}, _FIXED)
        for key, value in fixed.items():
            key = names.get(key, key)
            if text.get(key, value) != value:
                raise ConfigError(f"{file}: {key}={text[key]!r} is not supported, only {value!r}")
        layers = text["num_hidden_layers"]
        mla, kda = (list(range(layers)), None) if rotary else _linear_attention(file, text)
        tokens = text | whole
        situ = {"situ": True, "silu": False}[text["hidden_act"]]
        return ModelConfig(
            vocab_size=text["vocab_size"],
            hidden_size=text["hidden_size"],
            num_layers=layers,
            mla_layers=tuple(sorted(mla)),
            num_dense_layers=text["first_k_dense_replace"],
            dense_hidden_size=text["intermediate_size"],
            situ_beta=text["activation_situ_beta"] if situ else None,
            situ_linear_beta=text["activation_situ_linear_beta"] if situ else None,
            attn_res_block_size=text.get("attn_res_block_size"),
            rms_norm_eps=text["rms_norm_eps"],
            initializer_range=text["initializer_range"],
            max_position_embeddings=text.get("max_position_embeddings") or text["model_max_length"],
            bos_token_id=tokens["bos_token_id"],
            eos_token_id=tokens["eos_token_id"],
            # K2's file may leave it out; [PAD] is its tokenizer's last id.
            pad_token_id=tokens.get("pad_token_id", text["vocab_size"] - 1) if rotary else tokens["pad_token_id"],
            kda=kda,
            mla=MLAConfig(
                num_heads=text["num_attention_heads"],
                **{name: text[name] for name in MLA_SIZES},
                output_gate=bool(text.get("mla_use_output_gate")),
                rope=_rope(file, text) if rotary else None,
            ),
            moe=MoEConfig(
                num_experts=text[names.get("num_experts", "num_experts")],
                experts_per_token=text[names.get("num_experts_per_token", "num_experts_per_token")],
                num_shared_experts=text[names.get("num_shared_experts", "num_shared_experts")],
                hidden_size=text["moe_intermediate_size"],
                latent_size=text.get("routed_expert_hidden_size"),
                latent_norm=bool(text.get("latent_moe_use_norm")),
                renormalize=text[names.get("moe_renormalize", "moe_renormalize")],
                routed_scaling_factor=text["routed_scaling_factor"],
                aux_loss_alpha=text.get("aux_loss_alpha") or 0.0,
                activation_format=_activation_format(file, whole),
            ),
        )
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    except KeyError as error:
        raise ConfigError(f"{file} lacks or has an unknown value for {error}") from error
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{file} has a value of the wrong kind: {error}") from error


def _linear_attention(file: Path, text: dict) -> tuple[list[int], KDAConfig]:
    """The 0-based MLA layers, and the settings of all others."""
    linear, layers = text["linear_attn_config"], text["num_hidden_layers"]
    mla = [layer - 1 for layer in linear["full_attn_layers"]]
    if sorted([*mla, *(layer - 1 for layer in linear["kda_layers"])]) != list(range(layers)):
        raise ConfigError(f"{file}: full_attn_layers and kda_layers must name each of 1..{layers} once")
    return mla, KDAConfig(
        num_heads=linear["num_heads"],
        head_dim=linear["head_dim"],
        conv_size=linear["short_conv_kernel_size"],
        gate_lower_bound=linear.get("gate_lower_bound"),
        full_rank_gate=bool(linear.get("use_full_rank_gate")),
    )


def _rope(file: Path, text: dict) -> RoPEConfig:
    scaling = text.get("rope_scaling")
    if scaling is None:
        return RoPEConfig(theta=text["rope_theta"])
    kind = scaling.get("type", scaling.get("rope_type"))
    if kind != "yarn":
        raise ConfigError(f"{file}: rope_scaling of type {kind!r} is not supported, only 'yarn'")
    mscale = scaling["mscale_all_dim"]
    if scaling["mscale"] != mscale:  # else their ratio would scale the rotated channels
        raise ConfigError(f"{file}: mscale={scaling['mscale']} is not supported beside mscale_all_dim={mscale}")
    return RoPEConfig(
        theta=text["rope_theta"],
        factor=scaling["factor"],
        original_max_position_embeddings=scaling["original_max_position_embeddings"],
        beta_fast=scaling["beta_fast"],
        beta_slow=scaling["beta_slow"],
        mscale=mscale,
    )


_FIXED = {
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
"""What K3 and Kimi Linear have in common."""
_K2_NAMES = {
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
    "num_expert_group": "n_group",
}
"""What K2 calls the settings of the others."""
_K2_FIXED = {key: value for key, value in _FIXED.items() if key != "mla_use_nope"} | {
    "seq_aux": True,
    "attention_bias": False,
    "hidden_act": "silu",
}


def released_config(config: ModelConfig) -> dict:
    """The config.json of the released layout."""
    if is_k2(config):
        return _k2_config(config)
    kda, mla, moe = config.kda, config.mla, config.moe
    assert kda is not None
    tokens = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    linear = {
        "full_attn_layers": [layer + 1 for layer in config.mla_layers],
        "kda_layers": [layer + 1 for layer in config.kda_layers],
        "num_heads": kda.num_heads,
        "head_dim": kda.head_dim,
        "short_conv_kernel_size": kda.conv_size,
    }
    if kda.full_rank_gate:
        linear["use_full_rank_gate"] = True
    if kda.gate_lower_bound is not None:
        linear["gate_lower_bound"] = kda.gate_lower_bound
    text = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        **_sizes(config),
        "hidden_act": "silu" if config.situ_beta is None else "situ",
        "initializer_range": config.initializer_range,
        "rms_norm_eps": config.rms_norm_eps,
        **tokens,
        **_FIXED,
        "moe_intermediate_size": moe.hidden_size,
        "moe_renormalize": moe.renormalize,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.experts_per_token,
        "num_shared_experts": moe.num_shared_experts,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "first_k_dense_replace": config.num_dense_layers,
        "use_grouped_topk": True,
        **_mla_sizes(mla),
        "linear_attn_config": linear,
        "dtype": "bfloat16",
    }
    optional = {
        "mla_use_output_gate": mla.output_gate or None,
        "attn_res_block_size": config.attn_res_block_size,
        "latent_moe_use_norm": moe.latent_norm or None,
        "routed_expert_hidden_size": moe.latent_size,
        "activation_situ_beta": config.situ_beta,
    }
    text |= {key: value for key, value in optional.items() if value is not None}
    if config.situ_beta is not None:
        text["activation_situ_linear_beta"] = config.situ_linear_beta  # null: no cap
    if not is_nested(config):
        # Unused by the architecture, but the release has them and readers of it demand them.
        unused = {"head_dim": config.hidden_size // mla.num_heads, "rope_theta": 10000.0, "rope_scaling": None}
        return {**text, **unused, "model_max_length": config.max_position_embeddings}
    return {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        **tokens,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "text_config": {**text, "max_position_embeddings": config.max_position_embeddings},
    }


def _sizes(config: ModelConfig) -> dict:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.dense_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.mla.num_heads,
        "num_key_value_heads": config.mla.num_heads,
    }


def _mla_sizes(mla: MLAConfig) -> dict:
    return {name: getattr(mla, name) for name in MLA_SIZES}


def _k2_config(config: ModelConfig) -> dict:
    """`released_config` of K2: DeepSeek-V3's keys."""
    mla, moe, rope = config.mla, config.moe, config.mla.rope
    assert rope is not None
    shared = {
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.experts_per_token,
        "num_shared_experts": moe.num_shared_experts,
        "moe_renormalize": moe.renormalize,
        **_K2_FIXED,
    }
    return {
        "model_type": "kimi_k2",
        "architectures": ["DeepseekV3ForCausalLM"],
        **_sizes(config),
        "first_k_dense_replace": config.num_dense_layers,
        "moe_intermediate_size": moe.hidden_size,
        **{_K2_NAMES.get(key, key): value for key, value in shared.items()},
        "routed_scaling_factor": moe.routed_scaling_factor,
        "aux_loss_alpha": moe.aux_loss_alpha,
        **_mla_sizes(mla),
        "rope_theta": rope.theta,
        "rope_scaling": {
            "type": "yarn",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale,
        },
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "dtype": "bfloat16",
    }


def differences(theirs: dict, ours: dict) -> list[str]:
    """Where two released configs differ, a line each."""
    theirs, ours = (whole | whole.get("text_config", {}) for whole in (theirs, ours))
    return [
        f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} here"
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key) != ours.get(key) and key != "text_config"
    ]


_MXFP8 = {
    "num_bits": 8,
    "type": "float",
    "strategy": "group",
    "group_size": GROUP,
    "symmetric": True,
    "dynamic": True,
    "scale_dtype": "torch.uint8",
}
"""How config.json says that inputs of the quantized products are rounded to MXFP8."""


def _activation_format(file: Path, whole: dict) -> Literal["mxfp8"] | None:
    """What the inputs of routed experts are rounded to: nothing in the released files, MXFP8 after our QAT."""
    found = whole.get("quantization_config") or whole.get("text_config", {}).get("quantization_config") or {}
    given = [group.get("input_activations") for group in found.get("config_groups", {}).values()]
    for inputs in filter(None, given):
        if any(inputs.get(key) != value for key, value in _MXFP8.items()):
            raise CheckpointError(f"{file}: input_activations={inputs} are not supported, only {_MXFP8} or null")
    return "mxfp8" if any(given) else None


def quantization_config(config: ModelConfig) -> dict | None:
    """What config.json says of the format of the family."""
    if is_k2(config):
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    if not is_nested(config):
        return None
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": GROUP, "symmetric": True}
    group = {
        "format": "mxfp4-pack-quantized",
        "targets": ["Linear"],
        "weights": {**weights, "dynamic": False, "scale_dtype": "torch.uint8"},
        "input_activations": _MXFP8 if config.moe.activation_format == "mxfp8" else None,
        "output_activations": None,
    }
    kept = (
        "self_attn",
        "shared_experts",
        r"mlp\.(gate|up|gate_up|down)_proj",
        "lm_head",
        "vision_tower",
        "mm_projector",
    )
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [f"re:.*{part}.*" for part in kept],
        "kv_cache_scheme": None,
    }


def check_quantization(file: Path) -> None:
    """Refuses a config.json that describes a format that is not read here; which tensors have it, their names say."""
    whole = json.loads(file.read_text())
    found = whole.get("quantization_config") or whole.get("text_config", {}).get("quantization_config")
    if found is None:
        return
    method, form = found.get("quant_method"), found.get("format")
    if method == "fp8":
        size = found.get("weight_block_size")
        if size != [BLOCK, BLOCK]:
            raise CheckpointError(f"{file}: weight_block_size={size} is not supported, only {[BLOCK, BLOCK]}")
    elif method != "compressed-tensors":
        raise CheckpointError(f"{file}: quant_method={method!r} is not supported, only 'compressed-tensors' and 'fp8'")
    elif form not in ("mxfp4-pack-quantized", "pack-quantized"):
        known = "'mxfp4-pack-quantized' and 'pack-quantized'"
        raise CheckpointError(f"{file}: compressed-tensors of format {form!r} are not supported, only {known}")
    for group in found.get("config_groups", {}).values():
        size = (group.get("weights") or {}).get("group_size", GROUP)
        if size != GROUP:
            raise CheckpointError(f"{file}: group_size={size} is not supported, only {GROUP}")
