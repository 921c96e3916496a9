"""Released checkpoints in and out: the only file that knows Hugging Face's names and PyTorch's layouts.

Three released layouts of one model, told apart by the config: K3 nests its text model (`language_model.` in front of
names, `text_config` in config.json, `A_log` padded with zeros to `head_dim` entries); Kimi Linear does not, and stores
`A_log` as `[1, 1, heads, 1]`; K2 has DeepSeek-V3's names. A linear weight is `[out, in]` there and `[in, out]` here,
with heads as an axis. Channels that turn together are neighbours in both.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from kimi_jax.config import ConfigError, KDAConfig, MLAConfig, ModelConfig, MoEConfig, RoPEConfig
from kimi_jax.layers.param import arrays, named_params, with_arrays
from kimi_jax.layout import segments
from kimi_jax.model import Kimi

FLOAT32_NAMES = ("A_log", "dt_bias", "_conv1d.weight", "o_norm.weight", "e_score_correction_bias")
"""Endings of the tensors that are stored as F32; all others are BF16."""
NOT_TEXT = ("vision_tower.", "mm_projector.")
"""Tensors of a multimodal checkpoint that the text model has no use for."""
STRAY = ".rotary_emb.inv_freq"
"""Ending of buffers in K2's files that follow from the config."""
NUMPY_DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16)}
CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A checkpoint directory that cannot be used. The message names every offending file or tensor."""


@dataclass(frozen=True)
class Tensor:
    """One released tensor and where it lives in our tree."""

    name: str
    shape: tuple[int, ...]
    params: tuple[str, ...]
    """Paths of the parameters that it holds: one, or two for `kv_b_proj`."""
    index: tuple[int, ...]
    """Place in the stacked parameters."""
    decode: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    encode: Callable[..., np.ndarray]

    @property
    def dtype(self) -> str:
        return "F32" if self.name.endswith(FLOAT32_NAMES) else "BF16"


def load(path: str | Path, *, dtype=jnp.float32) -> tuple[Kimi, ModelConfig]:
    """Loads a released K3 or Kimi Linear directory (safetensors, bf16 or f32, one file or shards).

    Args:
        path: directory with `config.json` and `model.safetensors`, or shards and their index.
        dtype: of parameters and compute, whatever config.json says. What the family stores as F32 is at least f32.

    Returns:
        The model and its config.

    Raises:
        CheckpointError: missing, unexpected or mis-shaped tensors, unreadable files, shard names that leave the
            directory; every one of them is named.
        ConfigError: a config.json that describes another kind of model.
    """
    path, dtype = Path(path), jnp.dtype(dtype)
    if dtype == jnp.float64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ConfigError('dtype=float64 needs jax.config.update("jax_enable_x64", True)')
    config = replace(read_config(path), dtype=dtype.name, param_dtype=dtype.name)
    files = _tensor_files(path)
    expected = {tensor.name: tensor for tensor in tensors(config)}
    _check_headers(path, files, expected)
    model = Kimi(config)
    values = {name: np.empty(spec.shape, spec.dtype) for name, spec in arrays(model).items()}
    for file in sorted(set(files.values())):
        with safe_open(path / file, "numpy") as handle:
            for name in handle.keys():  # noqa: SIM118
                if name in expected:
                    tensor = expected[name]
                    for param, value in zip(tensor.params, tensor.decode(handle.get_tensor(name)), strict=True):
                        values[param][tensor.index] = value
    return with_arrays(model, {name: jnp.asarray(values.pop(name)) for name in list(values)}), config


def save(path: str | Path, model: Kimi, config: ModelConfig, *, max_shard_bytes: int = 5 * 2**30) -> None:
    """Writes the model in the released layout and dtypes, so that `save(load(x))` holds the bytes of x's tensors.

    The directory appears under its name only when it is whole.

    Raises:
        CheckpointError: `path` exists and is not an empty directory, or the disk is too small.
    """
    path = Path(path).absolute()
    if replace(config, dtype="float32", param_dtype="float32", remat="none") != replace(
        model.config, dtype="float32", param_dtype="float32", remat="none"
    ):
        raise ConfigError("the config is not that of the model; pass model.config")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists already; choose a new directory or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    all_tensors = list(tensors(config))
    total = sum(_num_bytes(tensor) for tensor in all_tensors)
    free = shutil.disk_usage(path.parent).free
    if total > free:
        raise CheckpointError(f"{path} needs {total:,} bytes and the disk has {free:,} free; choose another disk")
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    shards = _shards(all_tensors, max_shard_bytes)
    values = arrays(model)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {tensor.name: file for tensor in shard}
        save_file({tensor.name: _encoded(tensor, values) for tensor in shard}, partial / file, {"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (partial / CONFIG).write_text(json.dumps(released_config(config), indent=2) + "\n")
    if path.exists():
        path.rmdir()
    partial.rename(path)


def tensors(config: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of the released layout, without allocating any."""
    ours = {name: variable.get_value().shape for name, variable in named_params(Kimi(config)).items()}
    nested = _is_nested(config)
    root = "language_model." if nested else ""

    def tensor(name: str, param: str | tuple[str, ...], kind: str = "matrix", index: tuple[int, ...] = ()) -> Tensor:
        params = (param,) if isinstance(param, str) else param
        shapes = [ours[p][len(index) :] for p in params]
        shape, decode, encode = _CODECS[kind](config, shapes)
        return Tensor(root + name, shape, params, index, decode, encode)

    yield tensor("lm_head.weight", "head")
    yield tensor("model.embed_tokens.weight", "embed", "same")
    yield tensor("model.norm.weight", "norm.weight", "same")
    if config.attn_res_block_size is not None:
        yield tensor("model.output_attn_res_proj.weight", "output_mix.query", "row")
        yield tensor("model.output_attn_res_norm.weight", "output_mix.norm", "same")
    for i, segment in enumerate(segments(config)):
        for j, run in enumerate(segment.runs):
            experts = _K2_MOE if _is_k2(config) else _MOE
            table = [*_BLOCK, *(_KDA if run.mixer == "kda" else _MLA), *(_DENSE if segment.dense else experts)]
            base = f"segments.{i}.runs.{j}."
            for (repeat, place), layer in np.ndenumerate(segment.layers(j)):
                for name, param, kind in table:
                    params = tuple(base + p for p in param.split())
                    if params[0] not in ours:
                        continue  # a part that this config does not have
                    index = (repeat, place)
                    if "{e}" not in name:
                        yield tensor(f"model.layers.{layer}.{name}", params, kind, index)
                        continue
                    for expert in range(config.moe.num_experts):
                        yield tensor(f"model.layers.{layer}.{name.format(e=expert)}", params, kind, (*index, expert))


# Released name, our parameter(s), codec. An expert's tensors have its number in the name.
_BLOCK = [
    ("input_layernorm.weight", "attention_norm.weight", "same"),
    ("post_attention_layernorm.weight", "mlp_norm.weight", "same"),
    ("self_attention_res_proj.weight", "attention_mix.query", "row"),
    ("self_attention_res_norm.weight", "attention_mix.norm", "same"),
    ("mlp_res_proj.weight", "mlp_mix.query", "row"),
    ("mlp_res_norm.weight", "mlp_mix.norm", "same"),
]
_KDA = [
    ("self_attn.q_proj.weight", "attention.w_q", "matrix"),
    ("self_attn.k_proj.weight", "attention.w_k", "matrix"),
    ("self_attn.v_proj.weight", "attention.w_v", "matrix"),
    ("self_attn.q_conv1d.weight", "attention.conv_q", "conv"),
    ("self_attn.k_conv1d.weight", "attention.conv_k", "conv"),
    ("self_attn.v_conv1d.weight", "attention.conv_v", "conv"),
    ("self_attn.f_a_proj.weight", "attention.w_f_a", "matrix"),
    ("self_attn.f_b_proj.weight", "attention.w_f_b", "matrix"),
    ("self_attn.b_proj.weight", "attention.w_beta", "matrix"),
    ("self_attn.A_log", "attention.A_log", "A_log"),
    ("self_attn.dt_bias", "attention.dt_bias", "flat"),
    ("self_attn.o_norm.weight", "attention.o_norm", "same"),
    ("self_attn.g_proj.weight", "attention.w_g", "matrix"),
    ("self_attn.g_a_proj.weight", "attention.w_g_a", "matrix"),
    ("self_attn.g_b_proj.weight", "attention.w_g_b", "matrix"),
    ("self_attn.o_proj.weight", "attention.w_o", "from_heads"),
]
_MLA = [
    ("self_attn.q_proj.weight", "attention.w_q", "matrix"),
    ("self_attn.q_a_proj.weight", "attention.w_q_a", "matrix"),
    ("self_attn.q_a_layernorm.weight", "attention.q_norm", "same"),
    ("self_attn.q_b_proj.weight", "attention.w_q_b", "matrix"),
    ("self_attn.kv_a_proj_with_mqa.weight", "attention.w_kv_a", "matrix"),
    ("self_attn.kv_a_layernorm.weight", "attention.kv_norm", "same"),
    ("self_attn.kv_b_proj.weight", "attention.w_k_b attention.w_v_b", "kv_b"),
    ("self_attn.g_proj.weight", "attention.w_g", "matrix"),
    ("self_attn.o_proj.weight", "attention.w_o", "from_heads"),
]
_DENSE = [
    ("mlp.gate_proj.weight", "mlp.w_gate", "matrix"),
    ("mlp.up_proj.weight", "mlp.w_up", "matrix"),
    ("mlp.down_proj.weight", "mlp.w_down", "matrix"),
]
_MOE = [
    ("block_sparse_moe.gate.weight", "mlp.w_router", "matrix"),
    ("block_sparse_moe.gate.e_score_correction_bias", "mlp.router_bias", "same"),
    ("block_sparse_moe.routed_expert_down_proj.weight", "mlp.w_latent_down", "matrix"),
    ("block_sparse_moe.routed_expert_up_proj.weight", "mlp.w_latent_up", "matrix"),
    ("block_sparse_moe.routed_expert_norm.weight", "mlp.latent_norm", "same"),
    ("block_sparse_moe.shared_experts.gate_proj.weight", "mlp.shared.w_gate", "matrix"),
    ("block_sparse_moe.shared_experts.up_proj.weight", "mlp.shared.w_up", "matrix"),
    ("block_sparse_moe.shared_experts.down_proj.weight", "mlp.shared.w_down", "matrix"),
    ("block_sparse_moe.experts.{e}.w1.weight", "mlp.w_gate", "matrix"),
    ("block_sparse_moe.experts.{e}.w3.weight", "mlp.w_up", "matrix"),
    ("block_sparse_moe.experts.{e}.w2.weight", "mlp.w_down", "matrix"),
]
_K2_MOE = [
    ("mlp.gate.weight", "mlp.w_router", "matrix"),
    ("mlp.gate.e_score_correction_bias", "mlp.router_bias", "same"),
    ("mlp.shared_experts.gate_proj.weight", "mlp.shared.w_gate", "matrix"),
    ("mlp.shared_experts.up_proj.weight", "mlp.shared.w_up", "matrix"),
    ("mlp.shared_experts.down_proj.weight", "mlp.shared.w_down", "matrix"),
    ("mlp.experts.{e}.gate_proj.weight", "mlp.w_gate", "matrix"),
    ("mlp.experts.{e}.up_proj.weight", "mlp.w_up", "matrix"),
    ("mlp.experts.{e}.down_proj.weight", "mlp.w_down", "matrix"),
]


def _matrix(num_in: int):
    """`[in.., out..]` here, `[out, in]` there."""

    def codec(config, shapes):
        (shape,) = shapes
        rows, cols = math.prod(shape[:num_in]), math.prod(shape[num_in:])
        return (cols, rows), lambda w: (w.T.reshape(shape),), lambda a: a.reshape(rows, cols).T

    return codec


def _reshaped(stored: Callable[[tuple[int, ...]], tuple[int, ...]]):
    """The same numbers in the same order under another shape."""

    def codec(config, shapes):
        (shape,) = shapes
        return stored(shape), lambda w: (w.reshape(shape),), lambda a: a.reshape(stored(shape))

    return codec


def _kv_b(config, shapes):
    """Per head, the rows of W_k_b and then those of W_v_b."""
    (r, h, k), (_, _, v) = shapes

    def decode(w):
        return tuple(np.split(w.reshape(h, k + v, r).transpose(2, 0, 1), [k], axis=-1))

    def encode(w_k, w_v):
        return np.concatenate([w_k, w_v], axis=-1).transpose(1, 2, 0).reshape(h * (k + v), r)

    return (h * (k + v), r), decode, encode


def _a_log(config, shapes):
    """One number a head: K3 pads with zeros to `head_dim` entries, Kimi Linear stores `[1, 1, heads, 1]`."""
    ((h,),) = shapes
    if not _is_nested(config):
        return (1, 1, h, 1), lambda w: (w.reshape(h),), lambda a: a.reshape(1, 1, h, 1)
    size = max(h, config.kda.head_dim)

    def decode(w):
        if np.any(w[h:]):
            raise CheckpointError(f"A_log has {np.count_nonzero(w[h:])} non-zero entries past its {h} heads")
        return (w[:h],)

    return (size,), decode, lambda a: np.pad(a, (0, size - h))


_CODECS = {
    "same": _reshaped(lambda shape: shape),
    "row": _reshaped(lambda shape: (1, *shape)),
    "flat": _reshaped(lambda shape: (math.prod(shape),)),
    "conv": _reshaped(lambda shape: (math.prod(shape[:-1]), 1, shape[-1])),
    "matrix": _matrix(1),
    "from_heads": _matrix(2),
    "kv_b": _kv_b,
    "A_log": _a_log,
}


def _is_nested(config: ModelConfig) -> bool:
    """K3's layout. Attention Residuals are what only K3 has; the model types of both releases are the same."""
    return config.attn_res_block_size is not None


def _is_k2(config: ModelConfig) -> bool:
    """K2's layout. Of the family only K2 has rotary positions."""
    return config.mla.rope is not None


def _num_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * NUMPY_DTYPES[tensor.dtype].itemsize


def _encoded(tensor: Tensor, values: dict[str, jax.Array]) -> np.ndarray:
    parts = [np.asarray(values[param][tensor.index]) for param in tensor.params]
    return np.ascontiguousarray(tensor.encode(*parts).astype(NUMPY_DTYPES[tensor.dtype]))


def _shards(all_tensors: list[Tensor], max_bytes: int) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = [[]]
    used = 0
    for tensor in all_tensors:
        if shards[-1] and used + _num_bytes(tensor) > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += _num_bytes(tensor)
    return shards


def _tensor_files(path: Path) -> dict[str, str]:
    """Tensor name -> file in `path`."""
    if (path / INDEX).is_file():
        try:
            files = json.loads((path / INDEX).read_text())["weight_map"]
            if not (isinstance(files, dict) and all(isinstance(file, str) for file in files.values())):
                raise ValueError("weight_map must map names to files")
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path / INDEX} is not an index with a weight_map: {error}") from error
        outside = sorted({f for f in files.values() if "/" in f or "\\" in f or ".." in f})
        if outside:
            raise CheckpointError(f"{path / INDEX} names files outside its directory: {', '.join(outside)}")
        absent = sorted({f for f in files.values() if not (path / f).is_file()})
        if absent:
            raise CheckpointError(f"{path} lacks {', '.join(absent)}, which its index names; download them again")
        return files
    if not (path / SINGLE).is_file():
        raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}")
    return dict.fromkeys(_header(path / SINGLE), SINGLE)


def _header(file: Path) -> dict[str, dict]:
    """Names, shapes and dtypes of a safetensors file, checked against its size."""
    size = file.stat().st_size
    try:
        with open(file, "rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            if length > size - 8:
                raise ValueError(f"its header claims {length:,} bytes")
            header = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        needed = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if needed != size:
            raise ValueError(f"its header describes {needed:,} bytes")
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise CheckpointError(f"{file} ({size:,} bytes) is truncated or corrupt: {error}") from error
    return header


def _check_headers(path: Path, files: dict[str, str], expected: dict[str, Tensor]) -> None:
    """Compares names, shapes and dtypes in the files with what the config needs; names all differences."""
    found: dict[str, dict] = {}
    problems = []
    for file in sorted(set(files.values())):
        header = _header(path / file)
        problems += [f"in two files: {name}" for name in sorted(header.keys() & found.keys())]
        found |= header
    problems += [f"named in the index but in no file: {name}" for name in sorted(files.keys() - found.keys())]
    packed = sorted(name for name in found if name.endswith((".weight_packed", ".weight_scale")))
    if packed:
        raise CheckpointError(f"{path} has {len(packed)} quantized tensors, {packed[0]} first; load a bf16 or f32 copy")
    found = {name: entry for name, entry in found.items() if not name.startswith(NOT_TEXT) and not name.endswith(STRAY)}
    problems += [f"missing: {name} {list(expected[name].shape)}" for name in sorted(expected.keys() - found.keys())]
    problems += [f"unexpected: {name} {found[name]['shape']}" for name in sorted(found.keys() - expected.keys())]
    for name in sorted(expected.keys() & found.keys()):
        entry, shape = found[name], list(expected[name].shape)
        if entry["shape"] != shape:
            problems.append(f"shape: {name} is {entry['shape']}, the config needs {shape}")
        if entry["dtype"] not in NUMPY_DTYPES:
            problems.append(f"dtype: {name} is {entry['dtype']}, only {', '.join(NUMPY_DTYPES)} can be loaded")
    if problems:
        raise CheckpointError(f"{path} does not hold the model of its config.json:\n  " + "\n  ".join(problems))


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
                q_lora_rank=text["q_lora_rank"],
                kv_lora_rank=text["kv_lora_rank"],
                qk_nope_head_dim=text["qk_nope_head_dim"],
                qk_rope_head_dim=text["qk_rope_head_dim"],
                v_head_dim=text["v_head_dim"],
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
    if _is_k2(config):
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
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.dense_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": mla.num_heads,
        "num_key_value_heads": mla.num_heads,
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
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
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
    if not _is_nested(config):
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
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.dense_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": mla.num_heads,
        "num_key_value_heads": mla.num_heads,
        "first_k_dense_replace": config.num_dense_layers,
        "moe_intermediate_size": moe.hidden_size,
        **{_K2_NAMES.get(key, key): value for key, value in shared.items()},
        "routed_scaling_factor": moe.routed_scaling_factor,
        "aux_loss_alpha": moe.aux_loss_alpha,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
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
