"""How arrays of a model are sharded at block boundaries, and weights and checkpoints on other meshes than usual."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from kimi_jax import cli
from kimi_jax.config import Mesh, Rules
from kimi_jax.model.kimi import Kimi, declared
from kimi_jax.model.param import partitions, shapes, with_arrays
from kimi_jax.parallel.batch import batch_sharding
from kimi_jax.parallel.mesh import abstract_mesh, current_mesh
from kimi_jax.parallel.spec import spec_for, spec_of
from kimi_jax.train.loop import run_training
from tests import tiny
from tests.parity import K3, MESHES, case_config


@pytest.mark.parametrize("mesh", ["tensor 4 data 2", "seq 4 data 2", "fsdp 2 expert 4", "expert 2 tensor 2 seq 2"])
def test_block_boundaries_and_gradients_are_cut_by_the_rules(mesh):
    config = case_config("scanned", MESHES[mesh])
    names = ("h", "attn_in", "attn_out", "mlp_in", "mlp_out", "router_scores", "topk_idx", "topk_weight")
    with jax.sharding.use_abstract_mesh(abstract_mesh(config.mesh)):
        sizes = dict(current_mesh().shape)
        template = Kimi(config.model)
        params = shapes(declared(config.model), config.rules)
        shape = (config.data.batch_size, config.data.sequence_length)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(config))
        rows, time, _ = spec_for(config.rules, ("batch", "time", "width"), sizes)
        vocab = spec_for(config.rules, ("vocab",), sizes)[0]

        def forward(params, tokens):
            return with_arrays(template, params).forward(tokens, collect=names)

        def loss(params, tokens):
            return forward(params, tokens)[0].sum()

        logits, aux = jax.eval_shape(forward, params, tokens)
        assert spec_of(logits) == P(rows, time, vocab)
        assert {name: spec_of(aux[name]) for name in names} == dict.fromkeys(names, P(None, rows, time, None))
        grads = jax.eval_shape(jax.grad(loss), params, tokens)
        expected = partitions(declared(config.model), config.rules, sizes)
        assert {name: spec_of(grad) for name, grad in grads.items()} == expected


def test_weights_cut_over_spans_and_a_checkpoint_used_on_other_meshes(tmp_path, capsys):
    """A run on a mesh whose weights and experts are cut over time ends with its sample; evaluation and generation
    then give one answer on one device and on another mesh."""
    run_config = tiny.config(tmp_path, steps=2, sample_tokens=3)
    model = replace(K3, vocab_size=260, kda=replace(K3.kda, num_heads=2), mla=replace(K3.mla, num_heads=2))
    rules = Rules(embed=("fsdp", "seq"), experts=("seq",), expert_latent=("fsdp",))
    run_training(replace(run_config, model=model, mesh=Mesh(fsdp=2, seq=4), rules=rules))
    capsys.readouterr()
    folder = str(tmp_path / "runs" / "run")
    answers = []
    for mesh in ([], ["--mesh.fsdp", "2", "--mesh.tensor", "2"]):
        cli.main(["eval", "--checkpoint", folder, "--max-tokens", "200", *mesh])
        cli.main(["generate", "--checkpoint", folder, "--prompt", "the ", "--max-new-tokens", "4", *mesh])
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] and "bits per byte" in answers[0]
