"""What a run shows where the console knows only ASCII, and that its files are UTF-8 all the same."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kimi_jax.train.display import Display, degrade, print_summary
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]
FINAL = {"bits_per_byte": 2.0, "xz_bits_per_byte": 3.0}


def terminal(encoding: str) -> tuple[io.BytesIO, Console]:
    """A stream of an encoding as a run takes it for its own, and the console on it."""
    content = io.BytesIO()
    stream = io.TextIOWrapper(content, encoding=encoding, write_through=True)
    degrade(stream)
    return content, Console(file=stream, width=80, force_terminal=True, color_system=None)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_everything_a_run_shows_degrades_instead_of_raising(tmp_path, encoding):
    content, console = terminal(encoding)
    (tmp_path / "sample.txt").write_bytes("def λ(é): 中\n".encode())
    with console.status("Reading text"):
        console.print("é中 \udc80")  # a file name that is not UTF-8
    with Display(console, 3, 0) as display:
        display.show({"step": 1, "loss": 1.0, "bits_per_byte": 2.0, "tokens_per_second": 1.0})
    print_summary(console, tmp_path, FINAL)
    shown = content.getvalue().decode(encoding)
    expected = {"ascii": r"def \u03bb(\xe9): \u4e2d", "latin-1": r"def \u03bb(é): \u4e2d", "utf-8": "def λ(é): 中"}[
        encoding
    ]
    assert expected in shown and "val bits per byte: 2.00" in shown


def test_a_sample_is_shown_as_text_whatever_is_in_it(tmp_path):
    """Not UTF-8, rich's markup, and a folder whose name looks like markup."""
    content, console = terminal("utf-8")
    folder = tmp_path / "[red]"
    folder.mkdir()
    (folder / "sample.txt").write_bytes(b"[bold]x[/bold] [/none] \xff\n")
    print_summary(console, folder, FINAL | {"xz_bits_per_byte": None})
    shown = content.getvalue().decode().replace("\n", "")
    assert "[bold]x[/bold] [/none] \ufffd" in shown and f"{folder / 'curves.png'}" in shown
    assert "xz -9 on the same validation bytes: unknown" in shown


def test_a_run_in_a_c_locale(tmp_path):
    """Its files are UTF-8; what the console cannot show is replaced, also when the finished run is shown again."""
    text = tmp_path / "corpus"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(f"le numéro est {number}, 中\n" * 20, encoding="utf-8")
    config = tiny.config(tmp_path, steps=1, sample_prompt="numéro λ ", sample_tokens=1)
    file = tmp_path / "config.py"
    file.write_text(f"from kimi_jax.config import *\nconfig = {config!r}\n", encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in ("LANG", "PYTHONIOENCODING")}
    environment |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.programs.c_locale", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == 0 and not done.stderr, done.stderr.decode()
    shown = done.stdout.decode("ascii")
    assert shown.count(r"num\xe9ro \u03bb") == 2 and shown.count("val bits per byte: ") == 2
    folder = tmp_path / "runs" / "run"
    assert (folder / "sample.txt").read_bytes().startswith("numéro λ ".encode())
    assert json.loads((folder / "config.json").read_bytes())["train"]["sample_prompt"] == "numéro λ "
