"""How the command ends as a process: exit status, signals, pipes and locales."""

import doctest
import os
import subprocess
import sys

import pytest

from kimi_jax import cli, files
from kimi_jax.store.safetensors_files import CheckpointError

COMMAND = [sys.executable, "-m", "kimi_jax"]


def run(command: list[str], tmp_path, **options) -> subprocess.CompletedProcess:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment |= {"PYTHONUNBUFFERED": ""}
    environment |= options.pop("env", {})
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=120, **options)


@pytest.mark.parametrize("module", ["tyro", "kimi_jax.analysis.sizes", "jaxlib"])
def test_interrupts_while_modules_are_imported(module, tmp_path):
    """JAX's C++ among them, where an exception can get lost."""
    program = [sys.executable, "-m", "tests.programs.interrupted_import", module, "inspect", "k3_tiny"]
    done = run(program, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"Stopped.\n")


def test_an_ignored_interrupt_stays_ignored(tmp_path):
    """nohup and a script's background jobs start that way."""
    program = [sys.executable, "-m", "tests.programs.interrupted_import", "tyro", "--help"]
    done = run(["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh", *program], tmp_path)
    assert done.returncode == 0 and done.stdout.startswith(b"usage: kimi-jax") and not done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_ends_quietly(unbuffered, tmp_path):
    """Where a line is printed, or where the buffer is written out."""
    shell = '"$@" | head -n 1; exit "${PIPESTATUS[0]}"'
    command = [*COMMAND, "inspect", "kimi_linear_48b", "--manifest"]
    done = run(["/bin/bash", "-c", shell, "bash", *command], tmp_path, env={"PYTHONUNBUFFERED": unbuffered})
    assert (done.returncode, done.stderr) == (cli.CLOSED_PIPE, b"") == (141, b"")
    assert done.stdout.count(b"\n") == 1


def test_a_full_disk_under_the_output_is_one_line(tmp_path):
    done = run(["/bin/sh", "-c", '"$@" > /dev/full', "sh", *COMMAND, "--help"], tmp_path)
    message = b"error: cannot write the output: No space left on device; free some space or choose another disk\n"
    assert (done.returncode, done.stderr) == (1, message)


@pytest.mark.parametrize("stream", ["1", "2"])
def test_a_closed_stream_is_no_trace(stream, tmp_path):
    done = run(["/bin/sh", "-c", f'"$@" {stream}>&-', "sh", *COMMAND, "nonsense" if stream == "2" else "-h"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2 if stream == "2" else 0, b"", b"")


def test_any_locale_shows_any_name(tmp_path):
    """Where a terminal cannot show a character it is escaped; a file's name in other bytes is found all the same."""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    text = (
        b"# \xc3\xa9\nfrom kimi_jax.config import *\nconfig = load_config('k3_tiny')\nprint('\xc3\xa9', config.name)\n"
    )
    (tmp_path / "é.py").write_bytes(text + b"raise ValueError('\xc3\xa9')\n")
    done = run([*COMMAND, "inspect", "é.py"], tmp_path, env=plain)
    assert done.returncode == 1 and done.stdout == rb"\xe9 k3_tiny" + b"\n"
    assert done.stderr == b"error: " + rb"\udcc3\udca9.py:5: ValueError: \xe9; fix this line" + b"\n"


# In this process


def leaves(error: BaseException) -> int | str | None:
    with pytest.raises(SystemExit) as left, cli._plain_errors():
        raise error
    return left.value.code


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (cli.ConfigError("a=1 is wrong; set it to 2"), "a=1 is wrong; set it to 2"),
        (CheckpointError("a is torn; fetch it again"), "a is torn; fetch it again"),
        (files.FileError("a is not JSON; fetch it again"), "a is not JSON; fetch it again"),
        (PermissionError(13, "Permission denied", "a\nb"), r"cannot use a; b: Permission denied; change its perm"),
        (FileNotFoundError(2, "No such file or directory", b"caf\xe9"), r"cannot use caf\udce9: No such file"),
        (OSError(28, "No space left on device"), "cannot read or write a file or the output: No space left on device"),
        (
            ConnectionResetError("reset"),
            "cannot read or write a file or the output: reset; check the path and the disk",
        ),
        (cli.ConfigError("bad \x1b[31m\u2028name"), r"bad \x1b[31m; name"),
        (cli.ConfigError("a:\n" + "\n".join(f" b{i}" for i in range(9)) + "\nc"), "a: b0; b1; b2; and 6 more; c"),
        (cli.ConfigError("a" * 5000 + "; fix it"), "a" * 1000 + " ... " + "a" * 992 + "; fix it"),
    ],
)
def test_what_the_user_can_fix_is_one_line(error, line, capsys):
    assert leaves(error) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {line}") and shown.endswith("\n") and shown.count("\n") == 1


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyError("a"), RuntimeError("a")])
def test_a_bug_keeps_its_trace(error):
    with pytest.raises(type(error)), cli._plain_errors():
        raise error


def test_an_interrupt_says_how_to_resume(capsys):
    assert leaves(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err.startswith("Stopped at once. The same command resumes ")


def test_the_help_names_every_exit_status(capsys):
    cli.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for status in ("0 done", "1 a setting, file", "2 a flag or command", "130 Ctrl-C", f"{cli.CLOSED_PIPE} the reader"):
        assert status in text


def test_examples():
    result = doctest.testmod(cli)
    assert result.attempted and not result.failed


def test_a_path_is_tried_before_the_work_and_nothing_is_left(tmp_path):
    files.check_writable(tmp_path / "a" / "b" / "c.json")
    (tmp_path / "file").write_text("mine")
    for path, message in (
        (tmp_path / "file" / "x", "a part of the path is a file; choose another path"),
        (tmp_path, "it is a folder; choose another path"),
        ("/proc/x/y", "check the path"),
        (tmp_path / ("x" * 300), "choose a shorter name"),
        ("a\0b", "is no name of a file"),
        ("/", "choose another path"),
    ):
        with pytest.raises(files.FileError, match=message):
            files.check_writable(path)
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "mine"
