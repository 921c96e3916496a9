"""The three families, small enough that a test compiles and trains them in seconds, and a run of one of them."""

from dataclasses import replace
from pathlib import Path

from kimi_jax.config import (
    Config,
    DataConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    RoPEConfig,
    Source,
    TrainConfig,
)

MODEL = ModelConfig(  # K3 with every part of it
    vocab_size=260,
    hidden_size=16,
    num_layers=2,
    mla_layers=(1,),
    num_dense_layers=1,
    dense_hidden_size=24,
    situ_beta=4.0,
    situ_linear_beta=25.0,
    attn_res_block_size=2,
    kda=KDAConfig(num_heads=2, head_dim=8, gate_lower_bound=-5.0, full_rank_gate=True, chunk_size=8),
    mla=MLAConfig(
        num_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
        output_gate=True,
    ),
    moe=MoEConfig(
        num_experts=4, experts_per_token=2, num_shared_experts=1, hidden_size=8, latent_size=8, latent_norm=True
    ),
)
KIMI_LINEAR = replace(
    MODEL,
    situ_beta=None,
    situ_linear_beta=None,
    attn_res_block_size=None,
    kda=replace(MODEL.kda, gate_lower_bound=None, full_rank_gate=False),
    mla=replace(MODEL.mla, q_lora_rank=None, v_head_dim=6, output_gate=False),
    moe=replace(MODEL.moe, latent_size=None, latent_norm=False, routed_scaling_factor=2.446),
)
K2 = replace(
    KIMI_LINEAR,
    mla_layers=(0, 1),
    kda=None,
    mla=replace(
        MODEL.mla, output_gate=False, rope=RoPEConfig(theta=100.0, factor=4.0, original_max_position_embeddings=8)
    ),
    moe=replace(KIMI_LINEAR.moe, routed_scaling_factor=2.827, aux_loss_alpha=0.1),
)
FAMILIES = {"k3": MODEL, "kimi_linear": KIMI_LINEAR, "k2": K2}


def config(tmp_path: Path, *, steps: int = 12, name: str = "run", **train) -> Config:
    """A run of `steps` steps on a text of its own, which is written into `tmp_path`."""
    corpus = tmp_path / "corpus"
    if not corpus.is_dir():
        corpus.mkdir()
        for number in range(30):
            words = [f"{(number * 7 + i * i) % 97}" for i in range(20 + number)]
            (corpus / f"{number}.txt").write_text("the number is " + ", ".join(words) + "\n")
    settings = {"eval_every": 5, "eval_tokens": 100, "checkpoint_every": 4, "sample_prompt": "the ", "sample_tokens": 4}
    return Config(
        name=name,
        model=MODEL,
        optim=OptimConfig(learning_rate=1e-2, warmup_fraction=0.2),
        data=DataConfig(
            sequence_length=32,
            batch_size=4,
            sources=(Source(kind="text", path=str(corpus), glob="*.txt"),),
            validation_fraction=0.2,
        ),
        train=TrainConfig(steps=steps, runs_dir=str(tmp_path / "runs"), **(settings | train)),
    )


def with_train(config: Config, **changes) -> Config:
    return replace(config, train=replace(config.train, **changes))


def with_model(config: Config, **changes) -> Config:
    return replace(config, model=replace(config.model, **changes))
