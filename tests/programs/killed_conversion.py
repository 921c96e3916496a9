"""Converts argv[1] to argv[2], and kills itself when it has written argv[3] files."""

import os
import signal
import sys

from kimi_jax.store import safetensors_files, sliced
from kimi_jax.store.convert import convert


def fatal(write, left: list[int]):
    def limited(*args):
        left[0] -= 1
        if left[0] < 0:
            with open(args[0].with_name(f".{args[0].name}.partial"), "wb") as torn:
                torn.write(b"torn")
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args)

    return limited


def main() -> None:
    sliced.CHUNK_BYTES = 2048
    left = [int(sys.argv[3])]
    sliced.write_chunk = fatal(sliced.write_chunk, left)
    safetensors_files.write = fatal(safetensors_files.write, left)
    convert(sys.argv[1], sys.argv[2])


if __name__ == "__main__":
    main()
