"""Which rows of a batch a process holds, and where they go: as each of several processes sees it."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax.config import ConfigError, Mesh
from kimi_jax.parallel.batch import process_part, to_devices
from kimi_jax.parallel.mesh import make_mesh

ROWS, LENGTH = 16, 8


@dataclass(frozen=True)
class Seen:
    """A sharding over all devices, of which one process has some."""

    whole: NamedSharding
    devices: frozenset
    num_devices: int = 8

    def addressable_devices_indices_map(self, shape):
        places = self.whole.devices_indices_map(shape)
        return {device: index for device, index in places.items() if device in self.devices}


def seen(mesh: Mesh, spec: P, process: int, processes: int) -> Seen:
    made = make_mesh(mesh)
    assert made is not None
    own = np.array_split(np.array(jax.devices()), processes)[process]
    return Seen(NamedSharding(made, spec), frozenset(own))


@pytest.mark.parametrize(
    ("mesh", "spec", "processes", "expected"),
    [
        (Mesh(data=8), P("data", None), 2, [(0, 2), (1, 2)]),
        (Mesh(data=2, fsdp=4), P(("data", "fsdp"), None), 4, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (Mesh(data=2, tensor=4), P("data", None), 2, [(0, 2), (1, 2)]),
        (Mesh(data=2, tensor=4), P("data", None), 4, [(0, 2), (0, 2), (1, 2), (1, 2)]),  # two hold the same rows
        (Mesh(data=2, seq=4), P("data", "seq"), 4, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (Mesh(tensor=8), P(None, None), 2, [(0, 1), (0, 1)]),
    ],
)
def test_processes_load_their_rows_and_put_them_in_their_places(mesh, spec, processes, expected, monkeypatch):
    batch = np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH)
    for process, want in enumerate(expected):
        sharding = seen(mesh, spec, process, processes)
        index, count = process_part(sharding, ROWS)  # type: ignore[arg-type]
        assert (index, count) == want

        def put(shape, sharding, part_at):
            """As jax: asks for what this process's devices hold."""
            assert shape == batch.shape
            for where in sharding.addressable_devices_indices_map(shape).values():
                np.testing.assert_array_equal(part_at(where), batch[where])
            return shape

        monkeypatch.setattr(jax, "make_array_from_callback", put)
        own = batch[index * ROWS // count : (index + 1) * ROWS // count]
        assert to_devices({"tokens": own}, sharding, (index, count)) == {"tokens": batch.shape}  # type: ignore[arg-type]


def test_rows_that_are_no_equal_part_are_rejected():
    made = make_mesh(Mesh(data=8))
    assert made is not None
    devices = made.devices.flat
    apart = Seen(NamedSharding(made, P("data", None)), frozenset((devices[0], devices[2])))
    with pytest.raises(ConfigError, match="not one of equal parts"):
        process_part(apart, ROWS)  # type: ignore[arg-type]


def test_without_a_mesh_a_process_has_all_rows():
    batch = {"tokens": np.zeros((2, 3))}
    assert process_part(None, 7) == (0, 1)
    assert to_devices(batch, None)["tokens"] is batch["tokens"]
