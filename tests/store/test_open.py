"""One way to open a model, whatever kind of folder it is in."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.config import ConfigError, to_dict
from kimi_jax.model.kimi import declared, init
from kimi_jax.model.param import arrays
from kimi_jax.ops.quant.qtensor import QTensor
from kimi_jax.store import checkpoint
from kimi_jax.store.convert import convert
from kimi_jax.store.open import Opened, needed_tokenizer, open_model
from kimi_jax.store.write import save_release
from kimi_jax.text.tokenizer import ByteTokenizer
from tests import tiny

MODEL = replace(tiny.MODEL, moe=replace(tiny.MODEL.moe, hidden_size=32, latent_size=32))


def save_run(folder, config, params, step=3):
    """A run's folder as training leaves it, without the optimizer's state."""
    with checkpoint.opened(folder / "checkpoints", write=True) as checkpoints:
        checkpoints.save(step, {"params": params}, {"config": to_dict(config)})
    ByteTokenizer().save(folder / "tokenizer")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One model as a release with packed experts, as a conversion of it, and as a run."""
    home = tmp_path_factory.mktemp("open")
    save_release(home / "release", init(MODEL, 0), MODEL, packed=True)
    convert(home / "release", home / "conversion")
    opened = open_model(home / "release", dtype="float32")
    save_run(home / "run", replace(tiny.config(home), model=opened.config.model), arrays(opened.model))
    return home


@pytest.mark.parametrize("kind", ["release", "conversion", "run", "run/checkpoints"])
def test_every_kind_opens_alike(folders, kind):
    expected = arrays(open_model(folders / "release", dtype="float32").model)
    opened = open_model(folders / kind, dtype=jnp.float32)
    assert isinstance(opened, Opened) and (opened.model, opened.config, opened.tokenizer) == opened
    found = arrays(opened.model)
    assert found.keys() == declared(opened.config.model).keys() and opened.model.config == opened.config.model
    for name, value in expected.items():
        assert found[name].dtype == jnp.float32
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    half = open_model(folders / kind, dtype="bfloat16")
    assert half.config.model.dtype == half.config.model.param_dtype == "bfloat16"
    assert arrays(half.model)["embed"].dtype == jnp.bfloat16
    assert arrays(half.model)["segments.0.runs.0.attention.A_log"].dtype == jnp.float32


@pytest.mark.parametrize("kind", ["release", "conversion"])
def test_packed_experts_stay_so_when_asked(folders, kind):
    for packed in (False, True):
        found = arrays(open_model(folders / kind, packed=packed).model).values()
        assert sum(isinstance(value, QTensor) for value in found) == (3 if packed else 0)


def test_the_tokenizer_is_the_folders_or_none(folders):
    opened = open_model(folders / "run")
    assert needed_tokenizer(folders / "run", opened) is opened.tokenizer
    assert isinstance(opened.tokenizer, ByteTokenizer)
    for kind in ("release", "conversion"):
        opened = open_model(folders / kind)
        assert opened.tokenizer is None
        with pytest.raises(ConfigError, match=f"{kind} has no tokenizer; put the release's tiktoken.model or") as error:
            needed_tokenizer(folders / kind, opened)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "kind,options,message",
    [
        ("run", {"dtype": "int8"}, "dtype='int8' must be one of float32, bfloat16, float64"),
        ("release", {"dtype": "int8"}, "dtype='int8' must be one of"),
        ("run", {"dtype": "wide"}, "dtype='wide' must be one of"),
        ("run", {"dtype": jnp.float64}, "dtype=float64 needs jax.config.update"),
        ("run", {"step": 7}, r"has no checkpoint 7; it has \[3\]"),
        ("run", {"step": -1}, r"has no checkpoint -1; it has \[3\]"),
        ("release", {"step": 7}, "step=7: .* is a released directory, which has no steps; leave step out"),
        ("", {}, "no checkpoint in .*; name the folder of a run"),
        ("nowhere", {}, "no checkpoint in .*nowhere"),
    ],
)
def test_errors(folders, kind, options, message):
    with pytest.raises(ConfigError, match=message) as error:
        open_model(folders / kind, **options)
    assert "\n" not in str(error.value)
