"""Settings that cannot work are rejected with the numbers and the fix; shipped configs load; real ones are real."""

import ast
import dataclasses
import inspect
import json
import operator
import re
import traceback
from pathlib import Path

import pytest

from kimi_jax.config import (
    Config,
    ConfigError,
    KDAConfig,
    Mesh,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    RoPEConfig,
    Rules,
    Slice,
    Source,
    from_dict,
    load,
    load_config,
    shipped_configs,
    to_dict,
)

SHIPPED = load_config("k3_tiny")
TINY = dataclasses.replace(  # with sizes that the messages below name, whatever the shipped file says
    SHIPPED,
    model=dataclasses.replace(SHIPPED.model, num_layers=9, mla_layers=(3, 7, 8)),
    data=dataclasses.replace(SHIPPED.data, batch_size=8),
)

POSITIVE = {
    "model": "vocab_size hidden_size num_layers dense_hidden_size",
    "model.kda": "num_heads head_dim conv_size chunk_size",
    "model.mla": "num_heads kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
    "model.moe": "num_experts experts_per_token hidden_size",
    "data": "batch_size",
    "train": "steps accumulation eval_every eval_tokens checkpoint_every keep_last max_skips",
}
"""Part of the config -> fields that must be at least 1."""

REFUSED = [
    *((part, {name: 0}, f".{name}=0 must be at least 1") for part, names in POSITIVE.items() for name in names.split()),
    ("model.kda", {"gate_lower_bound": 0.0}, "gate_lower_bound=0.0 must be negative, or None"),
    ("model.kda", {"gate_lower_bound": 5.0}, "gate_lower_bound=5.0 must be negative, or None"),
    ("model.mla", {"q_lora_rank": 0}, "q_lora_rank=0 must be at least 1"),
    ("model.moe", {"experts_per_token": 16}, "experts_per_token=16 must be smaller than num_experts=16"),
    ("model.moe", {"num_shared_experts": -1}, "num_shared_experts=-1 must not be negative"),
    ("model.moe", {"latent_size": None}, "latent_norm=True needs a latent_size"),
    ("model", {"mla_layers": (3, 9)}, "mla_layers=(3, 9) must be rising layer numbers from 0 to 8"),
    ("model", {"mla_layers": (-1, 3)}, "mla_layers=(-1, 3) must be rising"),
    ("model", {"mla_layers": (7, 3)}, "mla_layers=(7, 3) must be rising"),
    ("model", {"mla_layers": (3, 3)}, "mla_layers=(3, 3) must be rising"),
    ("model", {"num_dense_layers": 10}, "num_dense_layers=10 must lie between 0 and num_layers=9"),
    ("model", {"num_dense_layers": -1}, "num_dense_layers=-1 must lie between 0 and num_layers=9"),
    ("model", {"attn_res_block_size": 0}, "attn_res_block_size=0 must be at least 1, or None"),
    ("model", {"situ_beta": None}, "situ_linear_beta=25.0 needs situ_beta; set both, or neither"),
    ("model", {"bos_token_id": 4096}, "bos_token_id=4096 is outside the vocabulary of 4096"),
    ("model", {"eos_token_id": -1}, "eos_token_id=-1 is outside the vocabulary of 4096"),
    ("model", {"pad_token_id": 5000}, "pad_token_id=5000 is outside the vocabulary of 4096"),
    ("optim", {"schedule_from": -1}, "schedule_from=-1 must lie between 0 and 2,147,483,647"),
    (
        "",
        {"optim": dataclasses.replace(TINY.optim, schedule_from=TINY.train.steps)},
        "optim.schedule_from=240 must be below train.steps=240; raise train.steps",
    ),
    ("optim", {"learning_rate": 0.0}, "learning_rate=0.0 must be above 0 and finite"),
    ("optim", {"learning_rate": float("nan")}, "learning_rate=nan must be above 0 and finite"),
    ("optim", {"warmup_fraction": 1.0}, "warmup_fraction=1.0 must lie in [0, 1)"),
    ("optim", {"weight_decay": -0.1}, "weight_decay=-0.1 must be at least 0 and finite"),
    ("optim", {"momentum": 1.0}, "momentum=1.0 must lie in [0, 1)"),
    ("optim", {"adam_b1": -0.1}, "adam_b1=-0.1 must lie in [0, 1)"),
    ("optim", {"adam_b2": 1.5}, "adam_b2=1.5 must lie in [0, 1)"),
    ("optim", {"qk_clip": 0.0}, "qk_clip=0.0 must be above 0 and finite"),
    ("data", {"sequence_length": 1}, "sequence_length=1 leaves nothing to predict from; set it to at least 2"),
    ("data", {"sources": ()}, "data.sources is empty; name at least one source"),
    ("data", {"validation_fraction": 0.0}, "validation_fraction=0.0 must lie in (0, 1) when no validation source"),
    ("data", {"validation_fraction": 1.0}, "validation_fraction=1.0 must lie in (0, 1) when no validation source"),
    ("data.tokenizer", {"kind": "tiktoken"}, 'tokenizer kind "tiktoken" needs a path'),
    ("data.tokenizer", {"kind": "tokenizers"}, 'tokenizer kind "tokenizers" needs a path'),
    ("data.tokenizer", {"kind": "bytes", "path": "x"}, 'tokenizer kind "bytes" takes no path'),
    ("train", {"keep_every": 0}, "keep_every=0 must be at least 1, or None"),
    ("train", {"spike_threshold": 0.0}, "spike_threshold=0.0 must be above 0 and finite"),
    (
        "",
        {"train": dataclasses.replace(TINY.train, accumulation=3)},
        "batch_size=8 does not divide into accumulation=3",
    ),
    ("", {"train": dataclasses.replace(TINY.train, accumulation=3)}, "set train.accumulation to one of [1, 2, 4, 8]"),
    (
        "",
        {"data": dataclasses.replace(TINY.data, sequence_length=1 << 21)},
        "sequence_length=2097152 is over the model's",
    ),
    ("", {"data": dataclasses.replace(TINY.data, sequence_length=1 << 21)}, "max_position_embeddings=1048576"),
    ("", {"name": ""}, "name='' must be the plain name of a folder"),
    *(("", {"name": name}, f"name={name!r} must be the plain name of a folder") for name in ("a/b", "..", ".", "a\0b")),
    ("model.kda", {"gate_lower_bound": float("-inf")}, "gate_lower_bound=-inf must be negative, or None"),
    ("model.moe", {"latent_size": 0}, "latent_size=0 must be at least 1"),
    ("model.moe", {"routed_scaling_factor": 0.0}, "routed_scaling_factor=0.0 must be above 0 and finite"),
    ("model", {"max_position_embeddings": 0}, "max_position_embeddings=0 must be at least 1"),
    ("model", {"rms_norm_eps": 0.0}, "rms_norm_eps=0.0 must be above 0 and finite"),
    ("model", {"initializer_range": -1.0}, "initializer_range=-1.0 must be at least 0 and finite"),
    ("model", {"situ_beta": 0.0}, "situ_beta=0.0 must be above 0 and finite"),
    ("model", {"situ_linear_beta": float("inf")}, "situ_linear_beta=inf must be above 0 and finite"),
    ("model", {"dtype": "float16"}, "dtype='float16' must be 'float32' or 'bfloat16' or 'float64'"),
    ("model", {"mla_layers": [3, 7]}, "mla_layers=[3, 7] must be tuple[int, ...]"),
    ("model.kda", {"num_heads": 2.5}, "num_heads=2.5 must be int"),
    ("model.mla", {"output_gate": 1}, "output_gate=1 must be bool"),
    ("model.moe", {"num_experts": True}, "num_experts=True must be int"),
    ("optim", {"learning_rate": float("inf")}, "learning_rate=inf must be above 0 and finite"),
    ("optim", {"balance": "foo"}, "balance='foo' must be 'quantile' or 'sign'"),
    ("data", {"sources": [Source()]}, "must be tuple["),
    ("data.tokenizer", {"kind": "word"}, "kind='word' must be 'bytes' or 'bpe'"),
    ("train", {"steps": 2.5}, "steps=2.5 must be int"),
    ("train", {"seed": -1}, "seed=-1 must not be negative"),
    ("source", {"kind": "csv"}, "kind='csv' must be 'stdlib' or"),
    ("", {"model": None}, "model=None must be ModelConfig"),
    ("source", {"kind": "jsonl"}, 'a source of kind "jsonl" needs a path'),
    ("mesh", {"fsdp": 0}, "Mesh.fsdp=0 must be at least 1"),
    ("mesh", {"seq": 2.0}, "Mesh.seq=2.0 must be int"),
    ("rules", {"heads": ["tensor"]}, "Rules.heads=['tensor'] must be"),
    ("rules", {"batch": ("data", "data")}, "Rules.batch=('data', 'data') names a mesh axis twice"),
    ("rules", {"time": ("seq", "expert")}, "Rules.time=('seq', 'expert') names 2 mesh axes; keep one of them"),
    ("rules", {"embed": ("tensor",)}, "Rules.embed=('tensor',) must be among the mesh axes of batch and time"),
    ("rules", {"mlp": ("seq",)}, "Rules.mlp=('seq',) must not share a mesh axis with batch and time"),
    ("slice", {"mesh": 4}, "Slice.mesh=4 must be Mesh"),
    ("slice", {"batch_size": 0}, "Slice.batch_size=0 must be at least 1, or None"),
    (
        "",
        {"mesh": Mesh(tensor=2), "rules": Rules(heads=(), mlp=(), vocab=(), expert_mlp=())},
        "mesh.tensor=2, but no rule cuts anything over tensor",
    ),
    ("rope", {"theta": "1"}, "theta='1' must be float"),
    ("rope", {"original_max_position_embeddings": 0}, "original_max_position_embeddings=0 must be at least 1"),
    ("rope", {"beta_slow": 0.0}, "beta_slow=0.0 must be above 0 and finite"),
    ("rope", {"mscale": -1.0}, "mscale=-1.0 must be at least 0 and finite"),
    ("rope", {"theta": 1.0}, "theta=1.0 must be above 1"),
    ("rope", {"factor": 0.5}, "factor=0.5 must be at least 1 (no stretch) and finite"),
    ("rope", {"beta_fast": 0.5}, "beta_fast=0.5 must be at least beta_slow=1.0 and finite"),
    ("model.mla", {"rope": RoPEConfig(theta=1e4), "qk_rope_head_dim": 3}, "qk_rope_head_dim=3 must be even with rope"),
    ("model.moe", {"aux_loss_alpha": -1.0}, "aux_loss_alpha=-1.0 must be at least 0 and finite"),
    ("model", {"kda": None}, "kda=None, but mla_layers=(3, 7, 8) leave KDA layers among num_layers=9; set kda"),
    ("model.moe", {"num_shared_experts": 10**6}, "num_shared_experts=1000000 must not be negative, or above 65,536"),
    ("model.moe", {"num_experts": 10**8}, "num_experts=100000000 must be at most 65,536; lower it"),
    ("model", {"num_layers": 10**10}, "num_layers=10000000000 must be at most 10,000; lower it"),
    ("data", {"sequence_length": 0}, "sequence_length=0 must be at least 1"),
    ("data", {"batch_size": 2**24}, "= 4,294,967,296 tokens per step must be at most"),
    ("train", {"eval_tokens": 0}, "eval_tokens=0 must be at least 1"),
    ("train", {"runs_dir": "a\0b"}, "runs_dir='a\\x00b' holds a NUL; take it out"),
    ("train", {"init_from": "\ud800"}, "init_from='\\ud800' has no spelling in this system's encoding"),
    ("train", {"sample_prompt": "\udcc3"}, "sample_prompt='\\udcc3' is not UTF-8; write it in UTF-8"),
    ("train", {"seed": 2**32}, "seed=4294967296 must not be negative, or above 4,294,967,295"),
    ("data.tokenizer", {"kind": "tokenizers", "path": "\0"}, "path='\\x00' holds a NUL"),
    ("source", {"path": "\0"}, "path='\\x00' holds a NUL"),
    ("source", {"text_field": "\ud800"}, "text_field='\\ud800' is not UTF-8"),
    ("source", {"prompt_field": "text"}, "prompt_field='text' is the text_field too; name another field, or None"),
    *(
        ("source", {"glob": glob}, "must name files below the source's folder")
        for glob in ("/etc/*", "../*", "**a", ".", "..", "a//b", "a/")
    ),
    ("", {"name": "\ud800"}, "name='\\ud800' has no spelling"),
    ("", {"name": "x" * 201}, "must be the plain name of a folder, e.g. 'k3_tiny', of at most 200 bytes"),
    ("source", {"weight": 0.0}, "weight=0.0 of a source must be positive; leave the source out instead"),
    ("train", {"qat_from_step": 10**6}, "qat_from_step=1000000 must lie between 0 and steps="),
    ("train", {"qat_from_step": -1}, "qat_from_step=-1 must lie between 0 and steps="),
    (
        "model",
        {"moe": dataclasses.replace(TINY.model.moe, weight_format="mxfp4", latent_size=48)},
        "model.moe.latent_size=48, the inputs of routed experts, does not divide into groups of 32 with one scale "
        "each; make it a multiple of 32",
    ),
    (
        "model",
        {"moe": dataclasses.replace(TINY.model.moe, activation_format="mxfp8", hidden_size=40)},
        "model.moe.hidden_size=40, the inputs of routed experts, does not divide into groups of 32",
    ),
    (
        "",
        {"mesh": Mesh(fsdp=4), "train": dataclasses.replace(TINY.train, qat_from_step=1)},
        "model.moe.latent_size=64, the inputs of routed experts, does not divide into groups of 32 with one scale each "
        "on 4 devices; make it a multiple of 128, or change rules.expert_latent",
    ),
]
"""Part of k3_tiny, the change that makes it impossible, and what the message must say."""


def change(part: str, fields: dict) -> None:
    others = {"source": Source(), "slice": Slice(topology="v5e:2x2", mesh=Mesh(fsdp=4)), "rope": RoPEConfig(theta=1e4)}
    old = others[part] if part in others else operator.attrgetter(part)(TINY) if part else TINY
    dataclasses.replace(old, **fields)


@pytest.mark.parametrize(("part", "fields", "message"), REFUSED)
def test_refuses_with_the_numbers_and_the_mend(part, fields, message):
    with pytest.raises(ConfigError) as error:
        change(part, fields)
    assert message in str(error.value)


def test_every_check_of_the_dataclasses_has_a_case_above():
    checks = {
        (file.name, node.lineno)
        for file in sorted(Path(load.__file__).parent.glob("*.py"))
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, ast.FunctionDef) and function.name == "__post_init__"
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("check")
    }
    seen = set()
    for part, fields, _ in REFUSED:
        with pytest.raises(ConfigError) as error:
            change(part, fields)
        frames = traceback.extract_tb(error.value.__traceback__)
        last = [frame for frame in frames if frame.name == "__post_init__"][-1]
        seen.add((Path(last.filename).name, last.lineno))
    assert seen == checks, f"add to REFUSED a case for {sorted(checks - seen)} of kimi_jax/config"


def test_a_misspelt_field_of_a_config_file_is_named(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from kimi_jax.config import TrainConfig\nconfig = TrainConfig(stepz=3)\n")
    with pytest.raises(ConfigError, match=r"mine.py:2: TrainConfig has no field 'stepz'; did you mean steps\?"):
        load_config(str(path))


def test_settings_do_not_change_after_they_were_checked():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SHIPPED.model.num_layers = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert hash(SHIPPED) == hash(load_config("k3_tiny"))


def test_layers_of_each_kind():
    model = dataclasses.replace(SHIPPED.model, num_layers=5, mla_layers=(1, 4), num_dense_layers=2)
    assert model.kda_layers == (0, 2, 3)
    assert model.moe_layers == (2, 3, 4)
    assert model.mla.qk_head_dim == 48


# Loading


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configs_load(name):
    config = load_config(name)
    assert config.name == name
    assert re.search(rf"^    (python train_main\.py|kimi-jax \w+) {name}$", shipped_configs()[name].read_text(), re.M)


def test_shipped_configs_are_those_of_the_checkout():
    assert {"k2_1t", "k2_tiny", "k3", "k3_tiny", "kimi_linear_48b", "kimi_linear_tiny"} <= shipped_configs().keys()
    assert all(path.is_file() and path.stem == name for name, path in shipped_configs().items())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("k3_tinny", "no config named 'k3_tinny' (did you mean k3_tiny"),
        ("kimi_linear", "did you mean kimi_linear_"),
        ("@", "there are k2_1t, k2_tiny, k3, k3_tiny, k3_tiny_qat, kimi_linear_48b"),
        ("", "no config named ''"),
        ("no/such/file.py", "no config file no/such/file.py"),
    ],
)
def test_unknown_name(name, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(name)


def test_path_to_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(shipped_configs()["k3_tiny"].read_text().replace('name="k3_tiny"', 'name="mine"'))
    assert load_config(str(path)) == dataclasses.replace(SHIPPED, name="mine")


@pytest.mark.parametrize(("text", "kind"), [("settings = 1", "NoneType"), ("config = {}", "dict")])
def test_file_without_a_config(tmp_path, text, kind):
    path = tmp_path / "empty.py"
    path.write_text(text)
    with pytest.raises(
        ConfigError, match=rf"empty\.py must define `config`, a kimi_jax\.config\.Config; it has {kind}"
    ):
        load_config(str(path))


def test_installation_without_configs(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "__file__", str(tmp_path / "kimi_jax" / "config" / "load.py"))
    with pytest.raises(ConfigError, match="installation is incomplete, install kimi_jax again"):
        shipped_configs()


@pytest.mark.parametrize("name", shipped_configs())
def test_round_trip_through_json(name):
    config = load_config(name)
    validation = (Source(kind="jsonl", path="a.jsonl", prompt_field="question"), Source(weight=0.5))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, validation=validation))
    assert from_dict(Config, json.loads(json.dumps(to_dict(config)))) == config


# Released values, typed from the released config.json files and under their names

K3 = {
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 93,
    "num_attention_heads": 96,
    "intermediate_size": 33792,
    "first_k_dense_replace": 1,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_output_gate": True,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_shared_experts": 2,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
    "latent_moe_use_norm": True,
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "aux_loss_alpha": None,
    "rope_theta": None,
    "rope_scaling": None,
    "attn_res_block_size": 12,
    "linear_attn_config": {
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
        "full_attn_layers": [*range(4, 93, 4), 93],
        "kda_layers": [layer for layer in range(1, 92) if layer % 4],
    },
    "dtype": "bfloat16",
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
}

KIMI_LINEAR_48B = {
    "vocab_size": 163840,
    "hidden_size": 2304,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "intermediate_size": 9216,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "activation_situ_beta": None,
    "activation_situ_linear_beta": None,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_output_gate": False,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": False,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "aux_loss_alpha": None,
    "rope_theta": None,  # the file has 10000, which nothing uses
    "rope_scaling": None,
    "attn_res_block_size": None,
    "linear_attn_config": {
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": False,
        "gate_lower_bound": None,
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
    },
    "dtype": "bfloat16",
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
}

K2 = {  # n_routed_experts, n_shared_experts and norm_topk_prob under the names of the others
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "intermediate_size": 18432,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "activation_situ_beta": None,
    "activation_situ_linear_beta": None,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_output_gate": False,
    "num_experts": 384,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": False,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.827,
    "aux_loss_alpha": 0.001,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
    },
    "attn_res_block_size": None,
    "linear_attn_config": None,
    "dtype": "bfloat16",
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "pad_token_id": 163839,
}


def released_names(model: ModelConfig) -> dict:
    """Our settings under the released names; layer lists count from 1 there."""
    kda, mla, moe, rope = model.kda, model.mla, model.moe, model.mla.rope
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": mla.num_heads,
        "intermediate_size": model.dense_hidden_size,
        "first_k_dense_replace": model.num_dense_layers,
        "hidden_act": "silu" if model.situ_beta is None else "situ",
        "activation_situ_beta": model.situ_beta,
        "activation_situ_linear_beta": model.situ_linear_beta,
        "rms_norm_eps": model.rms_norm_eps,
        "initializer_range": model.initializer_range,
        "max_position_embeddings": model.max_position_embeddings,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "mla_use_output_gate": mla.output_gate,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.experts_per_token,
        "num_shared_experts": moe.num_shared_experts,
        "moe_intermediate_size": moe.hidden_size,
        "routed_expert_hidden_size": moe.latent_size,
        "latent_moe_use_norm": moe.latent_norm,
        "moe_renormalize": moe.renormalize,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "aux_loss_alpha": moe.aux_loss_alpha or None,
        "rope_theta": rope and rope.theta,
        "rope_scaling": rope
        and {
            "type": "yarn",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "mscale_all_dim": rope.mscale,
        },
        "attn_res_block_size": model.attn_res_block_size,
        "linear_attn_config": kda
        and {
            "num_heads": kda.num_heads,
            "head_dim": kda.head_dim,
            "short_conv_kernel_size": kda.conv_size,
            "use_full_rank_gate": kda.full_rank_gate,
            "gate_lower_bound": kda.gate_lower_bound,
            "full_attn_layers": [layer + 1 for layer in model.mla_layers],
            "kda_layers": [layer + 1 for layer in model.kda_layers],
        },
        "dtype": model.dtype,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": model.eos_token_id,
        "pad_token_id": model.pad_token_id,
    }


@pytest.mark.parametrize(("name", "released"), [("k3", K3), ("kimi_linear_48b", KIMI_LINEAR_48B), ("k2_1t", K2)])
def test_real_configs_have_every_released_value(name, released):
    assert released_names(load_config(name).model) == released


def test_every_model_setting_is_released_or_ours():
    """A new setting of the model belongs in the released tables above, or here."""
    ours = {
        "chunk_size",
        "param_dtype",
        "remat",
        "balance",
        "transport",
        "weight_format",
        "activation_format",
        "release",
    }
    settings = {
        field.name
        for part in (ModelConfig, KDAConfig, MLAConfig, RoPEConfig, MoEConfig)
        for field in dataclasses.fields(part)
    } - {"kda", "mla", "rope", "moe"}
    body = ast.parse(inspect.getsource(released_names))
    compared = {node.attr for node in ast.walk(body) if isinstance(node, ast.Attribute)}
    assert settings - compared == ours
