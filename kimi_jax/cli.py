"""The command line: `kimi-jax train | eval | generate | convert | inspect | aot`."""

from __future__ import annotations

import itertools
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import tyro

from kimi_jax import files
from kimi_jax.config import Config, ConfigError, Mesh, Source, load_config, on_slice, shipped_configs
from kimi_jax.config.checks import printable

USAGE = """usage: kimi-jax COMMAND ...

  train NAME [--model.x ... --train.x ...]   train a config, or resume its run
  eval --checkpoint DIR [--source.x ...]     bits per byte of a checkpoint on any text
  generate --checkpoint DIR --prompt TEXT    continue a text
  convert SRC DST [--verify]                 a released directory to a checkpoint, or back; or verify an earlier one
  inspect NAME [--optim | --manifest]        components, shapes, counts, optimizer rules; allocates nothing
  aot NAME --topology v5p:8x8x8              compile its step for a TPU slice: memory, collectives, speed; no TPU needed

NAME is one of {names}, or a path to a .py file. `kimi-jax COMMAND --help` lists the settings.

Exit status: 0 done (also a training run that SIGTERM stopped: it is saved); 1 a setting, file or checkpoint that cannot
be used (one line, `error: ...`), a run that failed, a slice that `aot` finds too small; 2 a flag or command that does
not exist, or a value of the wrong type; 130 Ctrl-C; 141 the reader of the output closed the pipe.
"""

CLOSED_PIPE = 128 + signal.SIGPIPE
"""Exit status of what a shell's `| head` ends."""
MOST_LINES = 6
LONGEST_ERROR = 2000
"""Lines and characters of an error that are shown, in one line."""


@dataclass(frozen=True)
class TrainArgs:
    """Trains a config, or resumes the run of that name."""

    config: Annotated[Config, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands]
    restart: bool = False
    """Remove what an earlier run of this name left, and start over."""
    resume_from: int | None = None
    """Resume from the checkpoint of this step, e.g. when the newest is damaged; later ones are set aside. Leave it out
    when you start the run again."""
    dry_run: bool = False
    """Print shapes, memory, tokens and steps, and stop."""
    topology: str = ""
    """Take the mesh, rules and batch that the config has for this slice, e.g. v5p:8x8x8."""


@dataclass(frozen=True)
class EvalArgs:
    """Bits per byte of a checkpoint on any text."""

    checkpoint: str
    """Folder of a run, e.g. runs/k3_tiny."""
    step: int | None = None
    """Which checkpoint; the newest by default."""
    source: Source | None = None
    """Text to read; the run's validation text by default."""
    max_tokens: int | None = None
    """Stop after so many tokens."""
    mesh: Mesh = field(default_factory=Mesh)
    """Devices to use; one by default, whatever wrote the checkpoint."""


@dataclass(frozen=True)
class GenerateArgs:
    """Continues a text with a checkpoint, to standard output, as it is made."""

    checkpoint: str
    """Folder of a run, e.g. runs/k3_tiny."""
    prompt: str
    step: int | None = None
    """Which checkpoint; the newest by default."""
    max_new_tokens: int = 200
    temperature: float = 0.8
    """0 takes the likeliest token."""
    top_p: float = 0.95
    seed: int = 0
    mesh: Mesh = field(default_factory=Mesh)
    """Devices to use; one by default, whatever wrote the checkpoint."""


@dataclass(frozen=True)
class ConvertArgs:
    """A released directory (K3, Kimi Linear, K2; quantized or not) to a checkpoint, or a checkpoint to a released one.

    Streams: needs the memory of one tensor, not of the model. The same command resumes a killed one. With --verify and
    a target that is there already, nothing is written: the two are compared.
    """

    source: Annotated[str, tyro.conf.Positional]
    """A directory from the hub, or the folder of a run or of an earlier conversion."""
    target: Annotated[str, tyro.conf.Positional]
    """A new directory; with --verify, also one that the same command made."""
    verify: bool = False
    """Read both again at the end, and compare every tensor and file byte for byte."""
    like: str | None = None
    """A released or converted directory whose layout, dtypes, config and tensors of other parts (vision) an export
    takes; by default those that the checkpoint was converted from."""
    packed: bool = True
    """Export in the quantized format of the family (K3's experts MXFP4, K2 block-FP8), unless there is something to
    be like; else bf16."""
    step: int | None = None
    """Which checkpoint to export; the newest by default."""


@dataclass(frozen=True)
class InspectArgs:
    """Components, shapes and counts of a config; allocates nothing."""

    config: Annotated[Config, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands]
    optim: bool = False
    """How the optimizer sees each parameter."""
    manifest: bool = False
    """Every tensor that an export has: name, dtype and shape a line, sorted."""


@dataclass(frozen=True)
class AotArgs:
    """Compiles a config's step for a TPU slice, with shapes alone, and reports memory, collectives and speed.

    Exit status 0: it fits; 1: it does not, or cannot be compiled.
    """

    config: Annotated[Config, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands]
    topology: str
    """A slice as libtpu names it, e.g. v5p:8x8x8; v5p:8x8x8@2 for two. `list` prints the names, and stops."""
    step: Literal["train", "prefill", "decode"] = "train"
    rows: int | None = None
    """Of a prefill or decode, each of data.sequence-length tokens; by default one for each device that shards rows."""
    out: str = ""
    """JSON file of the report; by default in a folder aot/ beside the runs."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command of `kimi-jax`; mistakes of the user end in `SystemExit`, see USAGE."""
    argv = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[Sequence[str]], None]] = {
        "train": train,
        "eval": evaluate,
        "generate": generate,
        "convert": convert,
        "inspect": inspect,
        "aot": aot,
    }
    with _plain_errors():
        if not argv or argv[0] in ("-h", "--help"):
            print(USAGE.format(names=", ".join(shipped_configs())))
        elif argv[0] in commands:
            commands[argv[0]](argv[1:])
        else:
            _fail(f"unknown command {argv[0]!r}; use one of {', '.join(commands)}", status=2)


def train(argv: Sequence[str] | None = None) -> None:
    """`kimi-jax train NAME [--dotted.overrides]`, and all of `train_main.py`."""
    config, argv = _named_config(sys.argv[1:] if argv is None else argv, "kimi-jax train")
    with _plain_errors():
        name = _value(argv, "--topology")
        known = [each.topology for each in config.slices]
        if name is not None and name not in known:
            raise ConfigError(f"{config.name} has no mesh for {name!r}; it has {known}; or set --mesh.*")
        config = config if name is None else on_slice(config, name)
        args = tyro.cli(TrainArgs, args=argv, default=TrainArgs(config), prog="train NAME")
        from kimi_jax.analysis import sizes
        from kimi_jax.train.loop import TooManySkips, run_training
        from kimi_jax.train.signals import Interrupted

        if args.dry_run:
            print(sizes.dry_run(args.config))
            return
        try:
            run_training(args.config, restart=args.restart, resume_from=args.resume_from)
        except Interrupted as stopped:
            print(stopped, file=sys.stderr)
            # A scheduler that preempts with SIGTERM wants to see success; a shell wants to see its Ctrl-C.
            sys.exit(130 if stopped.signum == signal.SIGINT else 0)
        except TooManySkips as stopped:
            _fail(str(stopped))


def evaluate(argv: Sequence[str]) -> None:
    with _plain_errors():
        args = tyro.cli(EvalArgs, args=_source_last(argv), prog="kimi-jax eval")
        from kimi_jax.parallel.mesh import make_mesh, on_mesh
        from kimi_jax.train.evaluate import evaluate_checkpoint

        with on_mesh(make_mesh(args.mesh)):
            result = evaluate_checkpoint(args.checkpoint, args.step, args.source, args.max_tokens)
        print(f"{result['bytes']:,} bytes, {result['tokens']:,.0f} tokens, {result['loss']:.4f} nats a token")
        print(f"bits per byte: {result['bits_per_byte']:.4f}")


def _source_last(argv: Sequence[str]) -> list[str]:
    """tyro spells an optional group as a subcommand, which comes after the plain options: put `--source.*` there."""
    plain: list[str] = []
    source: list[str] = []
    for part in argv:
        if part.startswith("--"):
            into = source if part.startswith("--source.") else plain
        elif not (plain or source):
            into = plain
        into.append(part)
    return [*plain, "source:source", *source] if source else plain


def generate(argv: Sequence[str]) -> None:
    with _plain_errors():
        args = tyro.cli(GenerateArgs, args=argv, prog="kimi-jax generate")
        from kimi_jax.infer.sampling import Sampling

        names = ("temperature", "top_p", "max_new_tokens", "seed")
        sampling = Sampling(**{name: getattr(args, name) for name in names})  # checked before JAX starts
        from kimi_jax.infer.generate import stream_text
        from kimi_jax.parallel.mesh import make_mesh, on_mesh
        from kimi_jax.store.open import needed_tokenizer, open_model

        with on_mesh(make_mesh(args.mesh)):
            opened = open_model(args.checkpoint, step=args.step, packed=True)
            coder = needed_tokenizer(args.checkpoint, opened)
            pieces = stream_text(opened.model, coder, args.prompt, sampling, rules=opened.config.rules)
            try:
                first = next(pieces)  # a mistake shows before anything is printed
                print(args.prompt + first, end="", flush=True)
                for text in pieces:
                    print(text, end="", flush=True)
                print()
            except FloatingPointError as error:
                _fail(str(error))


def convert(argv: Sequence[str]) -> None:
    with _plain_errors():
        args = tyro.cli(ConvertArgs, args=argv, prog="kimi-jax convert")
        from kimi_jax.store import convert as conversion

        began = time.perf_counter()
        done = conversion.convert(
            args.source, args.target, verify=args.verify, like=args.like, packed=args.packed, step=args.step
        )
        seconds = time.perf_counter() - began
        rate = done["bytes"] / seconds / 1e9
        print(f"{done['tensors']:,} tensors, {done['bytes']:,} bytes in {seconds:,.1f} s, {rate:.2f} GB/s")
        print(f"{'Saved' if done['written'] else 'Verified'} {args.target}")


def inspect(argv: Sequence[str]) -> None:
    config, argv = _named_config(argv, "kimi-jax inspect")
    with _plain_errors():
        args = tyro.cli(InspectArgs, args=argv, default=InspectArgs(config), prog="kimi-jax inspect NAME")
        from kimi_jax.analysis import sizes

        if args.manifest:
            from kimi_jax.store import names as released_names

            for line in released_names.manifest_lines(args.config.model):
                print(line)
            return
        print(sizes.optimizer_table(args.config) if args.optim else sizes.report(args.config))


def aot(argv: Sequence[str]) -> None:
    config, argv = _named_config(argv, "kimi-jax aot")
    with _plain_errors():
        # The slice's own mesh is the default that options change, so the topology is read before they are.
        name = _value(argv, "--topology")
        config = config if name is None else on_slice(config, name)
        args = tyro.cli(AotArgs, args=argv, default=AotArgs(config, name or "list"), prog="kimi-jax aot NAME")
        from kimi_jax.analysis.aot import parse_topology, report, save, show, topologies

        if args.topology == "list":
            print(*topologies(), sep="\n")
            return
        parse_topology(args.topology)
        plain = args.topology.replace(":", "-")
        path = Path(args.out or f"{args.config.train.runs_dir}/aot/{args.config.name}-{plain}-{args.step}.json")
        files.check_writable(path)  # before minutes of compiling
        result = report(args.config, args.topology, args.step, rows=args.rows)
        show(result)
        save(result, path)
        print(f"Saved {path}")
        if not result["fits"]:
            sys.exit(1)


def _value(argv: Sequence[str], option: str) -> str | None:
    """Value of an option, spelt `--x value` or `--x=value`."""
    for part, following in itertools.zip_longest(argv, argv[1:]):
        if part == option:
            return following
        if part.startswith(option + "="):
            return part.partition("=")[2]
    return None


def _named_config(argv: Sequence[str], command: str) -> tuple[Config, list[str]]:
    """The config that the first argument names, and the arguments after it."""
    with _plain_errors():
        if argv and argv[0] not in ("-h", "--help"):
            return load_config(argv[0]), list(argv[1:])
        print(f"usage: {command} NAME [settings]; NAME is one of {', '.join(shipped_configs())}, or a .py file.")
        print(f"`{command} NAME --help` lists the settings and their values.")
        sys.exit(0 if argv else 2)
    raise AssertionError  # _plain_errors exits


class _plain_errors:
    """Ends a command with one line for what the user can fix, and with the exit status that USAGE promises. Any other
    error is a bug of ours, and keeps its trace."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if error is None or isinstance(error, SystemExit):
            _flush(error)
        elif isinstance(error, KeyboardInterrupt):
            _say("Stopped at once. The same command resumes a run or a conversion from what was saved last.")
            sys.exit(130)
        elif isinstance(error, BrokenPipeError) and _reader_is_gone():
            _end_quietly()
        elif isinstance(error, ConfigError | files.FileError):
            _fail(str(error))
        elif isinstance(error, OSError):
            named = isinstance(error.filename, str | bytes)
            path, doing = (os.fsdecode(error.filename), "use") if named else ("a file or the output", "read or write")
            _fail(str(files.problem(error, path, doing)))


def _flush(leaving: SystemExit | None) -> None:
    """Writes out what a command printed, so that a full disk or a closed pipe shows while it can be handled."""
    if leaving is not None and isinstance(leaving.__context__, BrokenPipeError):  # rich has seen it first
        _end_quietly()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _end_quietly()
    except OSError as error:
        _discard_output()
        _fail(str(files.problem(error, "the output", "write")))


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    try:
        output = select.poll()
        output.register(sys.stdout.fileno(), select.POLLOUT)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in output.poll(0))
    except (AttributeError, OSError, ValueError):  # no such call on this system; no file behind the stream
        return False


def _end_quietly() -> NoReturn:
    _discard_output()
    sys.exit(CLOSED_PIPE)


def _discard_output() -> None:
    """What the interpreter still has to write when it ends goes nowhere, instead of failing again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, status: int = 1) -> NoReturn:
    _say(f"error: {_one_line(message)}")
    sys.exit(status)


def _say(line: str) -> None:
    if sys.stderr is not None:  # print would take standard output instead
        with suppress(OSError):  # nobody may be reading
            print(line, file=sys.stderr, flush=True)


def _one_line(message: str) -> str:
    """A message without line breaks and control characters, whatever a file name in it holds.

    >>> print(_one_line("a differs:\\n  x: 1\\n  y: 2\\nset them back"))
    a differs: x: 1; y: 2; set them back
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES - 2 : -1] = [f"and {len(lines) - MOST_LINES + 1} more"]
    text = ""
    for line in lines:
        text += line if not text else f" {line}" if text.endswith((":", ";", ",")) else f"; {line}"
    if len(text) > LONGEST_ERROR:  # a path of the user's, most likely; what to do stands at the end
        text = f"{text[: LONGEST_ERROR // 2]} ... {text[-LONGEST_ERROR // 2 :]}"
    return printable(text)
