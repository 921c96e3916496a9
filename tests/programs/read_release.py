"""Opens what each [path, packed, mesh, release] tells: the numbers must be those that one process finds in the release.

Prints the bytes it read of safetensors and those that it had to; then trains.
"""

import json
import math
import sys

import numpy as np

from kimi_jax import load_config
from kimi_jax.config import Mesh
from kimi_jax.model.param import arrays
from kimi_jax.ops.quant.bits import GROUP
from kimi_jax.parallel import processes
from kimi_jax.parallel.mesh import make_mesh, on_mesh
from kimi_jax.store import checkpoint, safetensors_files
from kimi_jax.store import names as released_names
from kimi_jax.store import read as reader
from kimi_jax.store.open import open_model
from kimi_jax.train.loop import run_training
from tests.jax_private import share_compiled_programs_between_processes
from tests.programs.command import HEARTBEAT

kept = []  # what was mapped or decoded: (address, bytes, name), alive so that no address comes twice
touched = {}  # name of a mapped tensor -> which of its bytes were read
total = 0  # bytes read, those read again too


def address(a):
    return a.__array_interface__["data"][0]


def keep(a, name):
    kept.append((address(a), a.nbytes, name, a))
    return a


def read_from_disk(a):
    global total
    base, _, name, _ = next(item for item in kept if item[0] <= address(a) < item[0] + item[1])  # nothing was copied
    if name:
        item = touched[name][address(a) - base :].view()
        np.lib.stride_tricks.as_strided(item, (*a.shape, a.itemsize), (*a.strides, 1))[...] = True
        total += a.nbytes


def read(self, name, plain=safetensors_files.Directory.read):
    a = keep(plain(self, name), name)
    touched.setdefault(name, np.zeros(a.nbytes, bool))
    return a


def copy(out, value, plain=reader.copy_strips):
    read_from_disk(value)
    plain(out, value)
    keep(out if out.base is None else out.base, None)


def unpack(packed, scale, kind, dtype, plain=reader.unpack):
    read_from_disk(packed), read_from_disk(scale)
    return keep(plain(packed, scale, kind, dtype), None)


safetensors_files.Directory.read, reader.copy_strips, reader.unpack = (
    read,
    copy,
    unpack,
)  # all data of tensors passes through these


def held(array):
    boxes = array.sharding.addressable_devices_indices_map(array.shape).values()
    return sorted({tuple(s.indices(n)[:2] for s, n in zip(box, array.shape, strict=True)) for box in boxes})


def share(path, values):
    """Bytes, in a file, of what this process's devices hold, and the same with what two devices hold in part."""
    release = reader.Release(path)
    entries = release.directory.entries
    width = {
        param: safetensors_files.DTYPES[entries[t.name].dtype].itemsize
        for t in released_names.tensors(release.config)
        if t.name in entries
        for param in t.params
    }
    once = again = 0
    for name, array in checkpoint.flatten(values).items():
        shape, boxes, size = array.shape, held(array), width.get(name, array.dtype.itemsize)
        if name in release.kinds:  # decoded: whole groups of 32 inputs, 16 bytes and a scale
            shape, size = (*shape[:-2], shape[-2] // GROUP, shape[-1]), GROUP // 2 + 1
            boxes = [(*box[:-2], (box[-2][0] // GROUP, -(-box[-2][1] // GROUP)), box[-1]) for box in boxes]
        mask = np.zeros(shape, bool)
        for box in boxes:
            mask[tuple(slice(*ends) for ends in box)] = True
            again += math.prod(stop - start for start, stop in box) * size
        once += int(mask.sum()) * size
    return once, again


def compare(values, whole):
    values, whole = checkpoint.flatten(values), checkpoint.flatten(whole)
    assert values.keys() == whole.keys()
    for name, array in values.items():
        assert array.dtype == whole[name].dtype and len(array.addressable_shards) == 4, name
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.asarray(whole[name])[shard.index].tobytes(), name


def main() -> None:
    global total
    share_compiled_programs_between_processes()
    processes.initialize(heartbeat_timeout_seconds=HEARTBEAT)
    config, cases = sys.argv[2], json.loads(sys.argv[3])
    wholes = {}
    with processes.end_alone():
        for path, packed, mesh, release in cases:
            if (release, packed) not in wholes:
                wholes[release, packed] = arrays(reader.load_release(release, dtype=None, packed=packed)[0])
            kept.clear(), touched.clear()
            total = 0
            with on_mesh(make_mesh(Mesh(**mesh))):
                values = arrays(open_model(path, packed=packed)[0])
            compare(values, wholes[release, packed])
            if path == release:
                found = sum(int(mask.sum()) for mask in touched.values())
                print("READ", json.dumps([found, total, *share(path, values)]), flush=True)
        run_training(load_config(config))


if __name__ == "__main__":
    main()
