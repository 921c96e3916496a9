"""Runs `kimi-jax` with argv[2:], and presses Ctrl-C when the module argv[1] begins to be imported."""

import os
import signal
import sys

from kimi_jax.__main__ import main


class Interrupt:
    """A finder that finds nothing."""

    def find_spec(self, name: str, path=None, target=None) -> None:
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    assert sys.argv[1] not in sys.modules
    sys.meta_path.insert(0, Interrupt())
    main(sys.argv[2:])
