"""Orbax's format on disk, as far as files are written or read here without Orbax; the one place that knows it.

Orbax has no public way to write a checkpoint slice by slice, of arrays that no memory holds, nor to read a slice of
one. So conversions write its format themselves, and exports read it with TensorStore. What is assumed:

- a checkpoint's folder has one item, `state`, and the JSON `_CHECKPOINT_METADATA`, which names the item's handler;
- the item's folder has the JSON `_METADATA`: the arrays' names, and which of Zarr's versions, in OCDBT or in plain
  folders, holds them;
- each process writes what its devices hold into an OCDBT database of its own, `ocdbt.process_N`;
- what is being written has a name with `.orbax-checkpoint-tmp` in it.

`tests/store/test_orbax_format.py` compares this with what the installed Orbax writes and reads, and fails for one that
is newer than `VERIFIED`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

VERIFIED = "0.12.8"
"""The newest version of orbax-checkpoint whose format has been compared with this file."""

ITEM, METADATA, WHOLE = "state", "_METADATA", "_CHECKPOINT_METADATA"
"""Names in a checkpoint's folder: the arrays, the arrays' metadata in there, the checkpoint's metadata."""
CUSTOM = "custom_metadata"
"""Key of the user's own JSON in `_CHECKPOINT_METADATA`."""
TEMPORARY = ".orbax-checkpoint-tmp"
"""Part of the names of what Orbax is writing."""
ZARR = ".zarray"
"""Name of an array's metadata in its folder of chunks (Zarr, version 2)."""

_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"


def array_metadata(shape: tuple[int, ...], chunk: tuple[int, ...], dtype: np.dtype) -> dict[str, Any]:
    """Content of `.zarray`, for chunks that are not compressed."""
    kind = dtype.newbyteorder("<").str if dtype.kind != "V" else dtype.name
    array = {"zarr_format": 2, "shape": shape, "chunks": chunk, "dtype": kind, "order": "C"}
    return array | {"compressor": None, "filters": None, "fill_value": None, "dimension_separator": "."}


def tree_metadata(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Content of `_METADATA`, for a flat dict of arrays in plain folders."""
    entry = {"value_type": "jax.Array", "skip_deserialize": False}
    tree = {
        repr((name,)): {
            "key_metadata": [{"key": name, "key_type": 2}],
            "value_metadata": entry | {"write_shape": list(shape)},
        }
        for name, shape in shapes.items()
    }
    plain = {"use_ocdbt": False, "use_zarr3": False, "store_array_data_equal_to_fill_value": True}
    return {"tree_metadata": tree, **plain, CUSTOM: None}


def checkpoint_metadata(custom: dict) -> dict[str, Any]:
    """Content of `_CHECKPOINT_METADATA`."""
    now = time.time_ns()
    return {
        "item_handlers": {ITEM: _HANDLER},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        CUSTOM: custom,
    }


def names(stored: Mapping[str, Any]) -> list[str]:
    """The arrays' names, of the content of `_METADATA`."""
    return [entry["key_metadata"][0]["key"] for entry in stored["tree_metadata"].values()]


def is_plain(stored: Mapping[str, Any]) -> bool:
    """Whether each array is a folder of chunk files (Zarr, version 2), of the content of `_METADATA`."""
    return not stored["use_ocdbt"] and not stored["use_zarr3"]


def array_spec(root: Path, name: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """How TensorStore opens an array of an item's folder."""
    kv: dict[str, Any] = {"driver": "file", "path": f"{root}/{name}/"}
    if stored["use_ocdbt"]:
        kv = {"driver": "ocdbt", "base": f"file://{root}/", "path": f"{name}/"}
    return {"driver": "zarr3" if stored["use_zarr3"] else "zarr", "kvstore": kv, "recheck_cached_data": "open"}


def process_of(path: str) -> int:
    """The process that wrote a file of a checkpoint, by the file's path: 0 for what all have in common."""
    found = re.search(r"/ocdbt\.process_(\d+)/", path)
    return int(found[1]) if found else 0
