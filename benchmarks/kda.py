"""How fast is chunked KDA, and how much memory does its gradient take?

Beside it, in the same run: autodiff through the token recurrence, and, where torch and transformers >= 5.24
are installed, the eager chunked KDA of transformers' Kimi Linear. Every time is a median; memory is what
the compiler plans for temporaries (`memory_analysis().temp_size_in_bytes`), which eager torch does not have.

    python benchmarks/kda.py kda.json
    python benchmarks/kda.py kda.json --shapes 8x512x4x64x64 16x512x4x32x32 --chunk-size 16

The floor is the larger of FLOPs / measured matmul rate and bytes / measured memory rate: the chunked form's
own operations, each input and output moved once.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.ops.kda import kda

# A peer that would need more than this is not run (its memory is still compiled for).
MEMORY_LIMIT = 4 * 2**30
TOKENS = (1024, 2048, 4096, 8192, 16384)


def median_time(f, repeats):
    f()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        f()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def machine_rates():
    """(FLOP/s of a large float32 matmul, bytes/s of an update in place), as measured now."""
    a, x = jnp.ones((1536, 1536)), jnp.ones(2**24)
    matmul, update = jax.jit(lambda a: a @ a), jax.jit(lambda x: x + 1, donate_argnums=0)

    def touch():
        nonlocal x
        x = update(x).block_until_ready()

    flops = 2 * a.shape[0] ** 3 / median_time(lambda: matmul(a).block_until_ready(), 5)
    return flops, 2 * x.nbytes / median_time(touch, 5)


def floor_work(b, t, h, k, v, c):
    """{pass: (FLOPs, bytes)} of the chunked form in float32.

    A token and head costs 2 FLOPs for each of: 3 k v (two reads of the state, one write), 2 c v (inverse
    and scores times values), (c - 1) k (scores and A between the halves, all levels), (c^2 - 1) / 3
    (inverse). Backward repeats what it needs of these (not the outputs or the state) and does each twice.
    """
    rows = b * t * h
    forward = 2 * rows * (3 * k * v + 2 * c * v + (c - 1) * k + (c * c - 1) / 3)
    again = forward - 2 * rows * (2 * k * v + c * v)
    inputs, state = 4 * rows * (3 * k + v + 1), 4 * rows * k * v / c
    return {
        "forward": (forward, inputs + 4 * rows * v),
        "forward+backward": (3 * forward + again, 3 * inputs + 8 * rows * v + 2 * state),
    }


def inputs(b, t, h, k, v):
    rng = np.random.default_rng(0)
    q_k = rng.normal(size=(2, b, t, h, k))
    q_k /= np.linalg.norm(q_k, axis=-1, keepdims=True)
    value, d_o = rng.normal(size=(2, b, t, h, v))
    g = -5 / (1 + np.exp(2 - 2 * rng.normal(size=(b, t, h, k))))
    beta = 1 / (1 + np.exp(-rng.normal(size=(b, t, h))))
    return [x.astype(np.float32) for x in (*q_k, value, g, beta)], d_o.astype(np.float32)


def measure_jax(form, chunk_size, arrays, d_o, repeats):
    def forward(*x):
        return kda(*x, form=form, chunk_size=chunk_size)

    def both(d_o, *x):
        out, pull = jax.vjp(forward, *x)
        return out, pull((d_o, jnp.zeros_like(out[1])))

    def measure(f, *x):
        x = jax.device_put(x)
        compiled = jax.jit(f).lower(*x).compile()
        memory = compiled.memory_analysis()
        temp = memory.temp_size_in_bytes if memory else None
        fits = temp is None or temp <= MEMORY_LIMIT
        seconds = median_time(lambda: jax.block_until_ready(compiled(*x)), repeats) if fits else None
        return {"seconds": seconds, "temp_bytes": temp}

    return {"forward": measure(forward, *arrays), "forward+backward": measure(both, d_o, *arrays)}


def measure_transformers(chunk_size, arrays, d_o, repeats):
    import torch  # pyright: ignore[reportMissingImports]
    from transformers.models.kimi_linear import modeling_kimi_linear  # pyright: ignore[reportMissingImports]

    b, t, h, k = arrays[0].shape
    if 8 * 4 * b * t * h * k * chunk_size > MEMORY_LIMIT:  # its pairwise decays, some eight times with autograd
        return {name: {"seconds": None, "temp_bytes": None} for name in ("forward", "forward+backward")}
    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    d_o = torch.tensor(d_o)

    def forward():
        return modeling_kimi_linear.chunk_kimi_delta_attention(*tensors, chunk_size=chunk_size)[0]

    def forward_alone():
        with torch.no_grad():
            return forward()

    expected = np.asarray(kda(*map(jnp.asarray, arrays), chunk_size=chunk_size)[0])
    error = np.max(np.abs(forward_alone().numpy() - expected))
    print(f"transformers' output differs from ours by {error:.1e}, of {np.max(np.abs(expected)):.1e}")
    seconds = {
        "forward": median_time(forward_alone, repeats),
        "forward+backward": median_time(lambda: torch.autograd.grad(forward(), tensors, d_o), repeats),
    }
    return {name: {"seconds": x, "temp_bytes": None} for name, x in seconds.items()}


def ratio(x, y):
    return None if x is None or y is None else x / y


def cell(x, scale=1.0):
    return "-" if x is None else f"{x * scale:.1f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", help="where to write the figures")
    parser.add_argument("--shapes", nargs="+", default=[f"1x{t}x4x128x128" for t in TOKENS], help="b x t x h x k x v")
    parser.add_argument("--chunk-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    try:
        import torch  # noqa: F401 # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]
        import transformers.models.kimi_linear  # pyright: ignore[reportMissingImports]

        peer = "transformers " + transformers.__version__
    except ImportError as error:
        peer = None
        print(f"transformers' KDA is left out: {error}; pip install torch 'transformers>=5.24'")

    flops_rate, byte_rate = machine_rates()
    print(f"{jax.devices()[0].device_kind}: matmul {flops_rate / 1e9:.0f} GFLOP/s, memory {byte_rate / 1e9:.1f} GB/s")
    print(f"chunk {args.chunk_size}, float32, median of {args.repeats}; x = times the chunked form's")
    heads = f"{'b x t x h x k x v':20} {'pass':17} {'form':20} {'ms':>9} {'x':>6} {'temp MiB':>9} {'x':>6}"
    print(f"{heads} {'floor ms':>9}   (-: over {MEMORY_LIMIT >> 30} GiB and not run, or not known)")
    rows = []
    for text in args.shapes:
        b, t, h, k, v = map(int, text.split("x"))
        arrays, d_o = inputs(b, t, h, k, v)
        results = {
            "chunked": measure_jax("chunked", args.chunk_size, arrays, d_o, args.repeats),
            "autodiff of lax.scan": measure_jax("recurrent", args.chunk_size, arrays, d_o, args.repeats),
        }
        if peer:
            results[peer] = measure_transformers(args.chunk_size, arrays, d_o, args.repeats)
        for name, (flops, moved) in floor_work(b, t, h, k, v, args.chunk_size).items():
            floor = max(flops / flops_rate, moved / byte_rate)
            ours = results["chunked"][name]
            for form, result in results.items():
                seconds, temp = result[name]["seconds"], result[name]["temp_bytes"]
                x, temp_x = ratio(seconds, ours["seconds"]), ratio(temp, ours["temp_bytes"])
                row = {"shape": [b, t, h, k, v], "pass": name, "form": form, "seconds": seconds, "temp_bytes": temp}
                row |= {"times_chunked": x, "temp_times_chunked": temp_x, "floor_seconds": floor}
                rows.append(row | {"flops": flops, "bytes": moved})
                print(
                    f"{text:20} {name:17} {form:20} {cell(seconds, 1e3):>9} {cell(x):>6} "
                    f"{cell(temp, 2**-20):>9} {cell(temp_x):>6} {floor * 1e3:9.1f}",
                    flush=True,
                )
    settings = {"chunk_size": args.chunk_size, "repeats": args.repeats, "jax": jax.__version__, "peer": peer}
    settings |= {"flops_per_second": flops_rate, "bytes_per_second": byte_rate}
    with open(args.json, "w") as f:
        json.dump({"settings": settings, "rows": rows}, f, indent=1)
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
