"""config.json of released checkpoints in and out: `ModelConfig` in the words of K3, Kimi Linear and K2."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kimi_jax import files
from kimi_jax.config import ConfigError, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from kimi_jax.store.quantization import (
    KEY,
    activation_format,
    find_quantization,
    fp8_quantization,
    mxfp4_quantization,
    updated_quantization,
)
from kimi_jax.store.released_keys import (
    ABSENT,
    COMMON,
    K2_ABSENT,
    K2_COMMON,
    K2_NAMES,
    LARGEST_LAYERS,
    LINEAR_KEYS,
    check_fixed,
    check_keys,
    read_rope,
    shown,
    take,
    take_object,
    write_rope,
)
from kimi_jax.store.safetensors_files import CheckpointError, check_links

CONFIG = "config.json"
MLA_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Keys that we call the same."""
TEXT, LINEAR = "text_config", "linear_attn_config"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ACTIVATIONS = ("silu", "situ")
_ONE_OF = ({"rope_theta", "rope_scaling", "rope_parameters"}, {"max_position_embeddings", "model_max_length"})
"""Keys that say one thing in several ways: where it changes, only ours are kept."""


def is_nested(config: ModelConfig) -> bool:
    """K3's layout. Attention Residuals are what only K3 has; the model types of both releases are the same."""
    return config.attn_res_block_size is not None


def is_k2(config: ModelConfig) -> bool:
    """K2's layout. Of the family only K2 has rotary positions."""
    return config.mla.rope is not None


def read_config(path: str | Path) -> ModelConfig:
    """The model that a released config.json describes, with the text of the file as its `release`.

    Raises:
        ConfigError: a key that is missing, or a value that this family's code does not implement, with the key.
        CheckpointError, FileError: there is no such file, or it is no JSON object.
    """
    file = Path(path) / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{path} has no {CONFIG}")
    check_links(Path(path), [CONFIG])
    return parse_config(file, files.read_json(file))


def parse_config(file: Path, whole: dict[str, Any]) -> ModelConfig:
    """`read_config` of the content of a file, whose name messages begin with."""
    text = take_object(file, whole, TEXT) if TEXT in whole else whole
    if "hidden_act" not in text:
        raise ConfigError(f"{file} lacks or has an unknown value for 'hidden_act'; fetch it again")
    if text["hidden_act"] not in _ACTIVATIONS:
        known = " and ".join(map(repr, _ACTIVATIONS))
        raise ConfigError(f"{file}: hidden_act={shown(text['hidden_act'])} is not supported, only {known}")
    try:
        return replace(_model(file, whole, text), release=json.dumps(whole, separators=(",", ":")))
    except ConfigError as error:
        if str(error).startswith(str(file)):
            raise
        raise ConfigError(f"{file}: {error}") from error


def _model(file: Path, whole: dict[str, Any], text: dict[str, Any]) -> ModelConfig:
    rotary = K2_NAMES["num_experts"] in text  # K2, and nobody else in the family
    names, fixed = (K2_NAMES, K2_COMMON | K2_ABSENT) if rotary else ({}, COMMON)
    heads = take(file, text, "num_attention_heads", int)
    for keys in (text, whole):
        check_fixed(file, keys, ABSENT | fixed | {"num_key_value_heads": (heads, None)})
    layers = take(file, text, "num_hidden_layers", int)
    if layers > LARGEST_LAYERS:
        raise ConfigError(f"{file}: num_hidden_layers={layers} is over the {LARGEST_LAYERS:,} that are read")
    mla, kda = (tuple(range(layers)), None) if rotary else _linear_attention(file, text, layers)
    tokens = text | whole
    vocab_size = take(file, text, "vocab_size", int)
    situ = text["hidden_act"] == "situ"
    context = "max_position_embeddings" if text.get("max_position_embeddings") else "model_max_length"
    # K2's file may leave it out; [PAD] is its tokenizer's last id.
    pad = (vocab_size - 1,) if rotary else ()
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=take(file, text, "hidden_size", int),
        num_layers=layers,
        mla_layers=mla,
        num_dense_layers=take(file, text, "first_k_dense_replace", int),
        dense_hidden_size=take(file, text, "intermediate_size", int),
        situ_beta=take(file, text, "activation_situ_beta", float) if situ else None,
        situ_linear_beta=_optional(file, text, "activation_situ_linear_beta") if situ else None,
        attn_res_block_size=take(file, text, "attn_res_block_size", int, None),
        rms_norm_eps=take(file, text, "rms_norm_eps", float),
        initializer_range=take(file, text, "initializer_range", float),
        max_position_embeddings=take(file, text, context, int),
        bos_token_id=take(file, tokens, "bos_token_id", int),
        eos_token_id=_stop(file, tokens),
        pad_token_id=take(file, tokens, "pad_token_id", int, *pad),
        kda=kda,
        mla=MLAConfig(
            num_heads=heads,
            q_lora_rank=_optional(file, text, "q_lora_rank", int),
            **{name: take(file, text, name, int) for name in MLA_SIZES[1:]},
            output_gate=take(file, text, "mla_use_output_gate", bool, False),
            rope=read_rope(file, text) if rotary else None,
        ),
        moe=MoEConfig(
            num_experts=take(file, text, names.get("num_experts", "num_experts"), int),
            experts_per_token=take(file, text, names.get("num_experts_per_token", "num_experts_per_token"), int),
            num_shared_experts=take(file, text, names.get("num_shared_experts", "num_shared_experts"), int),
            hidden_size=take(file, text, "moe_intermediate_size", int),
            latent_size=take(file, text, "routed_expert_hidden_size", int, None),
            latent_norm=take(file, text, "latent_moe_use_norm", bool, False),
            renormalize=take(file, text, names.get("moe_renormalize", "moe_renormalize"), bool),
            routed_scaling_factor=take(file, text, "routed_scaling_factor", float),
            aux_loss_alpha=take(file, text, "aux_loss_alpha", float, 0.0),
            activation_format=activation_format(file, whole),
        ),
    )


def _optional(file: Path, text: dict[str, Any], key: str, kind: type = float) -> Any:
    """A value that may be null, but must be there: without the key, its meaning is open."""
    return None if key in text and text[key] is None else take(file, text, key, kind)


def _stop(file: Path, tokens: dict[str, Any]) -> int:
    """The id that ends a document: of several the first, which is what training writes after one."""
    given = tokens.get("eos_token_id")
    if not isinstance(given, list):
        return take(file, tokens, "eos_token_id", int)
    if not given:
        raise ConfigError(f"{file}: eos_token_id=[] must name at least one id; fetch it again")
    ids = [take(file, {"eos_token_id": one}, "eos_token_id", int) for one in given]
    return ids[0]


def _linear_attention(file: Path, text: dict[str, Any], layers: int) -> tuple[tuple[int, ...], KDAConfig]:
    """The 0-based MLA layers, and the settings of all others."""
    linear = take_object(file, text, LINEAR)
    if not linear:
        raise ConfigError(f"{file} lacks or has an unknown value for {LINEAR!r}; fetch it again")
    check_keys(file, {key: f"{LINEAR}.{key}" for key in linear}, LINEAR_KEYS, linear)
    full, others = (linear.get(key) for key in ("full_attn_layers", "kda_layers"))
    each = [layer for part in (full, others) if isinstance(part, list) for layer in part]
    # Lengths first: a number of layers out of a damaged file may be of any size.
    whole = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in each)
    if not whole or len(each) != layers or sorted(each) != list(range(1, layers + 1)) or not isinstance(full, list):
        raise ConfigError(f"{file}: full_attn_layers and kda_layers must name each of 1..{layers} once")
    return tuple(sorted(layer - 1 for layer in full)), KDAConfig(
        num_heads=take(file, linear, "num_heads", int),
        head_dim=take(file, linear, "head_dim", int),
        conv_size=take(file, linear, "short_conv_kernel_size", int),
        gate_lower_bound=take(file, linear, "gate_lower_bound", float, None),
        full_rank_gate=take(file, linear, "use_full_rank_gate", bool, False),
    )


def released_config(config: ModelConfig) -> dict:
    """The config.json of the family's layout: the keys that say what the model is, and no others."""
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
        **COMMON,
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
    }
    return {
        "model_type": "kimi_k2",
        "architectures": ["DeepseekV3ForCausalLM"],
        **_sizes(config),
        "first_k_dense_replace": config.num_dense_layers,
        "moe_intermediate_size": moe.hidden_size,
        **{K2_NAMES[key]: value for key, value in shared.items()},
        **K2_COMMON,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "aux_loss_alpha": moe.aux_loss_alpha,
        **_mla_sizes(mla),
        **write_rope(rope),
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "dtype": "bfloat16",
    }


def export_config(config: ModelConfig, *, packed: bool) -> dict[str, Any]:
    """The config.json to write: that of the release which the model came from, with what changed since.

    Keys that nothing here uses are kept, in their order; those that contradict the config are not. A model that is no
    release's, or has become one of another layout, has the family's own.

    Args:
        config: the model.
        packed: it is written in the quantized format of its family, if there is one.
    """
    ours = released_config(config)
    theirs = None if config.release is None else json.loads(config.release)
    quantization = find_quantization(theirs or {})
    if theirs is not None:
        theirs = _as_ours(theirs, ours)
    if theirs is not None:
        before = parse_config(Path(CONFIG), theirs)
        ours = _merged(theirs, released_config(before), ours) if _layout(before) == _layout(config) else ours
    made = _quantization(config) if packed else None
    home = ours if theirs is not None and KEY in theirs else ours.get(TEXT, ours)
    for keys in (ours, ours.get(TEXT, ours)):
        if made is None or keys is not home:
            keys.pop(KEY, None)
    if made is not None:
        home[KEY] = updated_quantization(quantization or {}, made, config)
    return ours


def _layout(config: ModelConfig) -> tuple[bool, bool]:
    return is_k2(config), is_nested(config)


def _quantization(config: ModelConfig) -> dict[str, Any] | None:
    """What config.json says of the format of the family."""
    if is_k2(config):
        return fp8_quantization()
    return mxfp4_quantization(config) if is_nested(config) else None


def _as_ours(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any] | None:
    """A release's config nested as ours is; None where it cannot be."""
    if TEXT in theirs and TEXT not in ours:  # K2.5: its text model is written as K2
        return {**theirs[TEXT], **{key: theirs[key] for key in TOKENS if key in theirs}}
    return theirs if (TEXT in theirs) == (TEXT in ours) else None


def _merged(theirs: dict[str, Any], before: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Theirs, with the keys in which ours differs from how we would have written theirs."""
    out = dict(theirs)
    changed = {key for key in before.keys() | ours.keys() if before.get(key) != ours.get(key)}
    for group in _ONE_OF:
        if changed & group:
            changed |= group
    for key in sorted(changed):
        value = ours.get(key)
        if isinstance(value, dict) and isinstance(theirs.get(key), dict) and key in (TEXT, LINEAR):
            out[key] = _merged(theirs[key], before[key], value)
        elif key in ours:
            out[key] = value
        else:
            out.pop(key, None)
    return out


def differences(theirs: dict, ours: dict) -> list[str]:
    """Where two released configs differ, a line each."""
    theirs, ours = (whole | whole.get("text_config", {}) for whole in (theirs, ours))
    return [
        f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} here"
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key) != ours.get(key) and key != "text_config"
    ]
