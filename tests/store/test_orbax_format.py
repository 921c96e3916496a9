"""What `store/orbax_format.py` assumes of Orbax's format, beside what the installed Orbax writes."""

import json
from importlib.metadata import version

import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from kimi_jax.store import checkpoint, orbax_format
from kimi_jax.store.checkpoint import Checkpoints
from kimi_jax.store.orbax_format import CUSTOM, ITEM, METADATA, WHOLE, ZARR

ARRAYS = {"params.w": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), "step": jnp.arange(5)}


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3])


def test_the_installed_orbax_is_one_that_was_verified():
    found = version("orbax-checkpoint")
    assert numbers(found) <= numbers(orbax_format.VERIFIED), (
        f"orbax-checkpoint {found} is newer than {orbax_format.VERIFIED}, with which kimi_jax/store/orbax_format.py "
        "was last compared: run tests/store, read Orbax's release notes for changes of its format, then raise VERIFIED"
    )


def test_plain_folders_are_described_as_orbax_describes_them(tmp_path):
    options = ocp.options.ArrayOptions(saving=ocp.options.ArrayOptions.Saving(use_ocdbt=False, use_zarr3=False))
    with ocp.Context(array_options=options):
        ocp.save(tmp_path / "theirs", ARRAYS, custom_metadata={"a": 1})
    theirs = json.loads((tmp_path / "theirs" / ITEM / METADATA).read_text())
    ours = orbax_format.tree_metadata({name: array.shape for name, array in ARRAYS.items()})
    assert ours["tree_metadata"].keys() == theirs["tree_metadata"].keys()
    for key, entry in ours["tree_metadata"].items():
        assert entry["key_metadata"] == theirs["tree_metadata"][key]["key_metadata"]
        assert entry["value_metadata"].items() <= theirs["tree_metadata"][key]["value_metadata"].items()
    assert ours.keys() <= theirs.keys()
    assert all(ours[key] == theirs[key] for key in ours.keys() - {"tree_metadata"})
    assert orbax_format.is_plain(ours) and orbax_format.is_plain(theirs)
    assert orbax_format.names(theirs) == list(ARRAYS)

    whole = json.loads((tmp_path / "theirs" / WHOLE).read_text())
    mine = orbax_format.checkpoint_metadata({"a": 1})
    assert mine.keys() == whole.keys() and mine["item_handlers"] == whole["item_handlers"]
    assert mine[CUSTOM] == whole[CUSTOM] == {"a": 1}

    for name, array in ARRAYS.items():
        stored = json.loads((tmp_path / "theirs" / ITEM / name / ZARR).read_text())
        described = orbax_format.array_metadata(array.shape, array.shape, np.dtype(array.dtype))
        described = json.loads(json.dumps(described))
        assert described.keys() == stored.keys()
        assert all(described[key] == stored[key] for key in ("zarr_format", "shape", "dtype", "order", "filters"))


def test_what_a_run_writes_is_named_as_assumed(tmp_path):
    seen = set()
    with checkpoint.opened(tmp_path, write=True) as checkpoints:
        checkpoints.save(1, ARRAYS, {"a": 1})
        while checkpoints.latest is None:
            seen.update(child.name for child in tmp_path.iterdir())
    assert any(orbax_format.TEMPORARY in name for name in seen), seen
    stored = json.loads((tmp_path / "1" / ITEM / METADATA).read_text())
    assert sorted(orbax_format.names(stored)) == sorted(ARRAYS) and not orbax_format.is_plain(stored)
    assert json.loads((tmp_path / "1" / WHOLE).read_text())[CUSTOM]["a"] == 1
    assert Checkpoints(tmp_path).metadata() == {"a": 1}
    own = [path.relative_to(tmp_path / "1").as_posix() for path in (tmp_path / "1").rglob("ocdbt.process_0/*")]
    assert own and all(orbax_format.process_of(path) == 0 for path in own)
    assert orbax_format.process_of("state/ocdbt.process_12/d/abc") == 12
    assert orbax_format.process_of("state/_METADATA") == 0
