"""A small Kimi K2 on the Python standard library's own sources.

    python train_main.py k2_tiny

MLA with rotary positions (YaRN) in every layer, plain residuals, SwiGLU experts at full width beside one shared
expert, balanced by the sign rule and DeepSeek-V3's loss for each document, and MuonClip: the same code as K3 with
other values. Sizes are ours; data and steps are k3_tiny's.
"""

from kimi_jax.config import Config, MLAConfig, ModelConfig, MoEConfig, OptimConfig, RoPEConfig, load_config

k3_tiny = load_config("k3_tiny")

config = Config(
    name="k2_tiny",
    model=ModelConfig(
        vocab_size=4096,
        hidden_size=192,
        num_layers=4,
        mla_layers=(0, 1, 2, 3),
        num_dense_layers=1,
        dense_hidden_size=384,
        rms_norm_eps=1e-6,
        kda=None,
        mla=MLAConfig(
            num_heads=4,
            q_lora_rank=64,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            rope=RoPEConfig(theta=10000.0, factor=4.0, original_max_position_embeddings=256, beta_fast=1.0),
        ),
        moe=MoEConfig(
            num_experts=16,
            experts_per_token=2,
            num_shared_experts=1,
            hidden_size=96,
            routed_scaling_factor=2.827,
            aux_loss_alpha=0.001,
        ),
        max_position_embeddings=1024,
    ),
    optim=OptimConfig(learning_rate=1e-2, balance="sign"),
    data=k3_tiny.data,
    train=k3_tiny.train,
)
