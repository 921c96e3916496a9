"""Exact sizes of the real models, and how the optimizer sees them."""

from dataclasses import replace

import pytest

from kimi_jax.analysis import sizes
from kimi_jax.config import ConfigError, Mesh, load_config
from kimi_jax.model.kimi import declared
from kimi_jax.model.rules import AdamW, Balanced, Muon

K3, KIMI_LINEAR, K2 = load_config("k3"), load_config("kimi_linear_48b"), load_config("k2_1t")


def test_k3_sizes():
    """Released sizes: the numbers of the checkpoint's own headers (A_log is stored padded)."""
    found = sizes.counts(K3.model)
    assert found.stored == 2_779_484_478_208
    assert found.total == 2_779_484_476_000
    assert f"{found.active / 1e9:.2f}" == "104.19"
    assert found.kda_state_bytes == 434_110_464
    assert found.mla_bytes_per_token == 27_648


def test_k3_components():
    """Per component, as the checkpoint's headers add up."""
    by_group: dict[str, int] = {}
    for part in sizes.components(K3.model):
        by_group[part.group] = by_group.get(part.group, 0) + part.count
    routed = sum(p.count for p in sizes.components(K3.model) if p.name in sizes.ROUTED and p.group == "experts")
    assert routed == 2_722_740_830_208
    assert by_group["KDA"] == 30_618_086_496
    assert by_group["MLA"] == 5_572_706_304
    assert by_group["dense MLP"] == 726_663_168
    assert by_group["experts"] - routed == 17_473_358_336
    assert by_group["norms and mixes"] == 93 * 43_008
    assert by_group["model"] == 2 * 1_174_405_120 + 3 * 7168


def test_kimi_linear_sizes():
    found = sizes.counts(KIMI_LINEAR.model)
    assert 47e9 < found.total < 50e9
    assert 2.5e9 < found.active < 3.5e9


def test_k2_sizes():
    """1.03 T without MTP (the report's 1.04 T may count it); 32.86 B active with both tables (the report says 32.6)."""
    found = sizes.counts(K2.model)
    assert found.total == found.stored == 1_026_408_232_448
    assert found.active == 31_687_095_808
    assert f"{(found.active + 163840 * 7168) / 1e9:.2f}" == "32.86"
    assert found.kda_state_bytes == 0
    assert found.mla_bytes_per_token == 61 * 576 * 2
    assert "(31.69 B) a token, head included; 32.86 B with the embedding's table" in sizes.report(K2)


def test_report_and_table_say_the_numbers():
    text = sizes.report(K3)
    for number in ("2,779,484,478,208", "104.19 B", "434,110,464 bytes", "27,648 bytes"):
        assert number in text
    table = sizes.optimizer_table(K3)
    assert len(table.splitlines()) == 1 + len(declared(K3.model))
    assert "64: gamma^1" in table and "128: gamma^0.5" in table


@pytest.mark.parametrize("config", [K3, KIMI_LINEAR, K2], ids=lambda config: config.name)
def test_every_parameter_gets_the_rule_it_should(config):
    """Embedding, head and pseudo-queries are the only AdamW matrices; no stack of vectors gets Muon."""
    parameters = declared(config.model)
    vectors = ("norm", "A_log", "dt_bias", "conv", "query", "weight", "bias")
    for name, declaration in parameters.items():
        per_layer = declaration.shape[-len(declaration.axes) :]
        leaf = name.rsplit(".", 1)[-1]
        if name in ("embed", "head"):
            assert declaration.rule == AdamW(decay=True), name
        elif leaf == "router_bias":
            assert declaration.rule == Balanced(), name
        elif any(word in leaf for word in vectors):
            assert declaration.rule == AdamW(decay=False), name
        else:
            assert isinstance(declaration.rule, Muon), name
            assert len(per_layer) >= 2, name
            used = sorted(declaration.rule.rows + declaration.rule.cols)
            assert min(used) >= -len(per_layer), f"{name}: a Muon axis reaches into the stacked layers"
    # What is a matrix in the released files and not under Muon: these three kinds.
    matrices = {name for name, d in parameters.items() if d.rule == AdamW(decay=True)}
    assert matrices == {"embed", "head"}
    per_head = {n.rsplit(".", 1)[-1] for n, d in parameters.items() if d.rule == Muon(rows=(-3,), cols=(-1,))}
    lora = config.model.mla.q_lora_rank is not None
    expected = {"w_k_b", "w_v_b", "w_q_b" if lora else "w_q"}
    assert per_head == expected | ({"w_q", "w_k", "w_v"} if config.model.kda_layers else set())
    clipped = {name.rsplit(".", 1)[-1] for name, d in parameters.items() if d.clip is not None}
    assert clipped == ({"w_q_b", "w_k_b"} if lora else {"w_q", "w_k_b"})


def test_dry_run_tells_memory_on_each_device_of_the_mesh_and_refuses_one_that_does_not_fit():
    (line,) = (t for t in sizes.dry_run(replace(K3, mesh=Mesh(fsdp=4, expert=128))).splitlines() if "mesh:" in t)
    assert line.startswith("mesh: fsdp 4 x expert 128 = 512 devices; on each parameters ")
    # All of 2.78 T f32 parameters but vectors and routers are cut 512 ways.
    unit, size = line.split("parameters ")[1].split(",")[0].split()[::-1]
    assert unit == "GiB" and 1 < float(size) * 2**30 / (4 * 2_779_484_476_000 / 512) < 1.05
    with pytest.raises(ConfigError, match=r"heads=96 does not divide over mesh tensor 5 = 5"):
        sizes.dry_run(replace(K3, mesh=Mesh(tensor=5)))
