"""`kimi-jax` in one of several processes; with SIGNAL="15 4" it sends itself signal 15 when it has written step 4."""

import os

from kimi_jax import cli
from kimi_jax.parallel import processes
from kimi_jax.train import metrics
from tests.jax_private import share_compiled_programs_between_processes

HEARTBEAT = 10
"""Seconds after which a process that is gone is missed."""


def main() -> None:
    if "SIGNAL" in os.environ:  # one that comes at a record, not when another process gets round to sending it
        number, record = map(int, os.environ["SIGNAL"].split())

        def write_and_signal(self, step, kind, write=metrics.Metrics.write, **values):
            write(self, step, kind, **values)
            if step == record:
                os.kill(os.getpid(), number)

        metrics.Metrics.write = write_and_signal
    share_compiled_programs_between_processes()
    processes.initialize(heartbeat_timeout_seconds=HEARTBEAT)
    cli.main()


if __name__ == "__main__":
    main()
