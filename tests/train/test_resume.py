"""What a run resumes from, and what it says and keeps: checkpoints that are gone, earlier ones, new schedules."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kimi_jax.config import ConfigError, to_dict
from kimi_jax.optim.schedule import cosine_with_warmup, schedule
from kimi_jax.store.checkpoint import Checkpoints
from kimi_jax.train import loop, metrics
from kimi_jax.train.loop import run_training
from kimi_jax.train.resume import check_same, check_saved, check_start, final_record, rate_change
from kimi_jax.train.signals import resume_command
from tests import tiny


def records(last: int) -> list[dict]:
    return [{"step": step, "kind": "train"} for step in range(1, last + 1)]


def longer(config, *, steps: int, **optim):
    """The config with more steps, and then with other settings of the optimizer."""
    return replace(more := tiny.with_train(config, steps=steps), optim=replace(more.optim, **optim))


def numbers(folder: Path) -> list[tuple]:
    rows = metrics.read(folder / "metrics.jsonl")
    return [(row["step"], row["kind"], row["loss"], row.get("learning_rate")) for row in rows]


# Checkpoints that are gone


@pytest.mark.parametrize(("last", "every", "before"), [(0, 4, None), (8, 4, None), (20, 4, 10), (8, 4, "bad")])
def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path, last, every, before):
    """It has an empty folder of checkpoints, and has got no further than to where it would wait for the first."""
    (tmp_path / "checkpoints").mkdir()
    if before is not None:
        (tmp_path / "config.json").write_text(json.dumps({"train": {"checkpoint_every": before}}))
    check_start(tmp_path, tiny.config(tmp_path, checkpoint_every=every), records(last))


@pytest.mark.parametrize(("folder", "last", "message"), [(False, 1, "is missing"), (True, 9, "is empty")])
def test_checkpoints_that_were_deleted_are_missed(tmp_path, folder, last, message):
    if folder:
        (tmp_path / "checkpoints").mkdir()
    config = tiny.config(tmp_path, checkpoint_every=4)
    with pytest.raises(ConfigError, match=f"checkpoints {message}, .* up to step {last}; .* start over with --restart"):
        check_start(tmp_path, config, records(last))


def test_a_run_whose_checkpoints_were_deleted_keeps_its_metrics(tmp_path):
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    content = "".join(json.dumps(record) + "\n" for record in records(3))
    (folder / "metrics.jsonl").write_text(content)
    for _ in range(2):  # and has not made an empty folder that would look like a run killed early
        with pytest.raises(ConfigError, match="is missing, though"):
            run_training(tiny.config(tmp_path))
        assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]
    assert (folder / "metrics.jsonl").read_text() == content


# A finished run


@pytest.mark.parametrize(
    ("values", "bits"),
    [
        ({"bits_per_byte": 2.5, "xz_bits_per_byte": 3.0}, 2.5),
        ({"bits_per_byte": 2}, 2),
        ({"bits_per_byte": None}, None),
    ],
)
def test_a_final_record_is_found(values, bits):
    found = final_record([*records(4), {"step": 4, "kind": "final", **values}], 4)
    assert found is not None and found["xz_bits_per_byte"] == values.get("xz_bits_per_byte")
    assert np.isnan(found["bits_per_byte"]) if bits is None else found["bits_per_byte"] == bits


@pytest.mark.parametrize(
    "record", [{"step": 3, "bits_per_byte": 2.0}, {"step": 4}, {"step": 4, "bits_per_byte": "2.0"}]
)
def test_a_final_record_of_another_step_or_without_its_number_is_none(record):
    assert final_record([*records(4), {"kind": "final", **record}], 4) is None


# Schedules


def test_a_schedule_that_begins_later_is_the_schedule_of_the_steps_that_follow():
    whole, later = cosine_with_warmup(3e-3, 160, 0.1), cosine_with_warmup(3e-3, 400, 0.1, start=240)
    steps = np.arange(161)
    np.testing.assert_array_equal([later(240 + i) for i in steps], [whole(i) for i in steps])
    assert later(0) == later(239) == later(240)
    with pytest.raises(ValueError, match="start=400 must lie between 0 and steps=400 - 1"):
        cosine_with_warmup(1.0, 400, 0.1, start=400)


@pytest.mark.parametrize(
    ("begin", "message"), [(-1, "schedule_from=-1 must lie between 0 and"), (12, "schedule_from=12 must be below")]
)
def test_schedules_that_begin_nowhere(tmp_path, begin, message):
    with pytest.raises(ConfigError, match=message):
        longer(tiny.config(tmp_path), steps=12, schedule_from=begin)


@pytest.mark.parametrize("restart", [False, True])
def test_a_new_run_has_no_later_schedule(tmp_path, restart):
    folder = tmp_path / "runs" / "run"
    if restart:
        folder.mkdir(parents=True)
        (folder / "sample.txt").write_text("of the run before")
    with pytest.raises(ConfigError, match=r"schedule_from=6 is for a run that resumes from step 6, .* set it to 0"):
        run_training(longer(tiny.config(tmp_path), steps=12, schedule_from=6), restart=restart)
    assert (folder / "sample.txt").is_file() == restart == (tmp_path / "runs").exists()


def test_the_schedule_may_change_where_a_new_one_begins(tmp_path):
    config = tiny.config(tmp_path, steps=240)
    saved = to_dict(config)
    fresh = longer(config, steps=400, schedule_from=240, learning_rate=1e-3, warmup_fraction=0.3)
    check_same(saved, to_dict(fresh), tmp_path, 240)
    check_same(to_dict(fresh), to_dict(fresh), tmp_path, 300)
    for step, now in ((200, fresh), (240, longer(config, steps=400, schedule_from=200))):
        with pytest.raises(ConfigError, match=rf"schedule_from: 0 in the checkpoint.*--optim\.schedule-from {step}\)"):
            check_same(saved, to_dict(now), tmp_path, step)
    with pytest.raises(ConfigError, match=r"learning_rate: 0\.001 in the checkpoint, 0\.002 now; set") as rejected:
        check_same(to_dict(fresh), to_dict(longer(fresh, steps=400, learning_rate=2e-3)), tmp_path, 300)
    assert "\n" not in str(rejected.value)
    with pytest.raises(ConfigError, match="momentum"):
        check_same(saved, to_dict(longer(fresh, steps=400, momentum=0.5)), tmp_path, 240)


def test_both_rates_are_shown_when_the_schedule_changes(tmp_path):
    config = tiny.config(tmp_path, steps=240)
    config = replace(config, optim=replace(config.optim, learning_rate=1e-2, warmup_fraction=0.01))
    saved = {"config": json.loads(json.dumps(to_dict(config)))}
    last = np.asarray(schedule(config.optim, 240)(239))
    jump = rate_change(saved, tiny.with_train(config, steps=400), 240, 240)
    assert last < 5e-7 and jump is not None
    assert f"Learning rate: {last:.3g} before, 0.0035 now" in jump and "ends at step 400 in place of 240" in jump
    assert "--optim.schedule-from 240" in jump and "\n" not in jump
    again = rate_change(saved, longer(config, steps=400, schedule_from=240, learning_rate=4e-4), 240, 240)
    assert again == f"Learning rate: {last:.3g} before, 0.0002 now, on a schedule that ends at step 400."
    assert rate_change(saved, tiny.with_train(config, keep_last=7), 100, 100) is None


def test_a_checkpoint_that_is_not_of_training(tmp_path):
    with pytest.raises(ConfigError, match=f"checkpoint 0 in {tmp_path} is not of training: its metadata lacks batches"):
        check_saved({"config": {}, "data": ""}, 0, tiny.config(tmp_path), tmp_path)


# An earlier checkpoint


@pytest.mark.parametrize("option", [["--resume-from", "8"], ["--resume-from=8"], ["--resume_from", "8"]])
def test_the_command_that_resumes_does_not_go_back(monkeypatch, option):
    monkeypatch.setattr("sys.argv", ["train_main.py", "k3_tiny", *option, "--restart", "--train.steps", "9"])
    assert resume_command() == "python train_main.py k3_tiny --train.steps 9"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An undisturbed run of six steps with all its checkpoints, and its folder."""
    tmp_path = tmp_path_factory.mktemp("finished")
    config = tiny.config(tmp_path, steps=6, eval_every=4, checkpoint_every=2, keep_last=3, sample_tokens=2)
    return config, run_training(config), tmp_path / "runs" / "run"


@pytest.fixture
def copy(finished, tmp_path):
    """A config and its finished run, to be damaged."""
    config, _, folder = finished
    shutil.copytree(folder, tmp_path / "runs" / "run")
    return tiny.with_train(config, runs_dir=str(tmp_path / "runs")), tmp_path / "runs" / "run"


def test_resuming_from_an_earlier_step_sets_later_checkpoints_aside_and_ends_the_same(finished, copy, capsys):
    _, result, undisturbed = finished
    config, folder = copy
    shutil.rmtree(folder / "checkpoints" / "6")
    (folder / "checkpoints" / "6").mkdir()  # all that is left of the newest
    broken = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    broken.insert(1, b"\0\0\0\n")
    (folder / "metrics.jsonl").write_bytes(b"".join(broken))
    assert run_training(config, resume_from=2) == result
    assert numbers(folder) == numbers(undisturbed)
    assert (folder / "sample.txt").read_bytes() == (undisturbed / "sample.txt").read_bytes()
    out = capsys.readouterr().out
    assert "Continuing from step 2." in out and "skipped 1 damaged line; 8 are whole" in out
    held = folder / "checkpoints"
    assert f"Set aside the later checkpoint 4: {held / '4.set_aside'}" in out
    assert sorted(path.name for path in held.iterdir()) == ["2", "4", "4.set_aside", "6", "6.set_aside"]
    checkpoints = Checkpoints(held)
    assert checkpoints.steps == [2, 4, 6]
    checkpoints.close()
    assert run_training(config, resume_from=6) == result  # finished there: nothing to do
    assert sorted(path.name for path in held.iterdir()) == ["2", "4", "4.set_aside", "6", "6.set_aside"]


@pytest.mark.parametrize(
    ("step", "message"), [(3, r"has no checkpoint 3; it has \[2, 4, 6\]"), (-1, "has no checkpoint -1")]
)
def test_resuming_from_a_step_without_a_checkpoint(copy, step, message):
    config, folder = copy
    before = sorted(path.name for path in folder.rglob("*"))
    with pytest.raises(ConfigError, match=message):
        run_training(config, resume_from=step)
    assert sorted(path.name for path in folder.rglob("*")) == before


def test_resuming_where_there_is_nothing(tmp_path):
    with pytest.raises(ConfigError, match=r"has no checkpoint to resume from; leave out --resume-from 4"):
        run_training(tiny.config(tmp_path), resume_from=4)
    with pytest.raises(ConfigError, match=r"--restart removes the checkpoint that --resume-from 4 names"):
        run_training(tiny.config(tmp_path), resume_from=4, restart=True)
    assert not (tmp_path / "runs").exists()


# The end of a run


@pytest.fixture
def ending(copy):
    """A run that has its last checkpoint, and lacks what comes after."""
    config, folder = copy
    rows = [row for row in metrics.read(folder / "metrics.jsonl") if row["kind"] != "final"]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sample.txt").unlink()
    return config, folder


@pytest.mark.parametrize("part", ["sample", "plot"])
def test_what_fails_at_the_end_does_not_take_the_final_record_along(finished, ending, monkeypatch, part):
    _, result, _ = finished
    config, folder = ending

    def fails(*_):
        raise MemoryError("no room for it")

    with monkeypatch.context() as patched:
        patched.setattr(*((loop, "sample") if part == "sample" else (metrics, "plot")), fails)
        with pytest.raises(MemoryError):
            run_training(config)
    assert metrics.read(folder / "metrics.jsonl")[-1] == result
    assert run_training(config) == result  # finished


def test_an_interrupted_sample_is_made_by_the_next_start(finished, ending, monkeypatch):
    _, result, undisturbed = finished
    config, folder = ending

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(loop, "sample", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_training(config)
    assert not (folder / "sample.txt").exists()
    assert run_training(config) == result
    assert (folder / "sample.txt").read_bytes() == (undisturbed / "sample.txt").read_bytes()
    assert numbers(folder) == numbers(undisturbed)


def test_validation_text_that_is_gone_at_the_end_costs_its_comparison_alone(finished, ending, monkeypatch, capsys):
    _, result, _ = finished
    config, _ = ending

    def gone(self):
        raise ConfigError("corpus is missing")

    with monkeypatch.context() as patched:
        patched.setattr("kimi_jax.data.pipeline.Data.validation_bytes", gone)
        final = run_training(config)
    assert final == result | {"validation_bytes": None, "xz_bits_per_byte": None}
    assert run_training(config) == final
    out = capsys.readouterr().out
    assert "cannot read the validation text again: corpus is missing" in out
    assert out.count("xz -9 on the same validation bytes: unknown") == 2
