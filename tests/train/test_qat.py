"""Experts that stay packed, and training with the rounding of what is exported: the same bits everywhere."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.config import Config, Mesh, ModelConfig, Rules, at_step
from kimi_jax.infer.generate import generate
from kimi_jax.infer.sampling import Sampling
from kimi_jax.model.kimi import Kimi, declared, init
from kimi_jax.model.param import arrays, named_params, shapes, with_arrays
from kimi_jax.ops.quant.mx import mxfp4_round
from kimi_jax.ops.quant.qtensor import QTensor
from kimi_jax.parallel.mesh import current_mesh, make_mesh, on_mesh
from kimi_jax.parallel.spec import placed
from kimi_jax.store import released_config, safetensors_files
from kimi_jax.store.read import load_release
from kimi_jax.store.write import save_release
from kimi_jax.train import metrics
from kimi_jax.train.loop import run_training
from kimi_jax.train.step import training_step
from tests import parity, tiny
from tests.jax_private import default_fusions

WIDE = replace(tiny.MODEL, moe=replace(tiny.MODEL.moe, hidden_size=64, latent_size=64))


def formats(model: ModelConfig, weights="mxfp4", activations="mxfp8", **moe) -> ModelConfig:
    return replace(model, moe=replace(model.moe, weight_format=weights, activation_format=activations, **moe))


def is_expert(name, parameters):
    return parameters[name].axes[0] == "experts"


def with_experts(model: Kimi, change, config: ModelConfig | None = None) -> Kimi:
    """The model with its routed experts' weights changed, and under another config."""
    values = {name: change(w) if is_expert(name, declared(model.config)) else w for name, w in arrays(model).items()}
    return with_arrays(Kimi(config or model.config), values)


def tokens_for(rows=8, t=16):
    return np.random.default_rng(0).integers(3, 259, (rows, t)).astype(np.int32)


@jax.jit
def logits(model, tokens):
    return model(tokens)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_rounded_packed_and_decoded_experts_give_the_same_bits(dtype):
    config = formats(replace(WIDE, dtype=dtype))
    model = init(config, 1)
    exported = formats(config, weights=None)
    packed = with_experts(model, jax.jit(QTensor.encode), exported)
    decoded = with_experts(packed, lambda w: w.decode(jnp.float32))
    tokens = tokens_for()
    rounded = np.asarray(logits(model, tokens).astype(jnp.float32))
    np.testing.assert_array_equal(rounded, logits(packed, tokens).astype(jnp.float32))
    np.testing.assert_array_equal(rounded, logits(decoded, tokens).astype(jnp.float32))
    # Packed ones are not rounded again, and either format changes the numbers.
    np.testing.assert_array_equal(
        rounded, logits(with_arrays(Kimi(config), arrays(packed)), tokens).astype(jnp.float32)
    )
    for other in (formats(config, activations=None), exported):
        assert (rounded != logits(with_arrays(Kimi(other), arrays(model)), tokens).astype(jnp.float32)).mean() > 0.5


def test_packed_experts_take_four_and_a_quarter_bits_and_work_wherever_parameters_do():
    model = init(formats(WIDE), 2)
    packed = with_experts(model, jax.jit(QTensor.encode))
    assert named_params(packed).keys() == named_params(model).keys()
    experts = {name: w for name, w in arrays(packed).items() if is_expert(name, declared(model.config))}
    assert len(experts) == 3 and all(isinstance(w, QTensor) for w in experts.values())
    assert all(w.shape == arrays(model)[name].shape for name, w in experts.items())
    assert sum(w.nbytes for w in experts.values()) * 8 == 4.25 * sum(w.size for w in experts.values())
    again = with_arrays(packed, arrays(packed))
    assert jax.tree.structure(again) == jax.tree.structure(packed)
    prompts = [[5, 9, 12], list(range(20, 40)), [7]]
    assert generate(packed, prompts, Sampling(max_new_tokens=6)) == generate(model, prompts, Sampling(max_new_tokens=6))


def test_an_export_loads_to_what_was_trained(tmp_path):
    """Parameters as wide as the release stores them, so that only the experts are rounded."""
    config = formats(replace(WIDE, dtype="bfloat16", param_dtype="bfloat16", attn_res_block_size=1))
    model = init(config, 3)
    save_release(tmp_path / "out", model, config, packed=True)
    trained = np.asarray(logits(model, tokens_for()).astype(jnp.float32))
    for packed in (True, False):
        loaded, found = load_release(tmp_path / "out", dtype=jnp.bfloat16, packed=packed)
        assert found.moe == formats(config, weights=None).moe
        np.testing.assert_array_equal(trained, logits(loaded, tokens_for()).astype(jnp.float32))


CUTS = {
    "experts lent": (Mesh(fsdp=2, expert=4), {"transport": "gather"}),
    "rows in rounds": (Mesh(expert=2, fsdp=2, tensor=2), {"transport": "a2a"}),
    "experts at home": (Mesh(expert=4, seq=2), {"balance": "none"}),
    "experts gathered": (Mesh(fsdp=2, tensor=2, seq=2), {}),
}


@pytest.mark.parametrize(
    "cut", ["experts lent", *(pytest.param(cut, marks=pytest.mark.slow) for cut in list(CUTS)[1:])]
)
def test_rounded_and_packed_experts_agree_on_meshes(cut):
    mesh, moe = CUTS[cut]
    config = formats(replace(WIDE, vocab_size=264), **moe)
    with on_mesh(make_mesh(mesh)):
        model = init(config, 4)
        packed = with_experts(model, jax.jit(QTensor.encode))
        specs = placed(current_mesh(), Rules(), ("batch", "time"))
        tokens = jax.device_put(tokens_for(), specs)
        w = next(w for w in arrays(packed).values() if isinstance(w, QTensor))
        assert w.packed.addressable_shards[0].data.size * 8 >= w.packed.size
        assert w.packed.addressable_shards[0].data.size < w.packed.size  # each device holds its part
        ours, rounded = (np.asarray(logits(m, tokens)) for m in (packed, model))
    np.testing.assert_array_equal(ours, rounded)


def test_gradient_passes_straight_through():
    """Weights alone: the gradient is that of the rounded weights. Activations too: it is finite and close."""
    model = init(formats(WIDE, activations=None), 5)
    tokens = tokens_for()

    # Two programs of the same bits: XLA's default code for fusions rounds them alike.
    @partial(jax.jit, compiler_options=default_fusions())
    def gradients(model):
        return jax.grad(lambda model: jnp.sum(jnp.sin(3 * model(tokens))))(model)

    plain = with_experts(model, lambda w: mxfp4_round(w, axis=-2), formats(WIDE, None, None))
    got, expected = arrays(gradients(model)), arrays(gradients(plain))
    for name, value in got.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    quantized = arrays(gradients(with_arrays(Kimi(formats(WIDE)), arrays(model))))
    for name, value in quantized.items():
        a, b = np.asarray(value).ravel(), np.asarray(expected[name]).ravel()
        if np.any(b):
            assert a @ b > 0.9 * np.sqrt((a @ a) * (b @ b)), name


parity.MODELS["qat"] = (
    formats(replace(parity.K3, moe=replace(parity.K3.moe, hidden_size=64, latent_size=64))),
    {},
)


@pytest.mark.parametrize(
    "mesh, accumulation, remat",
    [("fsdp 2 expert 4", 1, "none"), ("expert 2 tensor 2 seq 2", 1, "none"), ("data 8", 4, "full")],
)
@pytest.mark.slow
def test_training_does_not_depend_on_the_mesh(mesh, accumulation, remat):
    parity.check("qat", mesh, accumulation, remat, x64=True)


def run_config(tmp_path, **settings) -> Config:
    config = tiny.config(tmp_path, steps=8, eval_every=100, checkpoint_every=2, sample_tokens=0, **settings)
    return replace(config, model=WIDE, train=replace(config.train, qat_from_step=5))


def losses(config: Config) -> dict[int, float]:
    path = Path(config.train.runs_dir, config.name, "metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}


def test_the_switch_is_at_its_step_and_a_resumed_run_takes_it_too(tmp_path, monkeypatch):
    config = run_config(tmp_path)
    result = run_training(config)
    # One compiled step before the switch and one after.
    for step in (0, 4, 5, 7):
        assert training_step(at_step(config, step))._cache_size() == 1
    assert training_step(at_step(config, 4)) is not training_step(at_step(config, 5))

    original = metrics.Metrics.write

    def write(self, step, kind, **values):
        original(self, step, kind, **values)
        if step == 6:
            raise KeyboardInterrupt

    never = replace(config, name="never", train=replace(config.train, qat_from_step=None))
    killed = replace(config, name="killed")
    monkeypatch.setattr(metrics.Metrics, "write", write)
    for stopped in (never, killed):
        with pytest.raises(KeyboardInterrupt):
            run_training(stopped)
    monkeypatch.setattr(metrics.Metrics, "write", original)
    ours, plain = losses(config), losses(never)
    # The sixth step, from state 5 on, is the first that differs.
    assert [step for step in range(1, 7) if ours[step] != plain[step]] == [6]
    resumed = run_training(killed)
    assert resumed["bits_per_byte"] == result["bits_per_byte"]
    assert losses(killed) == ours


def test_a_config_json_says_how_activations_are_rounded(tmp_path):
    save_release(tmp_path / "out", init(WIDE, 0), WIDE, packed=True)
    assert released_config.read_config(tmp_path / "out").moe.activation_format is None
    file = tmp_path / "out" / "config.json"
    assert '"input_activations": null' in file.read_text()
    file.write_text(file.read_text().replace('"input_activations": null', '"input_activations": {"num_bits": 4}'))
    with pytest.raises(
        safetensors_files.CheckpointError,
        match=r"input_activations=\{'num_bits': 4\} are not supported, only .* or null",
    ):
        load_release(tmp_path / "out")


def test_packed_shapes_allocate_nothing():
    with on_mesh(make_mesh(Mesh(fsdp=2, expert=4))):
        parameters = declared(WIDE)
        shape = next(shape for name, shape in shapes(parameters).items() if is_expert(name, parameters))
        packed = jax.eval_shape(QTensor.encode, shape)
        assert packed.nbytes * 8 == 4.25 * packed.size
