"""Trains a model: `python train_main.py k3_tiny [--train.steps 100 ...]`; `--help` lists every setting.

The same as `kimi-jax train`, for a checkout.
"""

import sys

from kimi_jax.__main__ import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
