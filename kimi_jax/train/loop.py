"""A run from first step to last: data, the jitted step, metrics, evaluation and checkpoints."""

from __future__ import annotations

import lzma
import math
import shutil
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from rich.console import Console

from kimi_jax import files
from kimi_jax.config import Config, ConfigError, at_step, to_dict
from kimi_jax.data import pipeline
from kimi_jax.data.pipeline import Data
from kimi_jax.parallel import processes
from kimi_jax.parallel.batch import batch_sharding, process_part, to_devices
from kimi_jax.parallel.mesh import make_mesh, on_mesh
from kimi_jax.store import checkpoint
from kimi_jax.store.checkpoint import Checkpoints
from kimi_jax.store.open import check_initial, initial_parameters
from kimi_jax.text.load import load_tokenizer
from kimi_jax.text.tokenizer import Tokenizer
from kimi_jax.train import heap, metrics
from kimi_jax.train.display import Display, degrade, print_summary
from kimi_jax.train.evaluate import evaluate_batches
from kimi_jax.train.folder import CHECKPOINTS, check_folder, check_removable, remove_run, settle_restart
from kimi_jax.train.lock import locked
from kimi_jax.train.resume import check_saved, check_start, final_record, rate_change, versions, without_paths
from kimi_jax.train.sample import check_sample, sample
from kimi_jax.train.signals import Interrupted, Stop, resume_command, signals
from kimi_jax.train.step import Batch, State, abstract_state, evaluation_step, init_state, make_optimizer, training_step

SET_ASIDE = ".set_aside"
"""Ending of the name of a checkpoint that a run has gone back behind."""


class TooManySkips(RuntimeError):
    """Losses or gradients stayed bad for `train.max_skips` steps."""


def run_training(config: Config, *, restart: bool = False, resume_from: int | None = None) -> dict[str, Any]:
    """Trains from the latest checkpoint of the run's folder, or from the start, to `config.train.steps`.

    The folder `config.train.runs_dir / config.name` gets `config.json`, `metrics.jsonl`, `curves.png`, `sample.txt`
    and `checkpoints/`. A run that is finished prints its summary again. Only one process (or one set of processes that
    belong together) trains in a folder at a time.

    Args:
        config: all settings.
        restart: removes what an earlier run of this name left, and starts over.
        resume_from: step of the checkpoint to resume from in place of the latest. Later checkpoints are renamed to
            `STEP.set_aside`, and later lines of `metrics.jsonl` dropped.

    Returns:
        The final record of `metrics.jsonl`: `bits_per_byte` on the validation text, `xz_bits_per_byte`, ...

    Raises:
        ConfigError, FileError, CheckpointError: a setting, checkpoint, tokenizer, data or disk that cannot work, before
            training starts; a disk that fails, later.
        Interrupted: after Ctrl-C or SIGTERM; the state is saved.
        TooManySkips: the last good checkpoint is kept, and the batch is in `skipped_batch.npz`.

    With several processes, what one of them raises before training starts all of them raise; after that, one with
    an error of its own prints it and ends at once (`processes.end_alone`), and the others with it.
    """
    processes.initialize()
    degrade(sys.stdout)
    with processes.together("config", "version of kimi-jax or JAX") as same:
        exact = "float64" in (config.model.dtype, config.model.param_dtype)
        if exact and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            raise ConfigError('float64 needs JAX_ENABLE_X64=1 or jax.config.update("jax_enable_x64", True)')
        if restart and resume_from is not None:
            raise ConfigError(f"--restart removes the checkpoint that --resume-from {resume_from} names; choose one")
        if config.train.tensorboard:
            metrics.check_tensorboard()
        same["config"] = without_paths(to_dict(config)), restart, resume_from
        same["version of kimi-jax or JAX"] = versions()
        mesh = make_mesh(config.mesh)
    with on_mesh(mesh), ExitStack() as stack:
        folder = Path(config.train.runs_dir) / config.name
        with processes.together():
            if processes.is_lead():
                stack.enter_context(locked(folder))
                settle_restart(folder)
        return _run(config, folder, restart, resume_from, stack)


@dataclass(frozen=True)
class Run:
    """What a run works with from its setup on."""

    config: Config
    folder: Path
    data: Data
    checkpoints: Checkpoints
    log: metrics.Metrics
    stop: Stop
    console: Console
    split: NamedSharding | None
    """How a batch is sharded."""

    @property
    def part(self) -> tuple[int, int]:
        """This process's part of a batch's rows."""
        return process_part(self.split, self.config.data.batch_size)


def _run(config: Config, folder: Path, restart: bool, resume_from: int | None, stack: ExitStack) -> dict[str, Any]:
    """`run_training`, on the current mesh and in a folder that nobody else uses."""
    heap.keep_freed()
    notebook = Console().is_jupyter  # there rich would want widgets; plain lines do
    terminal = False if notebook else None
    console = Console(highlight=False, force_jupyter=False, force_terminal=terminal, quiet=not processes.is_lead())
    held = folder / CHECKPOINTS
    with processes.together():
        optimizer = make_optimizer(config)
        shapes = abstract_state(config, optimizer)
        process_part(batch_sharding(config), config.data.batch_size)
        check_folder(folder, config, checkpoint.host_bytes(shapes))
        # What is rejected is rejected before anything is removed.
        if restart:
            check_removable(folder)
            check_start(folder, config, [])
            if config.train.init_from:
                check_initial(config.train.init_from, config)
        fresh = _data(config, None, console) if restart else None
    with processes.together():
        if restart and processes.is_lead():
            remove_run(folder)
    stop = stack.enter_context(signals())
    keep = {"keep_last": config.train.keep_last, "keep_every": config.train.keep_every}
    with ExitStack() as reading:
        source: Checkpoints | None = None
        if held.is_dir():
            with processes.end_alone():
                source = reading.enter_context(checkpoint.opened(held))
        with processes.together("latest checkpoint", "training text or tokenizer") as same:
            step, saved, final = _resumed(config, folder, source, resume_from, console)
            same["latest checkpoint"] = step
            if saved is None and config.train.init_from and not restart:
                check_initial(config.train.init_from, config)
            tokenizer = None if saved is None else load_tokenizer(folder / "tokenizer")
            data = None if final is not None else fresh or _data(config, tokenizer, console)
            if data is not None and saved is not None and saved["data"] != data.fingerprint:
                raise ConfigError(
                    f"the training text is not that of the checkpoint in {folder} (documents or tokenizer changed); "
                    "restore it, or start over with --restart"
                )
            same["training text or tokenizer"] = data and data.fingerprint
        if data is None:
            assert final is not None
            console.print(f"This run is finished at step {config.train.steps}; --restart starts over.")
            print_summary(console, folder, final)
            return final
        with processes.end_alone(Interrupted, TooManySkips):
            if source is None or saved is None:
                state = _first_state(config, data, folder)
            else:
                state = source.restore(shapes, step)
                console.print(f"Continuing from step {step}.")
                change = rate_change(saved, config, step, int(state.step) - int(state.skipped))
                if change is not None:
                    console.print(change, soft_wrap=True)
    with processes.end_alone(Interrupted, TooManySkips):
        stop.agreed(now=True)
        stop.check(f"Stopped before the first step. The same command starts: {resume_command()}")
        with processes.together():
            if processes.is_lead():
                if resume_from is not None:
                    _set_aside(held, step, console)
                files.write_json(folder / "config.json", to_dict(config))
        checkpoints = stack.enter_context(checkpoint.opened(held, **keep, write=True))
        log = metrics.Metrics(folder, first_step=step, tensorboard=config.train.tensorboard, write=processes.is_lead())
        stack.callback(log.close)
        run = Run(config, folder, data, checkpoints, log, stop, console, batch_sharding(config))
        batches = data.train_iterator(seed=config.train.seed, shard=run.part)
        if saved is not None:
            batches.set_state(saved["batches"])
        state = _loop(run, state, batches)
        checkpoints.wait()  # a run is finished when its last checkpoint is whole
        final = _finish(run, state)
    print_summary(console, folder, final)
    return final


def _resumed(
    config: Config, folder: Path, source: Checkpoints | None, resume_from: int | None, console: Console
) -> tuple[int, dict | None, dict | None]:
    """The step to resume from and its checkpoint's metadata, or 0 and None; the final record of a finished run.

    Raises:
        ConfigError: the run cannot resume from there, or has lost its checkpoints.
    """
    found = metrics.load(folder / "metrics.jsonl")
    if found.damaged:
        console.print(found.report(folder / "metrics.jsonl"), markup=False, soft_wrap=True)
    latest = source.latest if source and resume_from is None else resume_from
    if latest is None:
        check_start(folder, config, found.records)
        return 0, None, None
    if source is None:
        raise ConfigError(f"{folder} has no checkpoint to resume from; leave out --resume-from {latest}")
    saved = source.metadata(latest)
    check_saved(saved, latest, config, folder)
    return latest, saved, final_record(found.records, latest) if latest == config.train.steps else None


def _first_state(config: Config, data: Data, folder: Path) -> State:
    """The state before the first step, and on the disk the tokenizer that belongs to it."""
    if processes.is_lead():
        data.tokenizer.save(folder / "tokenizer")
    begin = config.train.init_from
    return init_state(config, make_optimizer(config), initial_parameters(begin, config) if begin else None)


def _set_aside(held: Path, step: int, console: Console) -> None:
    """Renames the checkpoints after a step, so that none of them is the latest one any more."""
    later = sorted((path for path in held.iterdir() if path.name.isdigit() and int(path.name) > step), key=str)
    for path in later:
        aside = path.with_name(path.name + SET_ASIDE)
        try:
            if aside.exists():
                shutil.rmtree(aside)
            path.rename(aside)
        except OSError as error:
            raise files.problem(error, path, "rename") from error
        console.print(f"Set aside the later checkpoint {path.name}: {aside}", markup=False, soft_wrap=True)


def _loop(run: Run, state: State, batches) -> State:
    """Steps until the end. Step n is dispatched before the metrics of n - 1 are read, so the device never waits."""
    config, train, data = run.config, run.config.train, run.data
    start = done = int(state.step)
    part = run.part
    step_fn = training_step(at_step(config, start))
    pending: tuple[int, dict, Batch] | None = None

    def save():
        # The stream's state is that of the batches handed out, so it belongs to this state exactly.
        metadata = {"config": to_dict(config), "batches": batches.get_state(), "data": data.fingerprint}
        run.checkpoints.save(done, state, metadata)

    def flush():
        nonlocal pending
        if pending is not None:
            record, pending = pending, None
            display.show(_record(run.log, *record, since=display.interval()))
            if int(record[1]["skips_in_a_row"]) >= train.max_skips:
                raise _too_many(record, run.checkpoints, run.folder)

    with Display(run.console, train.steps, start) as display:
        while done < train.steps:
            if done == train.qat_from_step:
                step_fn = training_step(at_step(config, done))
            batch = next(batches)
            state, results = step_fn(state, to_devices(batch, run.split, part))
            flush()
            done += 1
            pending = (done, results, batch)
            last = done == train.steps
            due = done % train.checkpoint_every == 0 or last
            if done % train.eval_every == 0 and not last:
                flush()
                some = data.validation_batches(max_tokens=train.eval_tokens)
                eval_step = evaluation_step(at_step(config, done))
                result = evaluate_batches(eval_step, state.params, some, cut=run.split)
                run.log.write(done, "eval", **display.evaluated(result))
                run.log.plot(run.folder / "curves.png")
            stopping = run.stop.agreed(now=last)  # read once: a signal from here on waits for the next step
            if stopping or due:
                flush()
                save()
            if stopping:
                run.stop.check(f"Stopped and saved at step {done}. The same command goes on: {resume_command()}")
        flush()
    return state


def _finish(run: Run, state: State) -> dict[str, Any]:
    """The last evaluation, over all validation text; the sample; the final record; the curves."""
    config, data = at_step(run.config, run.config.train.steps), run.data
    with run.console.status("Evaluating on all validation text"):
        batches = data.validation_batches()
        result = evaluate_batches(evaluation_step(config), state.params, batches, run.stop, cut=run.split)
    final: dict[str, Any] = {**result, **_packed(data, run.console)}
    run.stop.agreed(now=True)
    run.stop.check(f"Stopped; training is finished. The same command ends it: {resume_command()}")
    try:
        if config.train.sample_tokens:
            text = sample(config, data.tokenizer, state.params)
            if processes.is_lead():
                files.write(run.folder / "sample.txt", text)
    except Exception:
        # What the run was for is kept all the same. After an interrupt it is not: the same command samples then.
        run.log.write(config.train.steps, "final", **final)
        raise
    run.log.write(config.train.steps, "final", **final)
    run.log.plot(run.folder / "curves.png")
    return {"step": config.train.steps, "kind": "final", **final}


def _packed(data: Data, console: Console) -> dict[str, Any]:
    """What xz makes of the validation text, to compare with; it is read again, and may be gone by now."""
    try:
        raw = data.validation_bytes()
    except (ConfigError, OSError) as error:
        console.print(f"cannot read the validation text again: {error}", markup=False, soft_wrap=True)
        return {"validation_bytes": None, "xz_bits_per_byte": None}
    packed = len(lzma.compress(raw, preset=9))
    return {"validation_bytes": len(raw), "xz_bits_per_byte": 8 * packed / len(raw) if raw else None}


def _data(config: Config, tokenizer: Tokenizer | None, console: Console) -> Data:
    """The corpus and its tokenizer, and on the console what there is."""
    with console.status("Reading and tokenising text"):
        data = pipeline.load(config.data, config.model, tokenizer)
    check_sample(config, data.tokenizer)
    console.print(data.summary(), soft_wrap=True)
    return data


def _record(log, step: int, results: dict, batch: Batch, *, since: float) -> dict[str, Any]:
    """Reads a step's metrics from the device and writes them."""
    values: dict[str, Any] = {}
    for name, value in results.items():
        array = np.asarray(value)
        values[name] = array.tolist() if array.ndim else array.item()
    values["tokens_per_second"] = values["tokens"] / since if since > 0 else math.nan
    log.write(step, "train", **values)
    return {"step": step, **values}


def _too_many(record, checkpoints: Checkpoints, folder: Path) -> TooManySkips:
    step, results, batch = record
    checkpoints.wait()
    newest = "there is no checkpoint yet" if checkpoints.latest is None else f"the newest is step {checkpoints.latest}"
    spike = np.isfinite(results["loss"]) and np.isfinite(results["grad_norm"])
    fix = "lower optim.learning_rate" + (" or raise train.spike_threshold" if spike else "")
    if processes.is_lead():
        with files.writing(folder / "skipped_batch.npz") as file:
            np.savez(file, **batch)  # its own rows, if there are several processes
    return TooManySkips(
        f"{int(results['skips_in_a_row'])} steps in a row were skipped up to step {step}: the last loss is "
        f"{float(results['loss']):.4g} and its gradient's norm {float(results['grad_norm']):.4g}. Parameters are "
        f"those of the last good step, and of checkpoints {newest}; the batch is in "
        f"{folder / 'skipped_batch.npz'}; {fix}"
    )
