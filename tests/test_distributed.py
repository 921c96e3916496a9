"""Two processes of four CPU devices each as one run, through death, preemption and restart; and how they find each
other."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from kimi_jax import distributed, metrics, train
from kimi_jax.config import ConfigError, Mesh
from tests import tiny

COMPILE_QUICKLY = True

ROOT = Path(__file__).resolve().parents[1]

HEARTBEAT = 10
"""Seconds of silence after which a process counts as dead; JAX's default is 100."""

PROCESS = f"""
import jax
import jax._src.cache_key as keys
# A CPU's topology names the process, so that two processes would each compile every program, at each start.
if hasattr(keys, "_hash_accelerator_config"):
    keys._hash_accelerator_config = keys._hash_devices
    jax.config.update("jax_share_binary_between_hosts", True)
    jax.config.update("jax_share_binary_between_hosts_timeout_ms", 300_000)
from kimi_jax import cli, distributed
distributed.initialize(heartbeat_timeout_seconds={HEARTBEAT})
cli.main()
"""


def start(config: Path, cache: Path, logs: Path) -> list[subprocess.Popen]:
    """Two processes with four CPU devices each, joined by environment variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
    }
    processes = []
    for index in range(2):
        with (logs / f"{index}.txt").open("w") as log:
            command = [sys.executable, "-c", PROCESS, "train", str(config)]
            own = environment | {"JAX_PROCESS_ID": str(index)}
            processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
    return processes


def train_rows(folder: Path) -> list[dict]:
    return [row for row in metrics.read(folder / "metrics.jsonl") if row["kind"] == "train"]


def test_kill_preempt_restart_and_end_with_the_numbers_of_one_device(tmp_path):
    one = tiny.config(tmp_path, steps=14, name="one", eval_every=10**6, checkpoint_every=3, sample_tokens=0)
    one = replace(one, data=replace(one.data, batch_size=8))
    two = replace(one, name="two", mesh=Mesh(data=2, fsdp=4))
    file, folder = tmp_path / "two.py", tmp_path / "runs" / "two"
    file.write_text(f"from kimi_jax.config import *\nconfig = {two!r}\n")
    processes: list[subprocess.Popen] = []

    def output(index: int) -> str:
        return (tmp_path / f"{index}.txt").read_text()

    def start_and_wait(records: int) -> None:
        processes[:] = start(file, tmp_path / "cache", tmp_path)
        while len(train_rows(folder)) < records:
            assert all(process.poll() is None for process in processes), output(0) + output(1)
            time.sleep(0.01)

    try:
        # Preempted: the signal reaches one process, both save the same step and call it success.
        start_and_wait(4)
        processes[1].send_signal(signal.SIGTERM)
        assert [process.wait(timeout=120) for process in processes] == [0, 0], output(0) + output(1)
        for index in range(2):
            assert "Stopped and saved at step" in output(index) and "The same command goes on:" in output(index)
        saved = len(train_rows(folder))
        assert (folder / "checkpoints" / str(saved)).is_dir()

        # Killed: the other does not wait for ever, and fails.
        start_and_wait(saved + 4)
        assert f"Continuing from step {saved}." in output(0) and "Continuing" not in output(1)
        processes[1].kill()
        began = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(lambda: (processes[0].wait(timeout=120), time.monotonic() - began))
            expected = train.run(one)  # meanwhile, what is to come out
        status, seconds = ended.result()
        print(f"the other process ended {seconds:.1f} s after the kill, with {status}; heartbeat {HEARTBEAT} s")
        assert status not in (0, None)

        # Started again, they end together.
        processes[:] = start(file, tmp_path / "cache", tmp_path)
        assert [process.wait(timeout=300) for process in processes] == [0, 0], output(0) + output(1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert output(0).splitlines()[-1].startswith("val bits per byte: ")
    assert not any(word in output(1) for word in ("step ", "documents", "Continuing", "bits per byte"))

    rows, plain = train_rows(folder), train_rows(tmp_path / "runs" / "one")
    assert [row["step"] for row in rows] == list(range(1, 15)) == [row["step"] for row in plain]
    for row, other in zip(rows, plain, strict=True):
        # The same sums in another order: float32's 6e-8, seen 2e-7.
        assert row["loss"] == pytest.approx(other["loss"], rel=2e-6), row["step"]
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5), row["step"]
        assert row["tokens"] == other["tokens"] and row["learning_rate"] == other["learning_rate"]
    (final,) = (row for row in metrics.read(folder / "metrics.jsonl") if row["kind"] == "final")
    assert final["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], rel=2e-6)
    assert final["bytes"] == expected["bytes"]


SLURM = {
    **{"SLURM_JOB_ID": "17", "SLURM_STEP_NODELIST": "node[3-4]", "SLURM_NTASKS": "2"},
    **{"SLURM_PROCID": "1", "SLURM_LOCALID": "0"},
}
NAMED = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:8476", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.fixture
def joined(monkeypatch):
    """Takes the place of JAX's initialize, in an environment of nothing; gives the list of its calls."""
    for name in (*SLURM, *NAMED, "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: calls.append((args, options)))
    return calls


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (NAMED, [(("10.0.0.1:8476", 2, 1), {})]),
        (NAMED | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, []),
        (SLURM, [((None, None, None), {})]),
        (SLURM | {"SLURM_NTASKS": "1"}, []),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, [((None, None, None), {})]),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, [((None, None, None), {})]),
        ({"TPU_WORKER_HOSTNAMES": "a"}, []),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, [((None, None, None), {})]),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, []),
        ({}, [((None, None, None), {})]),  # only JAX can ask a TPU pod's metadata
    ],
)
def test_who_joins(joined, monkeypatch, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    distributed.initialize()
    assert joined == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"JAX_PROCESS_ID": "1"}, "JAX_PROCESS_ID set, but not JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES"),
        (NAMED | {"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID=2 must be a number from 0 .* there are 2"),
        (NAMED | {"JAX_PROCESS_ID": "one"}, "JAX_PROCESS_ID=one must be a number"),
        (NAMED | {"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, "10.0.0.1 must be host:port"),
    ],
)
def test_variables_that_cannot_be_right(joined, monkeypatch, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        distributed.initialize()
    assert not joined


def test_processes_that_jax_cannot_tell_apart_or_that_come_too_late(monkeypatch):
    jax.devices()
    distributed.initialize()  # one process, in a notebook say
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="4 processes cannot join: this one has used its devices already"):
        distributed.initialize()

    def found_nothing(*_, **__):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", found_nothing)
    with pytest.raises(ConfigError, match=r"4 processes, but .* Set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES"):
        distributed.initialize()
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE")
    distributed.initialize()
