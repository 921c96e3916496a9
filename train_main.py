"""Trains a model: `python train_main.py k3_tiny [--train.steps 100 ...]`; `--help` lists every setting.

The same as `kimi-jax train`, for a checkout.
"""

from kimi_jax.cli import train

if __name__ == "__main__":
    train()
