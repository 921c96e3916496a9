"""A run from first step to last: data, the jitted step, metrics, evaluation and checkpoints."""

from __future__ import annotations

import json
import lzma
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from kimi_jax.config import Config, ConfigError, at_step, to_dict
from kimi_jax.data import pipeline
from kimi_jax.data.pipeline import Data
from kimi_jax.infer.generate import stream_text
from kimi_jax.infer.sampling import SEEDS, Sampling
from kimi_jax.model.kimi import Kimi
from kimi_jax.model.param import with_arrays
from kimi_jax.parallel import processes
from kimi_jax.parallel.batch import batch_sharding, process_part, to_devices
from kimi_jax.parallel.mesh import make_mesh, on_mesh
from kimi_jax.store import checkpoint
from kimi_jax.store.open import check_initial, initial_parameters
from kimi_jax.text.load import load_tokenizer
from kimi_jax.text.tokenizer import Tokenizer
from kimi_jax.train import heap, metrics
from kimi_jax.train.display import Display, print_summary
from kimi_jax.train.evaluate import evaluate_batches
from kimi_jax.train.folder import check_folder, remove_run, write_text
from kimi_jax.train.resume import check_saved, versions, without_paths
from kimi_jax.train.signals import Interrupted, resume_command, signals
from kimi_jax.train.step import Batch, State, abstract_state, evaluation_step, init_state, make_optimizer, training_step


class TooManySkips(RuntimeError):
    """Losses or gradients stayed bad for `train.max_skips` steps."""


def run_training(config: Config, *, restart: bool = False) -> dict[str, Any]:
    """Trains from the latest checkpoint of the run's folder, or from the start, to `config.train.steps`.

    The folder `config.train.runs_dir / config.name` gets `config.json`, `metrics.jsonl`, `curves.png`, `sample.txt`
    and `checkpoints/`. A run that is finished prints its summary again.

    Args:
        config: all settings.
        restart: removes what an earlier run of this name left, and begins anew.

    Returns:
        The final record of `metrics.jsonl`: `bits_per_byte` on the validation text, `xz_bits_per_byte`, ...

    Raises:
        ConfigError: a setting, checkpoint, tokenizer, data or disk that cannot work, before training starts.
        Interrupted: after Ctrl-C or SIGTERM; the state is saved.
        TooManySkips: the last good checkpoint is kept, and the batch is in `skipped_batch.npz`.

    With several processes, what one of them raises before training starts all of them raise; after that, one with
    an error of its own prints it and ends at once (`distributed.end_alone`), and the others with it.
    """
    processes.initialize()
    with processes.together("config", "version of kimi-jax or JAX") as same:
        exact = "float64" in (config.model.dtype, config.model.param_dtype)
        if exact and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            raise ConfigError('float64 needs JAX_ENABLE_X64=1 or jax.config.update("jax_enable_x64", True)')
        same["config"] = without_paths(to_dict(config)), restart
        same["version of kimi-jax or JAX"] = versions()
        mesh = make_mesh(config.mesh)
    with on_mesh(mesh):
        return _run(config, restart)


def _run(config: Config, restart: bool) -> dict[str, Any]:
    """`run`, on the current mesh."""
    heap.keep_freed()
    notebook = Console().is_jupyter  # there rich would want widgets; plain lines do
    terminal = False if notebook else None
    console = Console(highlight=False, force_jupyter=False, force_terminal=terminal, quiet=not processes.is_lead())
    folder = Path(config.train.runs_dir) / config.name
    with processes.together():
        optimizer = make_optimizer(config)
        shapes = abstract_state(config, optimizer)
        part = process_part(batch_sharding(config), config.data.batch_size)
        check_folder(folder, config, checkpoint.host_bytes(shapes))
        # What is refused is refused before anything is removed.
        if config.train.init_from and (restart or not (folder / "checkpoints").is_dir()):
            check_initial(config.train.init_from, config)
        fresh = _data(config, None, console) if restart else None
    with processes.together():
        if restart and processes.is_lead():
            remove_run(folder)
    with ExitStack() as stack:
        stop = stack.enter_context(signals())
        with processes.end_alone():
            keep = {"keep_last": config.train.keep_last, "keep_every": config.train.keep_every}
            checkpoints = stack.enter_context(checkpoint.opened(folder / "checkpoints", **keep, write=True))
        with processes.together("latest checkpoint", "training text or tokenizer") as same:
            latest = same["latest checkpoint"] = checkpoints.latest
            saved = None if latest is None else checkpoints.metadata()
            final = None if saved is None else check_saved(saved, latest or 0, config, folder)
            tokenizer = None if saved is None else load_tokenizer(folder / "tokenizer")
            data = None if final is not None else fresh or _data(config, tokenizer, console)
            if data is not None and saved is not None and saved["data"] != data.fingerprint:
                raise ConfigError(
                    f"the training text is not that of the checkpoint in {folder} (documents or tokenizer changed); "
                    "restore it, or begin anew with --restart"
                )
            same["training text or tokenizer"] = data and data.fingerprint
        if data is None:
            assert final is not None
            console.print(f"This run is finished at step {config.train.steps}; --restart begins anew.")
        else:
            with processes.end_alone(Interrupted, TooManySkips):
                final = _train(config, data, part, saved, checkpoints, folder, stop, console)
    print_summary(console, folder, final)
    return final


def _train(config, data: Data, part, saved, checkpoints, folder: Path, stop, console) -> dict[str, Any]:
    """`run`, of what is set up: the state, the loop and the end."""
    batches = data.train_iterator(seed=config.train.seed, shard=part)
    optimizer = make_optimizer(config)
    if saved is None:
        if processes.is_lead():
            data.tokenizer.save(folder / "tokenizer")
        begin = config.train.init_from
        state = init_state(config, optimizer, initial_parameters(begin, config) if begin else None)
    else:
        state = checkpoints.restore(abstract_state(config, optimizer))
        batches.set_state(saved["batches"])
        console.print(f"Continuing from step {checkpoints.latest}.")
    stop.agreed(now=True)
    stop.check(f"Stopped before the first step. The same command starts: {resume_command()}")
    lead = processes.is_lead()
    if lead:
        write_text(folder / "config.json", json.dumps(to_dict(config), indent=2) + "\n")
    log = metrics.Metrics(folder, first_step=int(state.step), tensorboard=config.train.tensorboard, write=lead)
    try:
        state = _loop(config, state, data, batches, checkpoints, log, folder, stop, console)
        checkpoints.wait()  # a run is finished when its last checkpoint is whole
        return _finish(config, state, data, log, folder, stop, console)
    finally:
        log.close()


def _loop(config, state, data: Data, batches, checkpoints, log, folder, stop, console) -> State:
    """Steps until the end. Step n is dispatched before the metrics of n - 1 are read, so the device never waits."""
    train = config.train
    cut = batch_sharding(config)
    part = process_part(cut, config.data.batch_size)
    start = done = int(state.step)
    step_fn = training_step(at_step(config, start))
    pending: tuple[int, dict, Batch] | None = None

    def save():
        # The stream's state is that of the batches handed out, so it belongs to this state exactly.
        metadata = {"config": to_dict(config), "batches": batches.get_state(), "data": data.fingerprint}
        checkpoints.save(done, state, metadata)

    def flush():
        nonlocal pending
        if pending is not None:
            record, pending = pending, None
            display.show(_record(log, *record, since=display.interval()))
            if int(record[1]["skips_in_a_row"]) >= train.max_skips:
                raise _too_many(record, checkpoints, folder)

    with Display(console, train.steps, start) as display:
        while done < train.steps:
            if done == train.qat_from_step:
                step_fn = training_step(at_step(config, done))
            batch = next(batches)
            state, results = step_fn(state, to_devices(batch, cut, part))
            flush()
            done += 1
            pending = (done, results, batch)
            last = done == train.steps
            due = done % train.checkpoint_every == 0 or last
            if done % train.eval_every == 0 and not last:
                flush()
                some = data.validation_batches(max_tokens=train.eval_tokens)
                eval_step = evaluation_step(at_step(config, done))
                log.write(done, "eval", **display.evaluated(evaluate_batches(eval_step, state.params, some, cut=cut)))
                log.plot(folder / "curves.png")
            stopping = stop.agreed(now=last)  # read once: a signal from here on waits for the next step
            if stopping or due:
                flush()
                save()
            if stopping:
                stop.check(f"Stopped and saved at step {done}. The same command goes on: {resume_command()}")
        flush()
    return state


def _finish(config, state, data: Data, log, folder, stop, console) -> dict[str, Any]:
    """The last evaluation, over all validation text; the sample; the curves; the final record."""
    config = at_step(config, config.train.steps)
    with console.status("Evaluating on all validation text"):
        cut = batch_sharding(config)
        result = evaluate_batches(evaluation_step(config), state.params, data.validation_batches(), stop, cut=cut)
    raw = data.validation_bytes()
    packed = len(lzma.compress(raw, preset=9))
    stop.agreed(now=True)
    stop.check(f"Stopped; training is finished. The same command ends it: {resume_command()}")
    if config.train.sample_tokens:
        model = with_arrays(Kimi(config.model), state.params)
        seed = config.train.seed % SEEDS
        drawn = Sampling(temperature=0.8, top_p=0.95, max_new_tokens=config.train.sample_tokens, seed=seed)
        pieces = stream_text(model, data.tokenizer, config.train.sample_prompt, drawn, rules=config.rules)
        try:
            text = "".join(pieces)
        except FloatingPointError as error:  # training is done, and its results count
            text = f"[no sample: {error}]"
        sample = config.train.sample_prompt + text + "\n"
        if processes.is_lead():
            write_text(folder / "sample.txt", sample)
    final = {**result, "validation_bytes": len(raw), "xz_bits_per_byte": 8 * packed / len(raw)}
    log.write(config.train.steps, "final", **final)
    log.plot(folder / "curves.png")
    return {"step": config.train.steps, "kind": "final", **final}


def _data(config: Config, tokenizer: Tokenizer | None, console: Console) -> Data:
    """The corpus and its tokenizer, and on the console what there is."""
    with console.status("Reading and tokenising text"):
        data = pipeline.load(config.data, config.model, tokenizer)
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


def _too_many(record, checkpoints, folder: Path) -> TooManySkips:
    step, results, batch = record
    checkpoints.wait()
    newest = "there is no checkpoint yet" if checkpoints.latest is None else f"the newest is step {checkpoints.latest}"
    spike = np.isfinite(results["loss"]) and np.isfinite(results["grad_norm"])
    mend = "lower optim.learning_rate" + (" or raise train.spike_threshold" if spike else "")
    if processes.is_lead():
        np.savez(folder / "skipped_batch.npz", **batch)  # its own rows, if there are several processes
    return TooManySkips(
        f"{int(results['skips_in_a_row'])} steps in a row were skipped up to step {step}: the last loss is "
        f"{float(results['loss']):.4g} and its gradient's norm {float(results['grad_norm']):.4g}. Parameters are "
        f"those of the last good step, and of checkpoints {newest}; the batch is in "
        f"{folder / 'skipped_batch.npz'}; {mend}"
    )
