"""`quantization_config` of a released config.json: what is read of it, and what is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from kimi_jax.config import ModelConfig
from kimi_jax.ops.quant.bits import GROUP
from kimi_jax.ops.quant.blocks import BLOCK
from kimi_jax.store.released_keys import shown
from kimi_jax.store.safetensors_files import CheckpointError

KEY = "quantization_config"
_FORMATS = ("mxfp4-pack-quantized", "pack-quantized")
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


def find_quantization(whole: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization that a config.json describes, of the whole model or of its text model."""
    return whole.get(KEY) or (whole.get("text_config") or {}).get(KEY)


def check_quantization(file: Path, whole: Mapping[str, Any]) -> None:
    """Rejects a description of a format that is not read here; which tensors have it, their names say.

    Raises:
        CheckpointError: with the key, its value and what is supported.
    """
    found = find_quantization(whole)
    if found is None:
        return
    if not isinstance(found, dict):
        raise CheckpointError(f"{file}: {KEY}={shown(found)} must be a JSON object; fetch it again")
    method, form = found.get("quant_method"), found.get("format")
    if method == "fp8":
        _only(file, found, "weight_block_size", [BLOCK, BLOCK])
        _only(file, found, "fmt", "e4m3", None)
    elif method != "compressed-tensors":
        raise CheckpointError(
            f"{file}: quant_method={shown(method)} is not supported, only 'compressed-tensors' and 'fp8'"
        )
    elif form not in _FORMATS:
        known = " and ".join(map(repr, _FORMATS))
        raise CheckpointError(f"{file}: compressed-tensors of format {shown(form)} are not supported, only {known}")
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if found.get(key):
            raise CheckpointError(f"{file}: {key}={shown(found[key])} is not supported, only null")
    for group in _groups(file, found):
        weights = _part(file, group, "weights")
        _only(file, weights, "group_size", GROUP, None)
        _only(file, weights, "symmetric", True, None)
        _only(file, weights, "num_bits", *((4, None) if method != "fp8" else (8, None)))
        if group.get("output_activations"):
            given = shown(group["output_activations"])
            raise CheckpointError(f"{file}: output_activations={given} is not supported, only null")


def _only(file: Path, keys: Mapping[str, Any], key: str, *allowed: Any) -> None:
    if keys.get(key) not in allowed:
        raise CheckpointError(f"{file}: {key}={shown(keys.get(key))} is not supported, only {allowed[0]}")


def _groups(file: Path, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = _part(file, found, "config_groups")
    return [_part(file, groups, name) for name in groups]


def _part(file: Path, keys: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object under a key of the description; empty if there is none."""
    value = keys.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{file}: {key}={shown(value)} of {KEY} must be a JSON object; fetch it again")
    return value or {}


def activation_format(file: Path, whole: Mapping[str, Any]) -> Literal["mxfp8"] | None:
    """What the inputs of routed experts are rounded to: nothing in the released files, MXFP8 after our QAT.

    Raises:
        CheckpointError: something else.
    """
    found = find_quantization(whole)
    if not isinstance(found, dict):
        return None  # `check_quantization` names what it is
    given = [_part(file, group, "input_activations") for group in _groups(file, found)]
    for inputs in filter(None, given):
        if any(inputs.get(key) != value for key, value in _MXFP8.items()):
            raise CheckpointError(f"{file}: input_activations={shown(inputs)} are not supported, only {_MXFP8} or null")
    return "mxfp8" if any(given) else None


def fp8_quantization() -> dict[str, Any]:
    """What config.json says of K2's format."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }


def mxfp4_quantization(config: ModelConfig) -> dict[str, Any]:
    """What config.json says of K3's format."""
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": GROUP, "symmetric": True}
    group = {
        "format": "mxfp4-pack-quantized",
        "targets": ["Linear"],
        "weights": {**weights, "dynamic": False, "scale_dtype": "torch.uint8"},
        "input_activations": _inputs(config),
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


def _inputs(config: ModelConfig) -> dict[str, Any] | None:
    return _MXFP8 if config.moe.activation_format == "mxfp8" else None


def updated_quantization(theirs: Mapping[str, Any], ours: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """The description that a release came with, for a model of the same format; ours if it is of another."""
    same = all(theirs.get(key) == ours.get(key) for key in ("quant_method", "format"))
    if not same:
        return ours
    if "config_groups" not in theirs:
        return dict(theirs)
    groups = {
        name: group
        if bool(group.get("input_activations")) == bool(_inputs(config))
        else {**group, "input_activations": _inputs(config)}
        for name, group in theirs["config_groups"].items()
    }
    return {**theirs, "config_groups": groups}
