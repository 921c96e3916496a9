"""Damaged, hostile and unusual releases: one line that names file and value, nothing written; or read all the same."""

import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.config import ConfigError
from kimi_jax.files import FileError
from kimi_jax.model.kimi import init
from kimi_jax.model.param import arrays
from kimi_jax.store import released_config, safetensors_files
from kimi_jax.store.convert import convert
from kimi_jax.store.open import open_model
from kimi_jax.store.read import load_release
from kimi_jax.store.safetensors_files import INDEX, ONLY, SINGLE, CheckpointError, Directory
from kimi_jax.store.write import save_release
from tests import tiny
from tests.store.test_convert import a_run, files_of, save_tensors, tensors_of
from tests.store.test_release import GOLDEN, read_file

ERRORS = (ConfigError, CheckpointError, FileError)


def release(folder: Path, name: str = "kimi_linear_tiny") -> Path:
    folder.mkdir(parents=True)
    for file in (released_config.CONFIG, SINGLE):
        shutil.copy(GOLDEN / name / file, folder)
    return folder


def change_config(folder: Path, **changes) -> None:
    whole = json.loads((folder / released_config.CONFIG).read_text()) | changes
    (folder / released_config.CONFIG).write_text(json.dumps(whole))


def rejected(source: Path, message: str, *, lines: bool = False, **options) -> None:
    """A conversion that ends in one line and leaves nothing."""
    target = source.parent / "target"
    before = sorted(str(path) for path in source.parent.rglob("*"))
    with pytest.raises(ERRORS, match=message) as error:
        convert(source, target, **options)
    assert lines or "\n" not in str(error.value)
    assert sorted(str(path) for path in source.parent.rglob("*")) == before


def raw(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def header(**changes) -> bytes:
    """A file of one tensor of 8 bytes, with parts of its description changed; `...` removes one."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    entry = {key: value for key, value in entry.items() if value is not ...}
    return raw(json.dumps({"a.weight": entry}).encode(), bytes(8))


def two(first: list, second: list, size: int = 8) -> bytes:
    entry = {"dtype": "F32", "shape": [1]}
    return raw(
        json.dumps({"a": entry | {"data_offsets": first}, "b": entry | {"data_offsets": second}}).encode(), bytes(size)
    )


HEADERS = {
    "no offsets": (header(data_offsets=[]), r"a\.weight has the data_offsets \[\]"),
    "one offset": (header(data_offsets=[0]), r"a\.weight has the data_offsets \[0\]"),
    "three offsets": (header(data_offsets=[0, 8, 8]), r"a\.weight has the data_offsets \[0, 8, 8\]"),
    "float offsets": (header(data_offsets=[0.0, 8.0]), r"has the data_offsets \[0\.0, 8\.0\]"),
    "negative offsets": (header(data_offsets=[-8, 0]), r"has the data_offsets \[-8, 0\]"),
    "true as an offset": (header(data_offsets=[False, 8]), r"has the data_offsets \[False, 8\]"),
    "text offsets": (header(data_offsets="08"), "has the data_offsets 08"),
    "null offsets": (header(data_offsets=None), "has the data_offsets None"),
    "huge offsets": (header(data_offsets=[0, 2**70]), r"has the data_offsets \[0, 1180591620717411303424\]"),
    "backward offsets": (header(data_offsets=[8, 0]), "cannot lie at bytes 8 to 0"),
    "offsets past the end": (header(shape=[4], data_offsets=[0, 16]), "its header describes"),
    "no data_offsets": (header(data_offsets=...), "has the data_offsets None"),
    "no shape": (header(shape=...), "has the shape None"),
    "no dtype": (header(dtype=...), "has the unknown dtype None"),
    "float shape": (header(shape=[2.0]), r"has the shape \[2\.0\]"),
    "negative shape": (header(shape=[-2]), r"has the shape \[-2\]"),
    "two negative sizes": (header(shape=[-1, -2]), r"has the shape \[-1, -2\]"),
    "true as a size": (header(shape=[True, 2]), r"has the shape \[True, 2\]"),
    "a nested shape": (header(shape=[[2]]), r"has the shape \[\[2\]\]"),
    "a shape that is a number": (header(shape=2), "has the shape 2"),
    "a shape that is null": (header(shape=None), "has the shape None"),
    "a huge shape": (header(shape=[2**62, 2**62]), "cannot lie at bytes 0 to 8"),
    "a size beyond any disk": (header(shape=[2**64]), "has the shape"),
    "very many axes": (header(shape=[1] * 1000), r"has the shape .*characters\)"),
    "an unknown dtype": (header(dtype="F4"), "has the unknown dtype F4"),
    "a list for a dtype": (header(dtype=["F32"]), r"has the unknown dtype \['F32'\]"),
    "overlapping": (two([0, 4], [2, 6]), "b F32.* cannot lie at bytes 2 to 6 after byte 4"),
    "the same bytes": (two([0, 4], [0, 4], 4), "b F32.* cannot lie at bytes 0 to 4 after byte 4"),
    "a gap": (two([0, 4], [8, 12], 12), "b F32.* cannot lie at bytes 8 to 12 after byte 4"),
    "bytes left over": (two([0, 4], [4, 8], 12), "its header describes"),
    "a name twice": (
        raw(
            b'{"a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}, "a": {"dtype":"F32","shape":[],"x":1}}', bytes(4)
        ),
        "the name 'a' occurs twice",
    ),
    "a key twice": (
        raw(b'{"a": {"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
        "the name 'dtype' occurs twice",
    ),
    "a name with a line break": (raw(b'{"a\\nb": {"dtype":"F32","shape":[1]}}'), r"'a\\nb' holds control characters"),
    "a name with an escape": (raw(b'{"\\u001b[31m": {}}'), r"'\\x1b\[31m' holds control characters"),
    "a list for a tensor": (raw(b'{"a": [1]}'), r"a is described by \[1\]"),
    "null for a tensor": (raw(b'{"a": null}'), "a is described by None"),
    "a list": (raw(b"[]"), "holds list where a JSON object is due"),
    "null": (raw(b"null"), "holds null where a JSON object is due"),
    "no JSON": (raw(b"hello"), "is not JSON"),
    "bad UTF-8": (raw(b'{"\xff": 1}'), "is not JSON"),
    "deep": (raw(b'{"a": ' + b"[" * 10**6), "nested too deeply"),
    "a long number": (raw(b'{"a": ' + b"9" * 5000 + b"}"), "is not JSON"),
    "an empty file": (b"", "it has no header"),
    "seven bytes": (b"1234567", "it has no header"),
    "a header longer than the file": (struct.pack("<Q", 2**40) + b"{}", "its header claims 1,099,511,627,776 bytes"),
    "a header of 2^64": (b"\xff" * 8 + b"{}", "its header claims 18,446,744,073,709,551,615 bytes"),
    "a header one too long": (struct.pack("<Q", 3) + b"{}", "its header claims 3 bytes"),
    "zeros": (bytes(4096), "is not JSON"),
    "a web page": (b"<!DOCTYPE html><html><body>404</body></html>", "its header claims"),
    "a pointer of git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n", "its header"),
}


@pytest.mark.parametrize(("content", "message"), HEADERS.values(), ids=HEADERS)
def test_headers_that_do_not_add_up(tmp_path, content, message):
    source = release(tmp_path / "source")
    (source / SINGLE).write_bytes(content)
    rejected(source, rf"{SINGLE} \([\d,]+ bytes\) is truncated or corrupt: .*{message}")


INDEXES = {
    "null": ("null", "is not an index with a weight_map"),
    "a list": ("[]", "is not an index with a weight_map"),
    "no map": ('{"metadata": {}}', "is not an index with a weight_map"),
    "a list of names": ('{"weight_map": ["a"]}', "is not an index with a weight_map"),
    "numbers for files": ('{"weight_map": {"a": 1}}', "is not an index with a weight_map"),
    "half": ('{"weight_map": {"a": ', "is not an index with a weight_map"),
    "deep": ('{"weight_map": ' + "[" * 10**6, "is not an index with a weight_map.*nested too deeply"),
    "nothing": ("", "is not an index with a weight_map"),
    "no tensors": ('{"weight_map": {}}', "names no tensors"),
    "no name": ('{"weight_map": {"a": ""}}', "do not end in .safetensors: ''"),
    "config.json": ('{"weight_map": {"a": "config.json"}}', "do not end in .safetensors: config.json"),
    "a line break": ('{"weight_map": {"a": "a\\nb.safetensors"}}', r"'a\\nb\.safetensors'"),
    "NUL": ('{"weight_map": {"a": "a\\u0000.safetensors"}}', r"outside its directory: 'a\\x00\.safetensors'"),
    "parents": ('{"weight_map": {"a": "../x.safetensors"}}', r"outside its directory: \.\./x\.safetensors"),
    "the root": ('{"weight_map": {"a": "/x.safetensors"}}', r"outside its directory: /x\.safetensors"),
    "backslashes": ('{"weight_map": {"a": "..\\\\x.safetensors"}}', "outside its directory"),
    "absent": ('{"weight_map": {"a": "b.safetensors"}}', r"lacks b\.safetensors, which its index names"),
    "many absent": (
        json.dumps({"weight_map": {str(n): f"{n}.safetensors" for n in range(1000)}}),
        "and 980 more, which its index names",
    ),
}


@pytest.mark.parametrize(("content", "message"), INDEXES.values(), ids=INDEXES)
def test_indexes_that_are_none(tmp_path, content, message):
    source = release(tmp_path / "source")
    (source / INDEX).write_text(content)
    rejected(source, rf"source.*{message}")


def test_an_index_that_contradicts_the_files(tmp_path):
    source = release(tmp_path / "source")
    names = list(Directory(source).entries)
    (source / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys([*names, "gone.weight"], SINGLE)}))
    rejected(source, r"is not whole; download it again:\n  gone\.weight is not in model\.safetensors", lines=True)


COUNTS = [
    ("kimi_linear_tiny", "first_k_dense_replace", 8, "num_dense_layers=8 must lie between"),
    ("k2_tiny", "num_hidden_layers", 6, "num_hidden_layers=6 there, and the files hold 5 layers"),
    ("k2_tiny", "num_hidden_layers", 10_000, "num_hidden_layers=10000 there, and the files hold 5 layers"),
    ("k2_tiny", "n_routed_experts", 9, "experts=9 there, and the files hold 8 experts"),
    ("k2_tiny", "n_routed_experts", 10**5, "experts=100000 there, and the files hold 8 experts|num_experts=100000"),
    ("kimi_linear_tiny", "num_experts", 10**8, "experts=100000000"),
]


@pytest.mark.parametrize(("name", "key", "value", "message"), COUNTS, ids=[f"{k}={v}" for _, k, v, _ in COUNTS])
def test_counts_beyond_the_files_are_rejected_at_once(tmp_path, name, key, value, message):
    source = release(tmp_path / "source", name)
    change_config(source, **{key: value})
    rejected(source, message)


SHAPES = [
    ("vocab_size", 10**9, r"embed_tokens\.weight is \[128, 64\], the config needs \[1000000000, 64\]"),
    ("moe_intermediate_size", 10**9, r"the config needs \[1000000000, 64\]"),
    ("num_shared_experts", 10**4, r"the config needs \[320000, 64\]"),
    ("intermediate_size", 10**9, r"the config needs \[64, 1000000000\]"),
    ("kv_lora_rank", 10**9, "the config needs .*1000000000"),
    ("num_attention_heads", 4096, r"num_key_value_heads=4 is not supported, only 4096"),
    ("num_experts", 5, r"unexpected: .*experts\.5\.w1\.weight"),
]


@pytest.mark.parametrize(("key", "value", "message"), SHAPES, ids=[f"{k}={v}" for k, v, _ in SHAPES])
def test_sizes_that_the_files_do_not_have_are_named(tmp_path, key, value, message):
    source = release(tmp_path / "source")
    change_config(source, **{key: value})
    rejected(source, message, lines=True)


def test_many_problems_are_cut_short(tmp_path):
    source = release(tmp_path / "source")
    found = tensors_of(source / SINGLE) | {f"x.{n}": np.zeros(1, np.float32) for n in range(1000)}
    save_tensors(found, source / SINGLE)
    with pytest.raises(CheckpointError, match=r"and 900 more$") as error:
        load_release(source)
    assert str(error.value).count("\n") == 101


@pytest.mark.parametrize(
    "content", [b"null", b"[]", b'{"a": ' + b"[" * 10**6, b""], ids=["null", "[]", "deep", "empty"]
)
def test_a_config_that_is_none_is_named(tmp_path, content):
    source = release(tmp_path / "source")
    (source / released_config.CONFIG).write_bytes(content)
    rejected(source, rf"source/{released_config.CONFIG}")
    with pytest.raises(ERRORS, match=released_config.CONFIG):
        open_model(source)


def test_several_stop_ids_are_read(tmp_path):
    source = release(tmp_path / "source")
    change_config(source, eos_token_id=[2, 5])
    convert(source, tmp_path / "converted", verify=True)
    convert(tmp_path / "converted", tmp_path / "back", verify=True)
    assert files_of(tmp_path / "back") == files_of(source)


# Links.


def hub_cache(home: Path) -> Path:
    """A release as the hub's own cache holds it: a snapshot of links to blobs."""
    blobs, snapshot = home / "blobs", home / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate((released_config.CONFIG, SINGLE)):
        shutil.copy(GOLDEN / "kimi_linear_tiny" / file, blobs / f"blob{number}")
        (snapshot / file).symlink_to(f"../../blobs/blob{number}")
    return snapshot


def test_the_hubs_cache_is_read(tmp_path):
    snapshot = hub_cache(tmp_path / "models--a--b")
    (snapshot / "COPY.json").symlink_to(released_config.CONFIG)
    (tmp_path / "release").symlink_to(snapshot)  # a link to the whole is the user's own
    convert(tmp_path / "release", tmp_path / "converted", verify=True)
    convert(tmp_path / "converted", tmp_path / "back", verify=True)
    assert files_of(tmp_path / "back") == files_of(snapshot)
    assert not any(path.is_symlink() for path in (tmp_path / "back").iterdir())


@pytest.mark.parametrize("name", ["README.md", released_config.CONFIG, SINGLE, "docs/note.txt"])
@pytest.mark.parametrize("way", ["absolute", "relative", "chain", "sibling of blobs"])
def test_links_that_lead_out_are_rejected(tmp_path, name, way):
    source = hub_cache(tmp_path / "models--a--b") if way == "sibling of blobs" else release(tmp_path / "source")
    outside = tmp_path / "outside"
    if way == "sibling of blobs":
        outside = source.parents[1] / "blobs2" / "secret"
        outside.parent.mkdir()
    outside.write_bytes((source / name).read_bytes() if (source / name).is_file() else b"secret")
    link = source / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    if way == "relative":
        link.symlink_to(os.path.relpath(outside, link.parent))
    elif way == "chain":
        (source / "inner").symlink_to(outside)
        link.symlink_to(os.path.relpath(source / "inner", link.parent))
    else:
        link.symlink_to(outside)
    rejected(source, rf"{name} -> {outside}")
    if name in (released_config.CONFIG, SINGLE):
        with pytest.raises(CheckpointError, match=rf"{name} -> {outside}"):
            load_release(source)


def test_links_to_folders_and_to_nothing_are_rejected(tmp_path):
    source = release(tmp_path / "source")
    (source / "gone.txt").symlink_to("nowhere")
    rejected(source, r"gone\.txt -> .*nowhere, which does not exist")
    (source / "gone.txt").unlink()
    (source / "docs").symlink_to("/etc")
    rejected(source, "holds links to folders; copy what they hold: docs")


def test_links_of_a_release_to_be_like_are_rejected(tmp_path):
    source = release(tmp_path / "source")
    convert(source, tmp_path / "converted")
    (source / "README.md").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match=r"README\.md -> /etc/hostname"):
        convert(tmp_path / "converted", tmp_path / "out", like=source)
    assert not list(tmp_path.glob("out*"))


def test_hidden_files_and_their_links_are_left_alone(tmp_path):
    source = release(tmp_path / "source")
    (source / ".cache").mkdir()
    (source / ".cache" / "x").symlink_to("/etc/hostname")
    (source / ".gitattributes").symlink_to("/etc/hostname")
    convert(source, tmp_path / "converted", verify=True)
    assert not list((tmp_path / "converted").rglob(".git*"))


def test_a_pipe_is_no_file(tmp_path):
    source = release(tmp_path / "source")
    (source / SINGLE).unlink()
    os.mkfifo(source / SINGLE)
    rejected(source, "has neither")


# Unusual, and read.


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_floats_are_read_and_come_back(tmp_path, dtype):
    source = release(tmp_path / "source")
    found = tensors_of(source / SINGLE)
    wide = {name: value.astype(dtype) for name, value in found.items()}
    if dtype == "float64":
        wide["model.norm.weight"] = wide["model.norm.weight"] * (1 + 2.0**-40)  # which float32 does not hold
    save_tensors(wide, source / SINGLE)
    loaded, config = load_release(source, dtype=None)
    assert config.dtype == "float32"
    np.testing.assert_array_equal(arrays(loaded)["embed"], wide["model.embed_tokens.weight"].astype(np.float32))
    convert(source, tmp_path / "converted", verify=True)
    convert(tmp_path / "converted", tmp_path / "back", verify=True)
    assert files_of(tmp_path / "back") == files_of(source)
    if dtype == "float64":
        with jax.enable_x64(True):
            exact = arrays(load_release(source, dtype=jnp.float64)[0])["norm.weight"]
            np.testing.assert_array_equal(exact, wide["model.norm.weight"])


def test_a_float64_that_was_trained_is_written_from_the_parameter(tmp_path):
    source = release(tmp_path / "source")
    found = {name: value.astype(np.float64) for name, value in tensors_of(source / SINGLE).items()}
    save_tensors(found, source / SINGLE)
    convert(source, tmp_path / "converted")
    chunk = next((tmp_path / "converted" / "checkpoints").rglob("params.norm.weight/0"))
    values = np.fromfile(chunk, np.float32)
    (tmp_path / "moved").mkdir()
    made = tensors_of(source / SINGLE) | {"model.norm.weight": (values + 1).astype(np.float64)}
    save_tensors(made, tmp_path / "moved" / SINGLE)
    shutil.copy(source / released_config.CONFIG, tmp_path / "moved")
    convert(tmp_path / "moved", tmp_path / "trained")
    convert(tmp_path / "trained", tmp_path / "out", like=source)
    after = read_file(tmp_path / "out" / SINGLE)
    assert after == read_file(tmp_path / "moved" / SINGLE)


@pytest.mark.parametrize("name", ["k3_tiny", "kimi_linear_tiny", "k2_tiny"])
def test_a_single_shard_needs_no_index(tmp_path, name):
    source = release(tmp_path / "source", name)
    (source / SINGLE).rename(source / ONLY)
    convert(source, tmp_path / "converted", verify=True)
    convert(tmp_path / "converted", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(source)


def test_shards_without_their_index_are_named(tmp_path):
    source = release(tmp_path / "source")
    (source / SINGLE).rename(source / "model-00001-of-00002.safetensors")
    rejected(source, "has neither .* it has 1 shards, whose index is to be fetched too")


def test_a_dense_layer_under_the_name_of_experts(tmp_path):
    """transformers' own class calls both kinds of MLP `block_sparse_moe`."""
    source = release(tmp_path / "source")
    names = ("gate_proj", "up_proj", "down_proj")
    ours = {f"model.layers.0.mlp.{name}.weight": f"model.layers.0.block_sparse_moe.{name}.weight" for name in names}
    found = tensors_of(source / SINGLE)
    save_tensors({ours.get(name, name): value for name, value in found.items()}, source / SINGLE)
    expected = arrays(load_release(GOLDEN / "kimi_linear_tiny")[0])
    for name, value in arrays(load_release(source)[0]).items():
        np.testing.assert_array_equal(value, expected[name])
    convert(source, tmp_path / "converted", verify=True)
    convert(tmp_path / "converted", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(source)
    both = found | {ours[name]: found[name] for name in ours}
    save_tensors(both, source / SINGLE)
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.0\.block_sparse_moe\.down_proj"):
        load_release(source)


def test_bf16_stays_bf16(tmp_path):
    source = release(tmp_path / "source")
    assert load_release(source, dtype=None)[1].param_dtype == "bfloat16"


def test_a_config_with_a_byte_order_mark_comes_back_with_it(tmp_path):
    source = release(tmp_path / "source")
    file = source / released_config.CONFIG
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    convert(source, tmp_path / "converted", verify=True)
    convert(tmp_path / "converted", tmp_path / "back", verify=True)
    assert files_of(tmp_path / "back") == files_of(source)


# Paths.


def test_paths_that_the_system_refuses(tmp_path):
    source = release(tmp_path / "source")
    file = tmp_path / "file"
    file.write_text("mine")
    long = tmp_path / ("x" * 300)
    cases = [
        (file / "below", tmp_path / "out", "cannot read .*file/below: Not a directory"),
        (long, tmp_path / "out", "cannot read .*: File name too long; choose a shorter name"),
        (source, file / "below", "cannot write .*file/below: Not a directory; a part of the path is a file"),
        (source, long, "cannot write .*: File name too long; choose a shorter name"),
        (source, tmp_path / ("x" * 250), "cannot write .*: File name too long"),  # with its ending
        (source, Path("/proc/nowhere/out"), "/proc"),
        (source, file, "exists already; choose a new directory"),
        (source, source, "exists already"),
        (source, source / "out", "is inside of .*source, which is read whole"),
        (tmp_path / "nowhere", tmp_path / "out", "no checkpoint in .*nowhere"),
    ]
    before = files_of(tmp_path)
    for given, target, message in cases:
        with pytest.raises(ERRORS, match=message) as error:
            convert(given, target)
        assert "\n" not in str(error.value)
    assert files_of(tmp_path) == before and sorted(os.listdir(tmp_path)) == ["file", "source"]


@pytest.mark.parametrize("way", ["link to an empty folder", "dangling link"])
def test_a_target_that_is_a_link_is_rejected(tmp_path, way):
    source = release(tmp_path / "source")
    if way == "link to an empty folder":
        (tmp_path / "elsewhere").mkdir()
    (tmp_path / "target").symlink_to(tmp_path / "elsewhere")
    model, config = load_release(source)
    for call in (
        lambda: convert(source, tmp_path / "target"),
        lambda: save_release(tmp_path / "target", model, config),
    ):
        with pytest.raises(CheckpointError, match="target exists already"):
            call()
    assert (tmp_path / "target").is_symlink() and not list(tmp_path.glob("*.partial"))


# Formats.


def test_experts_too_narrow_for_their_format_are_rejected_before_anything_is_written(tmp_path):
    assert tiny.MODEL.moe.hidden_size == 8
    config = replace(tiny.MODEL, kda=replace(tiny.MODEL.kda, chunk_size=64))
    model = init(config, 0)
    run = a_run(tmp_path / "run", model, config)
    before = files_of(tmp_path)
    message = r"experts\.0\.w\d\.weight has 8 columns, not a multiple of the 32 .* export it with --no-packed"
    with pytest.raises(CheckpointError, match=message) as error:
        convert(run, tmp_path / "out")
    assert "\n" not in str(error.value)
    with pytest.raises(CheckpointError, match=message):
        save_release(tmp_path / "out", model, config, packed=True)
    assert files_of(tmp_path) == before
    convert(run, tmp_path / "out", packed=False, verify=True)
    assert safetensors_files.Directory(tmp_path / "out").entries
