"""Where a run's numbers go: a JSONL file always, TensorBoard on request, and the plot of them."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kimi_jax import files
from kimi_jax.config import ConfigError


class Records(NamedTuple):
    """What a `metrics.jsonl` holds."""

    records: list[dict[str, Any]]
    damaged: int
    """Lines that are no record."""

    def report(self, path: Path) -> str:
        """One line on the damage."""
        return f"{path}: skipped {self.damaged} damaged line{'s' * (self.damaged != 1)}; {len(self.records)} are whole"


class Metrics:
    """Appends one JSON object a line to `metrics.jsonl`; on resume, lines of steps not in the checkpoint are dropped.

    With several processes one writes, and the others' `Metrics` swallow what they are given.
    """

    def __init__(self, folder: Path, *, first_step: int, tensorboard: bool = False, write: bool = True):
        self.path = folder / "metrics.jsonl"
        self._writes, self._board = write, None
        if not write:
            self._file = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            return
        kept = [record for record in load(self.path).records if record["step"] <= first_step]
        files.write(self.path, "".join(map(_line, kept)))
        self._board = _board(folder, first_step) if tensorboard else None
        try:
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise files.problem(error, self.path, "write") from error

    def plot(self, target: Path) -> None:
        """Draws what has been written so far; see `plot`."""
        if self._writes:
            plot(self.path, target)

    def write(self, step: int, kind: str, **values: Any) -> None:
        """One record: `step` counts finished steps, `kind` is train, eval or final."""
        try:
            self._file.write(_line({"step": step, "kind": kind, **values}))
            self._file.flush()
        except OSError as error:
            raise files.problem(error, self.path, "write") from error
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and math.isfinite(value):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        with suppress(OSError):  # `write` has flushed, or has raised for what is still to be written
            self._file.close()
        if self._board is not None:
            self._board.close()


def read(path: str | Path) -> list[dict[str, Any]]:
    """Records of a `metrics.jsonl`; damaged lines are skipped, and counted on standard error.

    A record has a `step` and a `kind`. A last line cut off by a crash is left out without a word.

    Raises:
        FileError: the file cannot be read.
    """
    found = load(path)
    if found.damaged:
        print(found.report(Path(path)), file=sys.stderr)
    return found.records


def load(path: str | Path) -> Records:
    """`read`, with the number of damaged lines in place of the message. Without a file there are no records."""
    records, damaged = [], 0
    for line in _lines(Path(path)):
        record = _parsed(line.strip(b"\0"))  # a power failure may leave a block of zeros before a whole line
        if record is not None:
            records.append(record)
        if record is None or line.startswith(b"\0"):
            damaged += 1
    return Records(records, damaged)


def _lines(path: Path) -> Iterator[bytes]:
    """Lines that are not blank, without their end; a last one that has none is cut off, unless it is zeros."""
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            for line in file:
                if line.strip() and line.endswith(b"\n") | line.startswith(b"\0"):
                    yield line.removesuffix(b"\n")
    except OSError as error:
        raise files.problem(error, path, "read") from error


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    step = record.get("step")
    return record if type(step) is int and 0 <= step < 2**63 else None


def _line(record: dict) -> str:
    # NaN and infinity are no JSON: null keeps the file readable for strict parsers.
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite) + "\n"


def check_tensorboard() -> None:
    """Checks that TensorBoard's writer is installed.

    Raises:
        ConfigError: it is not.
    """
    try:
        import tensorboardX  # noqa: F401
    except ImportError as error:
        raise ConfigError("train.tensorboard needs the extra: pip install 'kimi-jax[tensorboard]'") from error


def _board(folder: Path, first_step: int):
    check_tensorboard()
    from tensorboardX import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)


def plot(path: str | Path, target: str | Path) -> None:
    """Draws a run's `metrics.jsonl` as a picture of four panels: bits per byte, rates and norms, logits, experts."""
    from matplotlib.figure import Figure  # no pyplot: a notebook keeps its own backend

    records = read(path)
    train = [record for record in records if record["kind"] == "train"]
    evals = [record for record in records if record["kind"] in ("eval", "final")]
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2)

    def line(axis, rows, key, **style):
        points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
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
    with files.writing(target) as file:
        figure.savefig(file, format="png", dpi=110)  # type: ignore[arg-type]
