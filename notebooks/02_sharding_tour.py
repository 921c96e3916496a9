# %% [markdown]
# # A tour of sharding
#
# The same code trains on one device or on many. What changes is the **mesh**: how many devices there are along each of
# five named axes. Here one CPU plays eight devices, so everything below runs on a laptop: where arrays lie on several
# meshes, what devices tell each other, what does not depend on the mesh (the loss), and how the rows of a mixture of
# experts are shared out exactly evenly. Emulated devices show the layout and the communication, not the speed.

# %%
from importlib.util import find_spec
from pathlib import Path

from IPython import get_ipython

if find_spec("kimi_jax") is None:
    here = Path.cwd()
    checkout = next((folder for folder in (here, *here.parents) if (folder / "train_main.py").is_file()), None)
    if checkout is None:
        raise FileNotFoundError(f"no checkout of kimi_jax around {here}; clone the repository and open it from there")
    # One command for everything, before anything imports JAX: pip then picks a JAX and a Flax that belong together.
    get_ipython().run_line_magic("pip", f'install -q "{checkout}"')

# %% [markdown]
# Devices are counted once, when JAX first touches one. So their number is set before anything else is done; to change
# it, restart the kernel. Without most of XLA's optimisations, programs compile in about half the time.

# %%
from dataclasses import asdict, replace
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kimi_jax.analysis import hlo
from kimi_jax.config import ConfigError, Mesh, Rules, load_config
from kimi_jax.model.kimi import declared, init
from kimi_jax.model.param import arrays
from kimi_jax.parallel import context
from kimi_jax.parallel.batch import batch_sharding, to_devices
from kimi_jax.parallel.expert_plan import plan, routes
from kimi_jax.parallel.mesh import make_mesh, on_mesh
from kimi_jax.parallel.spec import spec_for, spec_of
from kimi_jax.train.loop import run_training
from kimi_jax.train.step import abstract_state, make_eval_step, make_optimizer, make_step

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)
print(jax.device_count(), jax.devices()[0].platform, "devices")

# %% [markdown]
# ## Meshes and rules
#
# A config holds a `Mesh`, the size of each axis, and `make_mesh` lays devices out in that shape. Axes of size one are
# left out, and one device is no mesh at all: then the same code meets no axis and communicates nothing.

# %%
print(make_mesh(Mesh(data=2, fsdp=2, tensor=2)))
print(make_mesh(Mesh(expert=8)))
print(make_mesh(Mesh()))

# %% [markdown]
# Parameters and batches name their axes by what they mean, such as `embed`, the model's width. `Rules` says which mesh
# axes each of these **logical axes** is cut over.

# %%
for name, axes in asdict(Rules()).items():
    print(f"{name:14} over {', '.join(axes)}")

# %% [markdown]
# A mesh and the rules together give a **partition spec**: for each axis of an array the mesh axes it is cut over, or
# `None` where every device has all of it. A mesh axis that no entry names holds copies. Below are the query weights of
# an attention layer, and a batch, under three meshes.

# %%
for sizes in ({"data": 8}, {"fsdp": 8}, {"fsdp": 2, "tensor": 2, "seq": 2}):
    weight = spec_for(Rules(), ("embed", "heads", "head_dim"), sizes)
    rows = spec_for(Rules(), ("batch", "time"), sizes)
    print(f"{sizes!s:36} weight {tuple(weight)!s:28} batch {tuple(rows)}")

# %% [markdown]
# ## A model to look at
#
# A K3 of two layers: Kimi Delta Attention (KDA) with a dense MLP, then multi-head latent attention (MLA) with a mixture
# of 16 experts. Eight rows of random bytes are its batch.

# %%
base = load_config("k3_tiny")
config = replace(
    base,
    model=replace(
        base.model,
        vocab_size=256,
        hidden_size=64,
        num_layers=2,
        mla_layers=(1,),
        attn_res_block_size=1,
        kda=replace(base.model.kda, num_heads=4, head_dim=16, chunk_size=16),
        moe=replace(base.model.moe, hidden_size=32, latent_size=32),
    ),
    data=replace(base.data, sequence_length=64, batch_size=8),
)
WEIGHT, EXPERTS = "segments.0.runs.0.attention.w_q", "segments.1.runs.0.mlp.w_gate"
parameters = declared(config.model)

text = np.random.default_rng(0).integers(3, 256, (8, 65), dtype=np.int32)
batch = {
    "tokens": text[:, :-1],
    "targets": text[:, 1:],
    "segment_ids": np.ones((8, 64), np.int32),
    "loss_weights": np.ones((8, 64), np.float32),
}

# %% [markdown]
# `tour` makes the model on a mesh and draws three arrays: a weight, the batch, and the gate weights of all experts.
# `jax.debug.visualize_array_sharding` draws two axes. Of arrays with more, two are picked, those that are cut first. In
# the drawings rows are the first axis and columns the second; each box is a part of the array, with the numbers of the
# devices that hold it. Then `tour` computes the loss, and counts the collectives of the compiled forward pass.

# %%
losses, forward = {}, {}


def draw(title, names, x):
    """The sharding of x along two of its axes, which `names` are the last of; leading ones are stacks of layers."""
    spec, lead = spec_of(x), x.ndim - len(names)
    axes = sorted(sorted(range(lead, x.ndim), key=lambda axis: spec[axis] is None)[:2])
    print(title, ", ".join(f"{names[i - lead]} {x.shape[i]} {f'over {spec[i]}' if spec[i] else 'whole'}" for i in axes))
    view = x[tuple(slice(None) if i in axes else 0 for i in range(x.ndim))]
    jax.debug.visualize_array_sharding(view, scale=0.5, max_width=100)


def tally(compiled, mesh):
    """(kind, mesh axes) of collectives -> [how many, bytes that a device receives in them all, whether known]."""
    found = {}
    for each in hlo.collectives(compiled.as_text(), dict(mesh.shape)):
        count, size, known = found.get((each.kind, each.axes), (0, 0, True))
        found[each.kind, each.axes] = count + each.count, size + each.total, known and each.known
    return found


def tour(**axes):
    """One mesh: its drawings, the loss and the collectives."""
    here, title = replace(config, mesh=Mesh(**axes)), " x ".join(f"{name} {size}" for name, size in axes.items())
    mesh = make_mesh(here.mesh)
    with on_mesh(mesh):
        params = arrays(init(here.model, here.train.seed, here.rules))
        placed = to_devices(batch, batch_sharding(here))
        if mesh is not None:
            draw("weight: ", parameters[WEIGHT].axes, params[WEIGHT])
            draw("batch:  ", ("batch", "time"), placed["tokens"])
            draw("experts:", parameters[EXPERTS].axes, params[EXPERTS])
        compiled = jax.jit(make_eval_step(here)).lower(params, placed).compile()
        nats, tokens = compiled(params, placed)
    title = title or "one device"
    losses[title], forward[title] = float(nats / tokens), {} if mesh is None else tally(compiled, mesh)
    print(f"loss {losses[title]:.6f} nats a token")


tour()

# %% [markdown]
# ### `data`: copies of the model
#
# Every device holds all parameters and one row of the batch. Gradients are summed over devices. Memory limits the model
# to what fits one device.

# %%
tour(data=8)

# %% [markdown]
# ### `fsdp`: cut parameters, gathered when needed
#
# Fully sharded data parallelism. Rows are spread as before, but each device keeps an eighth of each matrix and of its
# gradient and optimizer state. A layer's weights are gathered right before they are used, and dropped after.

# %%
tour(fsdp=8)

# %% [markdown]
# ### `tensor`: heads and widths
#
# Devices share the work on the same tokens: a head each of attention, a part each of the MLPs' widths (the experts'
# too). Their partial results are summed at the end of each block, by an all-reduce. Here two groups of four, with half
# of the rows each.

# %%
tour(data=2, tensor=4)

# %% [markdown]
# ### `expert`: experts stay, rows travel
#
# For other weights the axis works like `fsdp`. But each device keeps two of the sixteen experts, and tokens are sent to
# the experts that they chose.

# %%
tour(expert=8)

# %% [markdown]
# ### `seq`: a part of each row
#
# For texts too long for one device: each holds a span of a row's tokens. Copies of parameters are on all devices here;
# in practice the axis is combined with others.

# %%
tour(data=2, seq=4)

# %% [markdown]
# ### Several at once

# %%
tour(expert=2, tensor=2, seq=2)

# %% [markdown]
# ## The same number everywhere
#
# Initial parameters are a function of the seed and not of the mesh. So the loss is the same on each mesh, but for the
# order of sums, which may change the last of about seven digits of a 32-bit float.
# `tests/parallel/test_meshes.py` compares gradients and optimizer steps in the same way.

# %%
print(f"{'mesh':32}{'loss':>12}{'minus one device':>20}")
for title, loss in losses.items():
    print(f"{title:32}{loss:12.7f}{loss - losses['one device']:20.1e}")

# %% [markdown]
# ## What devices tell each other
#
# `kimi_jax.analysis.hlo.collectives` reads the communication from a compiled program, with loops counted. These are the
# forward passes above. An **all-gather** collects the parts of an array on every device, an **all-reduce** sums
# arrays and leaves the sum on every device, an **all-to-all** gives each device a part of each other's array, and a
# **collective-permute** sends to one neighbour. Bytes are what one device receives in all of them.
#
# With the expert axis, loops move as many windows of rows as a step's routing needs. That only the run can tell; such
# loops are counted once, and `+` marks the numbers. CPUs move rows by all-gathers; TPUs and GPUs have a *ragged*
# all-to-all, which moves nothing but the rows that are to travel.


# %%
def show(found):
    for (kind, axes), (count, size, known) in sorted(found.items()):
        print(f"  {kind:20}{' and '.join(axes):18}{count:6}{size:12,} bytes{'' if known else '  +'}")


for title, found in forward.items():
    print(title if found else f"{title}: none")
    show(found)

# %% [markdown]
# The whole training step adds the backward pass and the optimizer. It is compiled here from shapes alone, without
# memory for the model. The transpose of an all-gather is a **reduce-scatter**: gradients are summed, and each device
# keeps its part. Muon adds an exchange before its iteration, and one after, so that each matrix is whole on one device
# while it is orthogonalised.

# %%
here = replace(config, mesh=Mesh(fsdp=4, tensor=2))
mesh, optimizer = make_mesh(here.mesh), make_optimizer(here)
with on_mesh(mesh):
    cut = batch_sharding(here)
    rows = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut) for name, x in batch.items()}
    rows["num_bytes"] = rows["tokens"]
    compiled = jax.jit(make_step(here, optimizer)).lower(abstract_state(here, optimizer), rows).compile()
print("training step, fsdp 4 x tensor 2")
show(tally(compiled, mesh))

# %% [markdown]
# ## A mesh that cannot work
#
# Each of these stops `run_training` before anything is allocated; `train_main.py` prints the same after `error:`. The
# message has the numbers and what to change.

# %%
for change in (
    {"mesh": Mesh(data=16)},
    {"mesh": Mesh(tensor=8)},
    {"mesh": Mesh(fsdp=8), "data": replace(config.data, batch_size=12)},
    {"mesh": Mesh(expert=8), "rules": Rules(expert_latent=("expert",))},
):
    try:
        run_training(replace(config, **change))
    except ConfigError as error:
        print(f"ConfigError: {error}\n")

# %% [markdown]
# ## Rows longer than a device
#
# What must a device know of the tokens on others? MLA attends to all of them: it gathers one compressed vector a token
# (the *latent*), which grows with the row. KDA has a state of fixed size, a matrix a head, and what a span of tokens
# does to it is an affine map, as large for a thousand tokens as for a million. Devices exchange these maps, and each
# computes the state that its span begins with. The short convolution before it needs three tokens of the neighbour.
#
# The bytes below are read from programs with the sizes of the full K3, over `seq` 8, for one row in one layer, forward,
# in float32. (In bfloat16, latents and the convolution's inputs take half; states stay float32.) The programs are
# compiled from shapes; nothing that large runs here.

# %%
k3 = load_config("k3").model
mesh = make_mesh(Mesh(seq=8))
h, k, latent = k3.kda.num_heads, k3.kda.head_dim, k3.mla.kv_lora_rank + k3.mla.qk_rope_head_dim


def received(f, whole, *arguments):
    """Bytes that a device receives in f of arrays, the first `whole` of which all devices have, the others spans."""
    specs = (P(),) * whole + (P(None, "seq"),) * (len(arguments) - whole)
    given = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for (shape, dtype), spec in zip(arguments, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        run = jax.shard_map(f, in_specs=specs, out_specs=P(None, "seq"))
        text = jax.jit(run).lower(*given).compile().as_text()
    return sum(each.total for each in hlo.collectives(text, dict(mesh.shape)))


def kda(*qkvg_beta):
    return context.kda(*qkvg_beta, documents=None, axis="seq", chunk_size=k3.kda.chunk_size)[0]


def conv(taps, x):
    return context.short_conv(x, taps, documents=None, axis="seq")


def latents(x):
    return context.gather_latents(x, "seq")[:, : x.shape[1]] + x  # some use of them, so that they are not left out


lengths = (2**13, 2**17, 2**20)
traffic = {"MLA: latents": [], "KDA: states": [], "KDA: convolution of q": []}
for t in lengths:
    keys = ((1, t, h, k), jnp.float32)
    traffic["MLA: latents"].append(received(latents, 0, ((1, t, latent), jnp.float32)))
    traffic["KDA: states"].append(received(kda, 0, *[keys] * 4, ((1, t, h), jnp.float32)))
    taps = ((h * k, k3.kda.conv_size), jnp.float32)
    traffic["KDA: convolution of q"].append(received(conv, 1, taps, ((1, t, h * k), jnp.float32)))
print(f"{'tokens in a row':24}" + "".join(f"{t:>14,}" for t in lengths))
for name, sizes in traffic.items():
    print(f"{name:24}" + "".join(f"{size:>14,}" for size in sizes) + "  bytes")

# %%
# %matplotlib inline

figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
for name, sizes in traffic.items():
    axis.loglog(lengths, np.array(sizes) / 2**20, "o-", ms=4, label=name)
axis.set(title="Received by each of 8 devices, one row, one layer", xlabel="tokens in a row", ylabel="MiB")
axis.set_xticks(lengths, ["8k", "128k", "1M"])
axis.minorticks_off()
axis.grid(alpha=0.3)
axis.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## Experts, exactly balanced
#
# A router does not choose experts evenly, and a step takes as long as its busiest device. Take K3's experts, 896 with
# 16 chosen by each token, on eight devices (*ranks* of the expert axis) with 112 experts and 256 tokens each. A *row*
# is one token on its way to one expert, so that a rank sends 256 x 16 = 4,096. Three routings:
#
# - **uniform**: every expert is as likely;
# - **zipf**: the n-th expert is chosen in proportion to 1/n, so that the popular ones live on rank 0;
# - **worst**: all tokens choose the same 16 experts, all on rank 0.
#
# `plan` takes the counts, how many tokens of each rank chose each expert, and decides which rank computes how many rows
# of each expert. With `balance="none"` an expert's rows are computed where it lives. With `"exact"`, the rank that has
# the fewest rows **borrows** the weights of some experts of the rank that has the most, and takes over just as many of
# their rows as fill it to the mean; then the next, until all are even. The router's choices are unchanged: the same
# experts compute the same rows, elsewhere.

# %%
R, E, K, S = 8, k3.moe.num_experts, k3.moe.experts_per_token, 256


def choose(routing):
    """[R S, K] different experts of each token, drawn in proportion to their popularity (Gumbel's top K)."""
    score = np.random.default_rng(0).gumbel(size=(R * S, E))
    if routing == "zipf":
        score -= np.log(np.arange(1, E + 1))
    if routing == "worst":
        score[:, :K] = np.inf
    return np.argsort(-score, axis=1, kind="stable")[:, :K].astype(np.int32)


mesh = make_mesh(Mesh(expert=R))


@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
def slices(indices):
    """What each rank knows: rows [source, destination] and lent experts [donor, borrower] that travel."""
    way = routes(indices, E, "expert", "exact", block=8, num_rows=S * K)
    return way.rows.size[None], way.weights.size[None]


planners = {balance: jax.jit(partial(plan, balance=balance)) for balance in ("none", "exact")}
rows, lent = {}, {}
for routing in ("uniform", "zipf", "worst"):
    indices = choose(routing)
    counts = np.stack([np.bincount(part.ravel(), minlength=E) for part in np.split(indices, R)]).astype(np.int32)
    plans = {balance: planner(counts) for balance, planner in planners.items()}
    rows[routing] = {balance: np.asarray(found.alloc).sum(0) for balance, found in plans.items()}
    with jax.set_mesh(mesh):
        sent, weights = map(np.asarray, slices(jax.device_put(indices, NamedSharding(mesh, P("expert")))))
    lent[routing] = weights[0]
    # Every rank finds the same plan, and rows and weights travel as it says.
    assert (sent == sent[0]).all() and (weights == weights[0]).all()
    assert (sent[0].sum(0) == rows[routing]["exact"]).all()
    assert (weights[0].sum(0) == np.asarray(plans["exact"].borrowed)).all()

# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
for axis, (routing, by_balance) in zip(axes, rows.items(), strict=True):
    for shift, (balance, each) in zip((-0.2, 0.2), by_balance.items(), strict=True):
        axis.bar(np.arange(R) + shift, each, width=0.4, label=f'balance="{balance}"')
    axis.axhline(S * K, color="gray", ls="--", lw=1, label="mean")
    busiest = by_balance["none"].max() / (S * K)
    axis.set(title=f"{routing}: up to {busiest:.2f} x the mean", xlabel="rank", xticks=range(R))
    axis.yaxis.set_major_formatter("{x:,.0f}")
axes[0].set_ylabel("rows that a rank computes")
axes[2].legend(fontsize=8)
plt.show()

# %% [markdown]
# Mind the scales: the dashed line is at 4,096 rows in each panel. As every rank computes exactly that many, arrays have
# fixed sizes without a capacity that tokens could exceed, and no token is dropped. Without balance, a rank needs room
# for all 32,768 rows, in case all tokens choose its experts.
#
# The price is the weights that travel. Any plan fits into 112 borrowed experts a rank, as many as it holds itself; the
# busiest experts are lent first, so that usually few are needed. A rank borrows from one other, whose number is above
# its bar.

# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
for axis, (routing, pairs) in zip(axes, lent.items(), strict=True):
    bars = axis.bar(range(R), pairs.sum(0), color="tab:green")
    donors = [f"from {donor}" if count else "" for donor, count in zip(pairs.argmax(0), pairs.sum(0), strict=True)]
    axis.bar_label(bars, donors, fontsize=7, padding=2)
    axis.set(title=f"{routing}: {pairs.sum()} borrowed in all", xlabel="rank", xticks=range(R))
    axis.set_ylim(0, max(4, 1.15 * pairs.sum(0).max()))
    axis.yaxis.get_major_locator().set_params(integer=True)
axes[0].set_ylabel("experts that a rank borrows")
plt.show()

# %% [markdown]
# ## To go on
#
# - **Train on a mesh.** `JAX_NUM_CPU_DEVICES=8 python train_main.py k3_tiny --mesh.fsdp 4 --mesh.expert 2` in a
#   terminal; on a machine with accelerators without the variable. A checkpoint opens on any other mesh.
# - **Choose a mesh.** Begin with `fsdp`; add `expert` for many experts, `seq` for long rows, `tensor` where there would
#   be more devices than rows in the batch, and `data` between slices joined by a slow network.
# - **See whether it fits.** `kimi-jax aot` compiles a training step for a TPU slice without having one, and reports
#   memory and collectives.
# - **Time it.** `benchmarks/moe.py` measures the experts' bytes and time for the routings above.
# - **Read on.** `kimi_jax/parallel/mesh.py` has meshes and rules, the rest of `kimi_jax/parallel/` what devices do
#   together.
