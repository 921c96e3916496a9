"""Where a run's numbers go: a JSONL file always, TensorBoard on request, and the plot of them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kimi_jax.config import ConfigError


class Metrics:
    """Appends one JSON object a line to `metrics.jsonl`; on resume, lines of steps not in the checkpoint go.

    With several processes one writes, and the others' `Metrics` swallow what they are given.
    """

    def __init__(self, folder: Path, *, first_step: int, tensorboard: bool = False, write: bool = True):
        self.path = folder / "metrics.jsonl"
        self._writes, self._board = write, None
        if not write:
            self._file = Path(os.devnull).open("w")  # noqa: SIM115
            return
        kept = [record for record in read(self.path) if record["step"] <= first_step]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(_line(record) for record in kept))
        os.replace(partial, self.path)
        self._board = _board(folder, first_step) if tensorboard else None
        self._file = self.path.open("a")

    def plot(self, target: Path) -> None:
        """Draws what has been written so far; see `plot`."""
        if self._writes:
            plot(self.path, target)

    def write(self, step: int, kind: str, **values: Any) -> None:
        """One record: `step` counts finished steps, `kind` is train, eval or final."""
        self._file.write(_line({"step": step, "kind": kind, **values}))
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read(path: str | Path) -> Iterator[dict]:
    """Records of a `metrics.jsonl`; a last line cut off by a crash is left out."""
    path = Path(path)
    if not path.is_file():
        return
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def _line(record: dict) -> str:
    # NaN and infinity are no JSON: null keeps the file readable for strict parsers.
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite) + "\n"


def _board(folder: Path, first_step: int):
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ConfigError("train.tensorboard needs the extra: pip install 'kimi-jax[tensorboard]'") from error
    return SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)


def plot(path: str | Path, target: str | Path) -> None:
    """Draws a run's `metrics.jsonl` as a picture of four panels: bits per byte, rates and norms, logits, experts."""
    from matplotlib.figure import Figure  # no pyplot: a notebook keeps its own backend

    records = list(read(path))
    train = [record for record in records if record["kind"] == "train"]
    evals = [record for record in records if record["kind"] in ("eval", "final")]
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2)

    def line(axis, rows, key, **style):
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            axis.plot(*zip(*points, strict=True), **style)

    bits, norms, logits, experts = axes.flat
    line(bits, train, "bits_per_byte", label="train", color="tab:blue", alpha=0.5, lw=1)
    line(bits, evals, "bits_per_byte", label="validation", color="tab:red", marker="o", ms=3)
    bits.set(ylabel="bits per byte", title="Loss")
    line(norms, train, "grad_norm", label="gradient norm", color="tab:green", lw=1)
    for key, color in (("update_rms_muon", "tab:purple"), ("update_rms_adamw", "tab:orange")):
        line(norms, train, key, label=key.replace("_", " "), color=color, lw=1)
    norms.set(yscale="log", title="Gradient and updates")
    line(logits, train, "max_logit", label="largest attention logit", color="tab:brown", lw=1)
    logits.set(title="Attention (QK-Clip keeps heads below its threshold)")
    line(experts, train, "max_violation", label="max violation (max load / mean load - 1)", color="tab:cyan", lw=1)
    line(experts, train, "dead_experts", label="experts without a token", color="black", lw=1)
    experts.set(title="Expert balance, worst layer")
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    partial = Path(target).with_suffix(".partial.png")
    figure.savefig(partial, dpi=110)
    os.replace(partial, target)
