"""What a run shows: a progress bar on a terminal, plain lines elsewhere, a summary at the end."""

from __future__ import annotations

import io
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
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

    def __enter__(self) -> Display:
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


def degrade(stream: TextIO) -> None:
    """Makes a text stream escape what its encoding lacks, where it would raise: in a C locale all but ASCII."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="backslashreplace")


def print_summary(console: Console, folder: Path, final: dict) -> None:
    sample = folder / "sample.txt"
    if sample.is_file():
        console.rule("sample", style="dim")
        text = sample.read_bytes().decode("utf-8", "replace")
        console.print(text.rstrip(), markup=False, soft_wrap=True)
        console.rule(style="dim")
    console.print(
        f"Curves: {folder / 'curves.png'}   numbers: {folder / 'metrics.jsonl'}", markup=False, soft_wrap=True
    )
    packed = final["xz_bits_per_byte"]
    console.print(f"xz -9 on the same validation bytes: {'unknown' if packed is None else format(packed, '.2f')}")
    console.print(f"val bits per byte: {final['bits_per_byte']:.2f}")
