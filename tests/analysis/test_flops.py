"""Formulas of operations against counts by hand, against the products in the traced program, and known sizes."""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from kimi_jax.analysis import flops, sizes
from kimi_jax.config import KDAConfig, RoPEConfig, load_config
from kimi_jax.model.cache import init_cache
from kimi_jax.model.kimi import Kimi, declared
from kimi_jax.model.param import arrays, with_arrays
from kimi_jax.model.rules import Muon
from kimi_jax.ops import attention
from kimi_jax.optim.muon import newton_schulz
from kimi_jax.parallel.context import query_runs
from tests.tiny import MODEL

K3, KIMI_LINEAR, K2 = (load_config(name).model for name in ("k3", "kimi_linear_48b", "k2_1t"))
PLAIN = replace(  # Kimi Linear's parts: low-rank gate, no low-rank queries, no latent, no attention residuals
    MODEL,
    kda=KDAConfig(num_heads=2, head_dim=8, chunk_size=6),
    mla=replace(MODEL.mla, q_lora_rank=None, output_gate=False),
    moe=replace(MODEL.moe, latent_size=None, latent_norm=False),
    attn_res_block_size=None,
    situ_beta=None,
    situ_linear_beta=None,
)
ROTARY = replace(
    PLAIN,
    kda=None,
    mla_layers=(0, 1),
    mla=replace(MODEL.mla, output_gate=False, rope=RoPEConfig(theta=1e4)),
    moe=replace(PLAIN.moe, aux_loss_alpha=0.001),
)
NOT_PRODUCTS = ("KDA convolution", "attention residuals")
"""Counted, but written as sums of products of vectors."""


def products(jaxpr, loops: Sequence[Fraction] = ()) -> Fraction:
    """FLOPs of all matrix products of a traced program, scans counted; `loops` are the average trips of the others,
    the outermost first."""
    total = Fraction(0)
    for each in jaxpr.eqns:
        name, shapes = each.primitive.name, [v.aval.shape for v in each.invars if hasattr(v.aval, "shape")]
        if name == "dot_general":
            contracted = math.prod(shapes[0][axis] for axis in each.params["dimension_numbers"][0][0])
            total += 2 * contracted * math.prod(each.outvars[0].aval.shape)
        elif name.startswith("ragged_dot"):
            rows = [shape for shape in shapes[:2] if len(shape) == 2]
            # Every row meets one expert: its width times the expert's other one.
            wide = shapes[1][1:] if len(rows) == 1 else (rows[0][1], rows[1][1])
            total += 2 * rows[0][0] * math.prod(wide)
        elif name == "while":
            total += loops[0] * products(each.params["body_jaxpr"].jaxpr, loops[1:])
        else:
            times = each.params["length"] if name == "scan" else 1
            total += times * sum(products(inner, loops) for inner in jax.core.jaxprs_in_params(each.params))
    return total


def visits(pairs: attention._Pairs) -> tuple[int, int]:
    """Blocks of keys that attention goes through, and blocks of queries in all of them, by running its loops."""
    count = lambda inner: int(pairs.over_keys(lambda j, n: n + inner(j), jnp.int32(0)))  # noqa: E731
    return count(lambda j: 1), count(lambda j: pairs.over_queries(j, lambda at, n: n + 1, jnp.int32(0)))


def attention_pairs(queries: int, starts: list[int], slots: int) -> attention._Pairs:
    blocks = (min(attention.QUERY_BLOCK, queries // len(starts)), min(attention.KEY_BLOCK, slots))
    return attention._Pairs(blocks, jnp.ones((1, queries)), jnp.ones((1, slots)), jnp.array(starts))


def attention_loops(queries: int, start: int, slots: int) -> list[Fraction]:
    """Average trips of the loops over blocks of keys and of queries."""
    pairs = attention_pairs(queries, [start], slots)
    keys, cells = visits(pairs)
    q_count, k_count = pairs.counts
    return [Fraction(keys)] * (k_count > 1) + [Fraction(cells, keys)] * (q_count > 1)


def traced(f, *args, loops: Sequence[Fraction] = ()) -> Fraction:
    with mock.patch.object(jax, "default_backend", lambda: "tpu"):  # experts without padding to blocks
        return products(jax.make_jaxpr(f)(*args).jaxpr, loops)


def counted(parts, *, one_token: bool = False) -> int:
    """The formulas' part in matrix products; token by token KDA writes its state with an outer product, a third."""
    outer = parts["KDA recurrence"].run // 3 if one_token and "KDA recurrence" in parts else 0
    return sum(work.run for name, work in parts.items() if name not in NOT_PRODUCTS) - outer


def tokens(rows, length):
    return jax.ShapeDtypeStruct((rows, length), jnp.int32)


@pytest.mark.parametrize("starts", [[0, 1500], [1700, 0], [300, 900], [0]])
def test_attended_is_what_the_loops_visit(starts):
    pairs = attention_pairs(600, starts, 2100)
    keys, cells = visits(pairs)
    q_block, k_block = pairs.blocks
    assert flops.attended(600, starts, 2100) == (cells * q_block * k_block, keys * k_block)


def test_spans_share_attention_evenly():
    """32 devices, 8192 tokens each: the busiest has as many pairs as the mean but for whole blocks, as many keys as
    the row has where the mean device has three quarters; contiguous spans would have 1.97 times the mean.
    """
    t, n = 8192, 32
    of_device = [flops.attended(t, query_runs(t, i, n), n * t) for i in range(n)]
    cells, keys = zip(*of_device, strict=True)
    assert max(cells) / (sum(cells) / n) < 1.001
    assert max(keys) == n * t
    assert 0.74 < sum(keys) / n / max(keys) < 0.77
    contiguous = [flops.attended(t, [i * t], n * t)[0] for i in range(n)]
    assert sum(cells) == pytest.approx(sum(contiguous), rel=0.01)
    assert max(contiguous) / (sum(contiguous) / n) > 1.96
    whole, split = (flops.forward(K3, 1, n * t, spans=spans)["MLA attention"] for spans in (1, n))
    assert whole.model == split.model
    assert split.run == pytest.approx(whole.run, rel=0.01)


@pytest.mark.parametrize("model", [MODEL, PLAIN, ROTARY], ids=["k3", "kimi_linear", "k2"])
@pytest.mark.parametrize("length", [1, 5, 32, 300, 1100])
def test_forward_is_what_the_program_multiplies(model, length):
    loops = attention_loops(length, 0, length)
    found = traced(lambda module, t: module(t), Kimi(model), tokens(3, length), loops=loops)
    assert found == counted(flops.forward(model, 3, length), one_token=length == 1)


@pytest.mark.parametrize("model", [MODEL, PLAIN, ROTARY], ids=["k3", "kimi_linear", "k2"])
def test_prefill_and_decode_are_what_the_program_multiplies(model):
    cache = jax.eval_shape(lambda: init_cache(model, 3, 1100))

    def last(module, cache, t):
        x, _ = module.hidden(t, cache=cache)
        return module.logits(x[:, -1])

    for length in (4, 600):
        found = traced(last, Kimi(model), cache, tokens(3, length), loops=attention_loops(length, 0, 1100))
        assert found == counted(flops.prefill(model, 3, length, capacity=1100)), length
    found = traced(last, Kimi(model), cache, tokens(3, 1), loops=attention_loops(1, 699, 1100))
    assert found == counted(flops.decode(model, 3, 700, capacity=1100), one_token=True)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_train_is_what_the_program_multiplies(remat):
    """To a few parts in a hundred above: of what is computed again, a layer's last product is not needed."""
    length = 1088  # 16 rows make whole chunks of the loss
    model = replace(MODEL, remat=remat)
    config = replace(
        load_config("k3_tiny"), model=model, data=replace(load_config("k3_tiny").data, sequence_length=length)
    )
    template = Kimi(model)

    def loss(params, t):
        module = with_arrays(template, params)
        return module.loss(module.hidden(t)[0], t, jnp.ones(t.shape))[0]

    loops = attention_loops(length, 0, length)
    found = traced(jax.grad(loss), arrays(template), tokens(config.data.batch_size, length), loops=loops)
    parts = flops.train(config)
    del parts["Newton-Schulz"]
    assert 0.9 < found / counted(parts) <= 1, (found, counted(parts))


def test_newton_schulz_is_what_the_program_multiplies():
    found = 0
    for each in declared(MODEL).values():
        rule = each.rule
        if isinstance(rule, Muon):
            rows, cols = (math.prod(each.shape[axis] for axis in axes) for axes in (rule.rows, rule.cols))
            blocks = jax.ShapeDtypeStruct((each.size // (rows * cols), rows, cols), jnp.float32)
            found += traced(newton_schulz, blocks)
    assert found == flops.newton_schulz(MODEL)


def test_one_kda_head_by_hand():
    """A chunk of 4 with k = v = 2: products of [2, 2] x [2, 1] twice and of [4, 2] x [2, 2] once for the scores, the
    inverse from 2 x 2 products of 1 x 1 and two of 2 x 2, three of [4, 2] x [2, 2] with the state, two of
    [4, 4] x [4, 2]."""
    scores = 2 * (2 * 2 * 2 * 1) + 2 * 4 * 2 * 2
    inverse = 2 * 2 * 2 + 2 * 2 * 2**3
    state, values = 3 * 2 * 4 * 2 * 2, 2 * 2 * 4 * 4 * 2
    assert flops.chunked_recurrence(4, 4, 2, 2) == scores + inverse + state + values
    assert flops.chunked_recurrence(9, 4, 2, 2) == 3 * flops.chunked_recurrence(4, 4, 2, 2)  # filled up to chunks
    assert flops.chunked_recurrence(8, 3, 2, 2) == 3 * flops.chunked_recurrence(4, 4, 2, 2)  # and those to powers of 2


def test_one_product_is_the_compilers_count():
    a, b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 5), (5, 7)))
    compiled = jax.jit(jnp.dot).lower(a, b).compile().cost_analysis()["flops"]
    assert compiled == 2 * 3 * 5 * 7 == products(jax.make_jaxpr(jnp.dot)(a, b).jaxpr)


@pytest.mark.parametrize("model", [K3, KIMI_LINEAR, K2], ids=["k3", "kimi_linear", "k2"])
def test_two_a_token_for_every_active_weight(model):
    """What does not depend on length is twice the active weights that multiply something."""
    parts = flops.forward(model, 1, 1)
    linear = sum(work.model for name, work in parts.items() if name not in ("KDA recurrence", "MLA attention"))
    linear -= parts["attention residuals"].model if "attention residuals" in parts else 0
    vectors = sum(
        part.count
        for part in sizes.components(model)
        if "norm" in part.name or part.name.rsplit(".", 1)[-1] in ("A_log", "dt_bias", "router_bias", "query", "weight")
    )
    assert linear == 2 * (sizes.counts(model).active - vectors)


def test_k3_sizes():
    """104.19 B active parameters: 208.4 GFLOP a token; MLA's scores and values over 4,096.5 keys on average: 6.0."""
    parts = flops.forward(K3, 1, 8192)
    a_token = {name: work.model / 8192 / 1e9 for name, work in parts.items()}
    attention = 24 * 96 * 2 * (128 + 64 + 128) * 4096.5 / 1e9
    assert a_token["MLA attention"] == pytest.approx(attention)
    assert a_token["routed experts"] == pytest.approx(92 * 16 * 3 * 3584 * 3072 * 2 / 1e9)
    assert a_token["KDA recurrence"] == pytest.approx(69 * 96 * 6 * 128**2 / 1e9)
    assert sum(a_token.values()) == pytest.approx(208.38 + attention + a_token["KDA recurrence"], abs=0.05)
    assert flops.total(parts).run > flops.total(parts).model


def test_k2_sizes():
    """31.69 B active parameters with the head: 63.4 GFLOP a token, and 5.1 for scores and values at 4k."""
    parts = flops.forward(K2, 1, 4096)
    a_token = {name: work.model / 4096 / 1e9 for name, work in parts.items()}
    assert not [name for name in parts if "KDA" in name or "residuals" in name or "latent" in name]
    assert a_token["MLA attention"] == pytest.approx(61 * 64 * 2 * (192 + 128) * 2048.5 / 1e9)
    assert a_token["routed experts"] == pytest.approx(60 * 8 * 3 * 7168 * 2048 * 2 / 1e9)
    assert sum(a_token.values()) == pytest.approx(2 * 31.687 + a_token["MLA attention"], abs=0.05)


def test_decode_reads_latents_and_depends_on_length_by_attention_alone():
    short, long = (flops.decode(K3, 1, length) for length in (1, 1000))
    assert {name for name in short if short[name] != long[name]} == {"MLA attention"}
    assert long["MLA attention"].model == 1000 * short["MLA attention"].model == 1000 * 24 * 96 * 2 * (2 * 512 + 64)


def test_mfu_example():
    """A K3 step of 4 M tokens at 8k in 30 s on 512 v5p chips of 459 TFLOP/s: 37.5 % MFU."""
    config = load_config("k3")
    config = replace(config, data=replace(config.data, batch_size=512))
    work = flops.total(flops.train(config))
    assert work.model == 3 * flops.total(flops.forward(config.model, 512, 8192)).model
    assert work.model / (30 * 512 * 459e12) == pytest.approx(0.384, abs=0.005)
    assert 1.3 < work.run / work.model < 1.6  # layers computed again, masked keys, Newton-Schulz
