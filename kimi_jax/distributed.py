"""Several processes as one run: joining them, who writes, and what all must agree on."""

from __future__ import annotations

import os

import jax
import numpy as np
from jax.experimental import multihost_utils

from kimi_jax.config import ConfigError


def initialize() -> None:
    """Joins the processes of a run, before anything touches a device; does nothing for a single one, or twice.

    Slurm, GKE, TPU pods and Open MPI are detected by JAX. Elsewhere, set in each process JAX_COORDINATOR_ADDRESS
    (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Raises:
        ConfigError: some of the three variables are missing, or are not numbers in range.
    """
    if jax.distributed.is_initialized():
        return
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    values = {name: os.environ.get(name, "") for name in names}
    if any(values.values()):
        missing = [name for name, value in values.items() if not value]
        if missing:
            raise ConfigError(f"{', '.join(v for v in names if v not in missing)} set, but not {', '.join(missing)}")
        try:
            count, index = int(values[names[1]]), int(values[names[2]])
        except ValueError as error:
            raise ConfigError(f"{names[1]}={values[names[1]]!r} and {names[2]}={values[names[2]]!r}: {error}") from None
        if not 0 <= index < count:
            raise ConfigError(f"JAX_PROCESS_ID={index} must lie from 0 to JAX_NUM_PROCESSES - 1 = {count - 1}")
        jax.distributed.initialize(values[names[0]], count, index)
    elif _scheduled():
        jax.distributed.initialize()


def _scheduled() -> bool:
    """Whether a scheduler started several processes."""

    def several(name: str) -> bool:
        return os.environ.get(name, "1") not in ("", "0", "1")

    hosts = [host for host in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    return (
        several("SLURM_NTASKS") or several("OMPI_COMM_WORLD_SIZE") or several("MEGASCALE_NUM_SLICES") or len(hosts) > 1
    )


def is_lead() -> bool:
    """Whether this process writes and prints what only one should."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits until every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def largest(value: int) -> int:
    """The largest of the processes' values: the same decision everywhere. A collective call."""
    if jax.process_count() == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))
