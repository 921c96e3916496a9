"""Checkpoints and runs across meshes: bit for bit on any other, whole or invisible, and the same losses on all."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from kimi_jax.config import ConfigError, Mesh
from kimi_jax.parallel.mesh import make_mesh, on_mesh
from kimi_jax.parallel.spec import spec_of
from kimi_jax.store import checkpoint
from kimi_jax.train import metrics
from kimi_jax.train.loop import run_training
from kimi_jax.train.signals import Interrupted
from kimi_jax.train.step import abstract_state, make_optimizer
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]
EIGHT = Mesh(fsdp=2, expert=4)


def rows(config, count: int):
    return replace(config, data=replace(config.data, batch_size=count))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A state of random bits, saved on eight devices with their mesh set: its config, folder and values."""
    tmp_path = tmp_path_factory.mktemp("saved")
    config = replace(tiny.config(tmp_path), mesh=EIGHT)
    rng, values = np.random.default_rng(0), {}

    def filled(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        values[name] = rng.integers(0, 2**31, like.shape).astype(np.int32).view(like.dtype).reshape(like.shape)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: values[name][index])

    with on_mesh(make_mesh(EIGHT)):
        shapes = abstract_state(config, make_optimizer(config))
        flat = {name: filled(name, like) for name, like in checkpoint.flatten(shapes).items()}
        assert any(len(x.sharding.device_set) == 8 and not x.is_fully_replicated for x in flat.values())
        with checkpoint.opened(tmp_path / "checkpoints", write=True) as checkpoints:
            checkpoints.save(3, checkpoint.unflatten(shapes, flat), {"batches": 5})
    return config, tmp_path / "checkpoints", values


@pytest.mark.parametrize(
    "mesh",
    [
        *(Mesh(), Mesh(tensor=2), Mesh(data=2, tensor=2), Mesh(expert=4), Mesh(fsdp=8)),
        *(Mesh(data=2, seq=2, tensor=2), Mesh(fsdp=4, expert=2)),
    ],
    ids=lambda mesh: "-".join(f"{axis}{size}" for axis, size in mesh.shape.items() if size > 1) or "none",
)
def test_what_eight_devices_saved_any_others_restore_bit_for_bit(saved, mesh):
    config, folder, values = saved
    with on_mesh(make_mesh(mesh)), checkpoint.opened(folder) as checkpoints:
        shapes = abstract_state(config, make_optimizer(config))
        state = checkpoints.restore(shapes)
        assert checkpoints.metadata()["batches"] == 5
        restored, wanted = checkpoint.flatten(state), checkpoint.flatten(shapes)
        assert restored.keys() == values.keys()
        for name, array in restored.items():
            assert np.asarray(array).tobytes() == values[name].tobytes(), name
            assert spec_of(array) == spec_of(wanted[name]), name
            if mesh.size > 1:
                assert jax.typeof(array).sharding.mesh == jax.sharding.get_abstract_mesh(), name
                assert len(array.sharding.device_set) == mesh.size


def test_killed_while_saving_from_a_mesh_the_one_before_is_the_latest(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.killed_save", tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(list(tmp_path.iterdir())) == 2  # the first, and what was begun of the second
    like = {"x": jax.ShapeDtypeStruct((2**24,), np.float32)}
    with checkpoint.opened(tmp_path, write=True) as checkpoints:
        assert checkpoints.latest == 1 and checkpoints.steps == [1] and checkpoints.metadata() == {"step": 1}
        assert np.array_equal(checkpoints.restore(like)["x"], np.arange(2**24, dtype=np.float32))
    assert [child.name for child in tmp_path.iterdir()] == ["1"]


@pytest.mark.parametrize(
    "meshes",
    [(EIGHT,), pytest.param((EIGHT, Mesh(data=4, tensor=2)), marks=pytest.mark.slow)],
    ids=["one mesh", "two meshes"],
)
def test_a_run_goes_on_from_mesh_to_mesh_to_one_device_with_the_same_losses(tmp_path, monkeypatch, meshes):
    one = tiny.config(tmp_path, steps=9, name="one", eval_every=10**6, sample_tokens=0)
    one = rows(one, 8)
    expected = run_training(one)
    write = metrics.Metrics.write
    for mesh, last in zip(meshes, (3, 6), strict=False):

        def stopping(self, step, kind, last=last, **values):
            write(self, step, kind, **values)
            if step == last - 1:
                os.kill(os.getpid(), signal.SIGINT)  # noticed at the end of the step that is under way

        monkeypatch.setattr(metrics.Metrics, "write", stopping)
        with pytest.raises(Interrupted, match=f"saved at step {last}"):
            run_training(replace(one, name="moved", mesh=mesh))
        assert jax.sharding.get_abstract_mesh().empty
    monkeypatch.setattr(metrics.Metrics, "write", write)
    final = run_training(replace(one, name="moved"))

    def records(name: str):
        return [row for row in metrics.read(tmp_path / "runs" / name / "metrics.jsonl") if row["kind"] == "train"]

    assert [row["step"] for row in records("moved")] == list(range(1, 10))
    for row, other in zip(records("moved"), records("one"), strict=True):
        # The same sums in another order: float32's 6e-8, seen 2e-7.
        assert row["loss"] == pytest.approx(other["loss"], rel=2e-6), row["step"]
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5), row["step"]
    assert final["bits_per_byte"] == pytest.approx(expected["bits_per_byte"], rel=2e-6)


@pytest.mark.parametrize(
    ("mesh", "batch", "message"),
    [
        (Mesh(data=16), 16, r"data 16 = 16 devices is larger than the 8 there are; lower mesh\.\*"),
        (Mesh(data=8), 4, r"batch=4 does not divide over mesh data 8 = 8; set mesh\.data to one of \[1, 2, 4\]"),
        (Mesh(seq=3), 4, r"time=32 does not divide over mesh seq 3 = 3; set mesh\.seq to one of \[1, 2\]"),
        (Mesh(tensor=4), 4, r"heads=2 does not divide over mesh tensor 4 = 4; set mesh\.tensor to one of \[1, 2\]"),
        (Mesh(fsdp=3), 3, r"embed=16 does not divide over mesh fsdp 3 = 3; set mesh\.fsdp to one of \[1, 2\]"),
        (
            Mesh(expert=8),
            8,
            r"experts=4 does not divide over mesh expert 8 = 8; set mesh\.expert to one of \[1, 2, 4\]",
        ),
    ],
)
def test_meshes_that_cannot_work_are_refused_before_anything_is_written(tmp_path, mesh, batch, message):
    config = replace(rows(tiny.config(tmp_path), batch), mesh=mesh)
    with pytest.raises(ConfigError, match=message):
        run_training(config)
    assert not (tmp_path / "runs").exists()
