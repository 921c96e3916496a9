"""What parameters declare, and the numbers they begin with; nothing is compiled."""

from dataclasses import replace

import numpy as np

from kimi_jax.model.kimi import Kimi, init
from kimi_jax.model.param import arrays, named_params
from kimi_jax.model.rules import Muon
from tests import tiny

FIVE = replace(tiny.MODEL, num_layers=5, mla_layers=(4,), attn_res_block_size=5)
PER_HEAD, TO_HEADS = Muon(rows=(-3,), cols=(-1,)), Muon(rows=(-3,), cols=(-2, -1))
FROM_HEADS, MATRIX = Muon(rows=(-3, -2), cols=(-1,)), Muon(rows=(-2,), cols=(-1,))
RULES = {
    "kda": dict(w_q=PER_HEAD, w_k=PER_HEAD, w_v=PER_HEAD, w_f_a=MATRIX, w_f_b=TO_HEADS, w_beta=MATRIX, w_o=FROM_HEADS),
    "mla": dict(w_q_a=MATRIX, w_q_b=PER_HEAD, w_kv_a=MATRIX, w_k_b=PER_HEAD, w_v_b=PER_HEAD, w_o=FROM_HEADS),
}


def declared(config):
    return {name: variable.get_metadata()["declared"] for name, variable in named_params(Kimi(config)).items()}


def test_heads_are_orthogonalised_one_by_one():
    for mixer, config in (("kda", replace(tiny.MODEL, mla_layers=())), ("mla", replace(tiny.MODEL, mla_layers=(0, 1)))):
        found = {name: each for name, each in declared(config).items() if ".attention.w_" in name}
        for name, each in found.items():
            rule = RULES[mixer].get(name.rsplit(".", 1)[-1], TO_HEADS)  # the rest are output gates
            assert each.rule == rule, name


def test_qk_clip_takes_all_of_gamma_off_the_query_that_meets_the_shared_key():
    """(width, exponent) of the parts: half of gamma each where query and key have their own, else all on the query."""
    clips = {name.rsplit(".", 1)[-1]: each.clip for name, each in declared(tiny.MODEL).items() if each.clip is not None}
    assert {name: clip.parts for name, clip in clips.items()} == {
        "w_q_b": ((4, 0.5), (4, 1.0)),
        "w_k_b": ((4, 0.5),),
    }


def test_no_two_layers_or_experts_begin_alike():
    for name, value in arrays(init(FIVE, 0)).items():
        if ".w_" in name:
            lead = value.ndim - 3 if ".mlp.w_" in name and value.ndim == 5 else value.ndim - 2
            matrices = np.asarray(value).reshape(-1, *value.shape[lead:]) if name.count(".runs.") else value[None]
            blocks = {matrix.tobytes() for matrix in matrices}
            assert len(blocks) == len(matrices), name
