"""Checksums of checkpoints: every bit that flips is noticed before use, and a slice costs its own chunks alone."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_jax import files
from kimi_jax.store import checkpoint, checksums, sliced
from kimi_jax.store.checkpoint import Checkpoints
from kimi_jax.store.checksums import CHECKSUMS, Damaged, Sum
from kimi_jax.store.safetensors_files import CheckpointError
from kimi_jax.store.sliced import SlicedCheckpoint

TREE = {f"layer_{i}": np.random.default_rng(i).standard_normal((40, 50)).astype(np.float32) for i in range(4)}
SMALL = {"scalar": jnp.float32(1.5), "few": jnp.arange(3)}
"""Arrays so small that Orbax stores them in its index."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with checkpoint.opened(folder, write=True) as checkpoints:
        checkpoints.save(3, TREE | SMALL, {"batches": {"seed": 5}, "config": {"name": "x"}})
    return folder


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def use(folder: Path) -> None:
    checkpoints = Checkpoints(folder)
    checkpoints.metadata()
    checkpoints.restore(TREE | SMALL)


def test_every_bit_that_flips_is_noticed(saved):
    paths = sorted(path for path in (saved / "3").rglob("*") if path.stat().st_size and path.is_file())
    assert {"_METADATA", "_CHECKPOINT_METADATA", CHECKSUMS, "manifest.ocdbt", "_sharding"} <= {p.name for p in paths}
    rng = np.random.default_rng(0)
    use(saved)
    noticed = 0
    for number in range(60):  # each file in turn, at a random bit
        path = paths[number % len(paths)]
        bit = int(rng.integers(8 * path.stat().st_size))
        flip(path, bit)
        with pytest.raises(CheckpointError, match="3 is damaged: ") as raised:
            use(saved)
        assert path.name in str(raised.value)
        noticed += 1
        flip(path, bit)
    assert noticed == 60
    use(saved)


def test_a_flip_in_the_arrays_is_noticed_by_an_export_too(saved):
    path = max((saved / "3/state").rglob("d/*"), key=lambda path: path.stat().st_size)
    assert np.array_equal(sliced.open_arrays(saved, 3)["layer_2"].read((slice(7, 9),)), TREE["layer_2"][7:9])
    flip(path, 999)
    with pytest.raises(CheckpointError, match="has checksum"):
        sliced.open_arrays(saved, 3)
    flip(path, 999)


@given(st.dictionaries(st.text(st.characters(exclude_characters="\n", codec="utf-8"), min_size=1), st.integers(0)))
def test_the_list_of_checksums_comes_back(sizes):
    sums = {f"a/{path}": Sum(size, f"{size % 2**64:016x}") for path, size in sizes.items()}
    assert checksums.parse(checksums.text_of(sums)) == sums


@pytest.mark.parametrize("change", [lambda t: t[:-1], lambda t: t + "\n", lambda t: t.upper(), lambda t: t[1:], len])
def test_a_list_that_was_changed_is_rejected(change):
    text = checksums.text_of({"a": Sum(5, "0123456789abcdef")})
    with pytest.raises(Damaged, match="does not have its own checksum"):
        checksums.parse(str(change(text)))


ARRAYS = {"params.w": np.arange(4 * 64 * 32, dtype=np.float32).reshape(4, 64, 32), "params.b": np.arange(7)}
SHAPES = {name: (array.shape, array.dtype) for name, array in ARRAYS.items()}


def write_all(written: SlicedCheckpoint) -> dict[Path, str]:
    """Writes all chunks: file -> checksum."""
    chunks = [(array[index], file) for name, array in ARRAYS.items() for index, file in written.chunks(name)]
    return {file: sliced.write_chunk(file, values) for values, file in chunks}


@pytest.fixture
def converted(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(sliced, "CHUNK_BYTES", 64 * 32 * 4)
    written = SlicedCheckpoint(tmp_path, 0, SHAPES)
    assert len(write_all(written)) == 5
    written.finish({"config": {}})
    return tmp_path


def test_a_slice_costs_the_checksums_of_its_chunks_alone(converted, monkeypatch):
    read = []
    plain = files.file_checksum
    arrays = sliced.open_arrays(converted, 0)
    monkeypatch.setattr(files, "file_checksum", lambda path: read.append(path.name) or plain(path))
    assert np.array_equal(arrays["params.w"].read((2,)), ARRAYS["params.w"][2])
    assert np.array_equal(arrays["params.w"].read((slice(2, 4), 5)), ARRAYS["params.w"][2:4, 5])
    assert read == ["2.0.0", "3.0.0"]  # each once


@pytest.mark.parametrize("name", ["params.w/1.0.0", "params.b/0", "params.w/.zarray", "_METADATA"])
def test_damage_to_a_conversion_is_noticed_where_it_is_read(converted, name):
    like = {"params": {key.removeprefix("params."): array for key, array in ARRAYS.items()}}
    restored = Checkpoints(converted).restore(like)
    assert jax.tree.all(jax.tree.map(np.array_equal, restored, like))
    path = converted / "0/state" / name
    flip(path, 8 * path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"0 is damaged: .* has checksum .*convert it again"):
        Checkpoints(converted).restore(like)
    with pytest.raises(CheckpointError, match=r"0 is damaged: .* has checksum .*convert it again"):
        for name, array in sliced.open_arrays(converted, 0).items():
            assert np.array_equal(array.read(()), ARRAYS[name])
    path.unlink()
    with pytest.raises(CheckpointError, match=r"0 is damaged: .* is missing"):
        sliced.open_arrays(converted, 0)


def test_checksums_that_are_known_are_not_computed_again(converted, tmp_path, monkeypatch):
    read = []
    plain = files.file_checksum
    monkeypatch.setattr(files, "file_checksum", lambda path: read.append(path.name) or plain(path))
    written = SlicedCheckpoint(tmp_path / "other", 0, SHAPES)
    known = write_all(written)
    lost = tmp_path / "other/0/state/params.w/1.0.0"
    del known[lost]
    written.finish({"config": {}}, known)
    assert sorted(read) == [".zarray", ".zarray", "1.0.0", "_CHECKPOINT_METADATA", "_METADATA"]
    Checkpoints(tmp_path / "other").check()
    ours, theirs = ((folder / "0" / CHECKSUMS).read_text().splitlines() for folder in (converted, tmp_path / "other"))
    assert [line for line in ours if "params" in line] == [line for line in theirs if "params" in line]


def test_chunks_that_are_absent_or_short_make_no_checkpoint(tmp_path):
    written = SlicedCheckpoint(tmp_path, 0, SHAPES)
    write_all(written)
    file = tmp_path / "0/state/params.b/0"
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"state/params\.b/0 absent or of another size"):
        written.finish({})
    assert not (tmp_path / "0" / CHECKSUMS).exists()


def test_a_file_that_shows_up_later_is_no_damage(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    (tmp_path / "copy/3/notes.txt").write_text("mine")
    Checkpoints(tmp_path / "copy").check()


def test_bfloat16_and_packed_chunks(tmp_path):
    values = {"x": jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4), "y": jnp.arange(8, dtype=jnp.float8_e4m3fn)}
    written = SlicedCheckpoint(tmp_path, 0, {name: (x.shape, np.dtype(x.dtype)) for name, x in values.items()})
    for name, array in values.items():
        for index, file in written.chunks(name):
            sliced.write_chunk(file, np.asarray(array)[index])
    written.finish({})
    for name, array in sliced.open_arrays(tmp_path, 0).items():
        assert array.read(()).tobytes() == np.asarray(values[name]).tobytes()
