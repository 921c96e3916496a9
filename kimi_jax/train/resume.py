"""Whether a run may resume from a checkpoint: what may have changed and what must match."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from kimi_jax.config import Config, ConfigError, from_dict, to_dict
from kimi_jax.train import metrics

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


def check_saved(saved: dict, latest: int, config: Config, folder: Path) -> dict | None:
    """Refuses to go on from a checkpoint that is not this run's; gives the final record if the run is finished."""
    check_same(saved["config"], to_dict(config), folder)
    steps = config.train.steps
    if latest > steps:
        raise ConfigError(
            f"{folder} is at step {latest}, past train.steps={steps}; raise it, choose another --name, or "
            "begin anew with --restart"
        )
    return _final_record(folder, steps) if latest == steps else None


def without_paths(config: dict) -> dict[str, Any]:
    leaves = _leaves(json.loads(json.dumps(config)))
    return {key: leaf for key, leaf in leaves.items() if not key.endswith((".path", ".runs_dir", ".init_from"))}


def versions() -> tuple[str, str]:
    try:
        return version("kimi-jax"), jax.__version__
    except PackageNotFoundError:  # imported from a checkout that is not installed
        return "", jax.__version__


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


def _final_record(folder: Path, steps: int) -> dict | None:
    records = [r for r in metrics.read(folder / "metrics.jsonl") if r["kind"] == "final" and r["step"] == steps]
    return records[-1] if records else None
