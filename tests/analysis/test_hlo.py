"""Collectives of compiled programs, counted to the byte; buffers from an assignment as XLA writes it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax.analysis import hlo

SIZES = {"data": 2, "fsdp": 4}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Explicit,) * 2)


def compiled(mesh, f, *shapes_and_specs):
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in shapes_and_specs
    ]
    with jax.set_mesh(mesh):
        return jax.jit(f).lower(*args).compile().as_text()


def found(text, sizes=SIZES):
    return {(c.kind, c.axes): (c.bytes, c.count, c.known) for c in hlo.collectives(text, sizes)}


def test_kinds_axes_bytes_and_nested_loops(mesh):
    """Three times four steps of one collective of each kind; shards of 32 rows x 64 f32 on a mesh of 2 x 4."""

    def body(w, x):
        def layer(x, w):
            w = jax.lax.all_gather(w, "fsdp", axis=0, tiled=True)  # [16, 64] of each of 4
            y = jax.lax.ppermute(jnp.tanh(x @ w), "data", [(0, 1), (1, 0)])
            y = jax.lax.all_to_all(y, "fsdp", 0, 0, tiled=True)
            y = jax.lax.all_gather(y, ("data", "fsdp"), axis=0, tiled=True)
            return jax.lax.psum_scatter(jnp.sin(y), ("data", "fsdp"), scatter_dimension=0, tiled=True), None

        x, _ = jax.lax.scan(lambda x, _: jax.lax.scan(layer, x, w), x, None, length=3)
        return jax.lax.psum(jnp.sum(x), ("data", "fsdp"))

    run = jax.shard_map(body, in_specs=(P(None, "fsdp"), P(("data", "fsdp"))), out_specs=P())
    f32 = jnp.float32
    text = compiled(mesh, run, ((4, 64, 64), f32, P(None, "fsdp")), ((256, 64), f32, P(("data", "fsdp"))))
    both, shard = ("data", "fsdp"), 32 * 64 * 4
    assert found(text) == {
        ("all-gather", ("fsdp",)): (3 * 16 * 64 * 4, 12, True),
        ("collective-permute", ("data",)): (shard, 12, True),
        ("all-to-all", ("fsdp",)): (shard * 3 // 4, 12, True),
        ("all-gather", both): (7 * shard, 12, True),
        ("reduce-scatter", both): (7 * shard, 12, True),
        ("all-reduce", both): (2 * 4 * 7 // 8, 1, True),  # one f32
    }


def test_a_loop_of_unknown_length_is_said_to_be(mesh):
    def body(x):
        return jax.lax.while_loop(lambda x: jnp.max(x) < 100, lambda x: jax.lax.psum(x, "data") + 1, x)

    run = jax.shard_map(body, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    text = compiled(mesh, run, ((8, 8), jnp.float32, P("data")))
    assert found(text)["all-reduce", ("data",)] == (4 * 8 * 4, 1, False)


LOOP = """HloModule loop

%body.1 (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[8,4]{1,0:T(8,128)S(1)} get-tuple-element(%p), index=1
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %start = ((f32[2,4]{1,0}), f32[8,4]{1,0}) all-gather-start(%x), replica_groups=GROUPS, metadata={op_name="gather"}
  %done = f32[8,4]{1,0} all-gather-done(%start)
  %moving = (s32[], s32[], u32[]) copy-start(%next)
  %moved = s32[] copy-done(%moving)
  %kept = s32[] copy(%moved)
  ROOT %t = (s32[], f32[8,4]) tuple(%kept, %done)
}

%condition.1 (p: (s32[], f32[8,4])) -> pred[] {
  %p.1 = (s32[], f32[8,4]) parameter(0)
  %limit = s32[]{:T(128)} constant(10)
  %j = s32[] get-tuple-element(%p.1), index=0
  ROOT %lt = pred[] compare(%j, %limit), direction=LT
}

%wrapped (p: f32[8,4]) -> f32[2,4] {
  %p.2 = f32[8,4]{1,0} parameter(0)
  ROOT %rs = f32[2,4]{1,0} reduce-scatter(%p.2), replica_groups=GROUPS, to_apply=%add
}

ENTRY %main (a: f32[8,4]) -> f32[2,4] {
  %a = f32[8,4] parameter(0)
  %zero = s32[] constant(1)
  %begin = s32[] copy(%zero)
  %init = (s32[], f32[8,4]) tuple(%begin, %a)
  %loop = (s32[], f32[8,4]) while(%init), condition=%condition.1, body=%body.1
  %out = f32[8,4] get-tuple-element(%loop), index=1
  %s = ((f32[8,4]), f32[2,4], u32[]) async-start(%out), calls=%wrapped
  ROOT %d = f32[2,4] async-done(%s), calls=%wrapped
}
"""


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("fsdp",), 4),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",), 2),
        ("{}", ("data", "fsdp"), 8),
        ("[2,4]<=[8]", ("fsdp",), 4),
        ("[4,2]<=[2,4]T(1,0)", ("data",), 2),
        ("mesh['a'=2,'b'=4] {'b'}", ("fsdp",), 4),
        ("mesh['a'=2,'b'=1,'c'=4], device_ids=([4,2]T(1,0)) {'a'}", ("fsdp",), 2),
        ("mesh['a'=8] {'a':(1)2}", ("data",), 2),
        ("mesh['a'=8] {'a':(2)4}", ("fsdp",), 4),
    ],
)
def test_forms_of_groups_and_the_trip_count_from_the_condition(groups, axes, size):
    """From 1 by 2 while below 10: five times. Asynchronous forms count once."""
    gather, scatter = hlo.collectives(LOOP.replace("GROUPS", groups), SIZES)
    assert (gather.kind, gather.axes, gather.group, gather.count, gather.known) == ("all-gather", axes, size, 5, True)
    assert gather.bytes == 128 * (size - 1) // size and gather.name == "gather"
    assert (scatter.kind, scatter.axes, scatter.count) == ("reduce-scatter", axes, 1)
    assert scatter.bytes == 32 * (size - 1)


def test_bytes_of_shapes():
    assert hlo.shape_bytes("pred[3]{0}") == 3
    assert hlo.shape_bytes("f8e4m3fn[2,3]{1,0:T(8,128)(4,1)}") == 6
    assert hlo.shape_bytes("(s32[]{:T(128)}, /*index=1*/bf16[0,5], c64[2])") == 4 + 0 + 16


ASSIGNMENT = """BufferAssignment:
allocation 0: size 64, thread-local:
 value: <5 sum @0> (size=64,offset=0): f32[16]
allocation 1: size 4096, parameter 0, shape |bf16[2048]| at ShapeIndex {}, maybe-live-out:
 value: <1 w @0> (size=4096,offset=0): bf16[2048]{0:T(1024)}
allocation 2: size 65536, color 1, preallocated-temp:
 value: <2 in_vmem @1> (size=65536,offset=0): f32[16384]{0:S(1)}
allocation 3: size 9216, preallocated-temp:
 value: <3 dot.1 @0> (size=8192,offset=512): f32[2048]{0}
 value: <4 dot.2 @0> (size=4096,offset=512): f32[1024]{0}
 value: <6 pair.1{0} @0> (size=512,offset=0): f32[128]{0}
"""


def test_largest_buffers():
    text = '  %dot.1 = f32[2048]{0} dot(%a, %b), metadata={op_name="jit(step)/dot_general"}\n'
    assert hlo.largest_buffers(ASSIGNMENT, text, 3) == [
        hlo.Buffer("jit(step)/dot_general", "f32[2048]", 8192),
        hlo.Buffer("argument w", "bf16[2048]", 4096),
        hlo.Buffer("pair.1", "f32[128]", 512),
    ]
    assert hlo.hbm_total("Memory Space: default (color=0)\nTotal bytes: 17 (17B)\n") == 17
