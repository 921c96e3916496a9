"""What four-bit experts cost: bits per byte of a small model after training, after rounding, and trained with rounding.

Two runs share their steps up to the switch, from where one goes on with MXFP4 expert weights and MXFP8 activations
(quantization-aware training). Each is evaluated with its experts as they are and rounded, on the same validation text.

    python benchmarks/qat.py [--steps 160] [--dtype bfloat16] [--json out.json]
"""

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from kimi_jax.config import Config, ModelConfig, TokenizerConfig, load_config
from kimi_jax.data import pipeline
from kimi_jax.model.kimi import Kimi, declared
from kimi_jax.model.param import arrays, with_arrays
from kimi_jax.ops.quant.qtensor import QTensor
from kimi_jax.store.open import open_model
from kimi_jax.train.evaluate import evaluate_batches
from kimi_jax.train.loop import run_training
from kimi_jax.train.step import evaluation_step

FORMATS = {
    "as trained": (None, None),
    "MXFP4 weights": ("mxfp4", None),
    "MXFP8 activations": (None, "mxfp8"),
    "MXFP4 weights, MXFP8 activations": ("mxfp4", "mxfp8"),
}


def small(steps: int, dtype: str, folder: str) -> Config:
    """k3_tiny on bytes, with fewer and shorter rows."""
    config = load_config("k3_tiny")
    switch = steps * 3 // 4
    return replace(
        config,
        name="plain",
        model=replace(config.model, vocab_size=320, dtype=dtype),
        data=replace(config.data, batch_size=8, validation_fraction=0.004, tokenizer=TokenizerConfig(kind="bytes")),
        train=replace(
            config.train,
            steps=steps,
            eval_every=steps,
            checkpoint_every=switch,
            keep_every=switch,
            sample_tokens=0,
            runs_dir=folder,
        ),
    )


def formatted(model: ModelConfig, weights, activations) -> ModelConfig:
    return replace(model, moe=replace(model.moe, weight_format=weights, activation_format=activations))


def bits(config: Config, model: ModelConfig, params: dict, batches) -> float:
    step = evaluation_step(replace(config, model=model))
    return evaluate_batches(step, params, batches)["bits_per_byte"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--eval-tokens", type=int, default=40_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        plain = small(options.steps, options.dtype, folder)
        switch = plain.train.checkpoint_every
        begin = time.perf_counter()
        run_training(plain)
        seconds = time.perf_counter() - begin
        # The other run takes over the state at the switch.
        qat = replace(plain, name="qat", train=replace(plain.train, qat_from_step=switch))
        shutil.copytree(Path(folder, "plain"), Path(folder, "qat"))
        for newer in Path(folder, "qat", "checkpoints").iterdir():
            if newer.name != str(switch):
                shutil.rmtree(newer) if newer.is_dir() else newer.unlink()
        run_training(qat)
        for config in (plain, qat):
            model, loaded, tokenizer = open_model(Path(folder, config.name))
            assert tokenizer is not None
            data = pipeline.load(config.data, config.model, tokenizer)
            batches = list(data.validation_batches(max_tokens=options.eval_tokens))
            params = arrays(model)
            for name, formats in FORMATS.items():
                if config is plain or None not in formats:
                    rows[config.name, name] = bits(loaded, formatted(loaded.model, *formats), params, batches)
        # What the last run exports: packed experts, decoded as they are needed.
        experts = {name for name, each in declared(model.config).items() if each.axes[0] == "experts"}
        packed = {name: QTensor.encode(w) if name in experts else w for name, w in params.items()}
        exported = formatted(loaded.model, None, "mxfp8")
        rows["qat", "packed export"] = bits(loaded, exported, packed, batches)
        a, b = (
            jax.jit(lambda params, c=c: with_arrays(Kimi(c), params)(jnp.asarray(batches[0]["tokens"])))(p)
            for c, p in ((exported, packed), (loaded.model, params))
        )
        same = bool((a == b).all())
    print(f"\n{options.steps} steps, {options.dtype}, switch at {switch}; {seconds:.0f} s for the plain run\n")
    print("| trained | evaluated | bits per byte |\n|---|---|---|")
    for (trained, evaluated), value in rows.items():
        print(f"| {trained} | {evaluated} | {value:.4f} |")
    print(f"\nThe packed export's logits are those of the run bit for bit: {same}")
    if options.json:
        table = [{"trained": t, "evaluated": e, "bits_per_byte": v} for (t, e), v in rows.items()]
        options.json.write_text(json.dumps({"rows": table, "same_bits": same, **vars(options) | {"json": None}}))


if __name__ == "__main__":
    main()
