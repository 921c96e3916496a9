"""`python -m kimi_jax` and the `kimi-jax` command: ready for Ctrl-C before anything large is imported."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType


def main(argv: Sequence[str] | None = None) -> None:
    """The command of this process: sets its signals and streams, then runs `cli.main`."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # else the caller of this process ignores it
        signal.signal(signal.SIGINT, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a text that the locale cannot spell is escaped, and stops nothing
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    from kimi_jax import cli

    cli.main(argv)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Ctrl-C: KeyboardInterrupt; while a module is being imported, where the start of a C extension could swallow it
    or turn it into another error, the end of the process. Nothing is half done then: files are written as a whole."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"Stopped.\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
