"""Conversion of a large synthetic K3 checkpoint, both ways: memory and speed, beside the disk's own copy.

Makes a directory with K3's own widths, names and formats (MXFP4 experts, vision tensors, one file a layer) and fewer
layers and experts. Each step runs in a process of its own, with the files dropped from the page cache before it.

    python benchmarks/convert.py [--folder /tmp] [--experts 40] [--json out.json]

Takes four times the checkpoint's size on disk; the folder made in `--folder` is removed at the end.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from kimi_jax.config import load_config
from kimi_jax.store import released_config, safetensors_files
from kimi_jax.store.write import plan

GIB = 2**30


def model(num_experts: int):
    """K3 with its widths, four layers and fewer experts and tokens."""
    k3 = load_config("k3").model
    tokens = {"vocab_size": 32768, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return replace(k3, num_layers=4, mla_layers=(3,), moe=replace(k3.moe, num_experts=num_experts), **tokens)


def blocks(rng: np.random.Generator, name: str, entry: safetensors_files.Entry):
    """Random data that a release could hold: finite numbers, scales around one, A_log padded with zeros."""
    if name.endswith("A_log"):
        yield np.pad(rng.uniform(0, 1, 96).astype(np.float32), (0, entry.shape[0] - 96))
        return
    for start in range(0, entry.num_bytes, safetensors_files.BLOCK):
        block = np.frombuffer(rng.bytes(min(safetensors_files.BLOCK, entry.num_bytes - start)), np.uint8).copy()
        if name.endswith("_scale"):
            block = 110 + block % 16
        elif entry.dtype != "U8":
            width = safetensors_files.DTYPES[entry.dtype].itemsize
            block[width - 1 :: width] &= 0x3F  # the high byte: no NaN, no infinity
        yield block


def make(folder: Path, num_experts: int) -> None:
    config = model(num_experts)
    made = plan(config, packed=True)
    files: dict[str, list] = {}
    for s in made.stored.values():
        layer = s.name.split(".layers.")[1].split(".")[0] if ".layers." in s.name else "-1"
        files.setdefault(f"model-{int(layer) + 2:05d}-of-000006.safetensors", []).append(s.entry)
    vision = [(f"vision_tower.encoder.blocks.{b}.wqkv.weight", "BF16", (4608, 1024)) for b in range(27)]
    files["model-00006-of-000006.safetensors"] = [*vision, ("mm_projector.proj.2.weight", "BF16", (7168, 4096))]
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    written = {}
    for file, tensors in sorted(files.items()):
        written[file] = safetensors_files.make_shard(tensors)
        data = (block for name, entry in written[file].entries.items() for block in blocks(rng, name, entry))
        safetensors_files.write(folder / file, written[file], data)
    (folder / safetensors_files.INDEX).write_text(safetensors_files.index_of(written))
    (folder / released_config.CONFIG).write_text(made.config)


def drop_from_cache(folder: Path) -> None:
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


STEP = """
import resource, sys, time
from pathlib import Path
begin = time.perf_counter()
if sys.argv[1] == "copy":
    import os, shutil
    shutil.copytree(sys.argv[2], sys.argv[3])
    os.sync()
else:
    from kimi_jax.store.convert import convert
    convert(sys.argv[2], sys.argv[3], verify=sys.argv[1] == "verified")
print(time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def step(kind: str, source: Path, target: Path) -> tuple[float, int]:
    """Seconds and peak resident bytes of a process that does it."""
    drop_from_cache(source)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    command = [sys.executable, "-c", STEP, kind, source, target]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    seconds, peak = done.stdout.split()
    return float(seconds), int(float(peak))


def same_files(a: Path, b: Path) -> bool:
    return subprocess.run(["diff", "-rq", a, b], check=False, stdout=subprocess.DEVNULL).returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="/tmp")
    parser.add_argument("--experts", type=int, default=40)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    root = Path(args.folder) / f"convert_benchmark_{os.getpid()}"
    try:
        source = root / "release"
        make(source, args.experts)
        files = [path.stat().st_size for path in source.glob("*.safetensors")]
        total, largest = sum(files), max(files)
        free = shutil.disk_usage(root).free
        if free < 3.2 * total:
            sys.exit(f"{root} needs {3.2 * total / GIB:.1f} GiB more and has {free / GIB:.1f}; choose another --folder")
        bound = 1.2 * largest + GIB
        sizes = f"{len(files)} files, {total / GIB:.2f} GiB, the largest {largest / GIB:.2f} GiB"
        print(f"{sizes}; bound on memory {bound / GIB:.2f} GiB", flush=True)
        results: dict = {"bytes": total, "largest": largest}
        steps = [
            ("copy", "copy", source, root / "copy"),
            ("import", "plain", source, root / "converted"),
            ("export", "plain", root / "converted", root / "back"),
        ]
        for name, kind, there, here in steps:
            seconds, peak = step(kind, there, here)
            results[name] = {"seconds": seconds, "gb_per_s": total / seconds / 1e9, "peak_gib": peak / GIB}
            print(
                f"{name:8} {seconds:7.1f} s  {total / seconds / 1e9:5.2f} GB/s  peak memory {peak / GIB:.2f} GiB",
                flush=True,
            )
            if name == "copy":
                shutil.rmtree(here)
            elif peak > bound:
                sys.exit(f"{name} took {peak / GIB:.2f} GiB, more than {bound / GIB:.2f}")
        if not same_files(source, root / "back"):
            sys.exit("the way there and back changed bytes")
        print("the same bytes, file for file")
        if args.json:
            Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
