"""A small but complete Kimi K3, from scratch on the Python standard library's own sources, on a laptop.

    python train_main.py k3_tiny

Every part of K3 is here: bounded-gate KDA with a full-rank output gate, gated MLA with low-rank queries, Attention
Residuals with a ragged last block, a dense first layer, latent experts with Quantile Balancing, SiTU-GLU, per-head
Muon with QK-Clip. Sizes are ours, chosen for about five minutes on two cores.
"""

from kimi_jax.config import (
    Config,
    DataConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    TokenizerConfig,
    TrainConfig,
)

config = Config(
    name="k3_tiny",
    model=ModelConfig(
        vocab_size=4096,
        hidden_size=192,
        num_layers=5,
        mla_layers=(3, 4),
        num_dense_layers=1,
        dense_hidden_size=384,
        situ_beta=4.0,
        situ_linear_beta=25.0,
        attn_res_block_size=4,
        kda=KDAConfig(num_heads=2, head_dim=64, gate_lower_bound=-5.0, full_rank_gate=True, chunk_size=32),
        mla=MLAConfig(
            num_heads=4,
            q_lora_rank=64,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            output_gate=True,
        ),
        moe=MoEConfig(
            num_experts=16,
            experts_per_token=2,
            num_shared_experts=2,
            hidden_size=64,
            latent_size=64,
            latent_norm=True,
        ),
    ),
    optim=OptimConfig(learning_rate=1e-2),
    data=DataConfig(
        sequence_length=256, batch_size=16, validation_fraction=0.03, tokenizer=TokenizerConfig(kind="bpe")
    ),
    train=TrainConfig(
        steps=240,
        eval_every=60,
        eval_tokens=25_000,
        checkpoint_every=60,
        sample_prompt="def ",
    ),
)
