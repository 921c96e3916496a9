"""Routed experts, forward and backward: our backends beside dense and padded matmuls, in one run.

`capacity` is a batched matmul with the rows of the fullest expert known beforehand: a bound, not something one can
run (the shape would depend on the data, and rows are placed for free). Then forward and backward of 112 experts with
blocks of 8 to 64 rows, beside the one that is chosen.

    python benchmarks/experts.py [--json out.json]
"""

import argparse
import json
import time
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.ops import experts
from kimi_jax.ops.situ import swiglu

# tokens, choices, experts, d, f
CASES = (
    (4096, 2, 16, 64, 64),
    (4096, 4, 16, 128, 64),
    (4096, 2, 32, 128, 128),
    (4096, 4, 32, 128, 128),
    (512, 4, 896, 64, 64),
)


def milliseconds(f, *args, runs=7):
    f = jax.jit(f)
    jax.block_until_ready(f(*args))
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times)


def capacity(x, w_gate, w_up, w_down):
    """x [e, c, d]: the same arithmetic without routing."""
    hidden = swiglu(jnp.einsum("ecd,edf->ecf", x, w_gate), jnp.einsum("ecd,edf->ecf", x, w_up))
    return jnp.einsum("ecf,efd->ecd", hidden, w_down)


def with_gradients(f):
    return lambda *args: jax.grad(lambda *args: jnp.sum(f(*args) ** 2), argnums=tuple(range(len(args))))(*args)


def measure(n, k, e, d, f):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(n, d)), jnp.float32)
    indices = np.argsort(rng.random((n, e)), axis=1)[:, :k].astype(np.int32)
    weights = jnp.asarray(rng.random((n, k)), jnp.float32)
    matrices = [jnp.asarray(rng.normal(size=s) * 0.1, jnp.float32) for s in ((e, d, f), (e, d, f), (e, f, d))]
    fullest = int(np.bincount(indices.reshape(-1)).max())
    rows = jnp.asarray(rng.normal(size=(e, fullest, d)), jnp.float32)

    def ours(x, weights, *matrices, backend):
        return experts.expert_mlp(x, jnp.asarray(indices), weights, *matrices, activation=swiglu, backend=backend)

    result = {
        "tokens": n,
        "choices": k,
        "experts": e,
        "d": d,
        "f": f,
        "block": experts.choose_backend("blocks", n * k, e)[1],
    }
    for name, function, args in (
        ("blocks", partial(ours, backend="blocks"), (x, weights, *matrices)),
        ("ragged", partial(ours, backend="ragged"), (x, weights, *matrices)),
        ("capacity", capacity, (rows, *matrices)),
    ):
        slow = name == "ragged" and e > 100
        result[f"{name}_fwd_ms"] = round(milliseconds(function, *args, runs=2 if slow else 7), 2)
        result[f"{name}_fwd_bwd_ms"] = round(milliseconds(with_gradients(function), *args, runs=2 if slow else 7), 2)
    return result


def blocks(d, f, mean, k=16, e=112):
    """Milliseconds forward and backward by rows of a block, and the block chosen, for experts of `mean` rows."""
    rng, n = np.random.default_rng(0), mean * e // k
    x = jnp.asarray(rng.normal(size=(n, d)), jnp.float32)
    indices = jnp.asarray(np.argsort(rng.random((n, e)), axis=1)[:, :k], jnp.int32)
    weights = jnp.asarray(rng.random((n, k)), jnp.float32)
    matrices = [jnp.asarray(rng.normal(size=s) * 0.1, jnp.float32) for s in ((e, d, f), (e, d, f), (e, f, d))]
    result = {"d": d, "f": f, "rows": mean, "chosen": experts.choose_backend("blocks", n * k, e)[1]}
    for block in (8, 16, 32, 64):

        def run(x, weights, *matrices):
            return experts.expert_mlp(x, indices, weights, *matrices, activation=swiglu, backend="blocks")

        with mock.patch.object(experts, "choose_backend", lambda *_, block=block: ("blocks", block)):
            result[f"{block}_ms"] = round(milliseconds(with_gradients(run), x, weights, *matrices), 2)
    return result


def table(function, cases):
    results = []
    for case in cases:
        results.append(function(*case))
        if len(results) == 1:
            print(" ".join(f"{name:>18}" for name in results[0]))
        print(" ".join(f"{value:>18}" for value in results[-1].values()), flush=True)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the rows to this file too")
    arguments = parser.parse_args()
    results = table(measure, CASES)
    results += table(blocks, [(d, d // 2, mean) for d in (64, 256) for mean in (9, 18, 36, 73, 146, 292)])
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)
