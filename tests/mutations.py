"""Puts one-line faults into a copy of the package, one at a time, and sees whether the fast tests of that room fail.

A fault that no test notices marks a line that may be broken by the next edit. The faults are in `mutants.toml`; what
came of them is in `docs/mutations.md`. As a script, it prints a table; its exit code is 1 if a fault survives:

    python tests/mutations.py --room ops
    python tests/mutations.py --only kda-no-reset,yarn-no-rounding
    pytest tests/mutations.py -m slow -n0

Tests run with `-x`: the one that noticed the fault before, then the room's, files that are called like the module with
the fault first and the others by length. One JAX compilation cache serves all, so that only what a fault changes is
compiled again. Each test that failed must pass in a copy without a fault, or the run is void.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_name("mutants.toml")
WORK = Path(tempfile.gettempdir()) / "kimi-jax-mutations"
"""Copies and the compilation cache; may be deleted at any time."""
LIMIT_S = 1200
"""Of one run of a room's tests; a fault that makes them hang is caught."""
TIME_LIMIT = "(time limit)"


@dataclass(frozen=True)
class Mutant:
    id: str
    file: str
    old: str
    new: str
    breaks: str
    caught_by: str = ""
    """The test that noticed it before, if any: it runs first."""

    @property
    def room(self) -> str:
        return Path(self.file).parts[1]


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    caught_by: str | None
    """First test that failed, or `TIME_LIMIT`; None where the fault survived."""
    seconds: float


class Void(Exception):
    """The run says nothing: the tests fail without a fault, or a fault is not in the code."""


def mutants(only: set[str] = frozenset(), room: str | None = None) -> list[Mutant]:
    """The faults, in the order of their file.

    Raises:
        Void: an unknown id or room, or two faults of one id.
    """
    found = [Mutant(**entry) for entry in tomllib.loads(FAULTS.read_text(encoding="utf-8"))["mutant"]]
    ids = [mutant.id for mutant in found]
    if len(set(ids)) < len(ids):
        raise Void(f"{FAULTS.name} has an id twice: {sorted({i for i in ids if ids.count(i) > 1})}")
    if unknown := only - set(ids):
        raise Void(f"no fault is called {', '.join(sorted(unknown))}; see {FAULTS.name}")
    if room is not None and room not in {mutant.room for mutant in found}:
        raise Void(f"no fault is in room {room!r}; there are {', '.join(sorted({m.room for m in found}))}")
    return [m for m in found if (not only or m.id in only) and (room is None or m.room == room)]


def mutated(mutant: Mutant, text: str) -> str:
    """The file's text with the fault.

    Raises:
        Void: the code has changed, and the fault's place is not found, or not once.
    """
    count = text.count(mutant.old)
    if count != 1:
        raise Void(f"{mutant.id}: {mutant.old!r} occurs {count} times in {mutant.file}, not once; rewrite the fault")
    return text.replace(mutant.old, mutant.new)


def copy_of_repository(target: Path) -> Path:
    """A fresh copy of what git tracks or would track."""
    shutil.rmtree(target, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (REPOSITORY / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name)
    return target


def run_tests(copy: Path, tests: list[str], *options: str) -> tuple[int | None, list[str]]:
    """Runs pytest in a copy: its exit code, or None past the time limit, and the tests that failed."""
    report = copy / "report.xml"
    report.unlink(missing_ok=True)
    env = os.environ | {
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",  # a fault that is as long as the code it replaces must not run from a cache
        "JAX_COMPILATION_CACHE_DIR": str(WORK / "jax-cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    command = [sys.executable, "-m", "pytest", *tests, "-q", "-n0", "-m", "not slow", "-p", "no:cacheprovider"]
    with open(copy / "output.txt", "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*command, f"--junitxml={report}", "-o", "junit_family=xunit1", *options],
            cwd=copy,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    cases = ElementTree.parse(report).iter("testcase") if report.is_file() else []
    failed = [case for case in cases if any(child.tag in ("failure", "error") for child in case)]
    return code, [f"{case.get('file')}::{case.get('name')}" for case in failed]


def in_order(mutant: Mutant, copy: Path) -> list[str]:
    """The room's test files, those called like the module first, then short ones first."""
    stem = Path(mutant.file).stem
    files = list((copy / "tests" / mutant.room).rglob("test_*.py"))
    files.sort(key=lambda file: (stem not in file.stem, file.stat().st_size))
    return [file.relative_to(copy).as_posix() for file in files]


def judge(mutant: Mutant, copy: Path) -> Outcome:
    """Whether the room's tests notice a fault, in a copy that is clean before and after."""
    path = copy / mutant.file
    clean = path.read_text(encoding="utf-8")
    path.write_text(mutated(mutant, clean), encoding="utf-8")
    begin = time.monotonic()
    try:
        code, failed = run_tests(copy, [mutant.caught_by], "-x") if mutant.caught_by else (0, [])
        if code == 0:
            code, failed = run_tests(copy, in_order(mutant, copy), "-x")
    finally:
        path.write_text(clean, encoding="utf-8")
    if code is None:
        failed = [TIME_LIMIT]
    elif code not in (0, 1) or (code == 1 and not failed):
        raise Void(f"{mutant.id}: pytest ends with {code}; see {copy / 'output.txt'}")
    return Outcome(mutant, failed[0] if failed else None, time.monotonic() - begin)


def check_clean(outcomes: list[Outcome], copy: Path) -> None:
    """Runs the tests that caught something in a copy without a fault.

    Raises:
        Void: one of them fails.
    """
    tests = sorted({o.caught_by for o in outcomes if o.caught_by is not None and "::" in o.caught_by})
    if tests:
        code, failed = run_tests(copy, tests)
        if code != 0:
            raise Void(f"without a fault pytest ends with {code}: {failed or copy / 'output.txt'}")


def run(chosen: list[Mutant], jobs: int = 1, on_outcome=lambda outcome: None) -> list[Outcome]:
    """Judges faults, `jobs` at a time.

    Raises:
        Void: a fault is not in the code, or a test fails without one.
    """
    WORK.mkdir(parents=True, exist_ok=True)
    for mutant in chosen:
        mutated(mutant, (REPOSITORY / mutant.file).read_text(encoding="utf-8"))
    made = [copy_of_repository(WORK / f"copy-{os.getpid()}-{number}") for number in range(jobs)]
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for copy in made:
        copies.put(copy)

    def one(mutant: Mutant) -> Outcome:
        copy = copies.get()
        try:
            outcome = judge(mutant, copy)
        finally:
            copies.put(copy)
        on_outcome(outcome)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(one, chosen))
    check_clean(outcomes, made[0])
    for copy in made:  # kept where something went wrong: its output says what
        shutil.rmtree(copy)
    return outcomes


def row(outcome: Outcome) -> str:
    """One line of a markdown table."""
    mutant = outcome.mutant
    place = mutant.file.removeprefix("kimi_jax/")
    caught = "**SURVIVED**" if outcome.caught_by is None else f"`{outcome.caught_by}`"
    return f"| {mutant.id} | {place} | {mutant.breaks} | {caught} | {outcome.seconds:.0f} |"


HEADER = "| id | file | what it breaks | caught by | s |\n|---|---|---|---|---|"


@pytest.mark.slow
def test_no_fault_survives():
    outcomes = run(mutants())
    survivors = [row(outcome) for outcome in outcomes if outcome.caught_by is None]
    assert not survivors, "\n".join(survivors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="ids, separated by commas")
    parser.add_argument("--room", help="a folder of kimi_jax")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    options = parser.parse_args()
    begin = time.monotonic()
    try:
        chosen = mutants({i for i in options.only.split(",") if i}, options.room)
        print(HEADER, flush=True)
        outcomes = run(chosen, options.jobs, lambda outcome: print(row(outcome), flush=True))
    except Void as error:
        print(f"void: {error}", file=sys.stderr)
        return 2
    survivors = sum(outcome.caught_by is None for outcome in outcomes)
    print(f"\n{len(outcomes)} faults, {survivors} survived, {time.monotonic() - begin:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
