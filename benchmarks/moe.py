"""Balanced experts on eight emulated devices, 896 experts, top-16: rows, loans, bytes and time, forward and backward.

Beside them, on one device: the dense op, in which every token passes through every expert, and `lax.ragged_dot`, which
XLA makes dense over groups on CPUs: every row through every expert. All devices here share one processor, so a time is
that of all the work of all ranks, communication included. Once with 32 tokens a rank, 5 rows an expert, where what does
not depend on tokens decides (plan, reading and writing of 896 experts, their gradients' zeros), once with 128, 18 rows.
As in training, freed memory is kept.

    python benchmarks/moe.py [--json out.json]
"""

import argparse
import itertools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax.ops.experts import Backend, expert_mlp
from kimi_jax.ops.situ import swiglu
from kimi_jax.parallel.expert import expert_parallel_mlp
from kimi_jax.parallel.expert_move import Transport, expert_window, row_window
from kimi_jax.parallel.expert_plan import plan, routes
from kimi_jax.train import heap

R, E, K, Z, F = 8, 896, 16, 64, 32
M = E // R
TOKENS = (32, 128)
"""Of a rank."""


def floors(indices):
    """What any way to compute the layer takes: FLOPs, three products a row forward and twice that backward; and bytes,
    the matrices of all chosen experts read forward and backward, all gradients written.
    """
    return 18 * indices.size * Z * F, 4 * 3 * (2 * np.unique(indices).size + E) * Z * F


def choices(routing, n):
    """[n, K] different experts of each token; worst: all choose the same, at home on one rank."""
    rng = np.random.default_rng(0)
    noise = -np.log(-np.log(rng.random((n, E))))
    if routing == "zipf":
        noise -= np.log(np.arange(1, E + 1))
    if routing == "worst":
        noise[:, :K] = np.inf
    return np.argsort(-noise, axis=1, kind="stable")[:, :K].astype(np.int32)


def dense(x, indices, weights, w_gate, w_up, w_down):
    shares = jnp.einsum("nk,nke->en", weights, jax.nn.one_hot(indices, E))
    hidden = swiglu(jnp.einsum("nd,edf->enf", x, w_gate), jnp.einsum("nd,edf->enf", x, w_up))
    return jnp.einsum("enf,efd->nd", hidden * shares[..., None], w_down)


def with_gradients(f):
    def run(x, indices, weights, *matrices):
        y, pull = jax.vjp(lambda x, weights, *matrices: f(x, indices, weights, *matrices), x, weights, *matrices)
        return y, pull(x)

    return jax.jit(run)


def timed(f, args, runs):
    """Result and milliseconds of the fastest run; compiled beforehand, and with several runs warm."""
    compiled = f.lower(*args).compile()
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        result = jax.block_until_ready(compiled(*args))
        times.append(1e3 * (time.perf_counter() - begin))
    return result, round(min(times), 1)


def peak_flops():
    a = jnp.ones((1536, 1536))
    return 2 * 1536**3 / (timed(jax.jit(jnp.dot), (a, a), 5)[1] / 1e3)


def peak_bandwidth():
    """Bytes a second, read and written, of scaling 256 MiB."""
    a = jnp.ones((64, 2**20))
    return 2 * a.nbytes / (timed(jax.jit(lambda a: 2 * a), (a,), 5)[1] / 1e3)


def count(indices, s):
    """Of a routing: rows of ranks, loans, and mean MiB a rank receives from others, forward and backward."""
    counts = np.stack([np.bincount(part.reshape(-1), minlength=E) for part in np.split(indices, R)]).astype(np.int32)
    result = {}
    for balance in ("none", "exact"):
        rows = np.asarray(plan(jnp.asarray(counts), balance).alloc).sum(0)
        result[f"rows_max_{balance}"], result["rows_mean"] = int(rows.max()), int(rows.mean())
    mesh = jax.make_mesh((R,), ("expert",), axis_types=(AxisType.Explicit,))

    def traffic(indices):
        way = routes(indices, E, "expert", "exact", 8, s * K)
        return jax.tree.map(lambda a: a[None], (way.rows, way.weights))

    with jax.set_mesh(mesh):
        put = jax.device_put(indices, NamedSharding(mesh, P("expert")))
        rows, weights = jax.tree.map(
            lambda a: np.asarray(a)[0], jax.jit(jax.shard_map(traffic, out_specs=P("expert")))(put)
        )
    result["borrowed_max"], result["borrowed_sum"] = int(weights.size.sum(0).max()), int(weights.size.sum())

    def lines(traffic, n, window, transport):  # that a rank receives on average in one move
        if transport == "ragged":
            return (traffic.size.sum() - np.trace(traffic.size)) / R
        last = traffic.size if transport == "a2a" else np.where(traffic.size > 0, traffic.start + traffic.size, 0)
        return -(-int(last.max()) // window) * window * (R - 1)

    for transport in ("gather", "a2a", "ragged"):
        window = row_window(s * K, R, transport)
        there, back = (lines(t, s * K, window, transport) for t in (rows, rows.back))
        moved = there * (3 * Z + 1) + back * (2 * Z + 1)  # x twice, gradients of y, shares; y, gradients of both
        for height, columns in ((Z, F), (Z, F), (F, Z)):
            window = expert_window(M, height, R)
            fetch, give = (lines(t.times(height), M * height, window, transport) for t in (weights, weights.back))
            moved += (2 * fetch + give) * columns  # fetched twice, gradients returned
        result[f"mib_{transport}"] = round(4 * moved / 2**20, 2)
    return result


def measure(routing, s, peak, bandwidth):
    rng, n = np.random.default_rng(0), R * s
    indices = choices(routing, n)
    x, weights = (rng.normal(size=shape).astype(np.float32) for shape in ((n, Z), (n, K)))
    matrices = [rng.normal(size=shape).astype(np.float32) * 0.1 for shape in ((E, Z, F), (E, Z, F), (E, F, Z))]
    args = (x, indices, weights, *matrices)
    flops, moved = floors(indices)
    result = {"routing": routing, "tokens": s, **count(indices, s)}
    result["flops_floor_ms"] = round(1e3 * flops / peak, 2)
    result["bytes_floor_ms"] = round(1e3 * moved / bandwidth, 2)
    mesh = jax.make_mesh((R,), ("expert",), axis_types=(AxisType.Explicit,))
    outputs = {}
    for transport in ("a2a", "gather"):

        def local(*args, transport: Transport = transport):
            return expert_parallel_mlp(*args, activation=swiglu, axis="expert", transport=transport)

        with jax.set_mesh(mesh):
            put = [jax.device_put(a, NamedSharding(mesh, P("expert"))) for a in args]
            layer = jax.shard_map(local, in_specs=(P("expert"),) * 6, out_specs=P("expert"))
            outputs[transport], result[f"{transport}_ms"] = timed(with_gradients(layer), put, 9)

    def one_device(backend: Backend):
        return with_gradients(lambda *args: expert_mlp(*args, activation=swiglu, backend=backend))

    args = [jnp.asarray(a) for a in args]
    outputs["blocks"], result["one_device_ms"] = timed(one_device("blocks"), args, 9)
    outputs["dense"], result["dense_ms"] = timed(with_gradients(dense), args, 3)
    outputs["ragged_dot"], result["ragged_dot_ms"] = timed(one_device("ragged"), args, 1)
    slower = max(result["a2a_ms"], result["gather_ms"])
    result["dense/ours"] = round(result["dense_ms"] / slower, 1)
    result["ragged_dot/ours"] = round(result["ragged_dot_ms"] / slower, 1)
    errors = [
        max(
            float(np.max(np.abs(np.asarray(a) - np.asarray(b))) / np.max(np.abs(b)))
            for a, b in zip(*trees, strict=True)
        )
        for trees in ((jax.tree.leaves(o), jax.tree.leaves(outputs["dense"])) for o in outputs.values())
    ]
    result["error"] = float(f"{max(errors):.1e}")  # of outputs and gradients, of all of them against the dense op
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the results to this file too")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", R)
    heap.keep_freed()
    peak, bandwidth = peak_flops(), peak_bandwidth()
    print(f"{R} ranks, {E} experts, top-{K}, widths {Z} and {F}; {peak / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.0f} GB/s")
    cases = itertools.product(TOKENS, ("uniform", "zipf", "worst"))
    results = [measure(routing, tokens, peak, bandwidth) for tokens, routing in cases]
    for name in results[0]:
        print(f"{name:>18}" + "".join(f"{result[name]!s:>12}" for result in results))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"peak_flops": peak, "bandwidth": bandwidth, "results": results}, file, indent=1)
