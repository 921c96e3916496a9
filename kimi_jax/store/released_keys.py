"""Keys of a released config.json: read one by one with their kinds, and checked where only one value is implemented."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from kimi_jax.config import ConfigError, RoPEConfig

T = TypeVar("T", int, float, bool)

LARGEST = 2**40
"""Above any size of a model: what is larger is damage, and would be work without end."""
LARGEST_LAYERS = 10_000
COMMON = {
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
"""What K3 and Kimi Linear have in common: written into every config.json of theirs."""
K2_NAMES = {
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
    "num_expert_group": "n_group",
}
"""What K2 calls the settings of the others."""
K2_COMMON = {K2_NAMES.get(key, key): value for key, value in COMMON.items() if key != "mla_use_nope"} | {
    "seq_aux": True,
    "attention_bias": False,
    "hidden_act": "silu",
}
"""The same of K2."""
ABSENT: dict[str, tuple] = {
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "use_qkv_bias", "lm_head_bias", "moe_bias"),
        (False, None),
    ),
    **dict.fromkeys(
        ("qk_norm", "use_qk_norm", "qk_layernorm", "use_sliding_window", "rms_norm_add_unit_offset"), (False, None)
    ),
    **dict.fromkeys(
        (
            "sliding_window",
            "sliding_window_size",
            "attention_chunk_size",
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "logit_softcapping",
            "query_pre_attn_scalar",
            "index_topk",
            "index_n_heads",
            "index_head_dim",
            "sparse_attention_config",
            "swiglu_limit",
        ),
        (None,),
    ),
    **dict.fromkeys(
        (
            "embedding_multiplier",
            "residual_multiplier",
            "attention_multiplier",
            "logits_scaling",
            "logit_scale",
            "scale_emb",
            "partial_rotary_factor",
        ),
        (1, None),
    ),
}
"""Keys of related models that change the mathematics -> values with which they change nothing."""
K2_ABSENT: dict[str, tuple] = {
    "rope_interleave": (True, None),
    "mla_use_nope": (False, None),
    "mla_use_output_gate": (False, None),
    "latent_moe_use_norm": (False, None),
    "routed_expert_hidden_size": (None,),
    "attn_res_block_size": (None,),
    "linear_attn_config": (None,),
}
"""The same for K2: what the others of the family have."""
LINEAR_KEYS = {
    "full_attn_layers",
    "kda_layers",
    "num_heads",
    "head_dim",
    "short_conv_kernel_size",
    "use_full_rank_gate",
    "gate_lower_bound",
}
"""Of `linear_attn_config`."""
_ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters", "rope_interleave", "partial_rotary_factor"}
_ROPE_TYPE = "rope_type"
_YARN_FIXED: dict[str, tuple] = {
    "attention_factor": (1, None),
    "attn_factor": (1, None),
    "extrapolation_factor": (1, None),
    "partial_rotary_factor": (1, None),
    "truncate": (True, None),
}
"""Keys beside YaRN's numbers -> values with which they change nothing."""
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def take(where: str | Path, keys: Mapping[str, Any], key: str, kind: type[T], *default: Any) -> Any:
    """The value of a key, of this kind: int, float (an integer will do) or bool.

    Args:
        where: what messages begin with.
        keys: a JSON object.
        key: its name.
        kind: of the value.
        default: for a key that is absent or null; without it the key must be there.

    Raises:
        ConfigError: it is absent, of another kind or beyond any size.
    """
    if keys.get(key) is None and default:
        return default[0]
    if key not in keys:
        raise ConfigError(f"{where} lacks or has an unknown value for {key!r}; fetch it again")
    value = keys[key]
    fits = isinstance(value, bool) if kind is bool else isinstance(value, int) and not isinstance(value, bool)
    if not fits and not (kind is float and isinstance(value, float)):
        due = {int: "an integer", float: "a number", bool: "true or false"}[kind]
        raise ConfigError(f"{where} has a value of the wrong kind: {key}={shown(value)} must be {due}; fetch it again")
    if kind is int and abs(value) > LARGEST:
        raise ConfigError(f"{where}: {key}={shown(value)} is beyond the size of any model; fetch it again")
    return value


def take_object(where: str | Path, keys: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The JSON object under a key; empty if the key is absent or null.

    Raises:
        ConfigError: it is no object.
    """
    value = keys.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"{where} has a value of the wrong kind: {key}={shown(value)} must be a JSON object; fetch it again"
        )
    return value


def shown(value: object) -> str:
    """A value in a message: on one line, and short."""
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to print the digits of larger ones
        return f"an integer of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:190]}.. ({len(text):,} characters)"


def _printable(key: str) -> str:
    """A key in a message, on one line."""
    return key if key.isprintable() else repr(key)


def check_fixed(where: str | Path, keys: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Rejects keys with another value than ours, or than one of ours where a tuple is given.

    Raises:
        ConfigError: with the key, its value and what is supported.
    """
    for key, ours in fixed.items():
        allowed = ours if isinstance(ours, tuple) else (ours,)
        if key in keys and not any(_same(keys[key], value) for value in allowed):
            raise ConfigError(
                f"{where}: {key}={shown(keys[key])} is not supported, only {allowed[0]!r}; "
                "it is another model than this code computes"
            )


def _same(given: object, ours: object) -> bool:
    """Equal, `true` and 1 apart."""
    return given == ours and isinstance(given, bool) == isinstance(ours, bool)


def read_rope(where: str | Path, text: Mapping[str, Any]) -> RoPEConfig:
    """Rotary positions, from `rope_theta` with `rope_scaling` or from the `rope_parameters` of transformers 5.

    Raises:
        ConfigError: a key that is not understood, that contradicts another or is missing.
    """
    for key in sorted(text):
        if key not in _ROPE_KEYS and ("rope" in key or "rotary" in key or "yarn" in key) and "head_dim" not in key:
            raise ConfigError(
                f"{where}: {_printable(key)}={shown(text[key])} is not understood, only "
                f"{', '.join(sorted(_ROPE_KEYS))}; it may be another model than this code computes"
            )
    given: dict[str, Any] = {}
    names: dict[str, str] = {}  # key -> where it was found
    for part in (None, "rope_parameters", "rope_scaling"):
        if part is None:
            found = {key: text[key] for key in ("rope_theta", "original_max_position_embeddings") if key in text}
        else:
            found = take_object(where, text, part)
        for key, value in found.items():
            name = _printable(f"{part}.{key}" if part else key)
            key = _ROPE_TYPE if key == "type" else key
            if value is None:
                continue
            if key in given and not _same(given[key], value):
                raise ConfigError(
                    f"{where}: {name}={shown(value)} contradicts {names[key]}={shown(given[key])}; keep the right one"
                )
            given[key], names[key] = value, names.get(key, name)
    theta = take(where, given, "rope_theta", float)
    kind = given.get(_ROPE_TYPE)
    if kind is None or kind == "default":
        check_keys(where, names, {"rope_theta", _ROPE_TYPE, "original_max_position_embeddings"}, given)
        return RoPEConfig(theta=theta)
    if kind != "yarn":
        raise ConfigError(f"{where}: rope_scaling of type {shown(kind)} is not supported, only 'yarn' and 'default'")
    check_fixed(where, {names[key].partition(".")[2] or key: given[key] for key in given}, _YARN_FIXED)
    check_keys(where, names, {"rope_theta", _ROPE_TYPE, *_YARN, *_YARN_FIXED}, given)
    mscale = take(where, given, "mscale_all_dim", float)
    if take(where, given, "mscale", float) != mscale:  # else their ratio would scale the rotated channels
        raise ConfigError(f"{where}: mscale={given['mscale']} is not supported beside mscale_all_dim={mscale}")
    return RoPEConfig(
        theta=theta,
        factor=take(where, given, "factor", float),
        original_max_position_embeddings=take(where, given, "original_max_position_embeddings", int),
        beta_fast=take(where, given, "beta_fast", float, 32.0),  # the defaults of every reader of these keys
        beta_slow=take(where, given, "beta_slow", float, 1.0),
        mscale=mscale,
    )


def check_keys(where: str | Path, names: Mapping[str, str], known: set[str], given: Mapping[str, Any]) -> None:
    """Rejects keys outside of `known` that have a value, by the names under which they were found.

    Raises:
        ConfigError: with the first of them.
    """
    for key in sorted(given.keys() - known):
        if given[key] is not None:
            raise ConfigError(
                f"{where}: {_printable(names.get(key, key))}={shown(given[key])} is not understood; "
                "it may be another model than this code computes"
            )


def write_rope(rope: RoPEConfig) -> dict[str, Any]:
    """The keys that K2's releases have, which all versions of all readers take."""
    return {
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
    }
