"""Kimi K3: 2.78 T parameters, 104 B active, 1 M tokens of context.

    kimi-jax inspect k3
    kimi-jax aot k3 --topology v5p:8x8x8

Model values: the released config.json (moonshotai/Kimi-K3) and, for initial values, the K3 report. Moonshot has not
published batch size, learning rate or number of tokens: those below are K2's published ones (K2 report, section 2.5),
with K3's published schedule (cosine, 1 % warmup) and sequence length of the first stage (8k).
"""

from kimi_jax.config import (
    Config,
    DataConfig,
    KDAConfig,
    Mesh,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    Rules,
    Slice,
    Source,
    TokenizerConfig,
    TrainConfig,
)

# Devices that share a row hold different parts of the weights, too.
SEQUENCE = Rules(embed=("fsdp", "expert", "seq"), expert_latent=("fsdp", "seq"))

config = Config(
    name="k3",
    model=ModelConfig(
        vocab_size=163840,
        hidden_size=7168,
        num_layers=93,
        mla_layers=(*range(3, 92, 4), 92),
        num_dense_layers=1,
        dense_hidden_size=33792,
        situ_beta=4.0,
        situ_linear_beta=25.0,
        attn_res_block_size=12,
        rms_norm_eps=1e-5,
        initializer_range=0.02,
        kda=KDAConfig(num_heads=96, head_dim=128, conv_size=4, gate_lower_bound=-5.0, full_rank_gate=True),
        mla=MLAConfig(
            num_heads=96,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            output_gate=True,
        ),
        moe=MoEConfig(
            num_experts=896,
            experts_per_token=16,
            num_shared_experts=2,
            hidden_size=3072,
            latent_size=3584,
            latent_norm=True,
            renormalize=True,
            routed_scaling_factor=1.0,
        ),
        dtype="bfloat16",
        remat="full",
        max_position_embeddings=1048576,
        bos_token_id=163584,
        eos_token_id=163586,
        pad_token_id=163839,
    ),
    optim=OptimConfig(learning_rate=2e-4),
    data=DataConfig(
        sequence_length=8192,
        batch_size=8192,
        sources=(Source(kind="parquet", path="data/pretrain"),),
        tokenizer=TokenizerConfig(kind="tiktoken", path="data/tiktoken.model"),
    ),
    train=TrainConfig(steps=230_000, accumulation=16, checkpoint_every=500, keep_every=10_000),
    mesh=Mesh(fsdp=4, expert=128, seq=2),
    rules=SEQUENCE,
    slices=(
        # Parameters, momentum and gradients in f32 fill two thirds of these chips: no room for accumulated gradients.
        Slice(topology="v5p:8x8x8", mesh=Mesh(fsdp=2, expert=128, seq=2), batch_size=256, accumulation=1),
        Slice(topology="v5p:8x8x16", mesh=Mesh(fsdp=4, expert=128, seq=2)),
        Slice(topology="tpu7x:8x8x8", mesh=Mesh(fsdp=4, expert=128, seq=2)),
    ),
)
