"""Bad input of every kind, in one process: one line that names the value, the file and the fix, and nothing written.

Each table is one kind of input. A row says what to do and what the line must name; `rejected` asserts the rest. How the
process ends (signals, pipes, locales) is in test_exit_codes.py.
"""

import base64
import dataclasses
import json
import os
import re
import typing
from pathlib import Path

import pytest

from kimi_jax import cli
from kimi_jax.config import Config, DataConfig, Source, TokenizerConfig, from_dict, load_config, to_dict
from kimi_jax.data import pipeline
from kimi_jax.text.load import load_tokenizer, make_tokenizer
from tests.data.conftest import model_config
from tests.text.test_tokenizer import NUM_RANKS, ranks_file, word_json

FIX = re.compile(
    r"(?:; |, or |\? )(?:set|choose|fix|fetch|check|use|name|write|leave|lower|raise|change|add|restore|put|take|free|"
    r"bring|install|convert)\b|did you mean|pip install"
)
"""What to do stands after what is wrong, as an imperative."""
LONG = "x" * 300
DEEP = b'{"a": ' + b"[" * 10**6 + b"]" * 10**6 + b"}"


def snapshot(folder: Path) -> dict[str, tuple]:
    """Everything in a folder: names, kinds, contents."""
    found = {}
    for parent, folders, names in os.walk(os.fsencode(folder)):
        for name in folders:
            found[os.path.join(parent, name)] = ("folder",)
        for name in names:
            path = os.path.join(parent, name)
            found[path] = ("file", Path(os.fsdecode(path)).read_bytes()) if os.path.isfile(path) else ("other",)
    return found


@pytest.fixture
def rejected(tmp_path, monkeypatch, capsys):
    """Runs what must be rejected, in a folder of its own, and returns what standard error says."""
    monkeypatch.chdir(tmp_path)

    def check(run, status: int) -> str:
        before = snapshot(tmp_path)
        with pytest.raises(SystemExit) as left:
            run()
        shown = capsys.readouterr()
        assert left.value.code == status, shown.err
        assert "Traceback" not in shown.err + shown.out and not shown.out.strip()
        assert snapshot(tmp_path) == before
        return shown.err

    return check


@pytest.fixture
def one_line(rejected):
    """Runs what must be rejected with one line that names all of `named` and the fix."""

    def check(run, *named: str) -> None:
        shown = rejected(run, 1)
        assert shown.startswith("error: ") and shown.endswith("\n") and shown.count("\n") == 1, shown
        assert shown[:-1].isprintable() and len(shown) < 2100
        for text in named:
            assert text in shown
        assert FIX.search(shown), f"no fix in: {shown}"

    return check


def api(call, *arguments, **named) -> typing.Callable[[], None]:
    """A function of the Python API, under the command line's handling of errors."""

    def run() -> None:
        with cli._plain_errors():
            call(*arguments, **named)

    return run


def command(*argv: str) -> typing.Callable[[], None]:
    return lambda: cli.main(argv)


# Flags: status 2, in the box of the library that parses them

FLAGS = [
    ("nonsense", "'nonsense'"),
    ("--nonsense", "'--nonsense'"),
    ("Train k3_tiny", "'Train'"),
    ("train k3_tiny --train.stepz 4", "--train.stepz"),
    ("train k3_tiny --stepz", "--stepz"),
    ("train k3_tiny extra", "extra"),
    ("train k3_tiny --train.steps", "--train.steps"),
    ("train k3_tiny --train.steps x", "--train.steps"),
    ("train k3_tiny --train.steps 1.5", "--train.steps"),
    ("train k3_tiny --train.steps None", "--train.steps"),
    (f"train k3_tiny --train.steps {'9' * 5000}", "--train.steps"),
    ("train k3_tiny --train.seed 0x10", "--train.seed"),
    ("train k3_tiny --train.tensorboard yes", "yes"),
    ("train k3_tiny --train.keep-every often", "--train.keep-every"),
    ("train k3_tiny --optim.learning-rate fast", "--optim.learning-rate"),
    ("train k3_tiny --optim.balance magic", "--optim.balance"),
    ("train k3_tiny --data.sources.0.kind csv", "--data.sources.0.kind"),
    ("train k3_tiny --data.sources.1.kind text", "--data.sources.1.kind"),
    ("train k3_tiny --data.tokenizer.kind words", "--data.tokenizer.kind"),
    ("train k3_tiny --mesh.fsdp two", "--mesh.fsdp"),
    ("train k3_tiny --mesh.pipeline 2", "--mesh.pipeline"),
    ("train k3_tiny --rules.heads rows", "--rules.heads"),
    ("train k3_tiny --model.dtype float16", "--model.dtype"),
    ("train k3_tiny --model.mla-layers 1 two", "--model.mla-layers"),
    ("train k3_tiny --model.kda.num-heads", "--model.kda.num-heads"),
    ("eval", "--checkpoint"),
    ("eval --checkpoint", "--checkpoint"),
    ("eval --checkpoint x --nonsense", "--nonsense"),
    ("eval --checkpoint x --step newest", "--step"),
    ("eval --checkpoint x --source.kind csv", "--source.kind"),
    ("generate --checkpoint x", "--prompt"),
    ("generate --checkpoint x --prompt y --temperature hot", "--temperature"),
    ("generate --checkpoint x --prompt y --max-new-tokens 1e3", "--max-new-tokens"),
    ("convert", "A directory from the hub"),
    ("convert a", "A new directory"),
    ("convert a b c", "c"),
    ("convert a b --verify yes", "yes"),
    ("inspect k3_tiny --topology v5e:2x2", "--topology"),
    ("inspect k3_tiny --manifest 1", "1"),
    ("aot k3_tiny --topology v5e:2x2 --step forward", "--step"),
    ("aot k3_tiny --topology v5e:2x2 --rows all", "--rows"),
]


@pytest.mark.parametrize(("argv", "named"), FLAGS, ids=[argv[:60] for argv, _ in FLAGS])
def test_flags(argv, named, rejected):
    assert named in rejected(command(*argv.split()), 2)


@pytest.mark.parametrize("name", ["train", "inspect", "aot"])
def test_a_command_without_its_config_shows_its_usage(name, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([name])
    assert left.value.code == 2 and f"usage: kimi-jax {name} NAME" in capsys.readouterr().out


# Values of settings: every number of a config, too small, too large and not finite


def numbers(config: object, prefix: str = "") -> typing.Iterator[tuple[str, type]]:
    """The option of every number in a config, and its type."""
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value, option = getattr(config, field.name), prefix + field.name.replace("_", "-")
        kinds = typing.get_type_hints(type(config))[field.name]
        kinds = typing.get_args(kinds) or (kinds,)
        if dataclasses.is_dataclass(value):
            yield from numbers(value, f"{option}.")
        elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
            yield from numbers(value[0], f"{option}.0.")
        elif int in kinds and not isinstance(value, tuple):
            yield option, int
        elif float in kinds:
            yield option, float


NUMBERS = list(numbers(load_config("k2_tiny"), "--"))
VALUES = [
    *((f"k2_tiny {option}", value) for option, kind in NUMBERS if kind is int for value in ("-1", f"{2**63}")),
    *((f"k2_tiny {option}", value) for option, kind in NUMBERS if kind is float for value in ("nan", "inf")),
    ("k3_tiny --train.seed", f"{2**32}"),
    ("k3_tiny --train.seed", f"{2**64}"),
    ("k3_tiny --train.seed", f"{2**70}"),
    ("k3_tiny --train.steps", f"{2**31}"),
    ("k3_tiny --train.steps", "0"),
    ("k3_tiny --optim.learning-rate", "0"),
    ("k3_tiny --optim.learning-rate", "-1e-3"),
    ("k3_tiny --optim.learning-rate", "1e39"),
    ("k3_tiny --optim.learning-rate", "1e-300"),
    ("k3_tiny --optim.learning-rate", "1e999"),
    ("k3_tiny --optim.warmup-fraction", "1"),
    ("k3_tiny --optim.momentum", "1.5"),
    ("k3_tiny --data.sources.0.weight", "-inf"),
    ("k3_tiny --data.sources.0.weight", "0"),
    ("k3_tiny --data.sources.0.kind", "text"),
    ("k3_tiny --data.sources.0.glob", "/etc/*"),
    ("k3_tiny --data.sources.0.glob", "../*"),
    ("k3_tiny --data.sources.0.glob", "**a"),
    ("k3_tiny --data.sources.0.glob", "."),
    ("k3_tiny --data.sources.0.text-field", "\ud800"),
    ("k3_tiny --data.sources.0.prompt-field", "text"),
    ("k3_tiny --data.sources.0.path", "a\0b"),
    ("k3_tiny --data.batch-size", "1000000000"),
    ("k3_tiny --data.batch-size", "0"),
    ("k3_tiny --data.sequence-length", "1"),
    ("k3_tiny --data.sequence-length", "2000000"),
    ("k3_tiny --data.validation-fraction", "0"),
    ("k3_tiny --data.tokenizer.kind", "tiktoken"),
    ("k3_tiny --data.tokenizer.path", "x"),
    ("k3_tiny --train.accumulation", "7"),
    ("k3_tiny --train.runs-dir", "a\0b"),
    ("k3_tiny --train.init-from", "\0"),
    ("k3_tiny --train.sample-prompt", "\udcc3\udca9"),
    ("k3_tiny --train.qat-from-step", "100000"),
    ("k3_tiny --model.num-layers", "10000000000"),
    ("k3_tiny --model.num-layers", "1000000"),
    ("k3_tiny --model.moe.num-experts", "100000000"),
    ("k3_tiny --model.moe.experts-per-token", "16"),
    ("k3_tiny --model.num-dense-layers", "100"),
    ("k3_tiny --model.bos-token-id", "4096"),
    ("k3_tiny --model.mla-layers", "100"),
    ("k3_tiny --model.kda.gate-lower-bound", "5"),
    ("k2_tiny --model.mla.rope.theta", "1"),
    ("k2_tiny --model.mla.rope.factor", "0.5"),
    ("k3_tiny --mesh.fsdp", "0"),
    ("k3_tiny --rules.embed", "tensor"),
    ("k3_tiny --name", "a/b"),
    ("k3_tiny --name", ".."),
    ("k3_tiny --name", ""),
    ("k3_tiny --name", "a\0b"),
    ("k3_tiny --name", LONG),
    ("k3_tiny --name", "\ud800"),
]


@pytest.mark.parametrize(("option", "value"), VALUES, ids=[f"{o}={v[:30]!a}" for o, v in VALUES])
def test_values_of_settings(option, value, one_line):
    config, option = option.split()
    field = option.rpartition(".")[2].removeprefix("--").replace("-", "_")
    name = {"kind": "kind", "name": "name="}.get(field, field)
    number = value.strip("-").rstrip("0") if value.strip("-").isdecimal() else ""
    one_line(command("inspect", config, option, *value.split(" ")), name, number[:10])


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("k3_tinny", "did you mean k3_tiny"),
        ("", "no config named ''"),
        ("K3", "no config named 'K3'"),
        ("../k3", "no config named '../k3'"),
        (LONG * 20, "(6,002 characters)"),
        ("no.py", "no config file no.py; check the path"),
        ("folder.py", "folder.py is a folder"),
        ("folder.py/x.py", "no config file folder.py/x.py"),
        ("file/x.py", "no config file file/x.py"),
        (f"{LONG}.py", "File name too long; choose a shorter name"),
        ("a/" * 3000 + ".py", "File name too long; choose a shorter name"),
        ("a\0b.py", r"no config file a\x00b.py"),
        ("\udce9.py", r"no config file \udce9.py"),
        ("pipe.py", "no config file pipe.py"),
        ("line\nbreak.py", r"no config file line\nbreak.py"),
    ],
)
def test_names_of_configs(name, named, one_line, tmp_path):
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe.py")
    one_line(command("inspect", name), named)


IMPORT = b"from kimi_jax.config import *\n"
CONFIG_FILES = [
    (b"config = (\n", "mine.py:1: '(' was never closed"),
    (b"a = 1\n  b = 2\n", "mine.py:2: unexpected indent"),
    (b"import nowhere\n", "mine.py:1: ModuleNotFoundError: No module named 'nowhere'"),
    (b"from kimi_jax.config import Nothing\n", "mine.py:1: ImportError: cannot import name 'Nothing'"),
    (b"a = 1\nb = c\n", "mine.py:2: NameError: name 'c' is not defined"),
    (b"\n\nint('a')\n", "mine.py:3: ValueError: invalid literal"),
    (b"raise ValueError('a\\nb\\x1b[31m')\n", r"mine.py:1: ValueError: a b\x1b[31m; fix this line"),
    (b"raise ValueError\n", "mine.py:1: ValueError; fix this line"),
    (b"raise ValueError('x' * 10**6)\n", "mine.py:1: ValueError: xxx"),
    (b"assert 1 == 2\n", "mine.py:1: AssertionError"),
    (b"1 / 0\n", "mine.py:1: ZeroDivisionError"),
    (b"open('nowhere')\n", "mine.py:1: FileNotFoundError"),
    (b"import sys\nsys.exit(3)\n", "mine.py:2: SystemExit: 3"),
    (b"def f(): return f()\nf()\n", "mine.py:1: RecursionError"),
    (b"x = " + b"(" * 10_000 + b"\n", "mine.py:1: too many nested parentheses"),
    (b"# caf\xe9\n", "mine.py:1: not UTF-8"),
    (b"a = 1\nb = 'caf\xe9'\n", "mine.py:2: not UTF-8"),
    ("a = 1".encode("utf-16"), "mine.py:1: not UTF-8"),
    (b"# coding: nonsense\n", "mine.py: unknown encoding: nonsense; fix the file"),
    (b"a = 1\0\n", "null bytes"),
    (b"", "mine.py must define `config`, a kimi_jax.config.Config; it has NoneType"),
    (b"config = 'k3_tiny'\n", "it has str"),
    (IMPORT + b"config = Config\n", "it has type"),
    (IMPORT + b"config = load_config('k3')\nconfig = config.model\n", "it has ModelConfig"),
    (IMPORT + b"\nTrainConfig(steps=0)\n", "mine.py:3: TrainConfig.steps=0 must be at least 1"),
    (IMPORT + b"TrainConfig(steps=10**5000)\n", "mine.py:2: TrainConfig.steps=an integer of 16,610 bits must be int"),
    (IMPORT + b"TrainConfig(steps=float('nan'))\n", "mine.py:2: TrainConfig.steps=nan must be int"),
    (IMPORT + b"TrainConfig(steps=True)\n", "mine.py:2: TrainConfig.steps=True must be int"),
    (IMPORT + b"OptimConfig(learning_rate=10**400)\n", "mine.py:2: OptimConfig.learning_rate=an integer of 1,329 bits"),
    (IMPORT + b"OptimConfig(learning_rate='1e-3')\n", "mine.py:2: OptimConfig.learning_rate='1e-3' must be float"),
    (IMPORT + b"Source(path='x' * 10**6, weight=0)\n", "mine.py:2: weight=0 of a source must be positive"),
    (IMPORT + b"Source(path=b'x')\n", "mine.py:2: Source.path=b'x' must be str"),
    (IMPORT + b"DataConfig(sequence_length=8, batch_size=1, sources=5)\n", "mine.py:2: DataConfig.sources=5 must be"),
    (IMPORT + b"TrainConfig(stepz=3)\n", "mine.py:2: TrainConfig has no field 'stepz'; did you mean steps?"),
    (IMPORT + b"TrainConfig(zzz=3)\n", "mine.py:2: TrainConfig has no field 'zzz'; use one of steps, seed"),
    (IMPORT + b"TrainConfig()\n", "mine.py:2: TypeError: TrainConfig.__init__() missing 1 required"),
    (IMPORT + b"TrainConfig(5)\n", "mine.py:2: TypeError: TrainConfig.__init__() takes 1 positional argument"),
    (IMPORT + b"load_config('nowhere')\n", "mine.py:2: no config named 'nowhere'"),
    (IMPORT + b"c = load_config('k3_tiny')\nreplace(c, name='a/b')\n", "mine.py:3: name='a/b' must be the plain name"),
]


@pytest.mark.parametrize(("content", "named"), CONFIG_FILES, ids=[named[:50] for _, named in CONFIG_FILES])
def test_config_files(content, named, one_line, tmp_path):
    (tmp_path / "mine.py").write_bytes(content)
    one_line(command("inspect", "mine.py"), "mine.py", named)


TINY = to_dict(load_config("k3_tiny"))
SAVED = [
    (None, "Config is None where its settings by name are due"),
    ([], "Config is [] where"),
    ({}, "Config lacks name, model, optim, data, train"),
    (TINY | {"model": None}, "Config.model=None must be ModelConfig"),
    (TINY | {"model": []}, "Config.model=[] must be ModelConfig"),
    (TINY | {"model": {}}, "ModelConfig lacks vocab_size"),
    (TINY | {"extra": 1}, "Config has no field 'extra'"),
    (TINY | {"x" * 10**5: 1}, "Config has no field 'xxx"),
    (TINY | {"slices": 5}, "Config.slices=5 must be"),
    (TINY | {"slices": [5]}, "Config.slices=(5,) must be"),
    (TINY | {"mesh": {"fsdp": "4"}}, "Mesh.fsdp='4' must be int"),
    (TINY | {"mesh": {"rows": 1}}, "Mesh has no field 'rows'"),
    (TINY | {"train": TINY["train"] | {"steps": 1e400}}, "TrainConfig.steps=inf must be int"),
    (
        TINY | {"train": TINY["train"] | {"seed": 10**30}},
        "TrainConfig.seed=1000000000000000000000000000000 must be int",
    ),
    (TINY | {"model": TINY["model"] | {"mla_layers": "123"}}, "ModelConfig.mla_layers='123' must be"),
    (TINY | {"model": TINY["model"] | {"moe": TINY["model"]["moe"] | {"num_experts": 10**8}}}, "num_experts=100000000"),
]


@pytest.mark.parametrize(("values", "named"), SAVED, ids=[named[:50] for _, named in SAVED])
def test_configs_that_were_saved(values, named, one_line):
    one_line(api(from_dict, Config, values), named)


# Paths


def data(**source) -> DataConfig:
    return DataConfig(sequence_length=8, batch_size=1, sources=(Source(**source),), on_error="raise")


SOURCES = [
    ({"kind": "text", "path": "nowhere"}, "data source nowhere does not exist"),
    ({"kind": "jsonl", "path": "nowhere"}, "data source nowhere does not exist"),
    ({"kind": "parquet", "path": "nowhere"}, "data source nowhere does not exist"),
    ({"kind": "text", "path": "file/below"}, "data source file/below does not exist"),
    ({"kind": "text", "path": LONG}, "cannot read the data source xxx"),
    ({"kind": "text", "path": "x/" * 3000}, "File name too long; choose a shorter name"),
    ({"kind": "text", "path": "loop"}, "cannot read the data source loop: Too many levels of symbolic links"),
    ({"kind": "text", "path": "gone"}, "data source gone does not exist"),
    ({"kind": "text", "path": "\udce9"}, r"data source \udce9 does not exist"),
    ({"kind": "text", "path": "a\nb"}, r"data source a\nb does not exist"),
    ({"kind": "text", "path": "empty"}, "no file under empty matches glob='**/*'"),
    ({"kind": "jsonl", "path": "."}, "no file under . matches glob='**/*.jsonl'"),
    ({"kind": "text", "path": ".", "glob": "*.md"}, "no file under . matches glob='*.md'"),
    ({"kind": "text", "path": ".", "glob": LONG}, "File name too long"),
    ({"kind": "text", "path": "pipe"}, "pipe: unreadable file (not a regular file)"),
    ({"kind": "text", "path": "/dev/zero"}, "/dev/zero: unreadable file (not a regular file)"),
    ({"kind": "jsonl", "path": "/dev/null"}, "/dev/null: unreadable file (not a regular file)"),
]


@pytest.mark.parametrize(("source", "named"), SOURCES, ids=[str(source)[:60] for source, _ in SOURCES])
def test_paths_of_sources(source, named, one_line, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    one_line(api(pipeline.load, data(**source), model_config()), named)


@pytest.mark.parametrize(
    ("out", "named"),
    [
        ("file/report.json", "a part of the path is a file; choose another path"),
        ("/proc/nowhere/report.json", "cannot write /proc/nowhere/report.json: No such file or directory"),
        (LONG, "File name too long; choose a shorter name"),
        (f"{LONG}/report.json", "File name too long; choose a shorter name"),
        (".", "it is a folder; choose another path"),
        ("a\0b", r"'a\x00b' is no name of a file"),
        ("/", "choose another path"),
    ],
)
def test_paths_of_a_report(out, named, one_line, tmp_path):
    (tmp_path / "file").write_text("mine")
    one_line(command("aot", "k3_tiny", "--topology", "v5e:2x2", "--out", out), named)


@pytest.mark.parametrize(
    ("topology", "named"),
    [
        ("v9:2x2", "no TPU topology 'v9:2x2'; use v4:2x2x1"),
        ("v5e", "no TPU topology 'v5e'"),
        ("", "no TPU topology ''"),
        ("v5e:2", "no TPU topology 'v5e:2'"),
        ("v5e:0x2", "no TPU topology 'v5e:0x2'"),
        ("v5e:2x2@0", "no TPU topology 'v5e:2x2@0'"),
        ("v5p:99999x99999x99999", "no TPU topology 'v5p:99999x99999x99999'"),
        ("v5p:2x2x1@99999", "no TPU topology 'v5p:2x2x1@99999'"),
        ("v5p:" + "9" * 5000, "no TPU topology 'v5p:999"),
    ],
)
def test_topologies(topology, named, one_line):
    one_line(command("aot", "k3_tiny", "--topology", topology), named)


@pytest.mark.parametrize("rows", ["0", "-3", f"{2**40}"])
def test_rows_of_a_report(rows, one_line):
    argv = ("aot", "k3_tiny", "--topology", "v5e:2x2", "--step", "decode", "--rows", rows)
    one_line(command(*argv), f"rows={rows} of a decode must be from 1")


CHECKPOINTS = [
    ("eval --checkpoint nowhere", "no checkpoint in nowhere"),
    ("eval --checkpoint empty", "no checkpoint in empty"),
    ("eval --checkpoint file", "no checkpoint in file"),
    ("generate --checkpoint nowhere --prompt x", "no checkpoint in nowhere"),
    ("generate --checkpoint empty --prompt x", "no checkpoint in empty"),
    ("convert nowhere out", "no checkpoint in nowhere"),
    ("convert empty out", "no checkpoint in empty"),
]


@pytest.mark.parametrize(("argv", "named"), CHECKPOINTS, ids=[argv for argv, _ in CHECKPOINTS])
def test_folders_without_a_checkpoint(argv, named, one_line, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    one_line(command(*argv.split()), named)


# Files of data

LINES = [
    (b"{nonsense", "malformed JSON"),
    (b"[1, 2]", "list where an object is due"),
    (b"null", "NoneType where an object is due"),
    (DEEP, "malformed JSON"),
    (b'{"text": ' + b"9" * 5000 + b"}", "malformed JSON"),
    (b'{"text": "a\x00b"}', "malformed JSON"),
    (b'{"text": "tru', "malformed JSON"),
    (b'{"text": "a"}{"text": "b"}', "malformed JSON"),
    (b'{"other": "x"}', "no field 'text'"),
    (b'{"text": null}', "no field 'text'"),
    (b'{"text": 3}', "it is a int"),
    (b'{"text": NaN}', "it is a float"),
    (b'{"text": ["a"]}', "it is a list"),
    (b'{"text": ""}', "empty document"),
    (b'{"text": "\xe9"}', "not UTF-8"),
    (rb'{"text": "half \ud800"}', "not UTF-8"),
    (b"\xff\xfe{", "not UTF-8"),
    (b"\x1b[31m", "malformed JSON"),
]


@pytest.mark.parametrize(("line", "named"), LINES, ids=[repr(line[:30]) for line, _ in LINES])
def test_rows_of_jsonl(line, named, one_line, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "good"}\n')
    one_line(api(pipeline.load, data(kind="jsonl", path="a.jsonl"), model_config()), "a.jsonl:2: ", named)


TEXTS = [
    (b"", "empty document"),
    (b"\xef\xbb\xbf", "empty document"),
    ("é".encode("latin-1"), "not UTF-8 (unexpected end of data at byte 0)"),
    ("text".encode("utf-16"), "not UTF-8 (invalid start byte at byte 0)"),
    (b"text \xed\xa0\x80", "not UTF-8 (invalid continuation byte at byte 5)"),
]


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
@pytest.mark.parametrize(("content", "named"), TEXTS, ids=[repr(content) for content, _ in TEXTS])
def test_files_of_text(kind, content, named, one_line, tmp_path):
    name = "caf\udce9\x1b[31m.txt"  # its name is bad as well
    (tmp_path / name).write_bytes(content)
    named = {"text": named, "jsonl": named.split(" (")[0], "parquet": "unreadable file"}[kind]
    one_line(api(pipeline.load, data(kind=kind, path=name), model_config()), r"caf\udce9\x1b[31m.txt", named)


def parquet(path: Path, **columns) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"body": ["a"]}, "no column 'text' (it has body)"),
        ({"text": [1, 2]}, "a.parquet:1: field 'text' is not text (it is a int)"),
        ({"text": ["a", None]}, "a.parquet:2: no field 'text'"),
        ({"text": ["a", ""]}, "a.parquet:2: empty document"),
        ({"text": [["a"]]}, "a.parquet:1: field 'text' is not text (it is a list)"),
        ({"text": [b"\xff"]}, "a.parquet:1: field 'text' is not text (it is a bytes)"),
        ({}, "no column 'text'"),
    ],
)
def test_parquet(columns, named, one_line, tmp_path):
    parquet(tmp_path / "a.parquet", **columns)
    one_line(api(pipeline.load, data(kind="parquet", path="a.parquet"), model_config()), "a.parquet", named)


@pytest.mark.parametrize("end", [4, 8, -1, -8])
def test_parquet_that_is_cut_off(end, one_line, tmp_path):
    parquet(tmp_path / "a.parquet", text=["a"] * 100)
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:end])
    load = api(pipeline.load, data(kind="parquet", path="a.parquet"), model_config())
    one_line(load, "a.parquet: unreadable file")


# Files of tokenizers

WORDS = json.loads(word_json())
RANKS = ranks_file().splitlines()
SPLIT = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
LARGE = WORDS["model"]["vocab"] | {"the": 4 * 10**9}
TOKENIZERS = [
    ("tokenizers", b"", "x.json is no tokenizer.json"),
    ("tokenizers", b"{}", "x.json is no tokenizer.json"),
    ("tokenizers", b"null", "x.json is no tokenizer.json"),
    ("tokenizers", b"\xff\xfe", "not UTF-8"),
    ("tokenizers", b"[" * 10**6, "nested too deeply"),
    ("tokenizers", b'{"model": 3}', "x.json is no tokenizer.json"),
    ("tokenizers", word_json().encode()[:-1], "x.json is no tokenizer.json"),
    ("tokenizers", json.dumps(WORDS | {"pre_tokenizer": SPLIT}).encode(), "x.json is no tokenizer.json"),
    ("tokenizers", json.dumps(WORDS | {"normalizer": 5}).encode(), "x.json is no tokenizer.json"),
    (
        "tokenizers",
        json.dumps(WORDS | {"model": WORDS["model"] | {"vocab": LARGE}}).encode(),
        "of 'the', is 4000000000",
    ),
    ("tokenizers", word_json().encode(), "smaller than the tokenizers tokenizer's"),
    ("tiktoken", b"", "0 ranks must count from 0"),
    ("tiktoken", b"YQ== 0\nnonsense\n", ":2: b'nonsense' is not base64 and a rank"),
    ("tiktoken", b"!!!! 0\n", ":1: b'!!!! 0' is not base64"),
    ("tiktoken", b"YQ== " + b"9" * 5000, ":1: b'YQ== 999"),
    ("tiktoken", b"\n".join([*RANKS, base64.b64encode(b"new") + b" 10000000000"]), "and not have 10000000000"),
    ("tiktoken", b"\n".join([*RANKS, base64.b64encode(b"new") + b" -1"]), "and not have -1"),
    ("tiktoken", b"\n".join(RANKS[1:]), "ranks must count from 0 and hold every byte"),
    ("tiktoken", ranks_file(), "smaller than the tiktoken tokenizer's"),
]


@pytest.mark.parametrize(("kind", "content", "named"), TOKENIZERS, ids=[f"{k}-{n}" for k, _, n in TOKENIZERS])
def test_files_of_tokenizers(kind, content, named, one_line, tmp_path):
    (tmp_path / "x.json").write_bytes(content)
    config = TokenizerConfig(kind=kind, path="x.json")
    named = (named,) if "smaller than" in named else (named, "x.json")
    one_line(api(make_tokenizer, config, model_config(20, 1, 2, 2), []), *named)


@pytest.mark.parametrize("kind", ["tokenizers", "tiktoken"])
@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("nowhere", "cannot read the tokenizer nowhere: No such file or directory; check the path"),
        (".", "cannot read the tokenizer .: not a regular file"),
        ("pipe", "cannot read the tokenizer pipe: not a regular file"),
        ("/dev/zero", "cannot read the tokenizer /dev/zero: not a regular file"),
        (LONG, "File name too long; choose a shorter name"),
        ("file/below", "a part of the path is a file"),
    ],
)
def test_paths_of_tokenizers(kind, path, named, one_line, tmp_path):
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    one_line(api(make_tokenizer, TokenizerConfig(kind=kind, path=path), model_config(), []), named)


IDS = {"bos_token_id": NUM_RANKS, "eos_token_id": NUM_RANKS + 2, "vocab_size": NUM_RANKS + 256}
RELEASES = [
    ("config.json", b"null", "config.json holds null where a JSON object is due"),
    ("config.json", b"[]", "config.json holds list where"),
    ("config.json", b"{", "config.json is not JSON"),
    ("config.json", b"[" * 10**6, "config.json is JSON nested too deeply"),
    ("config.json", b"\xff\xfe", "config.json is not UTF-8"),
    ("config.json", b"{}", "config.json has no 'bos_token_id'"),
    ("config.json", {"eos_token_id": 1}, "config.json has no 'bos_token_id'"),
    ("config.json", {"bos_token_id": 1}, "config.json has no 'eos_token_id'"),
    ("config.json", {"bos_token_id": 1, "eos_token_id": 1}, "config.json has vocab_size=None"),
    ("config.json", IDS | {"eos_token_id": []}, "config.json has 0 ids in eos_token_id"),
    ("config.json", IDS | {"eos_token_id": [1, None]}, "config.json has eos_token_id[1]=None"),
    ("config.json", IDS | {"eos_token_id": {}}, "config.json has eos_token_id={}"),
    ("config.json", IDS | {"bos_token_id": -1}, "config.json has bos_token_id=-1"),
    ("config.json", IDS | {"bos_token_id": "1"}, "config.json has bos_token_id='1'"),
    ("config.json", IDS | {"pad_token_id": 10**30}, "config.json has pad_token_id=1000000000000000000000000000000"),
    ("config.json", IDS | {"vocab_size": 10**30}, "config.json has vocab_size=1000000000000000000000000000000"),
    ("config.json", IDS | {"text_config": 5}, "config.json has text_config=5"),
    ("tokenizer_config.json", b"[]", "tokenizer_config.json holds list where"),
    ("tokenizer_config.json", b"[" * 10**6, "tokenizer_config.json is JSON nested too deeply"),
    ("tokenizer_config.json", {"kind": "words"}, "tokenizer_config.json has kind='words'"),
    ("tokenizer_config.json", {"kind": "tiktoken"}, "tokenizer_config.json has no 'bos_token_id'"),
    ("tokenizer_config.json", {"added_tokens_decoder": 5}, "added_tokens_decoder does not give each id its content"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}, "does not give each id its content"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": None}}}, "does not give each id its content"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": "a"}}}, "but 9 is to be 'a'"),
    (
        "tokenizer_config.json",
        {"added_tokens_decoder": {f"{NUM_RANKS}": {"content": "\ud800"}}},
        r"'\ud800' is not UTF",
    ),
    ("tiktoken.model", b"nonsense", "tiktoken.model:1: b'nonsense'"),
]


@pytest.mark.parametrize(("name", "content", "named"), RELEASES, ids=[f"{n}-{m[:50]}" for n, _, m in RELEASES])
def test_tokenizers_of_releases(name, content, named, one_line, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(IDS))
    (tmp_path / "tiktoken.model").write_bytes(ranks_file())
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    one_line(api(load_tokenizer, tmp_path), str(tmp_path), named)


def test_there_are_enough():
    """Of what this page promises, and each a different one."""
    tables = (FLAGS, VALUES, CONFIG_FILES, SAVED, SOURCES, LINES, TOKENIZERS, RELEASES)
    assert sum(map(len, tables)) >= 300
    assert all(len(set(map(repr, table))) == len(table) for table in tables)
