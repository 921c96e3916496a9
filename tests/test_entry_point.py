"""The command's outermost shell in this process: signals, streams that escape, pipes that nobody reads, full disks."""

import io
import os
import signal
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kimi_jax import __main__, cli


@pytest.fixture(autouse=True)
def signals():
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def frames(*files: str):
    """The innermost of a stack of frames in these files, outermost first."""
    frame = None
    for file in files:
        frame = SimpleNamespace(f_code=SimpleNamespace(co_filename=file), f_back=frame)
    return frame


def test_the_command_takes_ctrl_c_and_escapes_what_the_locale_lacks(monkeypatch):
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    __main__.main(["--help"])
    assert signal.getsignal(signal.SIGINT) is __main__._interrupt
    assert [stream.errors for stream in streams] == ["backslashreplace"] * 2
    assert "usage: kimi-jax COMMAND" in streams[0].buffer.getvalue().decode()


def test_a_caller_that_ignores_ctrl_c_goes_on_ignoring_it():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    __main__.main(["--help"])
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_ctrl_c_during_an_import_ends_the_process(monkeypatch, capfd):
    def ended(status):
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", ended)
    with pytest.raises(SystemExit) as left:
        __main__._interrupt(signal.SIGINT, frames("a.py", "<frozen importlib._bootstrap>", "b.py"))  # pyright: ignore
    assert left.value.code == 130 and capfd.readouterr().err == "Stopped.\n"
    with pytest.raises(KeyboardInterrupt):
        __main__._interrupt(signal.SIGINT, frames("a.py", "b.py"))  # pyright: ignore


@contextmanager
def unread(monkeypatch):
    """Standard output is a pipe whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)  # here, since pytest puts its own back between a fixture and a test
        yield stream


def test_a_pipe_that_nobody_reads_ends_the_command_quietly(monkeypatch):
    with unread(monkeypatch) as stream:
        assert cli._reader_is_gone()
        stream.write("much\n")
        with pytest.raises(SystemExit) as left, cli._plain_errors():
            pass
    assert left.value.code == cli.CLOSED_PIPE
    with unread(monkeypatch), pytest.raises(SystemExit) as left, cli._plain_errors():
        try:  # rich has seen it first, and leaves
            raise BrokenPipeError
        except BrokenPipeError:
            raise SystemExit(0)  # noqa: B904
    assert left.value.code == cli.CLOSED_PIPE


def test_a_pipe_that_breaks_in_the_middle(monkeypatch):
    with unread(monkeypatch), pytest.raises(SystemExit) as left, cli._plain_errors():
        print("much", flush=True)
    assert left.value.code == cli.CLOSED_PIPE


def test_a_full_output_is_one_line(monkeypatch, capsys):
    stream = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", stream)
    stream.write("much")
    with pytest.raises(SystemExit) as left, cli._plain_errors():
        pass
    assert left.value.code == 1
    stream.close()
    assert capsys.readouterr().err.startswith("error: cannot write the output: No space left on device; free some")


def test_an_output_without_a_file_is_read_by_somebody(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert not cli._reader_is_gone()
