"""Kills itself while it writes the second of two checkpoints of a mesh."""

import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from kimi_jax.config import Mesh
from kimi_jax.parallel.mesh import make_mesh, on_mesh
from kimi_jax.store import checkpoint


def main() -> None:
    mesh = make_mesh(Mesh(fsdp=8))
    folder = Path(sys.argv[1])
    with on_mesh(mesh):
        cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
        values = jax.device_put(jnp.arange(2**24, dtype=jnp.float32), cut)
        checkpoints = checkpoint.Checkpoints(folder, write=True)
        checkpoints.save(1, {"x": values}, {"step": 1})
        checkpoints.wait()
        checkpoints.save(2, {"x": -values}, {"step": 2})
        while not any(".orbax-checkpoint-tmp" in child.name for child in folder.iterdir()):
            pass
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
