"""KDA, MLA and MoE layers against the released modules: outputs and every gradient."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from kimi_jax.model.kda import KDA
from kimi_jax.model.mla import MLA
from kimi_jax.model.moe import MoE
from kimi_jax.model.param import arrays, with_arrays
from kimi_jax.store import names as released_names
from tests.conftest import rel_to_max, rel_to_rms

GOLDEN = Path(__file__).parents[1] / "golden"
DTYPES = ["float32", "float64"]
CASES = [("kda_layer_op", case) for case in ("k3", "kimi_linear")]
CASES += [("mla_op", case) for case in ("gated", "gated_small", "plain")]
CASES += [("moe_op", case) for case in ("latent", "latent_smallw2", "plain_silu", "latent_top1")]


def layer_config(fixture: str, given: dict, dtype: str) -> ModelConfig:
    """The fixture's settings, with harmless values for the parts that it lacks."""
    heads = given.get("num_attention_heads", 1)
    linear = given.get("linear_attn_config", {})
    situ = given.get("hidden_act") == "situ"
    return ModelConfig(
        vocab_size=8,
        hidden_size=given.get("hidden_size", 0) or 1,
        num_layers=1,
        mla_layers=(),
        num_dense_layers=0,
        dense_hidden_size=1,
        situ_beta=4.0 if situ else None,
        situ_linear_beta=25.0 if situ else None,
        rms_norm_eps=given["rms_norm_eps"],
        kda=KDAConfig(
            num_heads=linear.get("num_heads", 1),
            head_dim=linear.get("head_dim", 1),
            gate_lower_bound=linear.get("gate_lower_bound"),
            full_rank_gate=linear.get("use_full_rank_gate", False),
            chunk_size=8,
        ),
        mla=MLAConfig(
            num_heads=heads,
            q_lora_rank=given.get("q_lora_rank"),
            kv_lora_rank=given.get("kv_lora_rank", 1),
            qk_nope_head_dim=given.get("qk_nope_head_dim", 1),
            qk_rope_head_dim=given.get("qk_rope_head_dim", 1),
            v_head_dim=given.get("v_head_dim", 1),
            output_gate=bool(given.get("mla_use_output_gate")),
        ),
        moe=MoEConfig(
            num_experts=given.get("num_experts", 2),
            experts_per_token=given.get("num_experts_per_token", 1),
            num_shared_experts=given.get("num_shared_experts", 0),
            hidden_size=given.get("moe_intermediate_size", 1),
            latent_size=given.get("routed_expert_hidden_size"),
            latent_norm=given.get("latent_moe_use_norm", False),
            renormalize=given.get("moe_renormalize", True),
            routed_scaling_factor=given.get("routed_scaling_factor", 1.0),
        ),
        dtype=dtype,  # type: ignore[arg-type]
        param_dtype=dtype,  # type: ignore[arg-type]
    )


def released(table, prefix, name_prefix, config, values):
    """Our layer's arrays as a dict of released names -> (paths, codec)."""
    for name, params, kind in table:
        paths = [param.removeprefix(prefix) for param in params.split()]
        if paths[0] in values:
            experts = range(config.moe.num_experts) if "{e}" in name else [None]
            for e in experts:
                shapes = [values[p].shape if e is None else values[p].shape[1:] for p in paths]
                if kind == "A_log":  # the fixture holds the live entries alone
                    kind = "same"
                yield name.removeprefix(name_prefix).format(e=e), paths, e, released_names._CODECS[kind](config, shapes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fixture,case", CASES)
def test_layer(fixture, case, dtype):
    with jax.enable_x64(dtype == "float64"):
        check_layer(fixture, case, dtype)


def check_layer(fixture, case, dtype):
    data = np.load(GOLDEN / fixture / f"{case}.npz", allow_pickle=True)
    given = json.loads((GOLDEN / fixture / "meta.json").read_text())["cases"][case]["config"]
    given.setdefault("hidden_size", data["in.x"].shape[-1])
    config = layer_config(fixture, given, dtype)
    kind = {"kda_layer_op": KDA, "mla_op": MLA, "moe_op": MoE}[fixture]
    table, name_prefix = {
        KDA: (released_names._KDA, "self_attn."),
        MLA: (released_names._MLA, "self_attn."),
        MoE: (released_names._MOE, "block_sparse_moe."),
    }[kind]
    prefix = "mlp." if kind is MoE else "attention."
    template = kind(config, ())
    values = {name: np.full(spec.shape, np.nan, dtype) for name, spec in arrays(template).items()}
    entries = list(released(table, prefix, name_prefix, config, values))
    assert {f"in.w.{name}" for name, *_ in entries} == {key for key in data if key.startswith("in.w.")}
    for name, paths, e, (_, decode, _) in entries:
        for path, value in zip(paths, decode(data[f"in.w.{name}"].astype(dtype)), strict=True):
            values[path][() if e is None else e] = value

    def forward(values, x):
        layer = with_arrays(template, values)
        if kind is KDA:
            return layer(x, None, None)[0]
        return layer(x, None, None, None)[0] if kind is MLA else layer(x, None)[0]

    x, d_out = jnp.asarray(data["in.x"], dtype), jnp.asarray(data["in.d_out"], dtype)
    values = {name: jnp.asarray(value) for name, value in values.items()}
    out, vjp = jax.vjp(jax.jit(forward), values, x)
    grads, d_x = vjp(d_out)

    tolerance, grad_tolerance = (2e-5, 2e-4) if dtype == "float32" else (1e-6, 1e-6)
    errors = {"out": rel_to_rms(out, data["out.out_f64"])}
    assert errors["out"] < tolerance, errors
    if data["out.d_x"].dtype != object:
        assert rel_to_max(d_x, data["out.d_x"]) < grad_tolerance
    has_grads = any(key.startswith("out.d_w.") for key in data)  # two MoE cases come without
    if kind is MoE:
        assert not np.any(grads["router_bias"])
    largest = max((np.max(np.abs(data[key])) for key in data if key.startswith("out.d_w.")), default=0.0)
    for name, paths, e, (_, _, encode) in entries:
        if not has_grads or name == "gate.e_score_correction_bias":
            continue
        grad = encode(*(np.asarray(grads[path])[() if e is None else e] for path in paths))
        expected = data[f"out.d_w.{name}"]
        errors[name] = rel_to_max(grad, expected)
        # A gradient that vanishes by cancellation is no better than the last bit of the terms that cancel. It
        # matters once: with one expert a token and the latent norm, the routing weight has no effect but for eps,
        # and d gate.weight (6.6e-4) is what is left of terms as large as the layer's other gradients (43).
        if np.max(np.abs(grad - expected)) < np.finfo(dtype).eps * largest:
            errors[name] = 0.0
    worst = max(((error, name) for name, error in errors.items() if name != "out"), default=(0.0, "none given"))
    print(f"{fixture}/{case} {dtype}: out {errors['out']:.1e}, worst gradient {worst[0]:.1e} ({worst[1]})")
    assert worst[0] < grad_tolerance, worst

    if kind is MoE:
        _, aux = with_arrays(template, values)(x, None)
        chosen, scores = (np.asarray(aux[key]).reshape(-1, aux[key].shape[-1]) for key in ("topk_idx", "router_scores"))
        np.testing.assert_array_equal(np.sort(chosen, axis=-1), np.sort(data["out.topk_idx"], axis=-1))
        assert rel_to_rms(scores, data["out.scores"]) < tolerance
