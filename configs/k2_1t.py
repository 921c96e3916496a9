"""Kimi K2: 1.03 T parameters, 32.9 B active, MLA with rotary positions in all layers.

    kimi-jax inspect k2_1t

Model values: the released config.json (moonshotai/Kimi-K2-Instruct). The run: pre-training as published (K2 report,
section 2.5): 15.5 T tokens in rows of 4,096, 67 M tokens a step, weight decay 0.1, MuonClip. There the rate is 2e-4,
constant over 10 T tokens and then falling along a cosine; here it is one cosine. YaRN's stretch to 128 k, which the
release has, came last.
"""

from kimi_jax.config import (
    Config,
    DataConfig,
    Mesh,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    RoPEConfig,
    Slice,
    Source,
    TokenizerConfig,
    TrainConfig,
)

config = Config(
    name="k2_1t",
    model=ModelConfig(
        vocab_size=163840,
        hidden_size=7168,
        num_layers=61,
        mla_layers=tuple(range(61)),
        num_dense_layers=1,
        dense_hidden_size=18432,
        rms_norm_eps=1e-6,
        initializer_range=0.02,
        kda=None,
        mla=MLAConfig(
            num_heads=64,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            rope=RoPEConfig(
                theta=50000.0,
                factor=32.0,
                original_max_position_embeddings=4096,
                beta_fast=1.0,
                beta_slow=1.0,
                mscale=1.0,
            ),
        ),
        moe=MoEConfig(
            num_experts=384,
            experts_per_token=8,
            num_shared_experts=1,
            hidden_size=2048,
            renormalize=True,
            routed_scaling_factor=2.827,
            aux_loss_alpha=0.001,
        ),
        dtype="bfloat16",
        remat="full",
        max_position_embeddings=131072,
        bos_token_id=163584,
        eos_token_id=163585,
        pad_token_id=163839,
    ),
    optim=OptimConfig(learning_rate=2e-4, balance="sign"),
    data=DataConfig(
        sequence_length=4096,
        batch_size=16384,
        sources=(Source(kind="parquet", path="data/pretrain"),),
        tokenizer=TokenizerConfig(kind="tiktoken", path="data/tiktoken.model"),
    ),
    train=TrainConfig(steps=231_000, accumulation=32, checkpoint_every=500, keep_every=10_000),
    mesh=Mesh(fsdp=4, expert=128),
    slices=(
        Slice(topology="v5p:8x8x8", mesh=Mesh(fsdp=4, expert=128)),
        Slice(topology="tpu7x:4x8x8", mesh=Mesh(fsdp=4, expert=128)),
    ),
)
