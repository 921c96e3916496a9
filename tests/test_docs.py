"""Documentation that names commands, tests and numbers: they exist, and they hold."""

import ast
import doctest
import re
from pathlib import Path

import pytest

from kimi_jax import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_examples_for_readers_of_articles_hold():
    result = doctest.testfile(str(ROOT / "docs" / "from_articles.md"), module_relative=False)
    assert result.attempted > 40 and result.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_tests_that_a_page_names_exist(page):
    named = set(
        re.findall(
            r"\b((?:tests|kimi_jax|configs|benchmarks|notebooks|docs|deploy)/[\w/.]*\w)(?:::(\w+))?", page.read_text()
        )
    )
    missing = {path for path, _ in named if not (ROOT / path).exists() and "NAME" not in path}
    for path, function in named:
        if function and path not in missing:
            tree = ast.parse((ROOT / path).read_text())
            if function not in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}:
                missing.add(f"{path}::{function}")
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_a_page_names_exist(page, capsys):
    cli.main(["--help"])
    usage = capsys.readouterr().out
    for command in set(re.findall(r"\bkimi-jax (\w+)", page.read_text())):
        assert re.search(rf"^  {command} ", usage, re.MULTILINE), f"kimi-jax {command}"
