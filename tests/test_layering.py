"""Imports point one way through the layers, and a few names stay where they belong.

The rules read the source with `ast` and import nothing. Each is a function from a module's name and source to what is
wrong with it, so that the rules themselves are tested too, on snippets that break them.
"""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "kimi_jax"

LAYERS = (
    {"config", "files"},
    {"ops"},
    {"parallel"},
    {"model"},
    {"optim", "text"},
    {"data"},
    {"store"},
    {"infer"},
    {"train"},
    {"analysis"},
    {"cli", "__main__"},
)
"""From the bottom up: a part imports only from its own layer and those above it in this list."""
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}

NOT_FROM_NNX = {"jit", "grad", "value_and_grad", "scan", "vmap", "remat", "Optimizer", "ModelAndOptimizer"}
"""Modules are plain pytrees here: transforms are JAX's, optimizers are Optax's."""

HUGGING_FACE = re.compile(
    r"(?<![A-Za-z0-9_])(self_attn|block_sparse_moe|shared_experts|routed_expert_\w+|language_model|lm_head|embed_tokens"
    r"|e_score_correction_bias|input_layernorm|post_attention_layernorm|self_attention_res_\w+|mlp_res_\w+"
    r"|output_attn_res_\w+|kv_a_proj_with_mqa|(?:q|k|v|o|b|g|gate|up|down|[qfg]_a|[qfg]_b|kv_b)_proj|[qkv]_conv1d"
    r"|q_a_layernorm|kv_a_layernorm|weight_packed|num_hidden_layers|linear_attn_config)(?![A-Za-z0-9_])"
)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path.read_text() for path in sorted((ROOT / PACKAGE).rglob("*.py"))}
FOLDERS = {module_name(path) for path in (ROOT / PACKAGE).rglob("__init__.py")} - {PACKAGE}
CONFIGS = {path.name: path.read_text() for path in sorted((ROOT / "configs").glob("*.py"))}


def part_of(module: str) -> str:
    """`kimi_jax.ops.kda` -> `ops`; the package itself -> ``."""
    return module.partition(".")[2].partition(".")[0]


def imports(source: str) -> Iterator[str]:
    """Every module that the source imports, inside functions too; a `from` import also gives its names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def is_in(module: str, folder: str) -> bool:
    return module.startswith(folder + ".")


def wrong_imports(module: str, source: str) -> list[str]:
    """What is wrong with a module's imports: upward, from the package's root, relative, or of an unknown part."""
    part = part_of(module)
    if part not in RANK:
        return [f"{module}: '{part}' is in no layer; add it to LAYERS in tests/test_layering.py"]
    wrong = []
    for name in set(imports(source)):
        if name.startswith("."):
            wrong.append(f"{module}: relative import of {name}; write the full name")
        elif name == PACKAGE or is_in(name, PACKAGE):
            other = part_of(name)
            if other not in RANK and name != PACKAGE:
                wrong.append(
                    f"{module}: imports {name}, which is no module in a layer; import from where it is defined"
                )
            elif other in RANK and RANK[other] > RANK[part]:
                below = ", ".join(p for parts in LAYERS[: RANK[part]] for p in sorted(parts))
                wrong.append(f"{module}: imports {name}, but '{part}' may only import from {below or 'nothing'}")
    return wrong


def impure_ops(module: str, source: str) -> list[str]:
    """ops are functions on arrays: JAX, NumPy and each other."""
    return [
        f"{module}: imports {name}; an op takes arrays and numbers, no modules and no settings"
        for name in set(imports(source))
        if part_of(module) == "ops"
        and (name.split(".")[0] == "flax" or (is_in(name, PACKAGE) and not is_in(name + ".", f"{PACKAGE}.ops")))
    ]


def nnx_transforms(module: str, source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("nnx", "flax.nnx"):
            found.append(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "flax.nnx":
            found.extend(alias.name for alias in node.names)
    return [f"{module}: nnx.{n}; use jax's or optax's" for n in found if n in NOT_FROM_NNX]


def foreign_names(module: str, source: str) -> list[str]:
    """Hugging Face's names of tensors and settings outside the modules whose concern they are."""
    if module in {f"{PACKAGE}.store.{name}" for name in ("names", "released_config", "released_keys", "quantization")}:
        return []
    return [
        f"{module}:{number}: {match[0]} is Hugging Face's name; it belongs in store/names.py or released_config.py"
        for number, line in enumerate(source.splitlines(), 1)
        for match in HUGGING_FACE.finditer(line)
    ]


def reexports(module: str, source: str) -> list[str]:
    body = ast.parse(source).body
    rest = [node for node in body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    return [f"{module}/__init__.py line {node.lineno}: a folder re-exports nothing" for node in rest]


def config_imports(file: str, source: str) -> list[str]:
    return [
        f"configs/{file}: imports {name}; a config imports kimi_jax.config alone"
        for name in set(imports(source))
        if not is_in(name + ".", "kimi_jax.config")
    ]


RULES = (wrong_imports, impure_ops, nnx_transforms, foreign_names)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_modules(rule):
    wrong = [line for name, source in SOURCES.items() if name != PACKAGE for line in rule(name, source)]
    assert not wrong, "\n".join(sorted(wrong))


def test_folders_reexport_nothing():
    assert len(FOLDERS) >= 3
    wrong = [line for name in FOLDERS - {f"{PACKAGE}.config"} for line in reexports(name, SOURCES[name])]
    assert not wrong, "\n".join(wrong)


def test_configs_import_only_the_config_module():
    assert CONFIGS
    wrong = [line for file, source in CONFIGS.items() for line in config_imports(file, source)]
    assert not wrong, "\n".join(wrong)


def test_no_import_goes_in_a_circle():
    """Inside a layer the table allows any import: there the order only has to exist."""
    graph = {name: SOURCES.keys() & set(imports(source)) for name, source in SOURCES.items() if name != PACKAGE}
    assert any(graph.values())
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"imports in a circle: {' <- '.join(error.args[1])}")


def test_no_module_is_a_drawer():
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert not [name for name in SOURCES if name.split(".")[-1] in drawers], "name the module by what it holds"


@pytest.mark.parametrize(
    ("rule", "module", "source", "message"),
    [
        (wrong_imports, "kimi_jax.ops.kda", "from kimi_jax.model import Kimi", "'ops' may only import from config"),
        (wrong_imports, "kimi_jax.config", "def f():\n    import kimi_jax.store.read", "may only import from nothing"),
        (wrong_imports, "kimi_jax.model.cache", "from kimi_jax import train", "imports kimi_jax.train, but 'model'"),
        (
            wrong_imports,
            "kimi_jax.model.kimi",
            "from kimi_jax import Kimi",
            "kimi_jax.Kimi, which is no module in a layer",
        ),
        (wrong_imports, "kimi_jax.model", "from .cache import Cache", "relative import of .cache"),
        (wrong_imports, "kimi_jax.widget", "", "'widget' is in no layer; add it to LAYERS in tests/test_layering.py"),
        (impure_ops, "kimi_jax.ops.kda", "from flax import nnx", "imports flax.nnx"),
        (impure_ops, "kimi_jax.ops.kda", "from kimi_jax.config import KDAConfig", "imports kimi_jax.config.KDAConfig"),
        (nnx_transforms, "kimi_jax.train", "from flax import nnx\nnnx.jit(f)", "nnx.jit"),
        (nnx_transforms, "kimi_jax.train", "from flax.nnx import Optimizer", "nnx.Optimizer"),
        (foreign_names, "kimi_jax.model", 'name = "layers.0.self_attn.q_proj.weight"', "kimi_jax.model:1: self_attn"),
        (reexports, "kimi_jax.ops", '"""Ops."""\nfrom kimi_jax.ops.kda import kda', "line 2: a folder re-exports"),
        (config_imports, "k3.py", "import os\nfrom kimi_jax.config import Config", "imports os"),
    ],
)
def test_rules_see_what_breaks_them(rule, module, source, message):
    assert any(message in line for line in rule(module, source)), rule(module, source)


@pytest.mark.parametrize(
    ("rule", "module", "source"),
    [
        (
            wrong_imports,
            "kimi_jax.model.mla",
            "from kimi_jax.model.cache import MLACache\nfrom kimi_jax.model.kda import KDA",
        ),
        (
            wrong_imports,
            "kimi_jax.train.loop",
            "import kimi_jax.infer.generate\nimport jax\nfrom kimi_jax.store import read",
        ),
        (impure_ops, "kimi_jax.ops.kda", "from kimi_jax.ops import segments\nfrom kimi_jax.ops.norm import rms_norm"),
        (nnx_transforms, "kimi_jax.model", "from flax import nnx\nnnx.Module\njax.jit(f)"),
        (foreign_names, "kimi_jax.model", "config.moe.num_shared_experts"),
        (foreign_names, "kimi_jax.store.names", '"self_attn"'),
        (reexports, "kimi_jax.ops", '"""Ops."""'),
        (config_imports, "k3.py", "from kimi_jax.config import Config"),
    ],
)
def test_rules_allow_what_is_right(rule, module, source):
    assert rule(module, source) == []
