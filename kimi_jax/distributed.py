"""Several processes as one run: joining them, who writes, and what all must agree on."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from kimi_jax.config import ConfigError

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def initialize(**options: Any) -> None:
    """Joins the processes of a run, before anything touches a device; does nothing for a single one, or twice.

    When one of them dies, the others end too, with a message, after `heartbeat_timeout_seconds` (100) at the latest:
    the scheduler is to start all of them again, and the run goes on from its last checkpoint.

    Slurm, GKE, TPU pods, indexed Kubernetes jobs and Open MPI are detected by JAX. Elsewhere, set in each process
    JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Args:
        options: of `jax.distributed.initialize`, e.g. `heartbeat_timeout_seconds`.

    Raises:
        ConfigError: some of the three variables are missing, or are not numbers in range; there are several
            processes, but JAX cannot tell which is which, or this one has used its devices already.
    """
    if jax.distributed.is_initialized():
        return
    named, count = _named(), _processes()
    if named is not None:
        count = named[1]
    if count == 1:
        return  # a service for one process would listen for nobody; and JAX would give it one GPU of Slurm's many
    try:
        jax.distributed.initialize(*named or (None, None, None), **options)
    except ValueError as error:  # JAX found nothing
        if count is not None:
            raise ConfigError(
                f"the environment speaks of {count} processes, but {error} Set {', '.join(VARIABLES)} in each"
            ) from error
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        if count is not None:
            raise ConfigError(
                f"{count} processes cannot join: this one has used its devices already; call "
                "kimi_jax.distributed.initialize() before anything else of JAX"
            ) from error


def _named() -> tuple[str, int, int] | None:
    """Coordinator, number of processes and this one's index, as three variables name them."""
    values = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    if not values:
        return None
    if len(values) < len(VARIABLES):
        raise ConfigError(f"{', '.join(values)} set, but not {', '.join(n for n in VARIABLES if n not in values)}")
    address, *numbers = values.values()
    if not all(number.isdecimal() for number in numbers) or int(numbers[1]) >= int(numbers[0]):
        raise ConfigError(
            f"JAX_PROCESS_ID={numbers[1]} must be a number from 0 to JAX_NUM_PROCESSES - 1, of which there are "
            f"{numbers[0]}"
        )
    if not address.rpartition(":")[2].isdecimal():
        raise ConfigError(f"JAX_COORDINATOR_ADDRESS={address} must be host:port of process 0, e.g. 10.0.0.1:8476")
    return address, int(numbers[0]), int(numbers[1])


def _processes() -> int | None:
    """How many processes a scheduler started; None where only JAX can find out."""
    env = os.environ
    if "SLURM_STEP_NODELIST" in env:  # not so in a batch script itself, which is one process whatever the job has
        return int(env.get("SLURM_NTASKS", 1))
    if "OMPI_COMM_WORLD_SIZE" in env:
        return int(env["OMPI_COMM_WORLD_SIZE"])
    hosts = env.get("TPU_PROCESS_ADDRESSES", env.get("TPU_WORKER_HOSTNAMES"))
    if hosts is not None:
        return max(1, len([host for host in hosts.split(",") if host])) * int(env.get("MEGASCALE_NUM_SLICES") or 1)
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" not in env:
        return 1  # a pod of its own, of which JAX would ask whose job it is
    return None


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
