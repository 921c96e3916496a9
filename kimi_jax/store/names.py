"""The tensors of released checkpoints: their names, PyTorch's layouts and what they are on disk.

Three released layouts of one model, told apart by the config: K3 nests its text model (`language_model.` in front of
names, `A_log` padded with zeros to `head_dim` entries); Kimi Linear does not, and stores `A_log` as
`[1, 1, heads, 1]`; K2 has DeepSeek-V3's names. A linear weight is `[out, in]` there and `[in, out]` here, with heads as
an axis. Channels that turn together are neighbours in both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kimi_jax.config import ModelConfig
from kimi_jax.model.kimi import declared
from kimi_jax.model.stacks import segments
from kimi_jax.ops.quant.bits import GROUP
from kimi_jax.ops.quant.blocks import BLOCK
from kimi_jax.ops.quant.qtensor import Kind
from kimi_jax.store.released_config import is_k2, is_nested
from kimi_jax.store.safetensors_files import CheckpointError, Entry, listed

FLOAT32_NAMES = ("A_log", "dt_bias", "_conv1d.weight", "o_norm.weight", "e_score_correction_bias")
"""Endings of the tensors that are stored as F32; all others are BF16."""
NOT_TEXT = ("vision_tower.", "mm_projector.")
"""Tensors of a multimodal checkpoint that the text model has no use for."""
STRAY = ".rotary_emb.inv_freq"
"""Ending of buffers in K2's files that follow from the config."""
ROOT = "language_model."
"""What a multimodal release puts in front of its text tensors' names."""
PLAIN = ("F32", "BF16", "F16", "F64")
"""Dtypes of tensors that are not quantized."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of the released model, whatever its encoding on disk, and where it lives in our tree."""

    name: str
    shape: tuple[int, ...]
    params: tuple[str, ...]
    """Paths of the parameters that it holds: one, or two for `kv_b_proj`."""
    index: tuple[int, ...]
    """Place in the stacked parameters."""
    decode: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    """Released array -> a layer's parameters, as views."""
    encode: Callable[..., np.ndarray]
    rows: int | None
    """Axis of the layer's parameter that runs along the first axis here; None where they mix."""

    @property
    def dtype(self) -> str:
        return "F32" if self.name.endswith(FLOAT32_NAMES) else "BF16"


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: a released tensor, or the part of one that is quantized."""

    name: str
    dtypes: tuple[str, ...]
    """What it may be stored in; the family's own comes first."""
    shape: tuple[int, ...]
    tensor: Tensor
    kind: Kind | None
    part: str
    """`packed` or `scale`, as in `QTensor`; `shape`; `plain` for one that is not quantized."""

    @property
    def entry(self) -> tuple[str, str, tuple[int, ...]]:
        return self.name, self.dtypes[0], self.shape


def tensors(config: ModelConfig, root: str | None = None) -> Iterator[Tensor]:
    """Every tensor of the released model, without allocating any; `root` begins the names, by default the family's."""
    ours = {name: each.shape for name, each in declared(config).items()}
    if root is None:
        root = ROOT if is_nested(config) else ""

    def tensor(name: str, param: str | tuple[str, ...], kind: str = "matrix", index: tuple[int, ...] = ()) -> Tensor:
        params = (param,) if isinstance(param, str) else param
        shapes = [ours[p][len(index) :] for p in params]
        shape, decode, encode = _CODECS[kind](config, shapes)
        rows = {"same": 0, "matrix": 1}.get(kind) if len(shapes[0]) == 2 else None
        return Tensor(root + name, shape, params, index, decode, encode, rows)

    yield tensor("lm_head.weight", "head")
    yield tensor("model.embed_tokens.weight", "embed", "same")
    yield tensor("model.norm.weight", "norm.weight", "same")
    if config.attn_res_block_size is not None:
        yield tensor("model.output_attn_res_proj.weight", "output_mix.query", "row")
        yield tensor("model.output_attn_res_norm.weight", "output_mix.norm", "same")
    for i, segment in enumerate(segments(config)):
        for j, run in enumerate(segment.runs):
            experts = _K2_MOE if is_k2(config) else _MOE
            table = [*_BLOCK, *(_KDA if run.mixer == "kda" else _MLA), *(_DENSE if segment.dense else experts)]
            base = f"segments.{i}.runs.{j}."
            for (repeat, turn), layer in np.ndenumerate(segment.layers(j)):
                for name, param, kind in table:
                    params = tuple(base + p for p in param.split())
                    if params[0] not in ours:
                        continue  # a part that this config does not have
                    index = (repeat, turn)
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
_DENSE_ALIASES = {f".mlp.{name}": f".block_sparse_moe.{name}" for name in ("gate_proj.", "up_proj.", "down_proj.")}
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
        return (cols, rows), lambda w: (w.T.reshape(shape),), lambda a: a.reshape(rows, -1).T

    return codec


def _reshaped(released: Callable[[tuple[int, ...]], tuple[int, ...]]):
    """The same numbers in the same order under another shape."""

    def codec(config, shapes):
        (shape,) = shapes
        there = released(shape)
        return there, lambda w: (w.reshape(shape),), lambda a: a if there == shape else a.reshape(there)

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
    if not is_nested(config):
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


def manifest(config: ModelConfig, *, packed: bool = True, root: str | None = None) -> Iterator[Stored]:
    """Every tensor of the files that the model is exported to, without allocating any.

    Raises:
        CheckpointError: one whose width the family's format cannot hold.
    """
    for tensor in tensors(config, root):
        kind = _family_kind(config, tensor) if packed else None
        if kind == "mxfp4" and tensor.shape[1] % GROUP:
            raise CheckpointError(
                f"{tensor.name} has {tensor.shape[1]} columns, not a multiple of the {GROUP} that share a scale in "
                "MXFP4; export it with --no-packed (packed=False)"
            )
        yield from stored(tensor, kind)


def manifest_lines(config: ModelConfig, *, packed: bool = True) -> list[str]:
    """`manifest` as sorted lines `name DTYPE AxB`."""
    return sorted(f"{s.name} {s.dtypes[0]} {'x'.join(map(str, s.shape))}" for s in manifest(config, packed=packed))


def stored(tensor: Tensor, kind: Kind | None) -> list[Stored]:
    """What a tensor is on disk in a format."""
    if kind is None:
        return [Stored(tensor.name, (tensor.dtype, *PLAIN), tensor.shape, tensor, None, "plain")]
    o, i = tensor.shape
    parts: dict[str, tuple[str, tuple[str, ...], tuple[int, ...]]] = {
        "mxfp4": {"packed": ("_packed", ("U8",), (o, i // 2)), "scale": ("_scale", ("U8",), (o, i // GROUP))},
        "int4": {
            "packed": ("_packed", ("I32",), (o, i // 8)),
            "scale": ("_scale", ("BF16", "F16", "F32"), (o, i // GROUP)),
            "shape": ("_shape", ("I64", "I32"), (2,)),
        },
        "fp8_block": {
            "packed": ("", ("F8_E4M3",), (o, i)),
            "scale": ("_scale_inv", ("F32",), (-(-o // BLOCK), -(-i // BLOCK))),
        },
    }[kind]
    return [
        Stored(tensor.name + ending, dtypes, shape, tensor, kind, part)
        for part, (ending, dtypes, shape) in parts.items()
    ]


def _found_kind(entries: Mapping[str, Entry], name: str) -> Kind | None:
    """The format in which a tensor lies in files, told by names and dtypes alone."""
    if name + "_scale_inv" in entries or (name in entries and entries[name].dtype == "F8_E4M3"):
        return "fp8_block"
    packed = entries.get(name + "_packed")
    if name + "_shape" in entries or (packed is not None and packed.dtype == "I32"):
        return "int4"
    return "mxfp4" if packed is not None or name + "_scale" in entries else None


def match(entries: Mapping[str, Entry], config: ModelConfig, where: str | Path) -> dict[str, Stored]:
    """Finds the model's tensors among those of files.

    Raises:
        CheckpointError: a config of more layers or experts than the files hold; tensors that are missing, unexpected,
            or of another shape or dtype: all of them, by name.
    """
    _check_counts(entries, config, where)
    root = ROOT if any(name.startswith(ROOT) for name in entries) else ""
    found: dict[str, Stored] = {}
    problems = []
    for tensor in tensors(config, root):
        tensor = _as_named(entries, tensor)
        kind = _found_kind(entries, tensor.name)
        if kind is not None and len(tensor.shape) != 2:
            problems.append(f"quantized: {tensor.name} {list(tensor.shape)} is no matrix")
            kind = None
        if kind in ("mxfp4", "int4") and tensor.shape[1] % GROUP:
            problems.append(f"quantized: {tensor.name} has {tensor.shape[1]} columns, not a multiple of {GROUP}")
        for s in stored(tensor, kind):
            found[s.name] = s
            entry = entries.get(s.name)
            if entry is None:
                problems.append(f"missing: {s.name} {list(s.shape)}")
                continue
            if entry.shape != s.shape:
                problems.append(f"shape: {s.name} is {list(entry.shape)}, the config needs {list(s.shape)}")
            if entry.dtype not in s.dtypes:
                only = ", ".join(PLAIN if s.part == "plain" else s.dtypes)
                problems.append(f"dtype: {s.name} is {entry.dtype}, only {only} can be loaded")
    others = (name for name in sorted(entries.keys() - found.keys()) if not name.startswith(NOT_TEXT))
    problems += [f"unexpected: {name} {list(entries[name].shape)}" for name in others if not name.endswith(STRAY)]
    if problems:
        raise CheckpointError(f"{where} does not hold the model of its config.json:\n  {listed(problems)}")
    return found


def _check_counts(entries: Mapping[str, Entry], config: ModelConfig, where: str | Path) -> None:
    """Rejects a number of layers or experts that the files' names do not reach, before work grows with it."""
    counts = {"layers": (config.num_layers, "num_hidden_layers"), "experts": (config.moe.num_experts, "experts")}
    if not config.moe_layers:
        del counts["experts"]
    for part, (wanted, key) in counts.items():
        numbers = (_NUMBERS[part].search(name) for name in entries if not name.startswith(NOT_TEXT))
        held = max((int(number[1]) + 1 for number in numbers if number), default=0)
        if wanted > held:
            raise CheckpointError(
                f"{where} does not hold the model of its config.json: {key}={wanted} there, and the files hold "
                f"{held} {part}; fetch the files that are missing, or config.json"
            )


_NUMBERS = {part: re.compile(rf"\.{part}\.(\d{{1,9}})\.") for part in ("layers", "experts")}


def _as_named(entries: Mapping[str, Entry], tensor: Tensor) -> Tensor:
    """The tensor under the other name that it may have: transformers' own class has one word for both kinds of MLP."""
    for ours, theirs in _DENSE_ALIASES.items():
        if ours in tensor.name:
            other = replace(tensor, name=tensor.name.replace(ours, theirs))
            if _is_there(entries, other.name) and not _is_there(entries, tensor.name):
                return other
    return tensor


def _is_there(entries: Mapping[str, Entry], name: str) -> bool:
    return name in entries or _found_kind(entries, name) is not None


def _family_kind(config: ModelConfig, tensor: Tensor) -> Kind | None:
    """The format in which the family releases a tensor."""
    if is_k2(config):
        return "fp8_block" if "_proj" in tensor.name and len(tensor.shape) == 2 else None
    return "mxfp4" if is_nested(config) and ".experts." in tensor.name else None
