"""What the data tests share."""

from kimi_jax.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig


def model_config(vocab_size: int = 259, bos: int = 0, eos: int = 1, pad: int = 2) -> ModelConfig:
    """A model of which only the vocabulary matters."""
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=8,
        num_layers=1,
        mla_layers=(),
        num_dense_layers=1,
        dense_hidden_size=8,
        kda=KDAConfig(num_heads=1, head_dim=8),
        mla=MLAConfig(
            num_heads=1, q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
        ),
        moe=MoEConfig(num_experts=2, experts_per_token=1, num_shared_experts=0, hidden_size=8),
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )
