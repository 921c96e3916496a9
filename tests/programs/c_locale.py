"""Trains the config of a file to its end, and shows the finished run, as the command does."""

import sys

from kimi_jax import cli


def main() -> None:
    for _ in range(2):
        cli.train(sys.argv[1:])


if __name__ == "__main__":
    main()
