"""k3_tiny with quantization-aware training: its last quarter has MXFP4 expert weights and MXFP8 activations.

    python train_main.py k3_tiny_qat

K3 is trained so from supervised fine-tuning on (K3 report), for which the last quarter stands here. What the run then
computes is what its packed export computes.
"""

from kimi_jax.config import load_config, replace

base = load_config("k3_tiny")

config = replace(base, name="k3_tiny_qat", train=replace(base.train, qat_from_step=base.train.steps * 3 // 4))
