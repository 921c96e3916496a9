"""Headers of safetensors files: no gaps, no overlaps, and no file larger than asked for."""

import json
import struct

import numpy as np
import pytest

from kimi_jax.store import safetensors_files
from kimi_jax.store.safetensors_files import SINGLE, Directory, divide, make_shard, shard_of, write


def header(*spans: tuple[int, int]) -> bytes:
    values = {f"t{i}": {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]} for i, (a, b) in enumerate(spans)}
    text = json.dumps(values).encode()
    return struct.pack("<Q", len(text)) + text


def test_tensors_follow_each_other_without_gap_or_overlap():
    assert list(shard_of(header((4, 6), (0, 4)), len(header((4, 6), (0, 4))) + 6).entries) == ["t1", "t0"]
    for spans in (((0, 4), (5, 6)), ((0, 4), (3, 6)), ((1, 4),), ((0, 4), (0, 4))):
        with pytest.raises(ValueError, match="bytes"):
            shard_of(header(*spans))


def test_files_are_as_large_as_asked_for_at_most():
    sizes = [40, 40, 30, 100, 250, 10, 90, 1]
    parts = divide([(f"t{i}", "U8", (size,)) for i, size in enumerate(sizes)], 100)
    data = [[entry.num_bytes for entry in shard.entries.values()] for shard in parts.values()]
    assert data == [[40, 40], [30], [100], [250], [10, 90], [1]]  # what alone is larger has a file of its own
    assert list(divide([("t", "U8", (100,))], 100)) == [SINGLE]


def test_a_tensor_of_several_blocks_is_read_block_by_block(tmp_path, monkeypatch):
    values = np.arange(50, dtype=np.uint8)
    write(tmp_path / SINGLE, make_shard([("a", "U8", (7,)), ("b", "U8", (50,))]), [np.zeros(7, np.uint8), values])
    monkeypatch.setattr(safetensors_files, "BLOCK", 16)
    blocks = list(Directory(tmp_path).blocks("b"))
    assert [len(block) for block in blocks] == [16, 16, 16, 2]
    np.testing.assert_array_equal(np.concatenate(blocks), values)
