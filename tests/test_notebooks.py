"""Notebooks equal their sources, hold no outputs, and run from a folder outside the checkout."""

import base64
import io
import os
import re
from pathlib import Path

import jupytext
import matplotlib.image
import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
STEPS = 4

pytestmark = [
    # Of jupyter_client, about the machine and not the notebook.
    pytest.mark.filterwarnings("ignore:.*TCP without encryption"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def test_each_source_has_its_notebook():
    assert NOTEBOOKS
    assert {path.stem for path in NOTEBOOKS} == {path.stem for path in (ROOT / "notebooks").glob("*.py")}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_equals_its_source(path):
    notebook, source = nbformat.read(path, as_version=4), jupytext.read(path.with_suffix(".py"))
    nbformat.validate(notebook)
    cells = [[(cell.cell_type, cell.source) for cell in document.cells] for document in (notebook, source)]
    assert cells[0] == cells[1], f"run `jupytext --sync {path.relative_to(ROOT)}`"
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None, f"clear the outputs of {path.name}"


def test_train_tiny_runs(tmp_path, monkeypatch):
    """A few steps on the standard library, in a kernel of its own; every plot is drawn, the model writes."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(ROOT / "notebooks" / "01_train_tiny.ipynb", as_version=4)
    # Fewer steps, and layers: compiling them is nearly all of the time.
    fewer = {
        r"^steps = \d+$": f"steps = {STEPS}",
        r"num_layers=\d+, mla_layers=\([\d, ]+\)": "num_layers=3, mla_layers=(2,)",
    }
    for pattern, replacement in fewer.items():
        hits = 0
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.source, count = re.subn(pattern, replacement, cell.source, flags=re.M)
                hits += count
        assert hits == 1, pattern
    work = tmp_path / "work"
    work.mkdir()
    before = dict(os.environ)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(work)}}).execute()
    assert dict(os.environ) == before

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "find_spec" in code[0].source and not code[0].outputs, "the install cell does nothing where kimi_jax is"
    plots = [cell for cell in code if "plt.show()" in cell.source]
    assert len(plots) == 2
    for cell in plots:
        (image,) = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
        pixels = matplotlib.image.imread(io.BytesIO(base64.b64decode(image)), format="png")[..., :3]
        assert pixels.shape[1] > 800
        inked = np.min(pixels, axis=-1) < 0.99
        for third in range(3):  # three panels beside each other, each with something in it
            width = pixels.shape[1] // 3
            assert inked[:, third * width : (third + 1) * width].mean() > 0.02
    written = "".join(output.get("text", "") for output in code[-1].outputs)
    assert written.count("--- temperature 0\n") == written.count("--- temperature 0.8\n") == 3
    run = work / "runs" / "notebook"
    assert {path.name for path in run.iterdir()} >= {"metrics.jsonl", "curves.png", "sample.txt", "checkpoints"}
