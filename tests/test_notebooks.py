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

from kimi_jax.store import safetensors_files

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


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a notebook in a kernel of its own, in an empty folder: (its code cells, the folder)."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    work = tmp_path / "work"
    work.mkdir()

    def execute(name: str, changes: dict[str, str]):
        notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        for pattern, replacement in changes.items():
            hits = 0
            for cell in code:
                cell.source, count = re.subn(pattern, replacement, cell.source, flags=re.M)
                hits += count
            assert hits == 1, pattern
        before = dict(os.environ)
        resources = {"metadata": {"path": str(work)}}
        NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
        assert dict(os.environ) == before
        assert "find_spec" in code[0].source and not code[0].outputs, "the install cell does nothing where kimi_jax is"
        return code, work

    return execute


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def assert_drawn(cell, panels: int) -> None:
    """The cell's plot has panels beside each other, each with something in it."""
    (image,) = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
    pixels = matplotlib.image.imread(io.BytesIO(base64.b64decode(image)), format="png")[..., :3]
    assert pixels.shape[1] > 500
    inked = np.min(pixels, axis=-1) < 0.99
    for panel in np.array_split(inked, panels, axis=1):
        assert panel.mean() > 0.02


def test_train_tiny_runs(run):
    """A few steps on the standard library; every plot is drawn, the model writes."""
    # Fewer steps, and layers: compiling them is nearly all of the time.
    code, work = run(
        "01_train_tiny",
        {
            r"^steps = \d+$": f"steps = {STEPS}",
            r"num_layers=\d+, mla_layers=\([\d, ]+\)": "num_layers=3, mla_layers=(2,)",
        },
    )
    plots = [cell for cell in code if "plt.show()" in cell.source]
    assert len(plots) == 2
    for cell in plots:
        assert_drawn(cell, panels=3)
    written = printed(code[-1])
    assert written.count("--- temperature 0\n") == written.count("--- temperature 0.8\n") == 3
    folder = work / "runs" / "notebook"
    assert {path.name for path in folder.iterdir()} >= {"metrics.jsonl", "curves.png", "sample.txt", "checkpoints"}


def test_sharding_tour_runs(run):
    """Drawings and one loss on every mesh, collectives, errors, bytes that do not grow, and plots."""
    # The step is compiled for one layer: that is a third of the time otherwise.
    one_layer = "model=replace(config.model, num_layers=1, mla_layers=()), "
    code, work = run(
        "02_sharding_tour",
        {r"^here = replace\(config, (mesh=Mesh\(fsdp=4, tensor=2\))\)$": rf"here = replace(config, {one_layer}\1)"},
    )
    by_start = {cell.source.partition("\n")[0]: cell for cell in code}
    tours = [cell for cell in code if re.match(r"tour\(\w", cell.source)]
    assert len(tours) == 6
    for cell in tours:
        drawings = [output.data["text/plain"] for output in cell.outputs if "text/html" in output.get("data", {})]
        assert len(drawings) == 3
        for drawing in drawings:
            held = [int(number) for group in re.findall(r"CPU ([\d,]+)", drawing) for number in group.split(",")]
            assert sorted(held) == list(range(8))

    table = printed(next(cell for start, cell in by_start.items() if "minus one device" in start))
    losses = [float(value) for value in re.findall(r" (\d\.\d{7}) ", table)]
    assert len(losses) == 7 and max(losses) - min(losses) <= 2e-6 * losses[0]

    def collectives(text: str, title: str) -> set[tuple[str, str]]:
        lines = text.split(f"{title}\n")[1].splitlines()
        lines = lines[: next((i for i, line in enumerate(lines) if not line.startswith("  ")), len(lines))]
        return {(kind, axes) for kind, axes in re.findall(r"^  (\S+) +(.*?)  ", "\n".join(lines), re.M)}

    forward = printed(by_start["def show(found):"])
    assert collectives(forward, "data 8") == {("all-reduce", "data")}
    assert collectives(forward, "data 2 x tensor 4") == {("all-reduce", "data"), ("all-reduce", "tensor")}
    assert {("all-gather", "seq"), ("collective-permute", "seq")} <= collectives(forward, "data 2 x seq 4")
    step = printed(next(cell for cell in code if "make_step(here" in cell.source))
    assert {kind for kind, _ in collectives(step, "training step, fsdp 4 x tensor 2")} == {
        *("all-gather", "all-reduce", "all-to-all", "reduce-scatter"),
    }

    errors = printed(next(cell for cell in code if "except ConfigError" in cell.source))
    for message in (
        "data 16 = 16 devices is larger than the 8 there are",
        "heads=4 does not divide over mesh tensor 8",
        "batch=12 does not divide over mesh fsdp 8",
        "'experts' and 'expert_latent'",
    ):
        assert message in errors
    assert errors.count("ConfigError: ") == 4

    sizes = printed(next(cell for cell in code if cell.source.startswith("k3 = ")))
    numbers = {
        name: [int(n.replace(",", "")) for n in re.findall(r"[\d,]{4,}", line)]
        for name, line in re.findall(r"^(KDA: \w+|MLA: \w+)(.*) bytes$", sizes, re.M)
    }
    assert len(set(numbers["KDA: states"])) == len(set(numbers["KDA: convolution"])) == 1
    shortest, *_, longest = numbers["MLA: latents"]
    assert longest == 128 * shortest

    plots = [cell for cell in code if "plt.show()" in cell.source]
    for cell, panels in zip(plots, (1, 3, 3), strict=True):
        assert_drawn(cell, panels)
    assert not list(work.iterdir()), "what is refused leaves nothing behind"


def test_released_checkpoint_runs(run):
    """Every file comes back as it was, packed and decoded experts say the same, and a change stays where it is made."""
    code, work = run("03_released_checkpoint", {})
    assert {folder.name for folder in (work / "released_checkpoint").iterdir()} == {
        *("hub", "converted", "exported", "changed"),
    }
    by_text = "\n".join(printed(cell) for cell in code)
    assert by_text.count("4.25 bits a weight") == by_text.count("mxfp4") >= 3
    assert re.search(r"\d+% of blocks get another scale; largest code of those: \[3\.\]", by_text)
    files = re.findall(r"^[0-9a-f]{16}  (\w+)  (\S+)$", by_text, re.M)
    assert {word for word, _ in files} == {"same"}
    assert {name for _, name in files} >= {
        "config.json",
        "tiktoken.model",
        "tokenizer_config.json",
        safetensors_files.INDEX,
    }
    assert len([name for _, name in files if name.endswith(".safetensors")]) > 2
    assert printed(code[-1]).split() == [
        "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight_scale",
    ]
    plots = [cell for cell in code if "plt.show()" in cell.source]
    assert len(plots) == 2
    for cell in plots:
        assert_drawn(cell, panels=3)
