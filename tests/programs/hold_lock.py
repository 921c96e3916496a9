"""Holds the lock of a run's folder until it is killed; says so once it has it."""

import sys
import time
from pathlib import Path

from kimi_jax.train.lock import locked


def main() -> None:
    with locked(Path(sys.argv[1])):
        print("locked", flush=True)
        time.sleep(300)


if __name__ == "__main__":
    main()
