"""Two models of one config are one program: the second compiles nothing."""

from contextlib import contextmanager
from dataclasses import replace

import jax
import pytest

from kimi_jax.config import load_config
from kimi_jax.infer.generate import generate
from kimi_jax.infer.sampling import Sampling
from kimi_jax.model.kimi import Kimi, init
from kimi_jax.model.param import arrays
from kimi_jax.store.open import open_model
from kimi_jax.store.write import save_release
from tests import tiny
from tests.store.test_open import save_run

MODEL = replace(tiny.MODEL, moe=replace(tiny.MODEL.moe, hidden_size=32, latent_size=32))


@contextmanager
def compilations():
    """A list that gets an entry for each program that is compiled."""
    found = []

    def listener(event: str, seconds: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


@pytest.mark.parametrize("name", ["k3", "kimi_linear_48b", "k2_1t", "k3_tiny"])
def test_two_models_have_one_tree_definition(name):
    config = load_config(name).model
    first, second = jax.tree.structure(Kimi(config)), jax.tree.structure(Kimi(load_config(name).model))
    assert first == second and hash(first) == hash(second)
    assert first != jax.tree.structure(Kimi(replace(config, rms_norm_eps=1e-3)))


def test_a_second_model_reuses_the_programs(tmp_path):
    """Of `init`, of a release with packed experts, and of a run."""
    save_release(tmp_path / "release", init(MODEL, 0), MODEL, packed=True)
    opened = open_model(tmp_path / "release", dtype="float32")
    config = replace(tiny.config(tmp_path), model=MODEL)
    save_run(tmp_path / "run", config, arrays(opened.model))
    kinds = {
        "init": lambda seed: init(MODEL, seed),
        "release": lambda _: open_model(tmp_path / "release", packed=True).model,
        "run": lambda _: open_model(tmp_path / "run").model,
    }
    for kind, make in kinds.items():
        counts = []
        for seed in range(2):
            model = make(seed)
            with compilations() as found:
                generate(model, [[3, 4, 5], [6]], Sampling(max_new_tokens=3))
            counts.append(len(found))
        assert counts[1] == 0, (kind, counts)
        if kind == "init":
            assert counts[0] >= 2  # the count counts: prefill and decode at least
