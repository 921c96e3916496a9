"""What we export, read and run by others: mlx-lm (all of the family) and transformers (Kimi Linear and K2).

    pip install -e '.[test,oracle]' && pytest -m oracle

Nothing of this package takes part on their side: they find a directory in the released layout. Weights are random, all
of them, so that each one counts. Everything is in f32 on both sides.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig, RoPEConfig, load_config
from kimi_jax.infer.generate import generate
from kimi_jax.infer.sampling import Sampling
from kimi_jax.model.kimi import Kimi, bias_layers, init
from kimi_jax.model.param import arrays, with_arrays
from kimi_jax.store import released_config
from kimi_jax.store.read import load_release
from kimi_jax.store.write import save_release
from tests import tiny
from tests.conftest import rel_to_rms

EXTRA = "needs the oracle extra: pip install -e '.[oracle]'"
mx = pytest.importorskip("mlx.core", reason=EXTRA)
mlx_lm = pytest.importorskip("mlx_lm", reason=EXTRA)
torch = pytest.importorskip("torch", reason=EXTRA)
transformers = pytest.importorskip("transformers", reason=EXTRA)

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")]

PROMPT, NEW, KEPT = 70, 8, 3
"""Tokens of a prompt, more than a chunk of the recurrence; tokens continued; prompts compared."""
TOLERANCE = 1e-4
ROUTER_MARGIN, TOKEN_MARGIN = 4e-4, 1e-3

ODD_K3 = ModelConfig(
    vocab_size=101,
    hidden_size=40,
    num_layers=7,
    mla_layers=(2, 5, 6),
    num_dense_layers=2,
    dense_hidden_size=56,
    situ_beta=1.5,
    attn_res_block_size=3,
    rms_norm_eps=1e-4,
    kda=KDAConfig(num_heads=9, head_dim=8, conv_size=3, chunk_size=16),
    mla=MLAConfig(
        num_heads=3, q_lora_rank=None, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10
    ),
    moe=MoEConfig(
        num_experts=7,
        experts_per_token=3,
        num_shared_experts=0,
        hidden_size=24,
        renormalize=False,
        routed_scaling_factor=1.7,
    ),
)
"""K3's layout and everything that its release leaves at another value."""
ODD_LINEAR = replace(
    ODD_K3,
    situ_beta=None,
    attn_res_block_size=None,
    rms_norm_eps=1e-5,
    moe=replace(ODD_K3.moe, num_shared_experts=2, renormalize=True),
)
ODD_K2 = ModelConfig(
    vocab_size=101,
    hidden_size=40,
    num_layers=4,
    mla_layers=(0, 1, 2, 3),
    num_dense_layers=2,
    dense_hidden_size=56,
    kda=None,
    mla=replace(
        ODD_K3.mla,
        q_lora_rank=16,
        rope=RoPEConfig(theta=500.0, factor=8.0, original_max_position_embeddings=16, beta_fast=4.0, mscale=0.7),
    ),
    moe=MoEConfig(num_experts=8, experts_per_token=3, num_shared_experts=2, hidden_size=24, routed_scaling_factor=1.3),
    max_position_embeddings=128,
)
"""Prompts reach far into the stretched positions."""
MODELS = {
    "k3": tiny.MODEL,
    "k3_tiny": load_config("k3_tiny").model,
    "k3_odd": ODD_K3,
    "k3_packed": replace(tiny.MODEL, moe=replace(tiny.MODEL.moe, latent_size=64, hidden_size=32)),
    "linear_tiny": load_config("kimi_linear_tiny").model,
    "linear_odd": ODD_LINEAR,
    "k2_tiny": load_config("k2_tiny").model,
    "k2_odd": ODD_K2,
    "k2_packed": load_config("k2_tiny").model,
}
"""packed: K3's experts in MXFP4, K2 in block-FP8."""


class Consumer(NamedTuple):
    """A model as another library has loaded it."""

    logits: Callable
    """(tokens [b, t], cache or None) -> logits [b, t, vocab]; a cache is changed in place."""
    new_cache: Callable


def load_mlx(folder) -> Consumer:
    mx.set_default_device(mx.cpu)
    mx.disable_compile()  # it would call a C++ compiler
    model, _ = mlx_lm.utils.load_model(folder)
    model.set_dtype(mx.float32)
    for layer in model.layers:
        norm = getattr(layer.self_attn, "kv_a_layernorm", None)
        if norm is not None:
            norm.eps = 1e-6  # as released; its Kimi Linear has rms_norm_eps there
    new_cache = partial(mlx_lm.models.cache.make_prompt_cache, model)
    return Consumer(lambda tokens, cache: np.array(model(mx.array(tokens), cache)), new_cache)


def load_transformers(folder) -> Consumer:
    config = json.loads((folder / released_config.CONFIG).read_text())
    if config["model_type"] == "kimi_k2":  # known there under the name of its architecture alone
        folder = shutil.copytree(folder, folder.with_name(folder.name + "_renamed"))
        (folder / released_config.CONFIG).write_text(json.dumps({**config, "model_type": "deepseek_v3"}))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def logits(tokens, cache):
        with torch.no_grad():
            return model(torch.tensor(tokens), cache=cache, use_cache=cache is not None).logits.numpy()

    return Consumer(logits, lambda: transformers.DynamicCache(config=model.config))


CONSUMERS = {"mlx": load_mlx, "transformers": load_transformers}
PAIRS = [
    (name, consumer)
    for name in MODELS
    for consumer in CONSUMERS
    # transformers has no K3, and wants a GPU for block-FP8.
    if consumer == "mlx" or not (name.startswith("k3") or name == "k2_packed")
]


def randomised(config: ModelConfig) -> Kimi:
    """A model in which every parameter is random and none negligible."""
    rng, values = np.random.default_rng(7), {}
    for name, value in arrays(init(config)).items():
        kind, noise = name.split(".")[-1], rng.standard_normal(value.shape)
        if kind.startswith("w_") or kind in ("head", "query"):
            values[name] = config.hidden_size**-0.5 * noise
        elif kind == "embed":
            values[name] = noise
        else:
            values[name] = np.asarray(value) + (0.02 if kind == "router_bias" else 0.2) * noise
    return with_arrays(init(config), {name: np.float32(value) for name, value in values.items()})


class Answers(NamedTuple):
    tokens: np.ndarray
    """[b, PROMPT + NEW] prompts and our greedy continuations."""
    logits: np.ndarray
    """[b, PROMPT + NEW, vocab]"""


def answers(model: Kimi) -> Answers:
    """Ours, for prompts on which f32 rounding changes neither an expert nor a token: the others are drawn again."""
    config, rng = model.config, np.random.default_rng(1)
    forward = jax.jit(lambda model, tokens: model.forward(tokens, collect=("router_scores",)))
    bias = np.zeros((len(config.moe_layers), config.moe.num_experts))
    for name, layers in bias_layers(config).items():
        bias[layers - config.num_dense_layers] = arrays(model)[name]
    rows: list[tuple] = []
    for _ in range(20):
        prompts = rng.integers(0, config.vocab_size, (16, PROMPT))
        tokens = np.concatenate([prompts, generate(model, prompts, Sampling(max_new_tokens=NEW))], axis=1)
        logits, aux = jax.tree.map(np.asarray, forward(model, tokens))
        ranked = np.sort(aux["router_scores"] + bias[:, None, None], axis=-1)[..., ::-1]
        k = config.moe.experts_per_token
        router = np.min(ranked[..., k - 1] - ranked[..., k], axis=(0, 2))
        best = np.sort(logits[:, PROMPT - 1 : -1], axis=-1)
        token = np.min(best[..., -1] - best[..., -2], axis=1) / np.sqrt(np.mean(logits**2))
        rows += [(tokens[i], logits[i]) for i in np.flatnonzero((router > ROUTER_MARGIN) & (token > TOKEN_MARGIN))]
        if len(rows) >= KEPT:
            return Answers(*map(np.stack, zip(*rows[:KEPT], strict=True)))
    raise AssertionError(f"only {len(rows)} of 320 prompts are free of ties")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """name -> a directory with the model, and our answers; each is made once."""
    made = {}

    def export(name: str):
        if name not in made:
            config = replace(MODELS[name], dtype="float32", param_dtype="float32")
            folder = tmp_path_factory.mktemp("exported") / name
            save_release(folder, randomised(config), config, packed=name.endswith("packed"))
            # As stored. Block-FP8 times its scale is no bf16 number, but mlx-lm makes it one.
            stored, _ = load_release(folder, dtype=jnp.bfloat16)
            values = {name: value.astype(jnp.float32) for name, value in arrays(stored).items()}
            made[name] = folder, answers(with_arrays(Kimi(config), values))
        return made[name]

    return export


@pytest.mark.parametrize("name,consumer", PAIRS)
def test_a_consumer_agrees(name, consumer, exported):
    folder, ours = exported(name)
    theirs = CONSUMERS[consumer](folder)
    whole = rel_to_rms(theirs.logits(ours.tokens, None), ours.logits)
    cache, tokens, steps = theirs.new_cache(), ours.tokens[:, :PROMPT], []
    for place in range(PROMPT, PROMPT + NEW):
        logits = theirs.logits(tokens, cache)[:, -1]
        steps.append(rel_to_rms(logits, ours.logits[:, place - 1]))
        tokens = np.argmax(logits, axis=-1)[:, None]
        np.testing.assert_array_equal(tokens[:, 0], ours.tokens[:, place])
    print(f"{name}, {consumer}: {whole:.1e} of rms without a cache, {max(steps):.1e} with it")  # pytest -rP
    assert max(whole, *steps) < TOLERANCE
