"""Two processes of four CPU devices each as one run, through death, preemption and restart; and how they find each
other."""

import json
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

from kimi_jax.config import ConfigError, Mesh
from kimi_jax.model.kimi import init
from kimi_jax.parallel import processes
from kimi_jax.parallel.mesh import make_mesh, on_mesh
from kimi_jax.parallel.processes import initialize, largest
from kimi_jax.store import safetensors_files
from kimi_jax.store.convert import convert
from kimi_jax.store.write import save_release
from kimi_jax.train import metrics
from kimi_jax.train.folder import folder_size
from kimi_jax.train.loop import run_training
from kimi_jax.train.signals import Interrupted, Stop
from tests import tiny
from tests.programs.command import HEARTBEAT

ROOT = Path(__file__).resolve().parents[2]


def start(configs: tuple[str, str], logs: Path, program="command", **last: str) -> list[subprocess.Popen]:
    """Two processes with four CPU devices each, joined by environment variables; `last` are the last one's own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
    }
    processes = []
    for index, (config, more) in enumerate(zip(configs, ({}, last), strict=True)):
        with (logs / f"{index}.txt").open("w") as log:
            command = [sys.executable, "-m", f"tests.programs.{program}", "train", *config.split()]
            own = environment | {"JAX_PROCESS_ID": str(index)} | more
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

    try:
        # Preempted: the signal reaches one process, both save the same step and call it success.
        both = (str(file), str(file))
        processes[:] = start(both, tmp_path, SIGNAL=f"{signal.SIGTERM.value} 4")
        assert [process.wait(timeout=120) for process in processes] == [0, 0], output(0) + output(1)
        for index in range(2):
            assert "Stopped and saved at step" in output(index) and "The same command goes on:" in output(index)
        # Step 4 is written after step 5 is dispatched; the processes are asked then, and answer one step later.
        saved = len(train_rows(folder))
        assert saved == 6
        assert (folder / "checkpoints" / str(saved)).is_dir()

        # Killed: the other does not wait for ever, and fails.
        processes[:] = start(both, tmp_path, SIGNAL=f"{signal.SIGKILL.value} {saved + 4}")
        assert processes[1].wait(timeout=120) == -signal.SIGKILL, output(0) + output(1)
        began = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(lambda: (processes[0].wait(timeout=120), time.monotonic() - began))
            expected = run_training(one)  # meanwhile, what is to come out
        status, seconds = ended.result()
        print(f"the other process ended {seconds:.1f} s after the kill, with {status}; heartbeat {HEARTBEAT} s")
        assert status not in (0, None)
        assert f"Continuing from step {saved}." in output(0) and "Continuing" not in output(1)

        # Started again, they end together.
        processes[:] = start(both, tmp_path)
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


def test_each_process_reads_what_its_devices_hold_and_trains_from_it(tmp_path):
    moe = replace(tiny.MODEL.moe, num_experts=8, hidden_size=32, latent_size=64)
    model = init(replace(tiny.MODEL, moe=moe), 0)
    save_release(tmp_path / "k3", model, model.config, packed=True, max_shard_bytes=20_000)
    convert(tmp_path / "k3", tmp_path / "converted")
    linear = Path(__file__).parents[1] / "golden" / "kimi_linear_tiny"
    k3, converted = tmp_path / "k3", tmp_path / "converted"
    cases = [
        (k3, False, {"fsdp": 4, "expert": 2}, k3),  # two devices of a process have halves of a group of 32
        (k3, True, {"fsdp": 2, "expert": 4}, k3),
        (k3, True, {"expert": 8}, k3),
        (k3, False, {"data": 2, "expert": 4}, k3),  # each process needs all of it, and two of its devices the same
        (linear, False, {"fsdp": 4, "expert": 2}, linear),
        (converted, False, {"fsdp": 4, "expert": 2}, k3),
        (converted, True, {"fsdp": 2, "expert": 4}, k3),
    ]
    one = tiny.config(tmp_path, steps=2, name="one", eval_every=10**6, sample_tokens=0, init_from=str(tmp_path / "k3"))
    one = replace(one, model=model.config, data=replace(one.data, batch_size=8))
    file = tmp_path / "two.py"
    two = replace(one, name="two", mesh=Mesh(fsdp=4, expert=2))
    file.write_text(f"from kimi_jax.config import *\nconfig = {two!r}\n")
    what = json.dumps(cases, separators=(",", ":"), default=str)
    processes = start((f"{file} {what}", f"{file} {what}"), tmp_path, "read_release")
    try:
        run_training(one)
        assert [process.wait(timeout=300) for process in processes] == [0, 0], [
            (tmp_path / f"{index}.txt").read_text() for index in range(2)
        ]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = [(tmp_path / f"{index}.txt").read_text().splitlines() for index in range(2)]
    found = [[json.loads(line[5:]) for line in log if line.startswith("READ ")] for log in logs]
    assert [len(rows) for rows in found] == [5, 5]
    for (path, packed, mesh, _), *both in zip(cases, *found, strict=False):
        entries = safetensors_files.Directory(path).entries.values()
        print(path.name, packed, mesh, both, "of", sum(entry.num_bytes for entry in entries))
        for once, total, share, again in both:
            assert (once, total) == (share, again)
    rows, plain = (train_rows(tmp_path / "runs" / name) for name in ("two", "one"))
    assert [row["step"] for row in rows] == [1, 2] == [row["step"] for row in plain]
    for row, other in zip(rows, plain, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=2e-6)


def test_what_one_process_refuses_ends_all_at_once(tmp_path):
    good = replace(tiny.config(tmp_path, steps=4, sample_tokens=0), mesh=Mesh(data=2, fsdp=4))
    good = replace(good, data=replace(good.data, batch_size=8))
    (source,) = good.data.sources
    other = replace(good, train=replace(good.train, seed=1))
    absent = replace(good, data=replace(good.data, sources=(replace(source, path=str(tmp_path / "absent")),)))
    for name, config in (("good", good), ("other", other), ("absent", absent)):
        (tmp_path / f"{name}.py").write_text(f"from kimi_jax.config import *\nconfig = {config!r}\n")
    files = {name: str(tmp_path / f"{name}.py") for name in ("good", "other", "absent")}

    def end(attempts, script) -> tuple[list[int], list[str]]:
        processes = start(attempts, tmp_path, script)
        try:
            statuses = [process.wait(timeout=60) for process in processes]  # JAX alone would wait for 300 s
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return statuses, [(tmp_path / f"{index}.txt").read_text() for index in range(2)]

    statuses, (first, second) = end((files["good"], files["absent"]), "command")
    assert statuses == [1, 1], first + second
    assert first.splitlines()[-1].endswith("process 1 refused to start; see its log")
    assert str(tmp_path / "absent") in second.splitlines()[-1] and "refused" not in second

    several = (f"{files['good']} {files['absent']}", f"{files['other']} {files['good']}")
    statuses, (first, second) = end(several, "attempts")
    for output in (first, second):
        assert "refused: the config of process 1 is not that of process 0; start all" in output
    assert "refused: process 0 refused to start" in second
    assert statuses[0] == 1 and "OSError: the disk is full\nprocess 0 ends" in first
    assert statuses[1] != 0, second
    assert not list((tmp_path / "runs").rglob("metrics.jsonl"))


def test_size_of_a_folder_whose_files_vanish(tmp_path):
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "kept").write_bytes(b"four")
    (tmp_path / "inside" / "gone").symlink_to(tmp_path / "absent")  # listed, and absent when it is looked at
    assert folder_size(tmp_path) == 4
    assert folder_size(tmp_path / "absent") == 0


def test_largest_is_not_waited_for_and_on_any_mesh():
    with on_mesh(make_mesh(Mesh(data=2, fsdp=4))):
        found = largest(15)
        assert isinstance(found, jax.Array) and found.is_fully_replicated and int(found) == 15
    assert int(largest(0)) == 0


def test_processes_stop_by_what_they_were_asked_a_step_ago(monkeypatch):
    """With two processes' answers told: a question is read at the next one, or at once when it is the last."""
    answers = iter([0, 15, 15, 15])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "largest", lambda value: next(answers))
    stop = Stop()
    assert [stop.agreed(), stop.agreed(), stop.agreed()] == [False, False, True]
    with pytest.raises(Interrupted):
        stop.check("stopped")
    answers = iter([0, 15])
    stop = Stop()
    assert [stop.agreed(), stop.agreed(now=True)] == [False, True]
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    stop = Stop()
    assert not stop.agreed()
    stop(signal.SIGTERM, None)
    assert stop.agreed()


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
    initialize()
    assert joined == expected


@pytest.mark.skipif("TPU_SKIP_MDS_QUERY" not in os.environ, reason="JAX has found a TPU")
def test_libtpu_is_quiet_where_no_tpu_is():
    """Nothing is printed, whether it is installed or not, and the variables of a host with a TPU stay as they are."""
    program = """if True:
        import os
        from kimi_jax import config
        from kimi_jax.parallel.mesh import make_mesh
        assert make_mesh(config.Mesh()) is None
        print(os.environ.get("TPU_WORKER_HOSTNAMES"))"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "JAX_PLATFORMS"))}
    for given, expected in (({}, "localhost"), ({"TPU_WORKER_HOSTNAMES": "a"}, "a")):
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=environment | given, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", expected)


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
        initialize()
    assert not joined


def test_processes_that_jax_cannot_tell_apart_or_that_come_too_late(monkeypatch):
    jax.devices()
    initialize()  # one process, in a notebook say
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="4 processes cannot join: this one has used its devices already"):
        initialize()

    def found_nothing(*_, **__):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", found_nothing)
    with pytest.raises(ConfigError, match=r"4 processes, but .* Set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES"):
        initialize()
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE")
    initialize()
