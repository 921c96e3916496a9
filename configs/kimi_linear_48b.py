"""Kimi Linear 48B-A3B: 48 B parameters, 3 B active, three KDA layers to one MLA layer.

    kimi-jax inspect kimi_linear_48b

Model values: the released config.json (moonshotai/Kimi-Linear-48B-A3B-Base). The run: the report's 5.7 T tokens at
4k; learning rate and batch are not published, the ones here are K2's rate and 32 M tokens a step.
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
    Slice,
    Source,
    TokenizerConfig,
    TrainConfig,
)

config = Config(
    name="kimi_linear_48b",
    model=ModelConfig(
        vocab_size=163840,
        hidden_size=2304,
        num_layers=27,
        mla_layers=(3, 7, 11, 15, 19, 23, 26),
        num_dense_layers=1,
        dense_hidden_size=9216,
        rms_norm_eps=1e-5,
        initializer_range=0.02,
        kda=KDAConfig(num_heads=32, head_dim=128, conv_size=4),
        mla=MLAConfig(
            num_heads=32,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        moe=MoEConfig(
            num_experts=256,
            experts_per_token=8,
            num_shared_experts=1,
            hidden_size=1024,
            renormalize=True,
            routed_scaling_factor=2.446,
        ),
        dtype="bfloat16",
        remat="full",
        max_position_embeddings=1048576,
        bos_token_id=163584,
        eos_token_id=163586,
        pad_token_id=163839,
    ),
    optim=OptimConfig(learning_rate=2e-4, balance="sign"),
    data=DataConfig(
        sequence_length=4096,
        batch_size=8192,
        sources=(Source(kind="parquet", path="data/pretrain"),),
        tokenizer=TokenizerConfig(kind="tiktoken", path="data/tiktoken.model"),
    ),
    train=TrainConfig(steps=170_000, accumulation=16, checkpoint_every=500, keep_every=10_000),
    mesh=Mesh(fsdp=8, expert=32),
    slices=(
        Slice(topology="v6e:16x16", mesh=Mesh(fsdp=8, expert=32)),
        # In f32 the state alone is larger than these chips (docs/aot.md).
        Slice(topology="v6e:4x4", mesh=Mesh(expert=16), batch_size=16, accumulation=1, param_dtype="bfloat16"),
    ),
)
