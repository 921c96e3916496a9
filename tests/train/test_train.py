"""Whole runs: files, resumption bit for bit after any kind of end, refusals, and the command line."""

import base64
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from kimi_jax import cli
from kimi_jax.config import ConfigError, Source, TokenizerConfig, to_dict
from kimi_jax.infer import generate
from kimi_jax.infer.generate import stream_text
from kimi_jax.infer.sampling import Sampling
from kimi_jax.store.checkpoint import Checkpoints
from kimi_jax.store.open import open_model
from kimi_jax.train import folder, metrics
from kimi_jax.train.display import Display
from kimi_jax.train.evaluate import evaluate_checkpoint
from kimi_jax.train.loop import TooManySkips, run_training
from kimi_jax.train.resume import check_same
from kimi_jax.train.signals import Interrupted, resume_command
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]


def losses(folder: Path) -> list[tuple]:
    """Every number that a run gives, exactly as written: all but the clock's."""
    return [
        (row["step"], row["kind"], row["loss"], row["bits_per_byte"], row.get("grad_norm"))
        for row in metrics.read(folder / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An undisturbed run, its config and its result."""
    tmp_path = tmp_path_factory.mktemp("finished")
    config = tiny.config(tmp_path)
    return config, run_training(config), tmp_path / "runs" / "run"


def test_a_run_leaves_its_files(finished):
    _, result, folder = finished
    assert {p.name for p in folder.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "curves.png",
        "sample.txt",
        "checkpoints",
        "tokenizer",
    }
    rows = list(metrics.read(folder / "metrics.jsonl"))
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 13))
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [5, 10]
    assert rows[-1]["kind"] == "final" and rows[-1]["bits_per_byte"] == result["bits_per_byte"]
    assert json.loads((folder / "config.json").read_text())["train"]["steps"] == 12
    assert (folder / "sample.txt").read_text().startswith("the ")
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert 0 < result["xz_bits_per_byte"] < 8
    first = next(row for row in rows if row["kind"] == "train")
    assert 7.5 < first["bits_per_byte"] < 8.6  # a byte-level model starts at log2 of its vocabulary
    assert result["bits_per_byte"] < first["bits_per_byte"] - 1


def test_the_rate_shown_is_the_median_of_steps_that_were_compiled():
    out = io.StringIO()
    with Display(Console(file=out, width=200, highlight=False), 5, 0) as display:
        for step, rate in enumerate((7.0, 1000.0, 1002.0, 990.0, 1e9), 1):
            display.show({"step": step, "loss": 1.0, "bits_per_byte": 2.0, "tokens_per_second": rate})
    shown = re.findall(r"bits/byte 2.000(?:  ([\d,]+) tokens/s)?", out.getvalue())
    assert shown == ["", "1,000", "1,001", "1,000", "1,001"]


def test_checkpoints_keep_the_last_and_the_marked(finished):
    _, _, folder = finished
    checkpoints = Checkpoints(folder / "checkpoints")
    assert checkpoints.steps == [8, 12]
    checkpoints.close()


def test_a_finished_run_prints_its_summary_again(finished, capsys):
    config, result, folder = finished
    before = (folder / "metrics.jsonl").read_bytes()
    again = run_training(config)
    assert again == result
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-1] == f"val bits per byte: {result['bits_per_byte']:.2f}"
    assert lines[-2] == f"xz -9 on the same validation bytes: {result['xz_bits_per_byte']:.2f}"
    assert (folder / "metrics.jsonl").read_bytes() == before


def continued(folder, prompt, sampling):
    model, _, tokenizer = open_model(folder)
    return "".join(stream_text(model, tokenizer, prompt, sampling))


def test_evaluation_and_generation_of_a_run(finished):
    config, result, folder = finished
    assert evaluate_checkpoint(folder)["bits_per_byte"] == pytest.approx(result["bits_per_byte"], rel=1e-6)
    corpus = config.data.sources[0]
    other = evaluate_checkpoint(folder, source=Source(kind="text", path=corpus.path, glob="1*.txt"), max_tokens=300)
    assert 0 < other["bits_per_byte"] < 8 and other["tokens"] > 0
    drawn = Sampling(temperature=0.8, top_p=0.95, max_new_tokens=5, seed=3)
    first, second = (continued(folder, "the number", drawn) for _ in range(2))
    assert first == second
    cold = [continued(f, "the", Sampling(max_new_tokens=2)) for f in (folder, folder / "checkpoints")]
    assert cold[0] == cold[1]
    with pytest.raises(ConfigError, match="no checkpoint 7"):
        open_model(folder, step=7)
    with pytest.raises(ConfigError, match="no checkpoint in"):
        open_model(folder.parent)


def test_a_run_keeps_the_tokenizer_of_a_release(tmp_path):
    """A K2 release's ranks and control tokens are trained on, saved, and used to generate once the release is gone."""
    content = b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "tiktoken.model").write_bytes(content)
    ids = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 511}
    (hub / "config.json").write_text(json.dumps({**ids, "model_type": "kimi_k2"}))
    config = tiny.with_model(tiny.config(tmp_path, steps=1, sample_tokens=0), vocab_size=512, **ids)
    tokens = TokenizerConfig(kind="tiktoken", path=str(hub / "tiktoken.model"))
    run_training(replace(config, data=replace(config.data, tokenizer=tokens)))
    shutil.rmtree(hub)
    folder = tmp_path / "runs" / "run"
    model, _, tokenizer = open_model(folder)
    assert tokenizer.files == {"tiktoken.model": content} and tokenizer.stop_ids == (257, 258)
    assert tokenizer.special_tokens["<|im_end|>"] == 258 and len(tokenizer.special_tokens) == 256
    prompt = "a 中 <|im_end|>"
    (row,) = generate.generate(model, [[256, *prompt.encode()]], Sampling(max_new_tokens=8, stop=(257, 258)))
    assert continued(folder, prompt, Sampling(max_new_tokens=8)) == tokenizer.decode(row)

    class Stops(type(tokenizer)):
        stop_ids = property(lambda _: (row[0],))

    tokenizer.__class__ = Stops
    assert "".join(stream_text(model, tokenizer, prompt, Sampling(max_new_tokens=8))) == ""


@pytest.mark.parametrize("instant", [1, 3, 4, 6, 11])
def test_interrupt_and_resume_bit_for_bit(finished, tmp_path, instant, monkeypatch):
    """Ctrl-C during step `instant`: saved, resumed, and every number after it is that of the undisturbed run."""
    config, result, folder = finished
    config = replace(config, name=f"interrupted_{instant}")
    calls = 0
    original = metrics.Metrics.write

    def write(self, step, kind, **values):
        nonlocal calls
        original(self, step, kind, **values)
        calls += kind == "train"
        if calls == instant and kind == "train":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(metrics.Metrics, "write", write)
    with pytest.raises(Interrupted, match="Stopped and saved at step"):
        run_training(config)
    monkeypatch.setattr(metrics.Metrics, "write", original)
    resumed = run_training(config)
    assert losses(folder.parent / config.name) == losses(folder)
    assert resumed["bits_per_byte"] == result["bits_per_byte"]
    assert (folder.parent / config.name / "sample.txt").read_text() == (folder / "sample.txt").read_text()


def script(config, path: Path) -> list[str]:
    """A command that runs the config in a process of its own."""
    path.write_text(f"from kimi_jax.config import *\nconfig = {config!r}\n")
    return [sys.executable, "-m", "kimi_jax", "train", str(path)]


def launch(command):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def test_kill_at_any_moment_and_resume_bit_for_bit(finished, tmp_path):
    """SIGKILL while starting, between checkpoints, and while one is being written; then to the end."""
    config, _, folder = finished
    config = replace(config, name="killed", train=replace(config.train, steps=40, checkpoint_every=3))
    undisturbed = replace(config, name="undisturbed")
    process = launch(script(undisturbed, tmp_path / "undisturbed.py"))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    target = folder.parent / "killed"
    command = script(config, tmp_path / "killed.py")

    def saving():
        return any(".orbax-checkpoint-tmp" in p.name for p in (target / "checkpoints").glob("*"))

    moments = [
        lambda: (target / "metrics.jsonl").is_file(),
        lambda: lines_of(target / "metrics.jsonl") >= 5,
        saving,
        lambda: lines_of(target / "metrics.jsonl") >= 20,
    ]
    for moment in moments:
        process = launch(command)
        deadline = time.monotonic() + 120
        while not moment() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        output, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, f"the moment to kill at never came: {output}"
    process = launch(command)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert losses(target) == losses(folder.parent / "undisturbed")
    final, other = (output.strip().splitlines()[-1], (folder.parent / "undisturbed" / "sample.txt").read_text())
    assert final.startswith("val bits per byte: ")
    assert (target / "sample.txt").read_text() == other


def test_signals_end_a_process_with_a_message(finished, tmp_path):
    """Ctrl-C exits with 130, SIGTERM (preemption) with 0; both say how to go on."""
    config, _, folder = finished
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 0)):
        config = replace(config, name=f"signal_{number}", train=replace(config.train, steps=100_000, eval_every=10**6))
        process = launch(script(config, tmp_path / f"{number}.py"))
        target = folder.parent / config.name
        while lines_of(target / "metrics.jsonl") < 6 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == code, output
        assert "Stopped and saved at step" in output and "The same command goes on:" in output
        checkpoints = Checkpoints(target / "checkpoints")
        assert checkpoints.latest == [row[0] for row in losses(target) if row[1] == "train"][-1]
        checkpoints.close()


def test_restart_begins_anew_and_leaves_other_files(finished, tmp_path):
    config, _, folder = finished
    config = replace(config, name="restarted")
    run_training(config)
    (folder.parent / "restarted" / "notes.txt").write_text("mine")
    run_training(config, restart=True)
    assert losses(folder.parent / "restarted") == losses(folder)
    assert (folder.parent / "restarted" / "notes.txt").read_text() == "mine"


def test_restart_removes_nothing_before_all_is_checked(finished):
    config, _, folder = finished
    source = replace(config.data.sources[0], path=str(folder / "nowhere"))
    with pytest.raises(ConfigError, match="nowhere"):
        run_training(replace(config, data=replace(config.data, sources=(source,))), restart=True)
    assert (folder / "metrics.jsonl").is_file() and any((folder / "checkpoints").iterdir())


def test_a_run_is_finished_only_with_its_last_checkpoint(finished, tmp_path):
    """Killed after the final record, before the last checkpoint was whole: the steps in between are done again."""
    config, result, folder = finished
    copied = tmp_path / "runs" / "copy"
    shutil.copytree(folder, copied)
    shutil.rmtree(copied / "checkpoints" / "12")
    config = tiny.with_train(replace(config, name="copy"), runs_dir=str(tmp_path / "runs"))
    assert run_training(config) == result
    assert losses(copied) == losses(folder)
    with pytest.raises(ConfigError, match=r"is at step 12, past train\.steps=6"):
        run_training(tiny.with_train(config, steps=6))


def test_a_run_outside_the_main_thread(finished):
    """Notebook front ends execute cells in threads, which cannot listen to signals."""
    config, result, _ = finished
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run_training, config).result() == result


def test_float64_needs_64_bit_arrays(tmp_path):
    config = tiny.with_model(tiny.config(tmp_path), dtype="float64", param_dtype="float64")
    with pytest.raises(ConfigError, match="JAX_ENABLE_X64"):
        run_training(config)


def test_the_command_that_goes_on(monkeypatch):
    """Never with --restart, which would remove what was saved; quoted as a shell needs it."""
    arguments = ["k3_tiny", "--restart", "--train.sample-prompt", "def f(x): "]
    monkeypatch.setattr("sys.argv", ["train_main.py", *arguments])
    assert resume_command() == "python train_main.py k3_tiny --train.sample-prompt 'def f(x): '"
    monkeypatch.setattr("sys.argv", ["/somewhere/kimi_jax/__main__.py", "train", "k3_tiny"])
    assert resume_command() == "python -m kimi_jax train k3_tiny"
    monkeypatch.setattr("sys.argv", ["/bin/kimi-jax", "train", "k3_tiny"])
    assert resume_command() == "/bin/kimi-jax train k3_tiny"


def test_settings_younger_than_the_checkpoint_have_their_defaults(finished):
    config, _, folder = finished
    saved = json.loads((folder / "config.json").read_text())
    del saved["train"]["max_skips"], saved["model"]["kda"]["conv_size"]
    check_same(saved, to_dict(config), folder)


@pytest.mark.parametrize(
    "change,named",
    [
        (lambda c: tiny.with_model(c, initializer_range=0.01), "model.initializer_range: 0.02 in the checkpoint, 0.01"),
        (lambda c: replace(c, optim=replace(c.optim, learning_rate=0.5)), "optim.learning_rate"),
        (lambda c: replace(c, data=replace(c.data, batch_size=8)), "data.batch_size: 4 in the checkpoint, 8 now"),
        (lambda c: replace(c, data=replace(c.data, sequence_length=16)), "data.sequence_length"),
        (lambda c: tiny.with_train(c, seed=5), "train.seed"),
    ],
)
def test_another_model_optimizer_data_or_batch_is_refused(finished, change, named):
    config, _, _ = finished
    with pytest.raises(ConfigError, match=named):
        run_training(change(config))


def test_what_may_change_on_resume(finished, tmp_path):
    """Steps, logging, recomputation and folders: the text may lie elsewhere as long as it is the same."""
    config, _, folder = finished
    shutil.copytree(folder, tmp_path / "runs" / "moved")
    shutil.copytree(config.data.sources[0].path, tmp_path / "text")
    source = replace(config.data.sources[0], path=str(tmp_path / "text"))
    moved = replace(config, name="moved", data=replace(config.data, sources=(source,)))
    moved = tiny.with_train(moved, steps=13, eval_every=7, runs_dir=str(tmp_path / "runs"), keep_last=1)
    run_training(tiny.with_model(moved, remat="full"))
    assert [step for step, kind, *_ in losses(tmp_path / "runs" / "moved") if kind == "train"] == list(range(1, 14))
    next(Path(source.path).glob("*.txt")).write_text("something else")
    with pytest.raises(ConfigError, match="training text is not that of the checkpoint"):
        run_training(tiny.with_train(moved, steps=14))


def test_too_many_skips_stop_the_run_and_keep_the_last_good_state(tmp_path):
    config = tiny.config(tmp_path, steps=40, max_skips=3, spike_threshold=0.01, checkpoint_every=2)
    config = replace(config, optim=replace(config.optim, learning_rate=50.0, warmup_fraction=0.05))
    with pytest.raises(TooManySkips, match="3 steps in a row were skipped") as stopped:
        run_training(config)
    folder = tmp_path / "runs" / "run"
    assert "skipped_batch.npz" in str(stopped.value)
    dumped = np.load(folder / "skipped_batch.npz")
    assert dumped["tokens"].shape == (4, 32)
    rows = [row for row in metrics.read(folder / "metrics.jsonl") if row["kind"] == "train"]
    assert rows[-1]["skips_in_a_row"] == 3


def test_unwritable_and_full_disks_are_refused(tmp_path, monkeypatch):
    config = tiny.config(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"):
        run_training(tiny.with_train(config, runs_dir=str(tmp_path / "file")))
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(ConfigError, match="1,000 are free"):
        run_training(config)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(tmp_path):
    config = tiny.with_model(tiny.config(tmp_path), vocab_size=200)
    with pytest.raises(ConfigError, match=r"vocab_size=200 .* 259"):
        run_training(config)


@pytest.mark.parametrize(
    "arguments,code,message",
    [
        (("train", "k3tiny"), 1, "did you mean k3_tiny"),
        (("train", "missing.py"), 1, "no config file missing.py"),
        (("train", "k3_tiny", "--train.stepz", "3"), 2, "--train.steps"),
        (("train", "k3_tiny", "--data.sequence-length", "0"), 1, "sequence_length=0"),
        (
            ("train", "k3_tiny", "--data.batch-size", "7", "--train.accumulation", "2"),
            1,
            "set train.accumulation to one of",
        ),
        (("tran",), 2, "unknown command 'tran'"),
        (("eval", "--checkpoint", "nowhere"), 1, "no checkpoint in nowhere"),
        (("generate", "--checkpoint", "nowhere", "--prompt", "x"), 1, "no checkpoint in nowhere"),
    ],
)
def test_mistakes_on_the_command_line_end_with_a_message(tmp_path, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        cli.main(list(arguments))
    printed = "".join(capsys.readouterr())
    if isinstance(left.value.code, str):  # Python prints it, and exits with 1
        printed, left.value.code = printed + left.value.code, 1
    assert left.value.code == code, printed
    assert message in printed
    assert "Traceback" not in printed
    assert not list(tmp_path.iterdir())


def test_dry_run_allocates_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cli.main(["train", "k3", "--dry-run"])
    printed = capsys.readouterr().out
    assert "2,779,484,476,000 parameters" in printed
    assert "8192 rows x 8192 tokens" in printed
    assert not list(tmp_path.iterdir())


def test_tensorboard_gets_the_scalars(tmp_path):
    log = metrics.Metrics(tmp_path, first_step=0, tensorboard=True)
    log.write(1, "train", loss=2.0, expert_load=[[1, 2]])
    log.close()
    (file,) = (tmp_path / "tensorboard").glob("events*")
    assert b"train/loss" in file.read_bytes() and b"expert_load" not in file.read_bytes()
