"""Number formats against the bytes of compressed-tensors and torchao, and against a search over all codes."""

import json
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.extra import numpy as hnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax.ops.quant import blocks, mx
from kimi_jax.ops.quant.qtensor import QTensor

GOLDEN = Path(__file__).parents[1] / "golden" / "quant_unit"
KINDS = json.loads((GOLDEN / "meta.json").read_text())["kind"]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
RULES = ("rceil", "even", "floor")

encode4 = jax.jit(mx.mxfp4_encode, static_argnames="rule")
encode8 = jax.jit(mx.mxfp8_encode, static_argnames="rule")
decode4 = jax.jit(mx.mxfp4_decode, static_argnums=2)
decode8 = jax.jit(mx.mxfp8_decode, static_argnums=2)


def as_bytes(x):
    return np.asarray(x).view(np.uint8)


def codes_of(packed):
    packed = np.asarray(packed)
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def nearest(x, scale):
    """Signed code of E2M1 for each number: by search, ties to the even code, -0 kept."""
    y = np.abs(x) / scale
    distance = np.abs(y[..., None] - E2M1)
    best = distance == distance.min(-1, keepdims=True)
    even = best & (np.arange(8) % 2 == 0)
    code = np.where(best.sum(-1) > 1, even.argmax(-1), best.argmax(-1))
    return code + 8 * np.signbit(x)


def scale_rceil(amax):
    """The exponent k of the smallest 2^k with amax <= 6 * 2^k, from -127, by search over exact numbers."""
    return int(np.flatnonzero(amax <= 6 * 2.0 ** np.arange(-127, 128))[0]) - 127


def group(*values):
    """One block of float32, filled up with zeros."""
    return np.array([*values, *[0.0] * (32 - len(values))], np.float32)[None]


def torchao_in_the_smallest_blocks(encode, x, codes, scale, rule, codes_of):
    """Our codes, with torchao's own in blocks whose scale is 2^-127, which float32 arithmetic cannot divide by.

    It divides by 2^-126, and so codes half of the number, which float64 holds; with rceil, it multiplies by zero.
    """
    with jax.enable_x64(True):
        half = 0.0 if rule == "rceil" else 0.5
        theirs = codes_of(encode(jnp.asarray(x.astype(np.float64) * half), rule)[0])
    smallest = scale == 0
    assert 4 <= smallest.sum() <= 12
    return np.where(smallest, theirs, codes)


@pytest.mark.parametrize("rule", RULES)
def test_golden_mxfp4(rule):
    data = np.load(GOLDEN / "mxfp4.npz")
    packed, scale = encode4(data["x"], rule=rule)
    np.testing.assert_array_equal(scale, data[f"ao_{rule}_scale"])
    expected = codes_of(data[f"ao_{rule}_packed"])
    got = torchao_in_the_smallest_blocks(
        mx.mxfp4_encode, data["x"], codes_of(packed), np.asarray(scale), rule, codes_of
    )
    if rule == "even":  # for compressed-tensors -0 is 0, and that is what this rule follows
        expected = np.where(data["x"] == 0, 0, expected)
    np.testing.assert_array_equal(got, expected)


def test_golden_compressed_tensors():
    data = np.load(GOLDEN / "mxfp4.npz")
    rows = np.array([kind != "near_max" for kind in KINDS])  # there its scale overflows to 1
    packed, scale = encode4(data["x"][rows], rule="even")
    np.testing.assert_array_equal(packed, data["ct_packed"][rows])
    np.testing.assert_array_equal(scale, data["ct_scale"][rows])
    np.testing.assert_array_equal(decode4(packed, scale, jnp.float32), data["ct_dequant"][rows])


@pytest.mark.parametrize("rule", RULES)
def test_golden_mxfp8(rule):
    data = np.load(GOLDEN / "mxfp4.npz")
    values, scale = encode8(data["x"], rule=rule)
    np.testing.assert_array_equal(scale, data[f"ao_mxfp8_{rule}_scale"])
    got = torchao_in_the_smallest_blocks(
        mx.mxfp8_encode, data["x"], as_bytes(values), np.asarray(scale), rule, as_bytes
    )
    np.testing.assert_array_equal(got, data[f"ao_mxfp8_{rule}_data"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_golden_decode(dtype):
    data = np.load(GOLDEN / "mxfp4_decode.npz")
    with jax.enable_x64(dtype == "float64"), np.errstate(over="ignore"):
        got = mx.mxfp4_decode(jnp.asarray(data["packed"]), jnp.asarray(data["scale"]), dtype)
        assert got.dtype == dtype
        expected = data["dequant_f64"].astype(np.float64 if dtype == "float64" else np.float32)
        got = np.asarray(got).astype(expected.dtype)  # numpy keeps subnormals
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(expected))


@pytest.mark.parametrize("case", "ab")
def test_golden_fp8_block(case):
    data = np.load(GOLDEN / "fp8_block.npz")
    q, scale = jax.jit(blocks.fp8_block_encode)(data[f"{case}.w"])
    np.testing.assert_array_equal(as_bytes(q), data[f"{case}.weight_fp8_bytes"])
    np.testing.assert_array_equal(scale, data[f"{case}.weight_scale_inv"])
    np.testing.assert_array_equal(jax.jit(blocks.fp8_block_decode)(q, scale), data[f"{case}.dequant"])


def test_golden_e4m3():
    data = np.load(GOLDEN / "fp8_block.npz")
    every = data["e4m3_all_bytes"].view(jnp.float8_e4m3fn)[None]
    ones = np.full((1, 8), 127, np.uint8)
    finite = np.isfinite(data["e4m3_all_values"])
    assert finite.sum() == 254  # the other two are NaN
    np.testing.assert_array_equal(np.asarray(decode8(every, ones, jnp.float32))[0], data["e4m3_all_values"])
    # A block whose scale is 1, because 448 is in it: the cast, with saturation.
    x = np.stack([np.append(part, 448) for part in data["cast.x"].reshape(-1, 16)])
    x = np.pad(np.clip(x, -448, 448), [(0, 0), (0, 15)]).astype(np.float32)
    values, scale = encode8(x)
    assert (np.asarray(scale) == 127).all()
    np.testing.assert_array_equal(as_bytes(values)[:, :16].reshape(-1), data["cast.bytes_clamped448"])


def test_golden_int4():
    data = np.load(GOLDEN / "int4_pack.npz")
    packed, scale = jax.jit(blocks.int4_encode)(data["w"])
    np.testing.assert_array_equal(packed, data["weight_packed"])
    np.testing.assert_array_equal(scale.astype(jnp.float32), data["weight_scale_bf16_as_f32"])
    np.testing.assert_array_equal(jax.jit(blocks.int4_decode)(packed, scale), data["dequant"])


@pytest.mark.parametrize("k", [-126, -100, -1, 0, 1, 60, 125])
def test_codes_midpoints_and_their_neighbours(k):
    """All 16 codes and every midpoint, one ulp below and above, with both signs, beside a 6 that fixes the scale."""
    points = [*E2M1, *((E2M1[1:] + E2M1[:-1]) / 2), 5.0, 2.0**-149 if k <= 0 else 0.25]
    scaled = (np.array(points) * 2.0**k).astype(np.float32)
    rows = []
    for x in np.concatenate([scaled, np.nextafter(scaled, np.float32(np.inf)), np.nextafter(scaled, np.float32(0))]):
        for value in (x, -x):
            if abs(value) <= 6 * 2.0**k:
                rows.append(group(6 * 2.0**k, value)[0])
    rows = np.array(rows)
    packed, scale = encode4(rows)
    assert (np.asarray(scale) == k + 127).all()
    np.testing.assert_array_equal(codes_of(packed), nearest(rows.astype(np.float64), 2.0**k))
    np.testing.assert_array_equal(codes_of(packed)[:, 0], 7)


def test_every_power_of_two_and_its_neighbours():
    powers = 2.0 ** np.arange(-149, 128)
    powers = np.concatenate([powers, 1.5 * 2.0 ** np.arange(-140, 127)]).astype(np.float32)
    around = np.concatenate([powers, np.nextafter(powers, np.float32(np.inf)), np.nextafter(powers, np.float32(0))])
    rows = np.concatenate([group(x, -x / 3) for x in around])
    packed, scale = encode4(rows)
    expected = np.array([scale_rceil(float(row[0])) for row in rows.astype(np.float64)])
    np.testing.assert_array_equal(np.asarray(scale)[:, 0], np.where(around == 0, 0, expected + 127))
    np.testing.assert_array_equal(codes_of(packed), nearest(rows.astype(np.float64), 2.0 ** expected[:, None]))
    with jax.enable_x64(True):  # the same numbers in float64, and numbers between those of float32
        np.testing.assert_array_equal(mx.mxfp4_encode(jnp.asarray(rows, jnp.float64))[0], packed)
        finer = np.nextafter(rows.astype(np.float64), np.inf)
        finer, scale = mx.mxfp4_encode(jnp.asarray(finer)), finer
        expected = np.array([scale_rceil(np.abs(row).max()) for row in scale])
        np.testing.assert_array_equal(np.asarray(finer[1])[:, 0] - 127.0, expected)
        np.testing.assert_array_equal(codes_of(finer[0]), nearest(scale, 2.0 ** expected[:, None]))


@pytest.mark.parametrize("rule", RULES)
def test_zeros_and_subnormals(rule):
    zeros = np.concatenate([group(), -group()])
    packed, scale = encode4(zeros, rule=rule)
    np.testing.assert_array_equal(scale, 0)
    np.testing.assert_array_equal(codes_of(packed)[0], 0)
    np.testing.assert_array_equal(codes_of(packed)[1], 0 if rule == "even" else 8)
    np.testing.assert_array_equal(decode4(packed, scale, jnp.float32), 0)
    # The smallest scale is 2^-127, half a subnormal float32 code further; nothing is flushed on the way.
    tiny = group(*(E2M1 * 2.0**-127), -(2.0**-128), 2.0**-149)
    packed, scale = encode4(tiny, rule=rule)
    np.testing.assert_array_equal(scale, 0)
    np.testing.assert_array_equal(codes_of(packed)[0, :10], [0, 1, 2, 3, 4, 5, 6, 7, 9, 0])
    np.testing.assert_array_equal(np.asarray(decode4(packed, scale, jnp.float32))[0, :9], tiny[0, :9])


def test_largest():
    top = np.finfo(np.float32).max
    packed, scale = encode4(group(top, -top, 2.0**127, 1.0))
    assert np.asarray(scale) == 253  # 2^126: 6 * 2^126 is over the largest float32
    np.testing.assert_array_equal(codes_of(packed)[0, :4], [6, 14, 4, 0])
    np.testing.assert_array_equal(np.asarray(decode4(packed, scale, jnp.float32))[0, :3], [np.inf, -np.inf, 2.0**127])
    with jax.enable_x64(True):
        x = jnp.asarray(6 * 2.0**127 * group(1, -0.5)[0].astype(np.float64))
        packed, scale = mx.mxfp4_encode(x)
        assert int(scale[0]) == 254
        np.testing.assert_array_equal(mx.mxfp4_decode(packed, scale, jnp.float64), x)
        # Beyond the largest float32, float64 has numbers, but no scale is larger.
        packed, scale = mx.mxfp4_encode(2 * x, nonfinite="nan")
        assert int(scale[0]) == 255


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "encode, decode",
    [
        (mx.mxfp4_encode, mx.mxfp4_decode),
        (mx.mxfp8_encode, mx.mxfp8_decode),
        (blocks.fp8_block_encode, blocks.fp8_block_decode),
        (blocks.int4_encode, blocks.int4_decode),
    ],
)
def test_what_is_not_finite(encode, decode, bad):
    x = np.ones((256, 256), np.float32)
    x[3, 40], x[200, 7] = bad, bad
    with pytest.raises(ValueError, match=r"2 of 65,536 values are NaN or infinite"):
        encode(x)
    for packed, scale in (jax.jit(encode)(x), encode(x, nonfinite="nan")):
        out = np.asarray(decode(packed, scale, jnp.float32))
        if encode is blocks.fp8_block_encode:
            assert np.isnan(out[:, :128]).all()
            clean = out[:128, 128:]
        else:
            assert np.isnan(out[3, 32:64]).all() and np.isnan(out[200, :32]).all()
            clean = out[4:200]
        np.testing.assert_allclose(clean, 1, rtol=2**-7)
    with pytest.raises(ValueError, match=r"nonfinite='zero' is unknown"):
        encode(x, nonfinite="zero")


def test_refused():
    x = np.ones((2, 48), np.float32)
    with pytest.raises(ValueError, match="axis of 48 does not divide into groups of 32; pad it to 64"):
        mx.mxfp4_encode(x)
    with pytest.raises(ValueError, match="rule='ceil' is unknown"):
        mx.mxfp4_encode(x[:, :32], "ceil")
    with pytest.raises(ValueError, match="int32 is not a float"):
        mx.mxfp8_encode(jnp.ones((2, 32), jnp.int32))
    with pytest.raises(ValueError, match=r"scales \[2, 2\] do not fit elements \[2, 16\]"):
        mx.mxfp4_decode(np.zeros((2, 16), np.uint8), np.zeros((2, 2), np.uint8))
    with pytest.raises(ValueError, match=r"scales \[1, 1\] do not fit a weight \[130, 7\]"):
        blocks.fp8_block_decode(np.zeros((130, 7), jnp.float8_e4m3fn), np.zeros((1, 1), np.float32))


released = st.tuples(
    hnp.arrays(np.uint8, (4, 16)),
    hnp.arrays(np.uint8, (4, 1), elements=st.integers(0, 252)),
    hnp.arrays(np.uint8, (4,), elements=st.integers(0, 31)),
    hnp.arrays(np.uint8, (4,), elements=st.sampled_from([6, 7, 14, 15])),
)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(released)
def test_released_blocks_give_their_bytes_again(block):
    """Any block with a 4 or a 6 in it, as all released ones have: amax / scale lies in (3, 6]."""
    packed, scale, place, code = block
    codes = codes_of(packed)
    codes[np.arange(4), place] = code
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    for dtype in (jnp.float32, jnp.bfloat16):
        again, scale_again = encode4(decode4(packed, scale, dtype))
        np.testing.assert_array_equal(again, packed)
        np.testing.assert_array_equal(scale_again, scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_jit_vmap_and_eager_agree(dtype):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4, 128)), dtype) * 3
    for encode, decode in ((mx.mxfp4_encode, mx.mxfp4_decode), (mx.mxfp8_encode, mx.mxfp8_decode)):
        eager = encode(x)
        for other in (jax.jit(encode)(x), jax.vmap(encode)(x)):
            assert all((as_bytes(a) == as_bytes(b)).all() for a, b in zip(eager, other, strict=True))
        back = decode(*eager, x.dtype)
        assert back.dtype == x.dtype and back.shape == x.shape
        np.testing.assert_array_equal(back, jax.jit(decode, static_argnums=2)(*eager, x.dtype))
    for encode, decode in (
        (blocks.fp8_block_encode, blocks.fp8_block_decode),
        (blocks.int4_encode, blocks.int4_decode),
    ):
        eager, jitted = encode(x), jax.jit(encode)(x)
        assert all((as_bytes(a) == as_bytes(b)).all() for a, b in zip(eager, jitted, strict=True))
        np.testing.assert_allclose(decode(*eager), x.astype(jnp.float32), atol=12 / 14 + 0.1)


def test_against_search():
    """Random blocks of all sizes, beside float64 arithmetic."""
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((500, 32)) * np.exp2(rng.integers(-120, 120, (500, 1)))).astype(np.float32)
    packed, scale = encode4(x)
    expected = np.array([scale_rceil(row) for row in np.abs(x.astype(np.float64)).max(-1)])
    np.testing.assert_array_equal(np.asarray(scale)[:, 0], expected + 127)
    np.testing.assert_array_equal(codes_of(packed), nearest(x.astype(np.float64), 2.0 ** expected[:, None]))
    # MXFP8: never further from x than any other code, and nothing saturates.
    values, scale = encode8(x)
    ratio = np.abs(x.astype(np.float64)).max(-1) * 2.0 ** (127.0 - np.asarray(scale)[:, 0])
    assert ratio.max() <= 448 and ratio.min() > 224
    every = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)
    every = np.unique(every[np.isfinite(every)])
    y = x.astype(np.float64) * 2.0 ** (127.0 - np.asarray(scale))
    best = np.abs(y[..., None] - every).min(-1)
    np.testing.assert_array_equal(np.abs(y - np.asarray(values).astype(np.float64)), best)


def mesh_of(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))


@pytest.mark.parametrize("partition", [P("a", "b"), P(None, ("a", "b")), P("b", None), P(None, None)])
def test_eight_devices_as_one(partition):
    rng = np.random.default_rng(2)
    for size, encode, decode in (
        (256, mx.mxfp4_encode, mx.mxfp4_decode),
        (256, mx.mxfp8_encode, mx.mxfp8_decode),
        (256, blocks.int4_encode, blocks.int4_decode),
        (1024, blocks.fp8_block_encode, blocks.fp8_block_decode),
    ):
        w = rng.standard_normal((size, size)).astype(np.float32)
        packed, scale = encode(w)
        with jax.set_mesh(mesh := mesh_of(a=2, b=4)):
            sharding = NamedSharding(mesh, partition)
            ours = jax.jit(encode)(jax.device_put(w, sharding))
            assert all(x.sharding.is_equivalent_to(sharding, 2) for x in ours)
            back = jax.jit(decode)(*ours)
            assert back.sharding.is_equivalent_to(sharding, 2)
        np.testing.assert_array_equal(as_bytes(ours[0]), as_bytes(packed))
        np.testing.assert_array_equal(as_bytes(ours[1]), as_bytes(scale))
        np.testing.assert_array_equal(back, decode(packed, scale))


def test_blocks_do_not_straddle_shards():
    with jax.set_mesh(mesh := mesh_of(a=8)):
        w = jax.device_put(np.ones((8, 128), np.float32), NamedSharding(mesh, P(None, "a")))
        with pytest.raises(ValueError, match=r"128 cut over a = 8 devices has shards of 16, which do not .* of 32"):
            mx.mxfp4_encode(w)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("axis", [-1, -2])
def test_round_is_decode_of_encode(axis, rule):
    x = jnp.asarray(np.random.default_rng(3).standard_normal((2, 64, 96)), jnp.float32).at[0, 0, 0].set(-0.0)
    for rounding, encode, decode in (
        (mx.mxfp4_round, mx.mxfp4_encode, mx.mxfp4_decode),
        (mx.mxfp8_round, mx.mxfp8_encode, mx.mxfp8_decode),
    ):
        along = x if axis == -1 else x.mT
        expected = decode(*encode(along, rule), x.dtype)
        got, pull = jax.vjp(lambda x, f=rounding: f(x, axis, rule), x)
        np.testing.assert_array_equal(got, expected if axis == -1 else expected.mT)
        # Straight through, except where the value is above the largest code.
        scale = np.repeat(2.0 ** (np.asarray(encode(along, rule)[1]) - 127.0), 32, -1)
        inside = np.abs(np.asarray(along)) <= scale * (6 if encode is mx.mxfp4_encode else 448)
        assert inside.all() == (rule == "rceil")
        d = jnp.asarray(np.random.default_rng(4).standard_normal(x.shape), jnp.float32)
        expected = np.where(inside if axis == -1 else inside.mT, d, 0)
        np.testing.assert_array_equal(pull(d)[0], expected)


def test_round_again_changes_nothing():
    x = jnp.asarray(np.random.default_rng(5).standard_normal((64, 64)), jnp.bfloat16)
    once = mx.mxfp4_round(x)
    np.testing.assert_array_equal(once, mx.mxfp4_round(once))
    assert once.dtype == x.dtype
    assert np.isnan(mx.mxfp4_round(x.at[0, 0].set(jnp.inf))[0, :32].astype(jnp.float32)).all()


@pytest.mark.parametrize("kind, bits", [("mxfp4", 4.25), ("int4", 4.5), ("fp8_block", 8 + 32 / 128**2)])
def test_qtensor(kind, bits):
    w = jnp.asarray(np.random.default_rng(6).standard_normal((3, 256, 128)), jnp.float32)
    q = QTensor.encode(w, kind)
    assert q.shape == w.shape and q.ndim == 3 and q.size == w.size and q.nbytes * 8 == bits * w.size
    assert q.packed.shape[:2] == (3, 128)  # as released: [out, in]
    decoded = jax.jit(lambda q: q.decode(jnp.float32))(q)
    assert float(jnp.abs(decoded - w).max()) < 0.2 * float(jnp.abs(w).max())
    np.testing.assert_array_equal(jax.jit(lambda q, i: q[i].decode(jnp.float32))(q, 1), decoded[1])
    # In a scan, and as shapes alone.
    scanned = jax.lax.scan(lambda c, q: (c, q.decode(jnp.float32)), 0, q)[1]
    np.testing.assert_array_equal(scanned, decoded)
    shapes = jax.eval_shape(lambda: q)
    assert shapes.shape == w.shape and shapes.kind == kind and shapes.nbytes == q.nbytes
