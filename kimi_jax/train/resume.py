"""Whether a run may resume from a checkpoint: what may have changed and what must match."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kimi_jax import files
from kimi_jax.config import Config, ConfigError, from_dict, to_dict
from kimi_jax.optim.schedule import schedule
from kimi_jax.train.folder import CHECKPOINTS

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
"""Beginnings of the settings of where a run computes: it resumes on any mesh."""


SCHEDULE = {f"optim.{name}" for name in ("schedule_from", "learning_rate", "warmup_fraction")}
"""Settings that may change where a new schedule begins: at the step resumed from."""


def check_start(folder: Path, config: Config, records: list[dict]) -> None:
    """Checks, where a run has no checkpoint, that it has lost none: else it would start over and drop its metrics.

    Raises:
        ConfigError: it has got further than to the second checkpoint; or the schedule is to begin at a later step.
    """
    begin = config.optim.schedule_from
    if begin:
        raise ConfigError(
            f"optim.schedule_from={begin} is for a run that resumes from step {begin}, and {folder} has no checkpoint; "
            "set it to 0"
        )
    last = max((record["step"] for record in records), default=0)
    # One checkpoint may still have been in writing when the run was killed, but a run waits for it before the next.
    held = folder / CHECKPOINTS
    if last > (2 * _interval(folder, config) if held.is_dir() else 0):
        raise ConfigError(
            f"{held} {'is empty' if held.is_dir() else 'is missing'}, though metrics.jsonl goes up to step {last}; "
            "put the checkpoints back, choose another --name, or start over with --restart"
        )


def _interval(folder: Path, config: Config) -> int:
    """Steps from one checkpoint to the next, as they were when the run was last started."""
    try:
        before = files.read_json(folder / "config.json")["train"]["checkpoint_every"]
    except (files.FileError, KeyError, TypeError):
        before = 0
    return max(before if isinstance(before, int) else 0, config.train.checkpoint_every)


def check_saved(saved: dict, step: int, config: Config, folder: Path) -> None:
    """Rejects a checkpoint that this run cannot resume from: of other settings, past its end, or not of training."""
    lacking = {"config", "batches", "data"} - saved.keys()
    if lacking:
        raise ConfigError(
            f"checkpoint {step} in {folder} is not of training: its metadata lacks {', '.join(sorted(lacking))}; "
            f"choose another --name, and begin with its parameters: --train.init-from {folder}"
        )
    check_same(saved["config"], to_dict(config), folder, step)
    steps = config.train.steps
    if step > steps:
        raise ConfigError(
            f"{folder} is at step {step}, past train.steps={steps}; raise it, choose another --name, or "
            "start over with --restart"
        )


def final_record(records: list[dict], steps: int) -> dict | None:
    """The record of a run that is finished at this step, if there is one with its number."""
    for record in reversed(records):
        if record["kind"] == "final" and record["step"] == steps:
            bits = record.get("bits_per_byte", "")
            if bits is None or isinstance(bits, int | float):  # null stands for NaN
                return {"xz_bits_per_byte": None, **record, "bits_per_byte": math.nan if bits is None else bits}
    return None


def rate_change(saved: dict, config: Config, step: int, count: int) -> str | None:
    """A line on where the learning rate goes from here, if its schedule is another than the checkpoint's.

    Args:
        saved: the checkpoint's metadata.
        config: of the run that resumes.
        step: the checkpoint's.
        count: steps that the optimizer has taken: fewer, if some were skipped.
    """
    before = from_dict(Config, saved["config"])
    if (before.optim, before.train.steps) == (config.optim, config.train.steps):
        return None
    last = np.asarray(schedule(before.optim, before.train.steps)(max(count - 1, 0)))
    following = np.asarray(schedule(config.optim, config.train.steps)(count))
    steps = config.train.steps
    line = f"Learning rate: {last:.3g} before, {following:.3g} now, on a schedule that ends at step {steps}"
    if config.optim.schedule_from or steps == before.train.steps:
        return line + "."
    return (
        f"{line} in place of {before.train.steps}. For a new warmup and cosine from here on, add "
        f"--optim.schedule-from {step}, and --optim.learning-rate for its peak."
    )


def without_paths(config: dict) -> dict[str, Any]:
    leaves = _leaves(json.loads(json.dumps(config)))
    return {key: leaf for key, leaf in leaves.items() if not key.endswith((".path", ".runs_dir", ".init_from"))}


def versions() -> tuple[str, str]:
    try:
        return version("kimi-jax"), jax.__version__
    except PackageNotFoundError:  # imported from a checkout that is not installed
        return "", jax.__version__


def check_same(saved: dict, current: dict, folder: Path, step: int = 0) -> None:
    """Rejects a checkpoint of another model, optimizer, data or batch; names each difference."""
    saved = to_dict(from_dict(Config, saved))  # settings younger than the checkpoint have their defaults
    before, now = (_leaves(json.loads(json.dumps(tree))) for tree in (saved, current))
    begin = now.get("optim.schedule_from")
    may_change = MAY_CHANGE | (SCHEDULE if step and begin == step else set())
    changed = sorted(
        f"{key}: {before.get(key)!r} in the checkpoint, {now.get(key)!r} now"
        for key in before.keys() | now.keys()
        if before.get(key) != now.get(key)
        and key not in may_change
        and not key.endswith(".path")
        and not key.startswith(HOW)
    )
    if changed:
        if step and begin != before.get("optim.schedule_from"):
            changed.append(f"(a new schedule begins at the step resumed from: --optim.schedule-from {step})")
        raise ConfigError(
            f"{folder} holds a run with other settings: {'; '.join(changed)}; set them back, choose another --name, or "
            "start over with --restart"
        )


def _leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        items: Iterable = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    else:
        return {prefix: tree}
    return {path: leaf for key, value in items for path, leaf in _leaves(value, f"{prefix}.{key}".lstrip(".")).items()}
