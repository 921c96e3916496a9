"""Prefill and decode of one exported checkpoint: this package, mlx-lm and transformers, in tokens a second.

Each library has a process of its own, on the same CPUs, with f32 weights and the same random prompts. They take turns,
run by run, so that what else the machine does strikes all alike; a figure is the median of a cell's runs, after one to
warm up and compile. Prefill reads a batch of prompts and ends with the next token of each; decode takes the likeliest
token, again and again, after such a prompt. A peer whose first run takes longer than --patience is not run again.

    pip install -e '.[oracle]' && python benchmarks/decode.py [--models linear k3] [--threads 1] [--json out.json]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

BATCHES, LENGTHS, STEPS, RUNS = (1, 8, 32), (64, 256, 1024), 16, 3
MOST = 8192
"""Tokens of a batch of prompts: the peers take a minute and more for those."""
PEERS = {"linear": ("mlx-lm", "transformers"), "k3": ("mlx-lm",)}


def export(name: str, folder: Path) -> None:
    """Writes a random model of about 120 M parameters, of which a token uses a third."""
    from kimi_jax.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
    from kimi_jax.model.kimi import init
    from kimi_jax.store.write import save_release

    kda = KDAConfig(num_heads=8, head_dim=64)
    config = ModelConfig(
        vocab_size=16384,
        hidden_size=512,
        num_layers=8,
        mla_layers=(3, 7),
        num_dense_layers=1,
        dense_hidden_size=2048,
        kda=kda,
        mla=MLAConfig(
            num_heads=8, q_lora_rank=None, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
        ),
        moe=MoEConfig(
            num_experts=32, experts_per_token=4, num_shared_experts=1, hidden_size=256, routed_scaling_factor=2.446
        ),
    )
    if name == "k3":
        config = replace(
            config,
            situ_beta=4.0,
            situ_linear_beta=25.0,
            attn_res_block_size=4,
            kda=replace(kda, gate_lower_bound=-5.0, full_rank_gate=True),
            mla=replace(config.mla, q_lora_rank=256, output_gate=True),
            moe=replace(config.moe, num_experts=64, latent_size=256, latent_norm=True, routed_scaling_factor=1.0),
        )
    save_release(folder, init(config), config)


def load_ours(folder: Path):
    import jax
    import jax.numpy as jnp
    import numpy as np

    from kimi_jax.infer.generate import decode, prefill
    from kimi_jax.model.cache import init_cache
    from kimi_jax.store.open import open_model

    model, whole, _ = open_model(folder, dtype="float32")
    config = whole.model
    likeliest = jax.jit(lambda logits: jnp.argmax(logits, -1))

    def start(prompts):
        cache = init_cache(config, len(prompts), prompts.shape[1] + 64)
        cache, logits = prefill(model, cache, prompts, np.ones_like(prompts))
        return cache, jax.block_until_ready(likeliest(logits))

    def go(state):
        cache, token = state
        out = []
        for _ in range(STEPS):
            out.append(np.asarray(token))
            cache, logits = decode(model, cache, token)
            token = likeliest(logits)
        token.block_until_ready()
        return out

    return start, go


def load_mlx(folder: Path):
    import mlx.core as mx  # pyright: ignore[reportMissingImports]
    import mlx_lm  # pyright: ignore[reportMissingImports]

    mx.set_default_device(mx.cpu)
    model, _ = mlx_lm.utils.load_model(folder)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())

    def start(prompts):  # as its generate_step: logits of the last token alone
        cache, prompts = mlx_lm.models.cache.make_prompt_cache(model), mx.array(prompts)
        model(prompts[:, :-1], cache=cache)
        mx.eval([layer.state for layer in cache])
        token = mx.argmax(model(prompts[:, -1:], cache=cache)[:, -1], -1)
        mx.eval(token)
        return cache, token

    def go(state):
        cache, token = state
        out = []
        for _ in range(STEPS):
            out.append(token)
            token = mx.argmax(model(token[:, None], cache=cache)[:, -1], -1)
            mx.async_eval(token)
        mx.eval(token)
        return out

    return start, go


def load_transformers(folder: Path):
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def next_token(tokens, cache):
        return model(tokens, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)

    @torch.inference_mode()
    def start(prompts):
        cache = transformers.DynamicCache(config=model.config)
        return cache, next_token(torch.tensor(prompts), cache)

    @torch.inference_mode()
    def go(state):
        cache, token = state
        out = []
        for _ in range(STEPS):
            out.append(token)
            token = next_token(token[:, None], cache)
        return out

    return start, go


LIBRARIES = {"ours": load_ours, "mlx-lm": load_mlx, "transformers": load_transformers}


def work(library: str, folder: Path) -> None:
    """Runs cells: a line with batch, length and vocabulary in, one with seconds and the first tokens out."""
    import numpy as np

    answers, sys.stdout = sys.stdout, sys.stderr
    start, go = LIBRARIES[library](folder)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        batch, length, vocab = json.loads(line)
        prompts = np.random.default_rng(0).integers(0, vocab, (batch, length), np.int32)
        marks = [(time.perf_counter(), time.process_time())]
        state = start(prompts)
        marks.append((time.perf_counter(), time.process_time()))
        tokens = go(state)
        marks.append((time.perf_counter(), time.process_time()))
        (prefill, prefill_cpu), (decode, decode_cpu) = np.diff(marks, axis=0)
        result = {"prefill": prefill, "decode": decode, "prefill_cpu": prefill_cpu, "decode_cpu": decode_cpu}
        print(json.dumps(result | {"tokens": [int(step[0]) for step in tokens]}), file=answers, flush=True)


class Worker:
    def __init__(self, library: str, folder: Path, num_threads: int):
        count = str(num_threads)
        threads = {name: count for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", library, str(folder), "--threads", count],
            env=os.environ | threads | {"JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready", f"{library} did not start"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, *cell: int) -> dict:
        assert self.process.stdin is not None
        print(json.dumps(cell), file=self.process.stdin, flush=True)
        return json.loads(self._line())


def measure(workers: dict[str, Worker], batch: int, length: int, vocab: int, patience: float) -> dict:
    """One cell: tokens a second of each library, in wall and in CPU time, and ours over the faster peer's."""
    runs = {name: [worker.run(batch, length, vocab)] for name, worker in workers.items()}
    tokens = {name: first[0]["tokens"] for name, first in runs.items()}
    again = [n for n, (run,) in runs.items() if n == "ours" or run["prefill"] + run["decode"] < patience]
    for name in again:
        runs[name].clear()  # it has only warmed up
    for _ in range(RUNS):
        for name in again:
            runs[name].append(workers[name].run(batch, length, vocab))
    result: dict = {"batch": batch, "length": length, "same_tokens": all(t == tokens["ours"] for t in tokens.values())}
    for kind, count in (("prefill", batch * length), ("decode", batch * STEPS)):
        for clock in ("", "_cpu"):
            speed = {n: count / statistics.median(run[kind + clock] for run in of) for n, of in runs.items()}
            peer = max(v for n, v in speed.items() if n != "ours")
            result[kind + clock] = {n: round(v, 1) for n, v in speed.items()} | {
                "ratio": round(speed["ours"] / peer, 2)
            }
    return result | {"runs": {name: len(of) for name, of in runs.items()}}


def show(result: dict) -> None:
    row = f"{result['batch']:>5} x {result['length']:<5}"
    for kind in ("prefill", "decode"):
        speeds = {n: v for n, v in result[kind].items() if n != "ratio"}
        row += f" | {kind}" + "".join(f" {n} {v:>8,.0f}" for n, v in speeds.items())
        row += f"  x {result[kind]['ratio']:.2f} (CPU time x {result[kind + '_cpu']['ratio']:.2f})"
    print(row + ("" if result["same_tokens"] else " | tokens differ"), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPUs of each library")
    parser.add_argument("--patience", type=float, default=20, help="seconds")
    parser.add_argument("--json", help="write the results to this file too")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        # Before any library counts the CPUs; and not by the parent between fork and exec, for JAX has threads there.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
        work(arguments.worker[0], Path(arguments.worker[1]))
        sys.exit()
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        for model in arguments.models:
            folder = Path(temporary) / model
            export(model, folder)
            config = json.loads((folder / "config.json").read_text())
            vocab = config.get("text_config", config)["vocab_size"]
            workers = {name: Worker(name, folder, arguments.threads) for name in ("ours", *PEERS[model])}
            print(f"{model}, {arguments.threads} threads, tokens a second; x: ours over the faster of the others")
            results[model] = []
            for length in arguments.lengths:
                for batch in arguments.batches:
                    if batch * length <= MOST:
                        results[model].append(measure(workers, batch, length, vocab, arguments.patience))
                        show(results[model][-1])
            for worker in workers.values():
                worker.process.communicate()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"threads": arguments.threads, "steps": STEPS, **results}, indent=1))
