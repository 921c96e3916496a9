"""A slice that reaches over several chunks of an array."""

import numpy as np

from kimi_jax.store import sliced


def test_every_slice_is_that_of_the_array(tmp_path, monkeypatch):
    monkeypatch.setattr(sliced, "CHUNK_BYTES", 32)
    values = np.arange(6 * 8, dtype=np.float32).reshape(6, 8)
    checkpoint = sliced.SlicedCheckpoint(tmp_path, 1, {"a": (values.shape, values.dtype)})
    chunks = list(checkpoint.chunks("a"))
    assert len(chunks) > 4
    for index, file in chunks:
        sliced.write_chunk(file, values[index])
    checkpoint.finish({})
    array = sliced.open_arrays(tmp_path, 1)["a"]
    for index in ((slice(None), slice(None)), (slice(1, 6), slice(2, 8)), (slice(0, 3), slice(5, 6)), (4, slice(3, 8))):
        np.testing.assert_array_equal(array.read(index), values[index])
