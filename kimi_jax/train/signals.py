"""Ctrl-C and SIGTERM: the run stops at the next safe point, on all processes at once."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import jax

from kimi_jax.parallel import processes


class Interrupted(Exception):
    """The user or the scheduler asked the run to stop; everything is saved."""

    def __init__(self, signum: int, message: str):
        super().__init__(message)
        self.signum = signum


class Stop:
    """Remembers that a signal asked to stop."""

    signum: int | None = None
    """The signal that this process got."""
    verdict: int | None = None
    """The signal that all processes have agreed to stop for."""
    asked: jax.Array | None = None
    """What the processes are about to agree on, once the devices come to it."""

    def __call__(self, signum: int, frame) -> None:
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum
        print("\nStopping at the next safe point; again to stop at once.", file=sys.stderr)

    def agreed(self, *, now: bool = False) -> bool:
        """Whether any process was asked to stop: all of them save, or none. A collective call.

        With several processes, it is what they were asked before the last call, unless `now`: this call's question
        is queued behind the step just dispatched, and to read it would leave the devices idle until the next one.
        """
        if jax.process_count() == 1:
            self.verdict = self.signum
            return self.verdict is not None
        before, self.asked = self.asked, processes.largest(self.signum or 0)
        read = self.asked if now else before
        self.verdict = None if read is None else int(read) or None
        return self.verdict is not None

    def check(self, message: str) -> None:
        if self.verdict is not None:
            raise Interrupted(self.verdict, message)


@contextmanager
def signals():
    """Ctrl-C and SIGTERM ask the loop to save and stop; a second one interrupts at once."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may listen to signals
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def resume_command() -> str:
    """The command that resumes this run, as a shell takes it: without what would send it back or remove it."""
    program, *arguments = sys.argv
    if "ipykernel" in program:
        return "run the cell again"
    start = ["python", "-m", "kimi_jax"] if Path(program).name == "__main__.py" else [program]
    if program.endswith(".py") and len(start) == 1:
        start = ["python", program]
    kept, option = [], ""
    for part in arguments:
        before, option = option, part.replace("_", "-")
        if option in ("--restart", "--no-restart") or "--resume-from" in (before, option.partition("=")[0]):
            continue
        kept.append(part)
    return shlex.join([*start, *kept])
