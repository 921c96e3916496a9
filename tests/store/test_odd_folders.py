"""Folders of checkpoints that are no such thing, and saves that fail for other reasons than the disk."""

import jax.numpy as jnp
import pytest

from kimi_jax.config import ConfigError
from kimi_jax.files import FileError
from kimi_jax.store.checkpoint import Checkpoints, opened
from kimi_jax.store.checksums import Damaged, Step, steps_in
from kimi_jax.store.safetensors_files import CheckpointError


@pytest.fixture
def saved(tmp_path):
    """A folder with checkpoints 1 and 2."""
    with opened(tmp_path / "checkpoints", write=True, keep_last=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": jnp.arange(4.0) + step}, {})
    return tmp_path / "checkpoints"


def test_a_folder_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"cannot write .*file/below: .*; a part of the path is a file"):
        Checkpoints(tmp_path / "file" / "below", write=True)
    with pytest.raises(FileError, match=r"cannot read .*/file: Not a directory"):
        steps_in(tmp_path / "file")
    assert steps_in(tmp_path / "none") == []


def test_a_step_that_is_a_file(saved):
    (saved / "3").write_text("")
    with opened(saved) as checkpoints, pytest.raises(CheckpointError) as error:
        checkpoints.metadata()
    assert "3 is damaged: it is not a folder; the newest whole checkpoint is step 2" in str(error.value)


def test_a_file_that_is_a_folder_or_that_nobody_listed(saved):
    step = Step(saved / "2")
    assert step.sums is not None
    with pytest.raises(Damaged, match=r"does not name state/none"):
        step.verify(["state/none"])
    path = next(path for path in step.sums if path.endswith("_METADATA"))
    (saved / "2" / path).unlink()
    (saved / "2" / path).mkdir()
    with pytest.raises(Damaged, match=f"{path} is not a file"):
        Step(saved / "2").verify([path])


def test_arrays_of_another_shape_are_named(saved):
    with opened(saved) as checkpoints, pytest.raises(ConfigError) as error:
        checkpoints.restore({"x": jnp.zeros(5), "y": jnp.zeros(1)}, 1)
    assert "missing: y" in str(error.value) and "x is float32[4], this run needs float32[5]" in str(error.value)


def test_a_save_that_fails_for_a_reason_of_its_own_says_what_is_kept(saved, tmp_path):
    with opened(saved) as checkpoints:
        error = checkpoints._failed(3, RuntimeError("out of luck\nand more"))
    assert str(error) == f"cannot write checkpoint {saved / '3'}: out of luck; the newest is step 2"
    with opened(tmp_path / "empty", write=True) as checkpoints:
        assert str(checkpoints._failed(1, KeyError())).endswith("KeyError(); there is none before it")
