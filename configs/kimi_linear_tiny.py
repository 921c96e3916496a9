"""A small Kimi Linear on the Python standard library's own sources, byte by byte.

    python train_main.py kimi_linear_tiny

Softplus-gated KDA with a low-rank output gate, ungated MLA with full-rank queries, plain residuals, SwiGLU experts at
full width, and the sign rule for balancing: the same code as K3 with other values. Sizes are ours.
"""

from kimi_jax.config import Config, DataConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig, OptimConfig, TrainConfig

config = Config(
    name="kimi_linear_tiny",
    model=ModelConfig(
        vocab_size=320,
        hidden_size=128,
        num_layers=5,
        mla_layers=(3, 4),
        num_dense_layers=1,
        dense_hidden_size=384,
        kda=KDAConfig(num_heads=4, head_dim=32),
        mla=MLAConfig(
            num_heads=4,
            q_lora_rank=None,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
        ),
        moe=MoEConfig(
            num_experts=8,
            experts_per_token=2,
            num_shared_experts=1,
            hidden_size=128,
            routed_scaling_factor=2.446,
        ),
    ),
    optim=OptimConfig(learning_rate=1e-2, balance="sign"),
    data=DataConfig(sequence_length=512, batch_size=8),
    train=TrainConfig(steps=300, eval_every=50, eval_tokens=50_000, checkpoint_every=100, sample_prompt="def "),
)
