"""What a crash, a damaged disk and many saves do: processes killed with SIGKILL, bits flipped, descriptors counted.

1. A tiny training run is killed again and again: at random instants, while it saves, while it starts. In the end all
   its records and its sample must equal those of a run that nobody disturbed.
2. A release is converted to a checkpoint and back, each killed at random instants and resumed; the files must come back
   byte for byte.
3. Single bits of a checkpoint are flipped, in each of its files in turn; each must be noticed.
4. Descriptors and threads are counted over saves; they must stay what they are.
5. What checksums cost: seconds of a save, and the time of steps that run meanwhile.

    python benchmarks/reliability.py [--quick] [--folder /tmp] [--seed 0]

Prints one table in Markdown, and ends with 1 if anything in it is wrong. Processes share a cache of compiled programs,
so that a start costs seconds. The folder made in `--folder` is removed at the end.
"""

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.config import (
    Config,
    DataConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    Source,
    TrainConfig,
)
from kimi_jax.model.kimi import init
from kimi_jax.store import checkpoint
from kimi_jax.store.checkpoint import Checkpoints
from kimi_jax.store.checksums import Sum
from kimi_jax.store.safetensors_files import CheckpointError
from kimi_jax.store.write import save_release
from kimi_jax.train import metrics

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 300
"""Seconds after which a process is given up."""

MODEL = ModelConfig(
    vocab_size=260,
    hidden_size=16,
    num_layers=2,
    mla_layers=(1,),
    num_dense_layers=1,
    dense_hidden_size=24,
    situ_beta=4.0,
    situ_linear_beta=25.0,
    attn_res_block_size=2,
    kda=KDAConfig(num_heads=2, head_dim=8, gate_lower_bound=-5.0, full_rank_gate=True, chunk_size=8),
    mla=MLAConfig(
        num_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
        output_gate=True,
    ),
    moe=MoEConfig(
        num_experts=4, experts_per_token=2, num_shared_experts=1, hidden_size=8, latent_size=8, latent_norm=True
    ),
)


def config(folder: Path, name: str, steps: int) -> Config:
    """A run of a model with every part of K3, on a text that is written into the folder."""
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number in range(30):
        words = ", ".join(f"{(number * 7 + i * i) % 97}" for i in range(20 + number))
        (corpus / f"{number}.txt").write_text(f"the number is {words}\n", encoding="utf-8")
    source = Source(kind="text", path=str(corpus), glob="*.txt")
    return Config(
        name=name,
        model=MODEL,
        optim=OptimConfig(learning_rate=1e-2, warmup_fraction=0.2),
        data=DataConfig(sequence_length=32, batch_size=4, sources=(source,), validation_fraction=0.2),
        train=TrainConfig(
            steps=steps,
            runs_dir=str(folder / "runs"),
            eval_every=10,
            eval_tokens=100,
            checkpoint_every=3,
            keep_last=2,
            sample_prompt="the ",
            sample_tokens=4,
        ),
    )


def start(folder: Path, *arguments: str | Path) -> subprocess.Popen:
    """The command line, in a process of its own."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | cache
    with open(folder / "log.txt", "w", encoding="utf-8") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "kimi_jax", *map(str, arguments)], env=environment, stdout=log, stderr=log
        )


def finish(folder: Path, *arguments: str | Path) -> None:
    process = start(folder, *arguments)
    if process.wait(LONGEST):
        raise SystemExit(f"{' '.join(map(str, arguments))} failed:\n{(folder / 'log.txt').read_text(encoding='utf-8')}")


def kill(process: subprocess.Popen, moment: Callable[[], bool]) -> bool:
    """Kills the process at the moment; False if it ended before."""
    deadline = time.monotonic() + LONGEST
    while not moment() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def records(folder: Path) -> list[dict]:
    """What a run has written down, without how fast it was."""
    found = metrics.read(folder / "metrics.jsonl")
    return [{key: value for key, value in record.items() if key != "tokens_per_second"} for record in found]


def killed_runs(folder: Path, rng: random.Random, kills: dict[str, int]) -> list[tuple[str, str, bool]]:
    """Kills a run so many times of each kind, then lets it end and compares it with one that was left alone."""
    kinds = [kind for kind, count in kills.items() for _ in range(count)]
    rng.shuffle(kinds)
    steps = 3 * len(kinds) + 30
    files = {}
    for name in ("undisturbed", "killed"):
        files[name] = folder / f"{name}.py"
        text = f"from kimi_jax.config import *\nconfig = {config(folder, name, steps)!r}\n"
        files[name].write_text(text, encoding="utf-8")
    finish(folder, "train", files["undisturbed"])
    target = folder / "runs" / "killed"
    log, saved = target / "metrics.jsonl", target / "checkpoints"

    def saving() -> bool:
        return saved.is_dir() and any(".partial" in name for name in os.listdir(saved))

    done, broken, startup = dict.fromkeys(kills, 0), [], 5.0
    for kind in kinds:
        begin, before = time.monotonic(), lines_of(log)
        process = start(folder, "train", files["killed"])
        if kind == "while it starts":
            happened = kill(process, after(rng.uniform(0, startup)))
        else:
            while lines_of(log) <= before and process.poll() is None:  # it has started, and may have taken lines back
                before = min(before, lines_of(log))
                time.sleep(0.001)
            startup = time.monotonic() - begin
            moment = saving if kind == "while it saves" else after(rng.uniform(0, 0.5))
            happened = kill(process, moment)
        done[kind] += happened
        checkpoints = Checkpoints(saved)
        if checkpoints.latest != checkpoints.newest_whole():
            broken.append(checkpoints.latest)
    finish(folder, "train", files["killed"])
    reference = target.with_name("undisturbed")
    same = records(target) == records(reference)
    same_text = (target / "sample.txt").read_bytes() == (reference / "sample.txt").read_bytes()
    count = len(records(reference))
    result = f"all {count} records and the sample equal" if same and same_text else "records or sample differ"
    result += f"; broken checkpoints: {broken}" if broken else "; no broken checkpoint at any time"
    right = same and same_text and not broken and done == kills
    how = ", ".join(f"{done[kind]} of {count} {kind}" for kind, count in kills.items())
    return [(f"training run killed {sum(done.values())} times: {how}", result, right)]


def killed_conversions(folder: Path, rng: random.Random, kills: int) -> list[tuple[str, str, bool]]:
    """Kills an import and an export, each so many times, and compares what comes back."""
    source, converted, back = folder / "release", folder / "converted", folder / "back"
    save_release(source, init(MODEL), MODEL, max_shard_bytes=3000)
    rows = []
    for what, there, here in (("import", source, converted), ("export", converted, back)):
        partial = here.with_name(here.name + ".partial")
        finish(folder, "convert", there, folder / "probe")
        total = sum(path.is_file() for path in (folder / "probe").rglob("*"))
        shutil.rmtree(folder / "probe")
        goals = sorted(rng.randrange(total) for _ in range(kills))  # files that are there when it is killed
        done = 0
        for goal in goals:
            process = start(folder, "convert", there, here)

            def written(partial=partial, goal=goal) -> bool:
                return partial.is_dir() and sum(len(names) for _, _, names in os.walk(partial)) >= goal

            done += kill(process, written) and not here.exists()
        if not here.exists():
            finish(folder, "convert", there, here, "--verify")
        whole = here == back or Checkpoints(here / "checkpoints").newest_whole() == 0
        result = "resumed and verified" if whole else "its checkpoint is not whole"
        rows.append((f"{what} killed {done} of {kills} times", result, whole and done == kills))
    same = subprocess.run(["diff", "-r", source, back], check=False, stdout=subprocess.DEVNULL).returncode == 0
    rows.append(("there and back, files compared", "byte for byte the same" if same else "files differ", same))
    return rows


def flipped_bits(folder: Path, rng: random.Random, flips: int) -> list[tuple[str, str, bool]]:
    """Flips bits of a run's newest checkpoint, one at a time, in each file in turn."""
    saved = folder / "runs" / "undisturbed" / "checkpoints"
    step = Checkpoints(saved).latest
    paths = sorted(path for path in (saved / str(step)).rglob("*") if path.is_file() and path.stat().st_size)
    noticed = 0
    for number in range(flips):
        path = paths[number % len(paths)]
        content = path.read_bytes()
        place = rng.randrange(8 * len(content))
        broken = bytearray(content)
        broken[place // 8] ^= 1 << place % 8
        path.write_bytes(broken)
        checkpoints = Checkpoints(saved)
        try:
            checkpoints.metadata()
            checkpoints.check()
        except CheckpointError as error:
            noticed += "is damaged" in str(error) and "\n" not in str(error)
        path.write_bytes(content)
    Checkpoints(saved).check()
    row = f"{flips} bits flipped, one at a time, in the {len(paths)} files of a checkpoint"
    return [(row, f"{noticed} noticed", noticed == flips)]


def counts() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def leaks(folder: Path, saves: int) -> list[tuple[str, str, bool]]:
    """Descriptors and threads of this process, after ten saves and after many more."""
    tree = {"x": jnp.arange(1000)}
    with checkpoint.opened(folder / "leaks", write=True) as checkpoints:
        for step in range(10):
            checkpoints.save(step, tree, {})
        checkpoints.wait()
        before = counts()
        for step in range(10, 10 + saves):
            checkpoints.save(step, tree, {})
        checkpoints.wait()
        now = counts()
    result = f"descriptors {before[0]} before, {now[0]} after; threads {before[1]} and {now[1]}"
    return [(f"{saves} saves", result, now[0] <= before[0] + 2 and now[1] <= before[1] + 2)]


def cost(folder: Path, size: int, saves: int) -> list[tuple[str, str, bool]]:
    """Seconds of a save of `size` bytes with and without checksums, alternating, and of the steps meanwhile."""
    rng = np.random.default_rng(0)
    tree = {f"x{i}": jnp.asarray(rng.standard_normal(size // 16, np.float32)) for i in range(4)}
    step = jax.jit(lambda x: jnp.tanh(x @ x))
    x = jnp.eye(256)
    step(x).block_until_ready()
    plain = checkpoint.sums_of
    spent: list[float] = []

    def timed(root, paths):
        begin = time.perf_counter()
        found = plain(root, paths)
        spent.append(time.perf_counter() - begin)
        return found

    variants = {"with": timed, "without": lambda root, paths: dict.fromkeys(paths, Sum(0, "0" * 16))}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    steps: dict[str, list[float]] = {name: [] for name in variants}
    with checkpoint.opened(folder / "cost", write=True) as checkpoints:
        for number in range(2 * saves):
            name = list(variants)[number % 2]
            checkpoint.sums_of = variants[name]
            begin = time.perf_counter()
            checkpoints.save(number, tree, {})
            while checkpoints.latest != number:
                tick = time.perf_counter()
                step(x).block_until_ready()
                steps[name].append(time.perf_counter() - tick)
            seconds[name].append(time.perf_counter() - begin)
            checkpoints.wait()
    checkpoint.sums_of = plain
    save = {name: statistics.median(values) for name, values in seconds.items()}
    tick = {name: 1000 * statistics.median(values) for name, values in steps.items()}
    hashed = sum(spent) / saves
    share = hashed / (save["with"] - hashed)
    result = f"{hashed:.2f} s of {save['with']:.2f} s: {share:.0%} of the rest"
    result += f"; a step meanwhile {tick['with']:.2f} ms, without checksums {tick['without']:.2f} ms"
    return [(f"checksums of {size / 2**30:.2g} GiB", result, share < 0.2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a quarter of the tries")
    parser.add_argument("--folder", default="/tmp")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    root = Path(args.folder).absolute() / f"reliability_benchmark_{os.getpid()}"
    root.mkdir()
    rng = random.Random(args.seed)
    kills = {"at a random instant": 20, "while it saves": 12, "while it starts": 10}
    if args.quick:
        kills = {kind: max(2, count // 4) for kind, count in kills.items()}
    begin = time.monotonic()
    try:
        rows = killed_runs(root, rng, kills)
        print(f"runs killed: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        rows += killed_conversions(root, rng, 3 if args.quick else 10)
        print(f"conversions killed: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        rows += flipped_bits(root, rng, 60)
        rows += leaks(root, 100 if args.quick else 300)
        rows += cost(root, 2**27 if args.quick else 2**30, 2 if args.quick else 3)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print("| what | result | as it should be |\n|---|---|---|")
    for what, result, right in rows:
        print(f"| {what} | {result} | {'yes' if right else '**no**'} |")
    print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr)
    if not all(right for _, _, right in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
