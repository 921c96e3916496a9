"""Documents from the standard library, text files, `.jsonl` and `.parquet`, and what was wrong with the others.

A document is one file (`stdlib`, `text`) or one row (`jsonl`, `parquet`). Sources are read in one pass and in a
fixed order, so that a corpus need not fit in memory as text and two readings agree.
"""

from __future__ import annotations

import collections
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kimi_jax.config import ConfigError, Source
from kimi_jax.config.checks import printable
from kimi_jax.files import problem, unit_hash

MARK = "\ufeff"
"""Byte order mark, with which some programs begin a UTF-8 file."""
GLOBS = {"text": "**/*", "jsonl": "**/*.jsonl", "parquet": "**/*.parquet"}
NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class DataError(ConfigError):
    """Data that cannot be trained on; the message says where it is and what to do."""


@dataclass(frozen=True)
class Document:
    text: str
    prompt: str = ""
    """Comes before `text`, is seen by the model and carries no loss."""
    key: str | None = None
    """What decides between training and validation; None: the end of the document validates, the rest trains."""


@dataclass
class Problems:
    """Documents that could not be used: how many of each kind, and where the first ones are."""

    on_error: Literal["skip", "raise"] = "skip"
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    first: list[str] = field(default_factory=list)

    def add(self, where: str, kind: str, detail: str = "") -> None:
        """Counts a problem, or raises it (`on_error="raise"`).

        Args:
          where: the file, with the line or row after a colon where there is one.
          kind: what is wrong, in words that are the same for every such problem.
          detail: what is wrong with this one.

        Raises:
          DataError: `on_error` is "raise".
        """
        message = printable(f"{where}: {kind}" + (f" ({detail})" if detail else ""))
        if self.on_error == "raise":
            raise DataError(f'{message}; fix it, or set data.on_error to "skip"')
        self.counts[kind] += 1
        if len(self.first) < 5:
            self.first.append(message)

    def summary(self) -> str:
        """One line with all counts and the first few problems; empty without problems.

        >>> problems = Problems()
        >>> problems.add("a.jsonl:3", "malformed JSON")
        >>> problems.summary()
        'skipped 1 document: 1 malformed JSON; first: a.jsonl:3: malformed JSON'
        """
        total = self.counts.total()
        if not total:
            return ""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.counts.most_common())
        return f"skipped {total} document{'s'[: total > 1]}: {kinds}; first: {'; '.join(self.first)}"


def read(source: Source, problems: Problems) -> Iterator[Document]:
    """Yields the documents of a source, always in the same order.

    Args:
      source: where they are. Folders are walked in the order of their relative paths; hidden files are left out.
      problems: takes what cannot be used: a file that cannot be read, bad UTF-8, a malformed line, a field that
        is missing or not text, an empty document.

    Raises:
      DataError: the path does not exist, or the glob matches nothing; or a problem under `on_error="raise"`.
    """
    if source.kind == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [p for p in root.rglob("*.py") if not NOT_LIBRARY.intersection(p.relative_to(root).parts)]
        paths = [p for p in paths if not p.name.startswith("_sysconfigdata")]  # how this machine built Python
    else:
        try:
            root, paths = _found(source)
        except OSError as error:
            raise DataError(str(problem(error, printable(source.path), "read the data source"))) from error
    # By the bytes of their names, which are the same in every locale.
    for path in sorted(paths, key=lambda p: os.fsencode(p.relative_to(root).as_posix())):
        try:
            if not path.is_file():
                raise OSError("not a regular file")  # a dangling link, or a pipe that would block
            if source.kind == "jsonl":
                yield from _jsonl(path, source, problems)
            elif source.kind == "parquet":
                yield from _parquet(path, source, problems)
            elif text := path.read_bytes().decode("utf-8").removeprefix(MARK):
                yield Document(text, key=path.relative_to(root).as_posix() if len(paths) > 1 else None)
            elif source.kind != "stdlib":  # there, an empty __init__.py is nothing to report
                problems.add(str(path), "empty document")
        except UnicodeDecodeError as error:
            problems.add(str(path), "not UTF-8", f"{error.reason} at byte {error.start}")
        except OSError as error:
            problems.add(str(path), "unreadable file", error.strerror or str(error))


def _found(source: Source) -> tuple[Path, list[Path]]:
    """The folder and the files of a source, in no order."""
    root = Path(source.path)
    try:
        os.stat(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(
            f"data source {printable(source.path)} does not exist; fix the path of the {source.kind} source"
        ) from error
    if not root.is_dir():
        return root.parent, [root]
    glob = source.glob or GLOBS[source.kind]
    found = ((p, p.relative_to(root).parts) for p in root.glob(glob) if not p.is_dir())
    paths = [p for p, parts in found if not any(part.startswith(".") for part in parts)]
    if not paths:
        raise DataError(f"no file under {printable(source.path)} matches glob={glob!r}; fix the path or the glob")
    return root, paths


def _jsonl(path: Path, source: Source, problems: Problems) -> Iterator[Document]:
    with path.open("rb") as lines:
        empty = True
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8").lstrip(MARK).strip(" \t\r\n\f\v")  # a mark per file that was concatenated
                if not text:
                    continue
                empty = False
                row = json.loads(text)
            except UnicodeDecodeError as error:
                empty = False
                problems.add(where, "not UTF-8", f"{error.reason} at byte {error.start} of the line")
            except (ValueError, RecursionError) as error:
                problems.add(where, "malformed JSON", str(error))
            else:
                if isinstance(row, dict):
                    yield from _row(row, where, source, problems)
                else:
                    problems.add(where, "malformed JSON", f"{type(row).__name__} where an object is due")
        if empty:
            problems.add(str(path), "empty document")


def _parquet(path: Path, source: Source, problems: Problems) -> Iterator[Document]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"reading {path} needs pyarrow: pip install 'kimi-jax[parquet]'") from error
    wanted = [source.text_field] + ([source.prompt_field] if source.prompt_field is not None else [])
    number = 0
    try:
        # A file of ours, since pyarrow takes no names that are not UTF-8.
        with path.open("rb") as opened, pyarrow.parquet.ParquetFile(opened) as file:
            columns = file.schema_arrow.names
            if missing := [name for name in wanted if name not in columns]:
                problems.add(str(path), f"no column {missing[0]!r}", f"it has {', '.join(columns)}")
                return
            if twice := [name for name in wanted if columns.count(name) > 1]:
                problems.add(str(path), f"two columns {twice[0]!r}")
                return
            for batch in file.iter_batches(batch_size=256, columns=wanted):
                for values in zip(*(batch.column(name) for name in wanted), strict=True):
                    number += 1
                    try:
                        row = dict(zip(wanted, (value.as_py() for value in values), strict=True))
                    except UnicodeDecodeError as error:
                        problems.add(f"{path}:{number}", "not UTF-8", f"{error.reason} at byte {error.start}")
                    else:
                        yield from _row(row, f"{path}:{number}", source, problems)
    except (pyarrow.ArrowException, OSError) as error:
        where = f"{path}:{number + 1}" if number else str(path)
        problems.add(where, "unreadable file", str(error).partition("\n")[0])
        return
    if number == 0:
        problems.add(str(path), "empty document")


def _row(row: dict, where: str, source: Source, problems: Problems) -> Iterator[Document]:
    texts = []
    for name in (source.text_field, source.prompt_field):
        value = row.get(name) if name is not None else ""
        if name is not None and value is None:
            return problems.add(where, f"no field {name!r}")
        if not isinstance(value, str):
            return problems.add(where, f"field {name!r} is not text", f"it is a {type(value).__name__}")
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which is no text
            return problems.add(where, "not UTF-8", f"{error.reason} in {name!r}")
        texts.append(value)
    text, prompt = texts
    if not text:
        return problems.add(where, "empty document")
    yield Document(text, prompt, key=f"{len(prompt)}:{prompt}{text}")


def side(documents: Iterable[Document], fraction: float, *, held_out: bool) -> Iterator[Document]:
    """The validation documents (`held_out`) or the training documents.

    A document validates when the hash of its key (a file's relative path, a row's text) is under `fraction`, so
    that it keeps its side when others come or go, and equal rows share one. A single text file is split instead,
    at the first line that begins in its last `fraction`.

    Args:
      documents: all of them.
      fraction: share of validation, in (0, 1).
      held_out: which side to yield.
    """
    for document in documents:
        if document.key is not None:
            if (unit_hash(document.key) < fraction) == held_out:
                yield document
            continue
        text = document.text
        cut = int(len(text) * (1 - fraction))
        cut = text.find("\n", cut) + 1 or cut
        if part := text[cut:] if held_out else text[:cut]:
            yield Document(part)
