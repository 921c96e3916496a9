"""A run from first step to last: data, the jitted step, metrics, evaluation, checkpoints, and what stops it."""

from __future__ import annotations

import json
import lzma
import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kimi_jax.config import Config, ConfigError, Source, at_step, from_dict, to_dict
from kimi_jax.data import pipeline
from kimi_jax.data.pipeline import Data
from kimi_jax.infer.generate import stream
from kimi_jax.model.kimi import Kimi
from kimi_jax.model.param import with_arrays
from kimi_jax.parallel import mesh as sharding
from kimi_jax.parallel import processes as distributed
from kimi_jax.store import checkpoint
from kimi_jax.store import open as pretrained
from kimi_jax.text import tokenizer as tokenizers
from kimi_jax.text.tokenizer import Tokenizer
from kimi_jax.train import heap, metrics
from kimi_jax.train.step import Batch, State, abstract_state, init_state, make_eval_step, make_optimizer, make_step

MAY_CHANGE = {
    "name",
    "model.remat",
    *(f"train.{name}" for name in ("steps", "accumulation", "eval_every", "eval_tokens", "checkpoint_every")),
    *(f"train.{name}" for name in ("keep_last", "keep_every", "spike_threshold", "max_skips", "tensorboard")),
    *(f"train.{name}" for name in ("runs_dir", "sample_prompt", "sample_tokens", "qat_from_step")),
    "train.init_from",
    *("model.moe.balance", "model.moe.transport"),
}
"""Settings that a resumed run may change. Paths may too, as long as the data behind them are the same."""

HOW = ("mesh.", "rules.", "slices.")
"""Beginnings of settings of where a run computes: it goes on on any mesh."""

ARTIFACTS = (
    *("config.json", "metrics.jsonl", "curves.png", "sample.txt", "skipped_batch.npz"),
    *("checkpoints", "tensorboard", "tokenizer"),
)


class TooManySkips(RuntimeError):
    """Losses or gradients stayed bad for `train.max_skips` steps."""


class Interrupted(Exception):
    """The user or the scheduler asked the run to stop; everything is saved."""

    def __init__(self, signum: int, message: str):
        super().__init__(message)
        self.signum = signum


def run(config: Config, *, restart: bool = False) -> dict[str, Any]:
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
    distributed.initialize()
    with distributed.together("config", "version of kimi-jax or JAX") as same:
        exact = "float64" in (config.model.dtype, config.model.param_dtype)
        if exact and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            raise ConfigError('float64 needs JAX_ENABLE_X64=1 or jax.config.update("jax_enable_x64", True)')
        same["config"] = _without_paths(to_dict(config)), restart
        same["version of kimi-jax or JAX"] = _versions()
        mesh = sharding.make_mesh(config.mesh)
    with sharding.on(mesh):
        return _run(config, restart)


def _run(config: Config, restart: bool) -> dict[str, Any]:
    """`run`, on the current mesh."""
    heap.keep_freed()
    notebook = Console().is_jupyter  # there rich would want widgets; plain lines do
    terminal = False if notebook else None
    console = Console(highlight=False, force_jupyter=False, force_terminal=terminal, quiet=not distributed.is_lead())
    folder = Path(config.train.runs_dir) / config.name
    with distributed.together():
        optimizer = make_optimizer(config)
        shapes = abstract_state(config, optimizer)
        part = sharding.process_part(batch_sharding(config), config.data.batch_size)
        _check_folder(folder, config, checkpoint.host_bytes(shapes))
        # What is refused is refused before anything is removed.
        if config.train.init_from and (restart or not (folder / "checkpoints").is_dir()):
            pretrained.check(config.train.init_from, config)
        fresh = _data(config, None, console) if restart else None
    with distributed.together():
        if restart and distributed.is_lead():
            _remove(folder)
    with ExitStack() as stack:
        stop = stack.enter_context(_signals())
        with distributed.end_alone():
            keep = {"keep_last": config.train.keep_last, "keep_every": config.train.keep_every}
            checkpoints = stack.enter_context(checkpoint.opened(folder / "checkpoints", **keep, write=True))
        with distributed.together("latest checkpoint", "training text or tokenizer") as same:
            latest = same["latest checkpoint"] = checkpoints.latest
            saved = None if latest is None else checkpoints.metadata()
            final = None if saved is None else _check_saved(saved, latest or 0, config, folder)
            tokenizer = None if saved is None else tokenizers.load(folder / "tokenizer")
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
            with distributed.end_alone(Interrupted, TooManySkips):
                final = _train(config, data, part, saved, checkpoints, folder, stop, console)
    _print_summary(console, folder, final)
    return final


def _check_saved(saved: dict, latest: int, config: Config, folder: Path) -> dict | None:
    """Refuses to go on from a checkpoint that is not this run's; gives the final record if the run is finished."""
    check_same(saved["config"], to_dict(config), folder)
    steps = config.train.steps
    if latest > steps:
        raise ConfigError(
            f"{folder} is at step {latest}, past train.steps={steps}; raise it, choose another --name, or "
            "begin anew with --restart"
        )
    return _final_record(folder, steps) if latest == steps else None


def _train(config, data: Data, part, saved, checkpoints, folder: Path, stop, console) -> dict[str, Any]:
    """`run`, of what is set up: the state, the loop and the end."""
    batches = data.train_iterator(seed=config.train.seed, shard=part)
    optimizer = make_optimizer(config)
    if saved is None:
        if distributed.is_lead():
            data.tokenizer.save(folder / "tokenizer")
        begin = config.train.init_from
        state = init_state(config, optimizer, pretrained.parameters(begin, config) if begin else None)
    else:
        state = checkpoints.restore(abstract_state(config, optimizer))
        batches.set_state(saved["batches"])
        console.print(f"Continuing from step {checkpoints.latest}.")
    stop.agreed(now=True)
    stop.check(f"Stopped before the first step. The same command starts: {_command()}")
    lead = distributed.is_lead()
    if lead:
        _write(folder / "config.json", json.dumps(to_dict(config), indent=2) + "\n")
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
    part = sharding.process_part(cut, config.data.batch_size)
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

    with _Display(console, train.steps, start) as display:
        while done < train.steps:
            if done == train.qat_from_step:
                step_fn = training_step(at_step(config, done))
            batch = next(batches)
            state, results = step_fn(state, sharding.to_devices(batch, cut, part))
            flush()
            done += 1
            pending = (done, results, batch)
            last = done == train.steps
            due = done % train.checkpoint_every == 0 or last
            if done % train.eval_every == 0 and not last:
                flush()
                some = data.validation_batches(max_tokens=train.eval_tokens)
                eval_step = evaluation_step(at_step(config, done))
                log.write(done, "eval", **display.evaluated(evaluate(eval_step, state.params, some, cut=cut)))
                log.plot(folder / "curves.png")
            stopping = stop.agreed(now=last)  # read once: a signal from here on waits for the next step
            if stopping or due:
                flush()
                save()
            if stopping:
                stop.check(f"Stopped and saved at step {done}. The same command goes on: {_command()}")
        flush()
    return state


def _finish(config, state, data: Data, log, folder, stop, console) -> dict[str, Any]:
    """The last evaluation, over all validation text; the sample; the curves; the final record."""
    config = at_step(config, config.train.steps)
    with console.status("Evaluating on all validation text"):
        cut = batch_sharding(config)
        result = evaluate(evaluation_step(config), state.params, data.validation_batches(), stop, cut=cut)
    raw = data.validation_bytes()
    packed = len(lzma.compress(raw, preset=9))
    stop.agreed(now=True)
    stop.check(f"Stopped; training is finished. The same command ends it: {_command()}")
    if config.train.sample_tokens:
        model = with_arrays(Kimi(config.model), state.params)
        pieces = sample_text(
            model,
            data.tokenizer,
            config.train.sample_prompt,
            max_new_tokens=config.train.sample_tokens,
            temperature=0.8,
            top_p=0.95,
            key=jax.random.wrap_key_data(state.rng),
            rules=config.rules,
        )
        sample = config.train.sample_prompt + "".join(pieces) + "\n"
        if distributed.is_lead():
            _write(folder / "sample.txt", sample)
    final = {**result, "validation_bytes": len(raw), "xz_bits_per_byte": 8 * packed / len(raw)}
    log.write(config.train.steps, "final", **final)
    log.plot(folder / "curves.png")
    return {"step": config.train.steps, "kind": "final", **final}


def _without_paths(config: dict) -> dict[str, Any]:
    leaves = _leaves(json.loads(json.dumps(config)))
    return {key: leaf for key, leaf in leaves.items() if not key.endswith((".path", ".runs_dir", ".init_from"))}


def _versions() -> tuple[str, str]:
    try:
        return version("kimi-jax"), jax.__version__
    except PackageNotFoundError:  # imported from a checkout that is not installed
        return "", jax.__version__


def _unnamed(config: Config) -> Config:
    """The config without what no compiled function depends on, so that runs in one process share them."""
    data = replace(config.data, sources=(Source(),), validation=())
    return replace(config, name="any", data=data, train=replace(config.train, qat_from_step=None))


@lru_cache(maxsize=8)
def _jitted_step(config: Config):
    return jax.jit(make_step(config, make_optimizer(config)), donate_argnums=0)


@lru_cache(maxsize=8)
def _jitted_eval_step(config: Config):
    return jax.jit(make_eval_step(config))


def training_step(config: Config):
    """The jitted `step(state, batch)` of a config; it takes the state's memory for its own."""
    return _jitted_step(_unnamed(config))


def evaluation_step(config: Config):
    """The jitted `eval_step(params, batch)` of a config."""
    return _jitted_eval_step(_unnamed(config))


def batch_sharding(config: Config) -> jax.sharding.NamedSharding | None:
    """How a batch `[rows, t]` lies on the current mesh; None without one.

    Raises:
        ConfigError: the mesh does not divide the rows of a micro-batch, or the tokens of a row.
    """
    mesh = sharding.current_mesh()
    if mesh is None:
        return None
    names, sizes = ("batch", "time"), dict(mesh.shape)
    shape = (config.data.batch_size // config.train.accumulation, config.data.sequence_length)
    what = "a micro-batch of data.batch_size / train.accumulation rows of data.sequence_length tokens"
    sharding.check_divides(what, names, shape, sharding.spec(config.rules, names, sizes), sizes)
    return sharding.placed(mesh, config.rules, names)


def evaluate(step, params: dict, batches: Iterable[Batch], stop=None, cut=None) -> dict[str, float]:
    """Sums an evaluation step over batches: `loss` in nats a token, `bits_per_byte`, `tokens`, `bytes`.

    With several processes, each has all batches and hands its own rows to its devices. `cut` is `batch_sharding`.
    """
    sums, num_bytes = [], 0
    for batch in batches:
        if stop is not None and stop.agreed():
            break  # the caller stops too, and throws the numbers away
        num_bytes += int(np.sum(batch["num_bytes"] * (batch["loss_weights"] > 0)))
        batch = {key: value for key, value in batch.items() if key != "num_bytes"}
        sums.append(step(params, sharding.to_devices(batch, cut)))
    nats, tokens = (float(sum(np.float64(part[i]) for part in sums)) for i in (0, 1))
    bits = nats / math.log(2) / max(num_bytes, 1)
    return {"loss": nats / max(tokens, 1), "bits_per_byte": bits, "tokens": tokens, "bytes": num_bytes}


def sample_text(model: Kimi, tokenizer: Tokenizer, prompt: str, **options) -> Iterator[str]:
    """Continues a text; yields what follows as it becomes whole characters."""
    tokens = [tokenizer.bos_id, *map(int, tokenizer.encode(prompt))]
    text = tokenizer.stream()
    for (token,) in stream(model, [tokens], stop=tokenizer.stop_ids, **options):
        if token is not None:
            yield text(token)
    yield text.finish()


def check_same(saved: dict, current: dict, folder: Path) -> None:
    """Refuses to resume a checkpoint of another model, optimizer, data or batch; names each difference."""
    saved = to_dict(from_dict(Config, saved))  # settings younger than the checkpoint have their defaults
    before, now = (_leaves(json.loads(json.dumps(tree))) for tree in (saved, current))
    changed = sorted(
        f"{key}: {before.get(key)!r} in the checkpoint, {now.get(key)!r} now"
        for key in before.keys() | now.keys()
        if before.get(key) != now.get(key)
        and key not in MAY_CHANGE
        and not key.endswith(".path")
        and not key.startswith(HOW)
    )
    if changed:
        raise ConfigError(
            f"{folder} holds a run with other settings:\n  " + "\n  ".join(changed) + "\nSet them back, choose "
            "another --name, or begin anew with --restart"
        )


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        items: Iterable = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    else:
        return {prefix: tree}
    return {path: leaf for key, value in items for path, leaf in _leaves(value, f"{prefix}.{key}".lstrip(".")).items()}


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
    if distributed.is_lead():
        np.savez(folder / "skipped_batch.npz", **batch)  # its own rows, if there are several processes
    return TooManySkips(
        f"{int(results['skips_in_a_row'])} steps in a row were skipped up to step {step}: the last loss is "
        f"{float(results['loss']):.4g} and its gradient's norm {float(results['grad_norm']):.4g}. Parameters are "
        f"those of the last good step, and of checkpoints {newest}; the batch is in "
        f"{folder / 'skipped_batch.npz'}; {mend}"
    )


class _Display:
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, steps: int, start: int):
        self.console, self.steps, self.start = console, steps, start
        self.live = console.is_terminal
        self.fields = "loss {loss:.3f}  bits/byte {bits_per_byte:.3f}"
        self.validation = ""
        # The median of the last steps is shown: one that waits for a file, or is read beside another, is an outlier.
        self.rates: deque[float] = deque(maxlen=31)
        self.clock = time.perf_counter()
        self.began = self.clock
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
            disable=not self.live,
        )
        self.task = self.progress.add_task("compiling the step", total=steps, completed=start)

    def __enter__(self) -> _Display:
        self.progress.start()
        return self

    def __exit__(self, *_) -> None:
        self.progress.stop()

    def interval(self) -> float:
        """Seconds since the last call."""
        before, self.clock = self.clock, time.perf_counter()
        return self.clock - before

    def show(self, record: dict) -> None:
        done = record["step"] - self.start
        if done > 1:  # the first compiles
            self.rates.append(record["tokens_per_second"])
        text = self.fields.format(**record)
        text += f"  {median(self.rates):,.0f} tokens/s" if self.rates else ""
        text += self.validation
        self.progress.update(self.task, completed=record["step"], description=text)
        if done == 1:
            self.began = self.clock  # compilation is over
        if not self.live and (done in (1, 10) or record["step"] % max(1, self.steps // 20) == 0):
            left = (self.clock - self.began) / max(done - 1, 1) * (self.steps - record["step"])
            ending = f"  {left:,.0f} s left" if done > 1 else ""
            self.console.print(f"step {record['step']}/{self.steps}  {text}{ending}", soft_wrap=True)

    def evaluated(self, result: dict) -> dict:
        self.validation = f"  validation {result['bits_per_byte']:.3f}"
        self.interval()  # an evaluation is not training time
        return result


class _Stop:
    """Remembers that a signal asked to stop."""

    signum: int | None = None
    """The signal that this process got."""
    verdict: int | None = None
    """The signal that all processes have agreed to stop for."""
    asked: jax.Array | None = None
    """What the processes are about to agree on, once the devices come to it."""

    def __call__(self, signum: int, frame) -> None:
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum
        print("\nStopping at the next safe point; again to stop at once.", file=sys.stderr)

    def agreed(self, *, now: bool = False) -> bool:
        """Whether any process was asked to stop: all of them save, or none. A collective call.

        With several processes, it is what they were asked before the last call, unless `now`: this call's question
        is queued behind the step just dispatched, and to read it would leave the devices idle until the next one.
        """
        if jax.process_count() == 1:
            self.verdict = self.signum
            return self.verdict is not None
        before, self.asked = self.asked, distributed.largest(self.signum or 0)
        read = self.asked if now else before
        self.verdict = None if read is None else int(read) or None
        return self.verdict is not None

    def check(self, message: str) -> None:
        if self.verdict is not None:
            raise Interrupted(self.verdict, message)


@contextmanager
def _signals():
    """Ctrl-C and SIGTERM ask the loop to save and stop; a second one interrupts at once."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may listen to signals
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_folder(folder: Path, config: Config, state_bytes: int) -> None:
    """The disk can be written and holds the checkpoints to come, one in flight included."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write_test_{jax.process_index()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error}; choose another --train.runs-dir") from error
    needed = state_bytes * (config.train.keep_last + 1)
    free = shutil.disk_usage(folder).free + _size(folder)
    if needed > free:
        raise ConfigError(
            f"{folder}: {config.train.keep_last} checkpoints and one being written need {needed:,} bytes, "
            f"{free:,} are free; choose another --train.runs-dir or a smaller --train.keep-last"
        )


def _size(folder: Path) -> int:
    """Bytes of all files in a folder, as far as other processes do not take them away meanwhile."""
    held = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                held += os.stat(os.path.join(parent, name)).st_size
    return held


def _remove(folder: Path) -> None:
    """Removes what a run writes, and nothing else that may lie in the folder."""
    for name in ARTIFACTS:
        path = folder / name
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _final_record(folder: Path, steps: int) -> dict | None:
    records = [r for r in metrics.read(folder / "metrics.jsonl") if r["kind"] == "final" and r["step"] == steps]
    return records[-1] if records else None


def _print_summary(console: Console, folder: Path, final: dict) -> None:
    sample = folder / "sample.txt"
    if sample.is_file():
        console.rule("sample", style="dim")
        console.print(sample.read_text().rstrip(), markup=False, soft_wrap=True)
        console.rule(style="dim")
    console.print(f"Curves: {folder / 'curves.png'}   numbers: {folder / 'metrics.jsonl'}", soft_wrap=True)
    console.print(f"xz -9 on the same validation bytes: {final['xz_bits_per_byte']:.2f}")
    console.print(f"val bits per byte: {final['bits_per_byte']:.2f}")


def _command() -> str:
    """The command that goes on with this run, as a shell takes it."""
    program, *arguments = sys.argv
    if "ipykernel" in program:
        return "run the cell again"
    start = ["python", "-m", "kimi_jax"] if Path(program).name == "__main__.py" else [program]
    if program.endswith(".py") and len(start) == 1:
        start = ["python", program]
    return shlex.join([*start, *(part for part in arguments if part not in ("--restart", "--no-restart"))])


def _write(path: Path, text: str) -> None:
    partial_path = path.with_name(path.name + ".partial")
    partial_path.write_text(text)
    os.replace(partial_path, path)
