"""Tries each config, and then one process fails alone, as in the loop."""

import sys
import time

from kimi_jax import load_config
from kimi_jax.config import ConfigError
from kimi_jax.parallel import processes
from kimi_jax.train.loop import run_training


def main() -> None:
    processes.initialize()
    import jax

    for file in sys.argv[2:]:
        try:
            run_training(load_config(file))
        except ConfigError as error:
            print("refused:", error, flush=True)
    with processes.end_alone():
        if jax.process_index() == 0:
            raise OSError("the disk is full")
        time.sleep(300)


if __name__ == "__main__":
    main()
