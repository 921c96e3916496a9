"""Several processes as one run: joining them, who writes, and what all must agree on."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from kimi_jax.config import ConfigError
from kimi_jax.files import FileError

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def initialize(**options: Any) -> None:
    """Joins the processes of a run, before anything touches a device; does nothing for a single one, or twice.

    When one of them dies, the others end too, with a message, after `heartbeat_timeout_seconds` (100) at the latest:
    the scheduler is to start all of them again, and the run resumes from its last checkpoint.

    Slurm, GKE, TPU pods, indexed Kubernetes jobs and Open MPI are detected by JAX. Elsewhere, set in each process
    JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Args:
        options: of `jax.distributed.initialize`, e.g. `heartbeat_timeout_seconds`.

    Raises:
        ConfigError: some of the three variables are missing, or are not numbers in range; there are several
            processes, but JAX cannot tell which is which, or this one has used its devices already.
    """
    if not jax.distributed.is_initialized():
        _join(**options)
    quiet_libtpu()  # here, since the next question to JAX (how many processes are there?) looks for devices


def _join(**options: Any) -> None:
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


def quiet_libtpu() -> None:
    """Keeps libtpu from complaining where it is installed and no TPU is. Not before joining, which reads one of these.

    JAX loads it whenever it looks for devices, JAX_PLATFORMS unset; it then misses two names that any TPU host has.
    """
    if "TPU_SKIP_MDS_QUERY" in os.environ:  # JAX sets it where it has found no chip
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


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


@contextmanager
def together(*names: str) -> Iterator[dict[str, Any]]:
    """A part of the setup that all processes finish, or none: where one fails, all raise. A collective call.

    It yields an empty dict, for the body to put a value under each name; all processes must have the same. The body
    itself does nothing collective. With a single process, what it raises is raised, and that is all.

    >>> with together("config") as same:
    ...     same["config"] = {"steps": 3}

    Args:
        names: of the values to compare, as they are to stand in a message; `repr` is what is compared.

    Raises:
        ConfigError: another process failed, or has other values.
    """
    same: dict[str, Any] = {}
    if jax.process_count() == 1:
        yield same
        return
    with end_alone():
        error = None
        try:
            yield same
        except Exception as raised:
            error = raised
            # Now, and not only when the last process is here to be told: it may have hours of text to read.
            print(f"process {jax.process_index()} refuses to start: {error}", file=sys.stderr, flush=True)
        own = np.zeros(1 + len(names), np.uint32)  # failed or not, then a hash of each value
        own[0] = error is not None
        if error is None:
            own[1:] = [_hash(same[name]) for name in names]
        every = np.asarray(multihost_utils.process_allgather(own))
    if error is not None:
        raise error
    failed = np.flatnonzero(every[:, 0])
    if failed.size:
        raise ConfigError(f"process {failed[0]} refused to start; see its log")
    for name, column in zip(names, every[:, 1:].T, strict=True):
        usual = column[np.argmax([np.sum(column == value) for value in column])]
        other = np.flatnonzero(column != usual)
        if other.size:
            raise ConfigError(
                f"the {name} of process {', '.join(map(str, other))} is not that of process "
                f"{np.argmax(column == usual)}; start all of them with the same command, packages and files"
            )


def _hash(value: Any) -> int:
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=4).digest(), "little")


@contextmanager
def end_alone(*shared: type[BaseException]) -> Iterator[None]:
    """Ends this process at once, with 1, at an error that the others may not have.

    Python's own way out would wait for them, who wait for this one's part of a collective; once its heartbeats stop
    they end too. With a single process an error is an error.

    Args:
        shared: exceptions that all processes raise at the same place; they pass.
    """
    try:
        yield
    except BaseException as error:
        if jax.process_count() == 1 or isinstance(error, shared):
            raise
        if isinstance(error, ConfigError | FileError):
            print(error, file=sys.stderr)
        else:
            traceback.print_exc()
        print(
            f"process {jax.process_index()} ends; the others follow when its heartbeats are missed. Start all again: "
            "the run resumes from its last checkpoint",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def largest(value: int) -> jax.Array:
    """The largest of the processes' values, int32 []: the same decision everywhere. A collective call.

    It waits for nothing: `int()` of the result does, and for what the devices had to do before.
    """
    flags = _flags(value)
    with jax.set_mesh(flags.sharding.mesh):  # type: ignore[attr-defined]
        return _maximum()(flags)


@lru_cache(maxsize=4)  # a run asks at each step, nearly always with 0: nothing is sent to the devices then
def _flags(value: int) -> jax.Array:
    """The value on each of this process's devices, as part of one array over all devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "all")
    own = [jax.device_put(np.full(1, value, np.int32), device) for device in jax.local_devices()]
    split = NamedSharding(mesh, PartitionSpec("all"))
    return jax.make_array_from_single_device_arrays((mesh.size,), split, own)


@lru_cache(maxsize=1)
def _maximum():
    return jax.jit(jnp.max, out_shardings=PartitionSpec())
