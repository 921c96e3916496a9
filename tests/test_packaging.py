"""What `python -m build` makes is complete: installed elsewhere, it trains without the checkout.

The subprocesses run with `-S`, so that the path file of an editable install is not read, and with a path of two
folders: the installed wheel, and the site-packages that hold its dependencies.
"""

import email
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = {path.name for path in (ROOT / "configs").glob("*.py")}


def run(*command, cwd: Path, **environment: str) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """A folder with the sdist, and the wheel that was built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory) -> Path:
    """A folder with the wheel installed in it, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    (wheel,) = dist.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--target", folder, wheel, cwd=folder)
    return folder


@pytest.fixture
def isolated(installed, tmp_path):
    """Runs the interpreter on the installed wheel, in an empty folder, with the checkout out of reach."""
    site_packages = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    path = os.pathsep.join([str(installed), *site_packages])

    def python(*arguments) -> str:
        return run(sys.executable, "-S", "-P", *arguments, cwd=tmp_path, PYTHONPATH=path)

    return python


def test_wheel_holds_the_package_and_the_configs(dist):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        fields = email.message_from_bytes(archive.read(metadata))
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert fields["Version"] == project["version"]
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Requires-Python"] == ">=3.11"
    assert set(fields.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])

    assert {Path(name).name for name in names if name.startswith("kimi_jax/configs/")} == CONFIGS
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kimi_jax").rglob("*.py")}
    assert modules <= set(names)
    assert not [name for name in names if not name.startswith(("kimi_jax/", "kimi_jax-"))]
    assert not [name for name in names if "__pycache__" in name]


def test_sdist_holds_what_the_test_line_needs(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"configs/{name}" for name in CONFIGS} <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "train_main.py", "tests/conftest.py"} <= names


def test_installed_package_finds_its_configs(isolated, installed):
    program = "import kimi_jax.config as c; print(c.__file__); print(*c.shipped_configs().values(), sep='\\n')"
    module, *configs = isolated("-c", program).split()
    assert Path(module) == installed / "kimi_jax" / "config" / "__init__.py"
    assert {Path(path) for path in configs} == {installed / "kimi_jax" / "configs" / name for name in CONFIGS}


def test_installed_command_trains_two_steps(isolated, installed, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        lines = (f"def f{number}_{line}(x):\n    return x + {line}\n\n" for line in range(20))
        (text / f"{number}.py").write_text("".join(lines))
    runs = tmp_path / "runs"
    out = isolated(
        installed / "bin" / "kimi-jax",
        *("train", "k3_tiny", "--train.runs-dir", runs),
        *("--data.sources.0.kind", "text", "--data.sources.0.path", text),
        *("--data.sequence-length", "64", "--data.batch-size", "2", "--data.validation-fraction", "0.1"),
        *("--train.steps", "2", "--train.eval-tokens", "2000", "--train.sample-tokens", "8"),
        *("--model.num-layers", "3", "--model.mla-layers", "2"),
    )
    name, _, value = out.strip().splitlines()[-1].partition(": ")
    assert name == "val bits per byte"
    assert 0 < float(value) < 20
    made = {path.name for path in (runs / "k3_tiny").iterdir()}
    assert {"curves.png", "metrics.jsonl", "sample.txt", "config.json", "checkpoints"} <= made
