"""What is written of a quantized matrix that training has changed, and chunks that divide their array."""

from types import SimpleNamespace

import numpy as np
import pytest

from kimi_jax.store import sliced
from kimi_jax.store.names import Tensor, stored
from kimi_jax.store.read import unpack
from kimi_jax.store.write import Parameters, Plan, pack


def test_a_changed_matrix_does_not_keep_its_released_bytes():
    w = np.random.default_rng(0).choice(np.array([-6, -1, 0, 0.5, 3], np.float32), (4, 64))
    tensor = Tensor("w", w.shape, ("w",), (), lambda a: (a,), lambda a: a, None)
    parts = stored(tensor, "mxfp4")
    packed = pack(w, "mxfp4")
    released = {"w_packed": packed["packed"], "w_scale": packed["scale"]}
    original = SimpleNamespace(where=dict.fromkeys(released, "file"), read=released.__getitem__)
    plan = Plan("", {}, {}, None, original)  # type: ignore[arg-type]

    same = plan._packed(parts[0], Parameters(lambda name, index: w, {}))
    np.testing.assert_array_equal(same["scale"], released["w_scale"])
    np.testing.assert_array_equal(same["packed"], released["w_packed"])
    changed = np.where(np.arange(4)[:, None] == 2, -w, w)
    after = plan._packed(parts[0], Parameters(lambda name, index: changed, {}))
    np.testing.assert_array_equal(unpack(after["packed"], after["scale"], "mxfp4", np.float32), changed)


@pytest.mark.parametrize("shape", [(7, 5, 96, 10), (100, 7), (7, 100), (97,), (3, 1, 50)])
def test_chunks_divide_their_array(shape, monkeypatch):
    monkeypatch.setattr(sliced, "CHUNK_BYTES", 128)
    chunk = sliced.chunk_shape(shape, 4)
    assert all(size % part == 0 for size, part in zip(shape, chunk, strict=True)), chunk
    assert np.prod(chunk) * 4 <= 128
