"""Released directories to checkpoints and back: byte for byte, killed and gone on with, refused before work starts."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kimi_jax import cli, files
from kimi_jax.config import ConfigError, Mesh, to_dict
from kimi_jax.model.kimi import init
from kimi_jax.model.param import arrays
from kimi_jax.ops.quant.qtensor import Kind, QTensor
from kimi_jax.parallel.mesh import make_mesh, on_mesh
from kimi_jax.store import checkpoint, released_config, safetensors_files, sliced
from kimi_jax.store import names as released_names
from kimi_jax.store.convert import convert
from kimi_jax.store.open import initial_parameters, needed_tokenizer, open_model
from kimi_jax.store.read import Release, load_release
from kimi_jax.store.safetensors_files import CheckpointError
from kimi_jax.store.write import pack, save_release
from kimi_jax.text.tokenizer import ByteTokenizer
from kimi_jax.train.loop import run_training
from tests import tiny
from tests.store.test_release import GOLDEN, mxfp4_directory, read, read_file

ROOT = Path(__file__).resolve().parents[2]
VISION = {
    "vision_tower.patch_embed.proj.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2),
    "mm_projector.proj.0.weight": np.ones((3, 5), ml_dtypes.bfloat16),
}


def tensors_of(file: Path) -> dict[str, np.ndarray]:
    dtypes = {name: (safetensors_files.DTYPES[dtype], shape) for name, (dtype, shape, _) in read_file(file).items()}
    return {
        name: np.frombuffer(data, dtypes[name][0]).reshape(dtypes[name][1])
        for name, (*_, data) in read_file(file).items()
    }


def save_tensors(found: dict[str, np.ndarray], file: Path) -> None:
    shard = safetensors_files.make_shard(
        (name, safetensors_files.NAMES[value.dtype], value.shape) for name, value in found.items()
    )
    safetensors_files.write(file, shard, (found[name] for name in shard.entries))


def k3_mxfp4(folder: Path) -> Path:
    """K3 with packed experts, a vision tower, and files of other kinds."""
    mxfp4_directory(folder)
    save_tensors(VISION, folder / "model-00003-of-00003.safetensors")
    index = json.loads((folder / safetensors_files.INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(VISION, "model-00003-of-00003.safetensors")
    (folder / safetensors_files.INDEX).write_text(json.dumps(index))
    (folder / "generation_config.json").write_text('{"max_length": 1048576}')
    (folder / "docs").mkdir()
    (folder / "docs" / "note.txt").write_text("as it was")
    return folder


def kimi_linear(folder: Path) -> Path:
    shutil.copytree(GOLDEN / "kimi_linear_tiny", folder)
    return folder


def k2_fp8(folder: Path) -> Path:
    """K2 in block-FP8 with ragged edges, several files, and scales that no encoder of ours would choose."""
    config = replace(released_config.read_config(GOLDEN / "k2_tiny"), dense_hidden_size=160)
    save_release(folder, init(config, 3), config, packed=True, max_shard_bytes=100_000)
    rng = np.random.default_rng(0)
    for file in sorted(folder.glob("*.safetensors")):
        found = tensors_of(file)
        for name, value in found.items():
            if name.endswith("_scale_inv"):
                found[name] = value * rng.uniform(1, 2, value.shape).astype(np.float32)
        if file.name.startswith("model-00001"):
            found["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, ml_dtypes.bfloat16)
        save_tensors(found, file)
    index = json.loads((folder / safetensors_files.INDEX).read_text())
    first = min(index["weight_map"].values())
    index["weight_map"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = first
    (folder / safetensors_files.INDEX).write_text(json.dumps(index))
    return folder


def k25_int4(folder: Path) -> Path:
    """K2.5: K2's text model under a prefix, its experts in INT4, and a vision tower."""
    folder.mkdir()
    rng, found = np.random.default_rng(0), dict(VISION)
    for name, value in tensors_of(GOLDEN / "k2_tiny" / safetensors_files.SINGLE).items():
        name = "language_model." + name
        if ".experts." not in name:
            found[name] = value
            continue
        o, i = value.shape
        found[name + "_packed"] = rng.integers(-(2**31), 2**31, (o, i // 8)).astype(np.int32)
        found[name + "_scale"] = rng.uniform(0.001, 0.01, (o, i // 32)).astype(ml_dtypes.bfloat16)
        found[name + "_shape"] = np.array([o, i], np.int64)
    save_tensors(found, folder / safetensors_files.SINGLE)
    text = json.loads((GOLDEN / "k2_tiny" / released_config.CONFIG).read_text())
    groups = {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "symmetric": True, "type": "int"}}}
    text["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    text["quantization_config"]["config_groups"] = groups
    (folder / released_config.CONFIG).write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    return folder


MAKERS = {make.__name__: make for make in (k3_mxfp4, kimi_linear, k2_fp8, k25_int4)}


@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    """Name -> a released directory and what it was converted to."""
    root, made = tmp_path_factory.mktemp("releases"), {}

    def get(name: str) -> tuple[Path, Path]:
        if name not in made:
            source = MAKERS[name](root / name)
            convert(source, root / f"{name}_converted", verify=True)
            made[name] = source, root / f"{name}_converted"
        return made[name]

    return get


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("block", [safetensors_files.BLOCK, 1000])
def test_an_untouched_release_comes_back_byte_for_byte(name, block, releases, tmp_path, monkeypatch):
    source, converted = releases(name)
    monkeypatch.setattr(safetensors_files, "BLOCK", block)
    convert(converted, tmp_path / "back", verify=True)
    assert files_of(tmp_path / "back") == files_of(source)
    assert not list(tmp_path.glob("*.partial")) and not list(converted.rglob("*.partial"))


@pytest.mark.parametrize("name", MAKERS)
def test_the_checkpoint_is_an_ordinary_one(name, releases):
    """Opened by Orbax, whole and on a mesh, packed and decoded: the numbers of the release."""
    source, converted = releases(name)
    expected = arrays(load_release(source, dtype=None)[0])
    packed = arrays(load_release(source, dtype=None, packed=True)[0])
    for mesh in (Mesh(), Mesh(expert=2)):
        with on_mesh(make_mesh(mesh)):
            for want, stay in ((expected, False), (packed, True)):
                found = checkpoint.flatten(arrays(open_model(converted, packed=stay)[0]))
                want = checkpoint.flatten(want)
                assert found.keys() == want.keys()
                for key, value in found.items():
                    assert value.dtype == want[key].dtype, key
                    assert np.asarray(value).tobytes() == np.asarray(want[key]).tobytes(), key


def test_experts_stay_packed_in_the_checkpoint(releases):
    _, converted = releases("k3_mxfp4")
    packed = arrays(open_model(converted, packed=True)[0])
    experts = [value for value in packed.values() if isinstance(value, QTensor)]
    assert len(experts) >= 3
    stored = sum(
        path.stat().st_size
        for path in converted.rglob("params.*/*")
        if ".mlp.w_" in str(path.parent) and path.parent.name.endswith((".packed", ".scale")) and path.name != ".zarray"
    )
    assert stored * 8 == 4.25 * sum(value.size for value in experts)


def test_a_slice_of_experts_opens_no_other(releases, monkeypatch):
    release = Release(releases("k3_mxfp4")[0])
    opened, plain = [], release.directory.read
    monkeypatch.setattr(release.directory, "read", lambda name: (opened.append(name), plain(name))[1])
    param = next(name for name in release.kinds if name.endswith("w_gate"))
    index = (slice(0, 1), slice(0, 1), slice(2, 4), slice(None), slice(None))
    assert release.read(param, index, jnp.float32).shape[2] == 2
    assert len(opened) == 4 and {name.split(".experts.")[1].split(".")[0] for name in opened} == {"2", "3"}


def a_run(folder: Path, model, config) -> Path:
    """A run's folder with one checkpoint."""
    whole = replace(tiny.config(folder.parent), model=config)
    with checkpoint.opened(folder / "checkpoints", write=True) as checkpoints:
        checkpoints.save(7, {"params": arrays(model), "step": jnp.int32(7)}, {"config": to_dict(whole)})
        checkpoints.wait()
    return folder


@pytest.mark.parametrize("name", MAKERS)
def test_what_was_trained_is_exported_in_the_format_of_its_release(name, releases, tmp_path, monkeypatch):
    """Parameters that moved are encoded anew; all that did not keeps its bytes."""
    monkeypatch.setattr(sliced, "CHUNK_BYTES", 4096)
    source, converted = releases(name)
    model, config = load_release(source)
    values = arrays(model)
    moved = next(key for key in values if key.endswith("mlp.w_down") and values[key].ndim == 5)
    values[moved] = values[moved] * 1.3 + 1e-4
    run = a_run(tmp_path / "run", jax.tree.unflatten(jax.tree.structure(model), list(values.values())), config)
    convert(run, tmp_path / "out", like=converted, verify=True)
    before, after = read(source), read(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {key for key in before if before[key] != after[key]}
    kinds: dict[str, Kind] = {"k3_mxfp4": "mxfp4", "k2_fp8": "fp8_block", "k25_int4": "int4"}
    where = {
        tensor.name: tensor
        for tensor in released_names.tensors(config, released_names.ROOT if name.startswith("k25") else None)
    }
    moved_tensors = [tensor for tensor in where.values() if moved in tensor.params]
    assert all(any(key.startswith(tensor.name) for key in changed) for tensor in moved_tensors)
    if name in ("k3_mxfp4", "kimi_linear"):  # formats whose encoder finds every code again
        assert all(any(key.startswith(tensor.name) for tensor in moved_tensors) for key in changed)
    tensor = moved_tensors[-1]
    w = np.asarray(values[moved][tensor.index]).T
    if name == "kimi_linear":
        assert after[tensor.name][2] == w.astype(ml_dtypes.bfloat16).tobytes()
    else:
        parts = pack(w, kinds[name])
        for s in released_names.stored(tensor, kinds[name]):
            if s.part in parts:
                assert after[s.name][2] == parts[s.part].tobytes(), s.name
    loaded, _ = load_release(tmp_path / "out")
    step = {"k3_mxfp4": 0.26, "k2_fp8": 0.07, "k25_int4": 0.1, "kimi_linear": 0.004}[name]
    scale = float(jnp.max(jnp.abs(values[moved])))
    np.testing.assert_allclose(arrays(loaded)[moved], values[moved], atol=step * scale)
    assert files_of(tmp_path / "out").keys() == files_of(source).keys()


@pytest.mark.parametrize("name", ["k3_tiny", "kimi_linear_tiny", "k2_tiny"])
def test_a_run_is_exported_in_the_format_of_its_family(name, tmp_path):
    model, config = load_release(GOLDEN / name)
    run = a_run(tmp_path / "run", model, config)
    ByteTokenizer().save(run / "tokenizer")
    convert(run, tmp_path / "out", verify=True)
    lines = [f"{key} {dtype} {'x'.join(map(str, shape))}" for key, (dtype, shape, _) in read(tmp_path / "out").items()]
    assert sorted(lines) == released_names.manifest_lines(config)
    quantized = {dtype for dtype, *_ in read(tmp_path / "out").values()} - {"BF16", "F32"}
    assert quantized == {"k3_tiny": {"U8"}, "kimi_linear_tiny": set(), "k2_tiny": {"F8_E4M3"}}[name]
    save_release(tmp_path / "saved", model, config, packed=True)
    assert files_of(tmp_path / "saved") == files_of(tmp_path / "out")
    convert(run, tmp_path / "plain", packed=False)
    assert read(tmp_path / "plain") == read(GOLDEN / name)
    assert load_release(tmp_path / "out")[1] == config


def killed(source: Path, target: Path, after: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.programs.killed_conversion", source, target, str(after)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not target.exists() and target.with_name(target.name + ".partial").is_dir()


def test_killed_it_goes_on_where_it_stopped(releases, tmp_path, monkeypatch):
    """kill -9 amid an import, and amid an export: nothing has the name, and what was finished is not done again."""
    monkeypatch.setattr(sliced, "CHUNK_BYTES", 2048)
    source, _ = releases("k3_mxfp4")
    killed(source, tmp_path / "converted", 40)
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "converted.partial").rglob("params.*/[0-9]*")}
    done = {path: stamp for path, stamp in done.items() if path.suffix != ".partial"}
    assert len(done) == 40
    written = []
    plain = sliced.write_chunk
    monkeypatch.setattr(sliced, "write_chunk", lambda file, values: (written.append(file), plain(file, values))[1])
    convert(source, tmp_path / "converted", verify=True)
    assert written and not {*written} & {*done}
    for path, stamp in done.items():
        moved = tmp_path / "converted" / path.relative_to(tmp_path / "converted.partial")
        assert moved.stat().st_mtime_ns == stamp
    killed(tmp_path / "converted", tmp_path / "back", 1)
    assert [path.name for path in (tmp_path / "back.partial").glob("*.safetensors")] == [
        "model-00001-of-00002.safetensors"
    ]
    convert(tmp_path / "converted", tmp_path / "back", verify=True)
    assert files_of(tmp_path / "back") == files_of(source)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["back", "converted"]


def test_what_another_source_left_is_not_gone_on_with(releases, tmp_path, monkeypatch):
    source, _ = releases("k3_mxfp4")
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(safetensors_files, "write", lambda *args: 1 / 0)
        convert(source, tmp_path / "out")
    assert list((tmp_path / "out.partial").rglob("params.*/0.*"))
    other, _ = releases("kimi_linear")
    convert(other, tmp_path / "out", verify=True)
    convert(tmp_path / "out", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(other)


def test_verify_finds_a_byte_that_went_wrong(releases, tmp_path, monkeypatch):
    source, _ = releases("k3_mxfp4")
    plain, hit = sliced.write_chunk, []

    def flipped(file, values):
        if file.parent.name.endswith("w_up.packed") and not hit:
            hit.append(file)
            values = values.copy()
            values[0, 0, 3, 5, 1] ^= 1
        plain(file, values)

    monkeypatch.setattr(sliced, "write_chunk", flipped)
    with pytest.raises(CheckpointError, match=r"1 tensors of .* differ:\n .*experts\.3\.w3\.weight_packed$"):
        convert(source, tmp_path / "bad", verify=True)
    assert hit and not (tmp_path / "bad").exists()


def truncate(folder: Path) -> None:
    with open(folder / "model-00002-of-00002.safetensors", "r+b") as handle:
        handle.truncate(5000)


def lose_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def rename_shard(folder: Path, name: str = "../elsewhere.safetensors") -> None:
    index = json.loads((folder / safetensors_files.INDEX).read_text())
    index["weight_map"][sorted(index["weight_map"])[0]] = name
    (folder / safetensors_files.INDEX).write_text(json.dumps(index))


def change_config(change):
    def apply(folder: Path) -> None:
        whole = json.loads((folder / released_config.CONFIG).read_text())
        change(whole["text_config"])
        (folder / released_config.CONFIG).write_text(json.dumps(whole))

    return apply


def change_experts(change):
    def apply(folder: Path) -> None:
        file = folder / "model-00002-of-00002.safetensors"
        found = tensors_of(file)
        change(found)
        save_tensors(found, file)
        index = json.loads((folder / safetensors_files.INDEX).read_text())
        kept = {name: f for name, f in index["weight_map"].items() if f != file.name}
        (folder / safetensors_files.INDEX).write_text(
            json.dumps({"weight_map": kept | dict.fromkeys(found, file.name)})
        )

    return apply


def headers_lie(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"U8"', b'"I8"', 1).replace(b'"shape":[64,16]', b'"shape":[64,17]', 1))


EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.2.w1.weight"


@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        (truncate, [r"model-00002-of-00002\.safetensors \(5,000 bytes\) is truncated or corrupt"]),
        (headers_lie, [r"is truncated or corrupt: .* cannot lie at bytes"]),
        (lose_shard, [r"lacks model-00002-of-00002\.safetensors, which its index names; download them again"]),
        (rename_shard, [r"names files outside its directory: \.\./elsewhere\.safetensors"]),
        (lambda folder: rename_shard(folder, "/etc/x.safetensors"), [r"outside its directory: /etc/x\.safetensors"]),
        (
            change_config(lambda text: text["quantization_config"].update(quant_method="gptq")),
            [r"quant_method='gptq' is not supported, only 'compressed-tensors' and 'fp8'"],
        ),
        (
            change_config(lambda text: text["quantization_config"].update(format="nvfp4-pack-quantized")),
            [r"format 'nvfp4-pack-quantized' are not supported, only 'mxfp4-pack-quantized' and 'pack-quantized'"],
        ),
        (
            change_config(
                lambda text: text["quantization_config"]["config_groups"]["group_0"]["weights"].update(group_size=16)
            ),
            [r"group_size=16 is not supported, only 32"],
        ),
        (
            change_experts(
                lambda found: (
                    found.pop(f"{EXPERT}_scale"),
                    found.update({f"{EXPERT.replace('w1', 'w9')}_scale": np.zeros((2, 2), np.uint8)}),
                    found.update({EXPERT.replace("w1", "w3") + "_packed": np.zeros((64, 15), np.uint8)}),
                    found.update({EXPERT.replace("w1", "w2") + "_scale": np.zeros((32, 2), np.float32)}),
                )
            ),
            [
                r"missing: .*experts\.2\.w1\.weight_scale \[64, 1\]",
                r"unexpected: .*experts\.2\.w9\.weight_scale \[2, 2\]",
                r"shape: .*experts\.2\.w3\.weight_packed is \[64, 15\], the config needs \[64, 16\]",
                r"dtype: .*experts\.2\.w2\.weight_scale is F32, only U8 can be loaded",
            ],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", "") if callable(value) else "",
)
def test_what_cannot_be_converted_is_refused_before_work_starts(releases, tmp_path, damage, messages):
    shutil.copytree(releases("k3_mxfp4")[0], tmp_path / "damaged")
    damage(tmp_path / "damaged")
    for message in messages:
        with pytest.raises(CheckpointError, match=message):
            convert(tmp_path / "damaged", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_targets_that_exist_and_disks_that_are_full_are_refused(releases, tmp_path, monkeypatch):
    source, converted = releases("kimi_linear")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 800_000})())
    for path in (source, converted):
        with pytest.raises(CheckpointError, match="exists already"):
            convert(path, tmp_path / "taken")
        with pytest.raises(files.FileError, match=r"needs [\d,]+ bytes and the disk has 800,000 free"):
            convert(path, tmp_path / "out")
    with pytest.raises(ConfigError, match="no checkpoint in"):
        convert(tmp_path / "taken", tmp_path / "out")
    with pytest.raises(ConfigError, match="--like is for exports"):
        convert(source, tmp_path / "out", like=converted)
    with pytest.raises(CheckpointError, match=r"is not the model's:\n"):
        convert(converted, tmp_path / "out", like=releases("k3_mxfp4")[1])
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_values_without_a_code_are_refused_by_name(releases, tmp_path):
    source, converted = releases("k3_mxfp4")
    model, config = load_release(source)
    values = arrays(model)
    key = next(key for key in values if key.endswith("mlp.w_up") and values[key].ndim == 5)
    values[key] = values[key].at[0, 0, 3, 1, 1].set(jnp.nan)
    run = a_run(tmp_path / "run", jax.tree.unflatten(jax.tree.structure(model), list(values.values())), config)
    with pytest.raises(CheckpointError, match=r"experts\.3\.w3\.weight cannot be stored as mxfp4: 1 of 2,048 values"):
        convert(run, tmp_path / "out", like=converted)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def usable(tmp_path_factory):
    """A converted model whose tokenizer is bytes."""
    folder = tmp_path_factory.mktemp("usable")
    save_release(folder / "release", init(tiny.MODEL, 0), tiny.MODEL)
    convert(folder / "release", folder / "converted")
    with pytest.raises(ConfigError, match="has no tokenizer; put the release's tiktoken"):
        needed_tokenizer(folder / "converted", open_model(folder / "converted"))
    ByteTokenizer().save(folder / "converted" / "tokenizer")
    return folder


def test_converted_and_released_models_generate_and_evaluate(usable, tmp_path, capsys):
    config = tiny.config(tmp_path)
    options = ["--checkpoint", str(usable / "converted")]
    cli.main(["generate", *options, "--prompt", "the ", "--max-new-tokens", "3"])
    cli.main(["eval", *options, "--source.kind", "text", "--source.path", config.data.sources[0].path])
    assert "bits per byte" in capsys.readouterr().out


def test_parameters_to_begin_with_are_in_the_runs_own_dtype(usable, tmp_path):
    config = tiny.config(tmp_path)
    for name, value in initial_parameters(usable / "converted", config).items():
        assert value.dtype == jnp.float32
        np.testing.assert_array_equal(value, initial_parameters(usable / "release", config)[name])


@pytest.mark.slow
def test_a_run_begins_with_the_parameters_it_is_given(usable, tmp_path):
    config = tiny.with_train(tiny.config(tmp_path, steps=1, sample_tokens=0), init_from=str(usable / "release"))
    config = replace(config, optim=replace(config.optim, learning_rate=1e-9, weight_decay=0.0, qk_clip=1e9))
    run_training(config)
    model, *_ = open_model(tmp_path / "runs" / "run")
    expected = arrays(load_release(usable / "release")[0])
    for name, value in arrays(model).items():
        if not name.endswith("router_bias"):
            np.testing.assert_allclose(value, expected[name], atol=1e-6, err_msg=name)


def test_a_run_refuses_the_parameters_of_another_model(usable, tmp_path):
    config = tiny.with_train(tiny.config(tmp_path, steps=1), init_from=str(usable / "converted"))
    config = tiny.with_model(config, rms_norm_eps=1e-6)
    with pytest.raises(ConfigError, match=r"another model than the config's:\n  rms_norm_eps: 1e-05 there, 1e-06 here"):
        run_training(config)
    assert not (tmp_path / "runs" / "run" / "tokenizer").exists()


def test_the_command_line(usable, tmp_path, capsys):
    cli.main(["convert", str(usable / "release"), str(tmp_path / "converted"), "--verify"])
    cli.main(["convert", str(tmp_path / "converted"), str(tmp_path / "back")])
    assert files_of(tmp_path / "back") == files_of(usable / "release")
    assert f"Saved {tmp_path / 'back'}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "out")])
    assert "error: no checkpoint in" in capsys.readouterr().err
    cli.main(["inspect", "k2_tiny", "--manifest"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 100 and lines == sorted(lines) and any(" F8_E4M3 " in line for line in lines)
