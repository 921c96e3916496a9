"""config.json of releases: every way to write rotary positions, keys kept over a round trip, and what is rejected."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from kimi_jax.config import ConfigError, ModelConfig, RoPEConfig, from_dict, load_config, to_dict
from kimi_jax.files import FileError
from kimi_jax.model.param import arrays
from kimi_jax.store import released_config
from kimi_jax.store.read import load_release
from kimi_jax.store.safetensors_files import SINGLE, CheckpointError
from kimi_jax.store.write import save_release
from tests.conftest import rel_to_rms
from tests.store.test_release import GOLDEN, NAMES

YARN = {
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def released(name: str) -> dict:
    return json.loads((GOLDEN / name / released_config.CONFIG).read_text())


def write(folder: Path, whole: object) -> Path:
    (folder / released_config.CONFIG).write_text(json.dumps(whole))
    return folder


def k2(folder: Path, **changes) -> Path:
    """K2's config.json with keys changed; `...` removes one."""
    whole = released("k2_tiny") | changes
    return write(folder, {key: value for key, value in whole.items() if value is not ...})


ROPES = {
    "parameters, theta beside": {
        "rope_scaling": ...,
        "rope_parameters": {"rope_type": "yarn", **YARN},
    },
    "parameters, theta inside": {
        "rope_scaling": ...,
        "rope_theta": ...,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, **YARN},
    },
    "parameters, theta in both": {
        "rope_scaling": ...,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 50000, **YARN},
    },
    "parameters, both words for the type": {
        "rope_scaling": None,
        "rope_theta": ...,
        "rope_parameters": {"rope_type": "yarn", "type": "yarn", "rope_theta": 50000.0, **YARN},
    },
    "parameters and scaling": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, **YARN}},
    "what changes nothing": {
        "rope_interleave": True,
        "partial_rotary_factor": 1.0,
        "rope_parameters": {"rope_type": "yarn", **YARN, "attention_factor": 1.0, "truncate": True},
        "rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": None},
    },
    "the context before the stretch beside": {
        "original_max_position_embeddings": 4096,
        "rope_scaling": {key: value for key, value in YARN.items() if key[:4] != "orig"} | {"type": "yarn"},
    },
}


@pytest.mark.parametrize("changes", ROPES.values(), ids=ROPES)
def test_rotary_positions_however_they_are_written(tmp_path, changes):
    expected = released_config.read_config(GOLDEN / "k2_tiny")
    assert expected.mla.rope == RoPEConfig(theta=50000.0, factor=32.0, beta_fast=1.0, beta_slow=1.0)
    assert released_config.read_config(k2(tmp_path, **changes)) == expected


def test_the_defaults_of_yarns_ramp(tmp_path):
    scaling = {key: value for key, value in YARN.items() if not key.startswith("beta")}
    config = released_config.read_config(k2(tmp_path, rope_scaling={"type": "yarn", **scaling}))
    assert config.mla.rope == RoPEConfig(theta=50000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0)


@pytest.mark.parametrize("given", [{"rope_type": "default", "rope_theta": 1e4}, {"rope_theta": 1e4}])
def test_parameters_without_a_stretch(tmp_path, given):
    changes = {"rope_scaling": ..., "rope_theta": ..., "rope_parameters": given}
    assert released_config.read_config(k2(tmp_path, **changes)).mla.rope == RoPEConfig(theta=1e4)


def test_the_logits_of_k2_from_rope_parameters(tmp_path):
    """The very numbers of the released config.json, and the golden ones."""
    shutil.copy(GOLDEN / "k2_tiny" / SINGLE, tmp_path)
    k2(tmp_path, **ROPES["parameters, theta beside"])
    run = jax.jit(lambda model, tokens: model(tokens))
    tokens = np.load(GOLDEN / "k2_tiny" / "inputs.npz")["ids_T33"]
    expected = np.load(GOLDEN / "k2_tiny" / "outputs.npz")["T33.logits_f64"]
    ours, theirs = (run(load_release(path)[0], tokens) for path in (tmp_path, GOLDEN / "k2_tiny"))
    np.testing.assert_array_equal(ours, theirs)
    assert rel_to_rms(ours, expected) < 2e-3
    model, config = load_release(tmp_path)
    save_release(tmp_path / "again", model, config)  # keeps their key
    assert json.loads((tmp_path / "again" / released_config.CONFIG).read_text()) == json.loads(
        (tmp_path / released_config.CONFIG).read_text()
    )


def test_a_changed_stretch_is_written_in_one_way_only(tmp_path):
    config = released_config.read_config(k2(tmp_path, **ROPES["parameters, theta inside"]))
    assert config.mla.rope is not None
    config = replace(config, mla=replace(config.mla, rope=replace(config.mla.rope, factor=64.0)))
    out = released_config.export_config(config, packed=False)
    assert "rope_parameters" not in out and out["rope_scaling"]["factor"] == 64.0 and out["rope_theta"] == 50000.0
    assert released_config.read_config(write(tmp_path, out)) == config


SCALED = {"type": "yarn", **YARN}
ROPE_ERRORS = [
    ({"rope_interleave": False}, "rope_interleave=False is not supported, only True"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported, only 1"),
    ({"rope_scaling": SCALED | {"attention_factor": 1.2}}, "attention_factor=1.2 is not supported, only 1"),
    ({"rope_scaling": SCALED | {"truncate": False}}, "truncate=False is not supported, only True"),
    ({"rope_scaling": SCALED | {"truncate": 1}}, "truncate=1 is not supported, only True"),
    ({"rope_scaling": SCALED | {"attn_factor": 2.0}}, "attn_factor=2.0 is not supported, only 1"),
    ({"rope_scaling": SCALED | {"extrapolation_factor": 0.5}}, "extrapolation_factor=0.5 is not supported, only 1"),
    ({"rope_scaling": SCALED | {"short_factor": [1.0]}}, r"rope_scaling\.short_factor=\[1\.0\] is not understood"),
    ({"rope_scaling": SCALED | {"long\nfactor": 2}}, r"'rope_scaling\.long\\nfactor'=2 is not understood"),
    ({"rope_parameters": SCALED | {"low_freq_factor": 1}}, r"rope_parameters\.low_freq_factor=1 is not understood"),
    (
        {"rope_scaling": ..., "rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        r"rope_parameters\.full_attention=\{'rope_theta': 10000\.0\} is not understood",
    ),
    ({"rope_scaling": {"type": "default", "factor": 2.0}}, r"rope_scaling\.factor=2\.0 is not understood"),
    ({"rope_scaling": {"factor": 2.0}}, r"rope_scaling\.factor=2\.0 is not understood"),
    ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_scaling of type 'llama3' is not supported"),
    ({"rope_scaling": {"type": ["yarn"]}}, r"rope_scaling of type \['yarn'\] is not supported"),
    ({"rope_scaling": SCALED | {"rope_type": "linear"}}, r"rope_scaling\.rope_type='linear' contradicts .*'yarn'"),
    ({"rope_parameters": SCALED | {"factor": 16.0}}, r"rope_scaling\.factor=32\.0 contradicts .*factor=16\.0"),
    ({"rope_parameters": {"rope_theta": 1e4}}, r"rope_parameters\.rope_theta=10000\.0 contradicts rope_theta=50000\.0"),
    ({"original_max_position_embeddings": 8192}, "original_max_position_embeddings=4096 contradicts .*=8192"),
    ({"rope_theta": ...}, "lacks or has an unknown value for 'rope_theta'"),
    ({"rope_theta": "50000"}, "wrong kind: rope_theta='50000' must be a number"),
    ({"rope_theta": True}, "wrong kind: rope_theta=True must be a number"),
    ({"rope_theta": -1.0}, "theta=-1.0 must be above"),
    ({"rope_theta": float("nan")}, "theta=nan must be"),
    ({"rope_scaling": SCALED | {"factor": float("inf")}}, "factor=inf must be at least 1"),
    ({"rope_scaling": SCALED | {"factor": 0.5}}, "factor=0.5 must be at least 1"),
    ({"rope_scaling": SCALED | {"factor": "32"}}, "wrong kind: factor='32' must be a number"),
    ({"rope_scaling": SCALED | {"beta_fast": 0.5}}, "beta_fast=0.5 must be at least beta_slow=1.0"),
    ({"rope_scaling": SCALED | {"mscale": 0.5}}, "mscale=0.5 is not supported beside mscale_all_dim=1.0"),
    ({"rope_scaling": SCALED | {"mscale": None}}, "lacks or has an unknown value for 'mscale'"),
    ({"rope_scaling": SCALED | {"original_max_position_embeddings": 4096.5}}, r"4096\.5 must be an integer"),
    ({"rope_scaling": "yarn"}, "wrong kind: rope_scaling='yarn' must be a JSON object"),
    ({"rope_parameters": ["yarn"]}, r"wrong kind: rope_parameters=\['yarn'\] must be a JSON object"),
    ({"rope_scale": 2.0}, "rope_scale=2.0 is not understood, only"),
    ({"rotary_dim": 8}, "rotary_dim=8 is not understood, only"),
    ({"rope_local_base_freq": 1e4}, "rope_local_base_freq=10000.0 is not understood, only"),
]
OTHER_MODELS = [
    (name, key, value)
    for key, value in [
        ("num_key_value_heads", 2),
        ("sliding_window", 4096),
        ("use_sliding_window", True),
        ("attention_chunk_size", 8192),
        ("mlp_bias", True),
        ("use_bias", True),
        ("qkv_bias", True),
        ("lm_head_bias", True),
        ("tie_word_embeddings", True),
        ("tie_word_embeddings", None),
        ("qk_norm", True),
        ("use_qk_norm", True),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("query_pre_attn_scalar", 256),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("logits_scaling", 8.0),
        ("logit_scale", 0.0625),
        ("swiglu_limit", 7.0),
        ("index_topk", 2048),
        ("topk_group", 2),
        ("topk_method", "greedy"),
        ("moe_layer_freq", 2),
        ("num_nextn_predict_layers", 1),
    ]
    for name in NAMES
]
OTHER_MODELS += [(name, "attention_bias", True) for name in NAMES]
OTHER_MODELS += [("k3_tiny", "hidden_act", act) for act in ("gelu", "swish", "SILU", None, ["silu"], 1)]
OTHER_MODELS += [("k2_tiny", "hidden_act", act) for act in ("gelu_pytorch_tanh", "relu", "situ")]
OTHER_MODELS += [("k3_tiny", "moe_router_activation_func", "softmax"), ("kimi_linear_tiny", "mla_use_nope", False)]
OTHER_MODELS += [
    ("k2_tiny", key, value)
    for key, value in [
        ("attn_res_block_size", 4),
        ("mla_use_output_gate", True),
        ("routed_expert_hidden_size", 32),
        ("latent_moe_use_norm", True),
        ("linear_attn_config", {}),
        ("mla_use_nope", True),
        ("n_group", 8),
        ("scoring_func", "softmax"),
        ("seq_aux", False),
    ]
]


def rejected(folder: Path, message: str) -> None:
    """Reading the folder's config.json ends in one line that names the file."""
    with pytest.raises((ConfigError, CheckpointError, FileError), match=message) as error:
        released_config.read_config(folder)
    assert str(error.value).startswith(str(folder)) and "\n" not in str(error.value)


@pytest.mark.parametrize(("changes", "message"), ROPE_ERRORS, ids=[message for _, message in ROPE_ERRORS])
def test_rope_keys_that_are_not_understood_are_named(tmp_path, changes, message):
    rejected(k2(tmp_path, **changes), message)


@pytest.mark.parametrize(("name", "key", "value"), OTHER_MODELS, ids=lambda value: str(value))
def test_keys_that_change_the_mathematics_are_rejected_by_name(tmp_path, name, key, value):
    whole = released(name)
    whole.get("text_config", whole)[key] = value
    rejected(write(tmp_path, whole), rf"{key}=.* is not supported, only ")


@pytest.mark.parametrize("key", ["tie_word_embeddings", "sliding_window", "attention_bias"])
def test_keys_of_the_whole_model_count_as_well(tmp_path, key):
    rejected(write(tmp_path, released("k3_tiny") | {key: True}), f"{key}=True is not supported")


@pytest.mark.parametrize("name", NAMES)
def test_values_that_change_nothing_are_read(tmp_path, name):
    whole = released(name)
    text = whole.get("text_config", whole)
    text |= {"sliding_window": None, "use_sliding_window": False, "mlp_bias": False, "logit_scale": 1.0}
    text |= {"embedding_multiplier": 1, "num_key_value_heads": 4, "attention_dropout": 0.1, "index_topk": None}
    assert released_config.read_config(write(tmp_path, whole)) == released_config.read_config(GOLDEN / name)


KINDS = [
    ("num_hidden_layers", "9"),
    ("num_hidden_layers", 9.0),
    ("num_hidden_layers", True),
    ("num_hidden_layers", [9]),
    ("vocab_size", None),
    ("vocab_size", "160"),
    ("hidden_size", {"a": 1}),
    ("hidden_size", 64.5),
    ("rms_norm_eps", "1e-5"),
    ("rms_norm_eps", None),
    ("routed_scaling_factor", [1.0]),
    ("moe_renormalize", 1),
    ("moe_renormalize", "true"),
    ("mla_use_output_gate", "false"),
    ("latent_moe_use_norm", 1),
    ("q_lora_rank", "none"),
    ("num_experts", False),
    ("num_experts_per_token", 2.5),
    ("activation_situ_beta", "4"),
    ("linear_attn_config", [1, 2]),
]


@pytest.mark.parametrize(("key", "value"), KINDS, ids=lambda value: str(value))
def test_values_of_the_wrong_kind_are_named(tmp_path, key, value):
    whole = released("k3_tiny")
    whole["text_config"][key] = value
    rejected(write(tmp_path, whole), rf"has a value of the wrong kind: {key}=")


@pytest.mark.parametrize(
    "key",
    sorted(
        set(released("k3_tiny")["text_config"])
        - {"model_type", "architectures", "use_cache", "dtype", "use_grouped_topk", "num_key_value_heads"}
        - {"tie_word_embeddings", "moe_router_activation_func", "moe_layer_freq", "num_expert_group", "topk_group"}
        - {"topk_method", "mla_use_nope", "num_nextn_predict_layers", "bos_token_id", "eos_token_id", "pad_token_id"}
        - {"mla_use_output_gate", "attn_res_block_size", "latent_moe_use_norm", "routed_expert_hidden_size"}
    ),
)
def test_a_key_that_is_missing_is_named(tmp_path, key):
    whole = released("k3_tiny")
    del whole["text_config"][key]
    due = "model_max_length" if key == "max_position_embeddings" else key
    rejected(write(tmp_path, whole), rf"lacks or has an unknown value for '{due}'; fetch it again")


SIZES = [
    ("k3_tiny", {"num_hidden_layers": 10**10}, "num_hidden_layers=10000000000 is over the 10,000"),
    ("k2_tiny", {"num_hidden_layers": 10**10}, "num_hidden_layers=10000000000 is over the 10,000"),
    ("k2_tiny", {"num_hidden_layers": 0}, "must be at least 1"),
    ("k2_tiny", {"num_hidden_layers": -5}, "must be at least 1"),
    ("k3_tiny", {"num_hidden_layers": 5000}, r"must name each of 1\.\.5000 once"),
    ("k3_tiny", {"vocab_size": 10**30}, "vocab_size=1000000000000000000000000000000 is beyond the size of any model"),
    ("k3_tiny", {"hidden_size": 2**41}, "hidden_size=2199023255552 is beyond the size"),
    ("k3_tiny", {"vocab_size": 0}, "vocab_size=0 must be at least 1"),
    ("k3_tiny", {"num_experts": 2}, "experts_per_token=3 must be smaller than num_experts=2"),
    ("k3_tiny", {"first_k_dense_replace": 100}, "num_dense_layers=100 must lie between"),
    ("k3_tiny", {"first_k_dense_replace": -1}, "num_dense_layers=-1 must lie between"),
    ("k3_tiny", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be above 0 and finite"),
    ("k3_tiny", {"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0 must be above 0"),
    ("k3_tiny", {"initializer_range": float("inf")}, "initializer_range=inf must be"),
    ("k3_tiny", {"activation_situ_beta": 0.0}, "situ_beta=0.0 must be above 0"),
    ("k3_tiny", {"attn_res_block_size": 0}, "attn_res_block_size=0 must be at least 1"),
    ("k2_tiny", {"qk_rope_head_dim": 15}, "qk_rope_head_dim=15 must be even"),
    ("k2_tiny", {"bos_token_id": 256}, "bos_token_id=256 is outside the vocabulary of 256"),
    ("k2_tiny", {"eos_token_id": []}, r"eos_token_id=\[\] must name at least one id"),
    ("k2_tiny", {"eos_token_id": [2, "5"]}, "wrong kind: eos_token_id='5' must be an integer"),
    ("k2_tiny", {"eos_token_id": [[2]]}, r"wrong kind: eos_token_id=\[2\] must be an integer"),
    ("k2_tiny", {"eos_token_id": None}, "wrong kind: eos_token_id=None"),
    ("k2_tiny", {"eos_token_id": -1}, "eos_token_id=-1 is outside the vocabulary"),
]


@pytest.mark.parametrize(("name", "changes", "message"), SIZES, ids=[f"{n} {c}"[:60] for n, c, _ in SIZES])
def test_sizes_that_no_model_has_are_named_before_work_grows_with_them(tmp_path, name, changes, message):
    whole = released(name)
    (whole.get("text_config", whole)).update(changes)
    if name == "k3_tiny":
        whole = {key: value for key, value in whole.items() if key not in changes}
    rejected(write(tmp_path, whole), message)


LINEAR_ERRORS = [
    ({"full_attn_layers": [4, 8, 9, 9]}, r"must name each of 1\.\.9 once"),
    ({"full_attn_layers": [4, 8]}, r"must name each of 1\.\.9 once"),
    ({"full_attn_layers": [3, 7, 8], "kda_layers": [0, 1, 2, 4, 5, 6]}, r"must name each of 1\.\.9 once"),
    ({"full_attn_layers": ["4", 8, 9]}, r"must name each of 1\.\.9 once"),
    ({"full_attn_layers": [[4], 8, 9]}, r"must name each of 1\.\.9 once"),
    ({"full_attn_layers": [4.0, 8, 9]}, r"must name each of 1\.\.9 once"),
    ({"full_attn_layers": None}, r"must name each of 1\.\.9 once"),
    ({"kda_layers": "1235"}, r"must name each of 1\.\.9 once"),
    ({"num_heads": 0}, "num_heads=0 must be at least 1"),
    ({"num_heads": "4"}, "wrong kind: num_heads='4'"),
    ({"gate_lower_bound": 1.0}, "gate_lower_bound=1.0 must be negative"),
    ({"gate_lower_bound": "-5"}, "wrong kind: gate_lower_bound='-5'"),
    ({"use_full_rank_gate": "yes"}, "wrong kind: use_full_rank_gate='yes' must be true or false"),
    ({"short_conv_kernel_size": -4}, "conv_size=-4 must be at least 1"),
    ({"expand_v": 2}, r"linear_attn_config\.expand_v=2 is not understood"),
]


@pytest.mark.parametrize(("changes", "message"), LINEAR_ERRORS, ids=[str(changes) for changes, _ in LINEAR_ERRORS])
def test_settings_of_linear_attention_are_checked(tmp_path, changes, message):
    whole = released("k3_tiny")
    whole["text_config"]["linear_attn_config"].update(changes)
    rejected(write(tmp_path, whole), message)


NOT_CONFIGS = {
    "null": b"null",
    "a list": b"[1, 2]",
    "a number": b"7",
    "a text": b'"config"',
    "nothing": b"",
    "half": b'{"vocab_size": 160,',
    "two": b"{} {}",
    "NUL bytes": b"\0" * 100,
    "UTF-16": json.dumps(released("k3_tiny")).encode("utf-16"),
    "bad UTF-8": b'{"vocab_size": "\xff"}',
    "deep lists": b'{"a": ' + b"[" * 10**6,
    "deep objects": b'{"a": ' * 10**6,
    "a long number": b'{"vocab_size": ' + b"9" * 5000 + b"}",
    "empty": b"{}",
    "no text": b'{"text_config": null}',
    "text is a list": b'{"text_config": []}',
    "another model": b'{"model_type": "llama", "hidden_act": "silu", "vocab_size": 9}',
}


@pytest.mark.parametrize("content", NOT_CONFIGS.values(), ids=NOT_CONFIGS)
def test_what_is_no_config_is_one_line(tmp_path, content):
    (tmp_path / released_config.CONFIG).write_bytes(content)
    rejected(tmp_path, "fetch it again|fetch or write it again")


def test_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / released_config.CONFIG).write_bytes(
        b"\xef\xbb\xbf" + (GOLDEN / "k2_tiny" / released_config.CONFIG).read_bytes()
    )
    assert released_config.read_config(tmp_path) == released_config.read_config(GOLDEN / "k2_tiny")


@pytest.mark.parametrize("name", NAMES)
def test_of_several_stop_ids_the_first_ends_documents(tmp_path, name):
    whole = released(name) | {"eos_token_id": [2, 5]}
    config = released_config.read_config(write(tmp_path, whole))
    assert config.eos_token_id == 2
    assert released_config.export_config(config, packed=False)["eos_token_id"] == [2, 5]
    changed = released_config.export_config(replace(config, eos_token_id=7), packed=False)
    assert changed["eos_token_id"] == 7


UNUSED = {"use_cache": False, "ep_size": 8, "attention_dropout": 0.0, "auto_map": {"AutoConfig": "a.B"}, "x-y": [None]}


@pytest.mark.parametrize("name", [*NAMES, "k3_tiny_mxfp4"])
def test_a_release_saved_again_keeps_every_key(tmp_path, name):
    """In the order that they came in, unused and unknown ones too."""
    whole = released(name) | UNUSED
    whole.get("text_config", whole).update(UNUSED, head_dim=32)
    config = released_config.read_config(write(tmp_path, whole))
    again = released_config.export_config(config, packed=name.endswith("mxfp4"))
    assert json.dumps(again) == json.dumps(whole)
    assert from_dict(ModelConfig, json.loads(json.dumps(to_dict(config)))).release == config.release


@pytest.mark.parametrize("name", ["kimi_linear_tiny", "k2_tiny"])
def test_a_saved_release_on_disk_keeps_every_key(tmp_path, name):
    shutil.copy(GOLDEN / name / SINGLE, tmp_path)
    whole = released(name) | UNUSED | {"head_dim": 32}
    model, config = load_release(write(tmp_path, whole))
    save_release(tmp_path / "again", model, config)
    assert json.loads((tmp_path / "again" / released_config.CONFIG).read_text()) == whole
    assert list(arrays(load_release(tmp_path / "again")[0])) == list(arrays(model))


@pytest.mark.parametrize("name", NAMES)
def test_keys_that_contradict_a_changed_config_are_not_written(tmp_path, name):
    whole = released(name)
    text = whole.get("text_config", whole)
    text |= {"model_max_length": 777, "max_position_embeddings": 777}
    config = released_config.read_config(write(tmp_path, whole))
    config = replace(config, max_position_embeddings=555, bos_token_id=3, moe=replace(config.moe, hidden_size=96))
    out = released_config.export_config(config, packed=False)
    found = out.get("text_config", out)
    assert {found.get(key) for key in ("model_max_length", "max_position_embeddings")} <= {555, None}
    assert found["moe_intermediate_size"] == 96 and found["bos_token_id"] == out["bos_token_id"] == 3
    assert released_config.read_config(write(tmp_path, out)) == config


def test_layers_that_changed_are_written_with_the_rest_of_their_settings():
    config = released_config.read_config(GOLDEN / "k3_tiny")
    config = replace(config, num_layers=4, mla_layers=(3,))
    linear = released_config.export_config(config, packed=False)["text_config"]["linear_attn_config"]
    assert (linear["full_attn_layers"], linear["kda_layers"]) == ([4], [1, 2, 3])
    assert linear["gate_lower_bound"] == -5.0


def test_a_model_of_another_layout_has_its_familys_own_config():
    config = replace(released_config.read_config(GOLDEN / "k3_tiny"), attn_res_block_size=None)
    own = released_config.released_config(config)
    assert released_config.export_config(config, packed=False) == own and "text_config" not in own


def test_a_quantization_that_is_not_written_is_not_claimed(tmp_path):
    config = released_config.read_config(GOLDEN / "k3_tiny_mxfp4")
    assert "quantization_config" not in json.dumps(released_config.export_config(config, packed=False))
    whole = released("k3_tiny_mxfp4")
    theirs = copy.deepcopy(whole["text_config"]["quantization_config"])
    rounded = replace(config, moe=replace(config.moe, activation_format="mxfp8"))
    group = released_config.export_config(rounded, packed=True)["text_config"]["quantization_config"]
    inputs = group["config_groups"]["group_0"].pop("input_activations")
    assert inputs["num_bits"] == 8 and theirs["config_groups"]["group_0"].pop("input_activations") is None
    assert group == theirs
    whole["quantization_config"] = whole["text_config"].pop("quantization_config")
    again = released_config.export_config(released_config.read_config(write(tmp_path, whole)), packed=True)
    assert again == whole


def test_our_own_models_have_no_release():
    config = load_config("k2_1t").model
    assert config.release is None
    assert released_config.export_config(config, packed=False) == released_config.released_config(config)


def test_the_release_is_no_part_of_a_configs_identity():
    read = released_config.read_config(GOLDEN / "k2_tiny")
    plain = replace(read, release=None)
    assert read == plain and hash(read) == hash(plain) and repr(read) == repr(plain)


QUANTIZATION_ERRORS = [
    ([], "must be a JSON object"),
    ({"quant_method": "gptq"}, "quant_method='gptq' is not supported"),
    ({"quant_method": None}, "quant_method=None is not supported"),
    ({"quant_method": "fp8"}, "weight_block_size=None is not supported"),
    ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\] is not supported"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, "fmt='e5m2' is not supported"),
    ({"format": "float-quantized"}, "format 'float-quantized' are not supported"),
    ({"kv_cache_scheme": {"num_bits": 8}}, r"kv_cache_scheme=\{'num_bits': 8\} is not supported"),
    ({"sparsity_config": {"format": "dense"}}, "sparsity_config=.* is not supported"),
    ({"transform_config": {"R1": {}}}, "transform_config=.* is not supported"),
    ({"config_groups": [1]}, r"config_groups=\[1\] .* must be a JSON object"),
    ({"config_groups": {"a": 1}}, "a=1 of quantization_config must be a JSON object"),
    ({"config_groups": {"a": {"weights": 4}}}, "weights=4 .* must be a JSON object"),
    ({"config_groups": {"a": {"weights": {"group_size": 16}}}}, "group_size=16 is not supported"),
    ({"config_groups": {"a": {"weights": {"symmetric": False}}}}, "symmetric=False is not supported"),
    ({"config_groups": {"a": {"weights": {"num_bits": 8}}}}, "num_bits=8 is not supported"),
    ({"config_groups": {"a": {"output_activations": {"num_bits": 8}}}}, "output_activations=.* is not supported"),
    ({"config_groups": {"a": {"input_activations": {"num_bits": 4}}}}, "input_activations=.* are not supported"),
    ({"config_groups": {"a": {"input_activations": 8}}}, "input_activations=8 .* must be a JSON object"),
]


@pytest.mark.parametrize(("changes", "message"), QUANTIZATION_ERRORS, ids=[str(c) for c, _ in QUANTIZATION_ERRORS])
def test_formats_that_are_not_read_are_named(tmp_path, changes, message):
    shutil.copy(GOLDEN / "k3_tiny" / SINGLE, tmp_path)
    whole = released("k3_tiny_mxfp4")
    plain = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    whole["text_config"]["quantization_config"] = plain | changes if isinstance(changes, dict) else [1]
    with pytest.raises(CheckpointError, match=message) as error:
        load_release(write(tmp_path, whole))
    assert str(tmp_path / released_config.CONFIG) in str(error.value) and "\n" not in str(error.value)
