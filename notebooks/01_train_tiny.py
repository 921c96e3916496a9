# %% [markdown]
# # Train a small Kimi K3
#
# From nothing to generated text in about a minute on two CPU cores: look at a model, train it on the source code of
# Python's standard library, draw its curves and the load of its experts, and let it write. Nothing is downloaded but
# packages, and those only where they are missing.

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

# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np

from kimi_jax.analysis import sizes
from kimi_jax.config import TokenizerConfig, load_config
from kimi_jax.infer.generate import generate
from kimi_jax.infer.sampling import Sampling
from kimi_jax.store.open import open_model
from kimi_jax.train import metrics
from kimi_jax.train.loop import run_training

# %% [markdown]
# ## The model
#
# Kimi K3 reads tokens and gives, at each place, the logits of the next one. Three layers of four mix tokens by **Kimi
# Delta Attention** (KDA): each head holds a matrix that maps keys to values, lets it decay channel by channel and
# corrects it at every token, so that its cache does not grow with the text. The other layers, and always the last, are
# **multi-head latent attention** (MLA): they attend to every earlier token through one compressed vector a token, and
# use no position embedding, since KDA tells the order. After the first layer, the feed-forward part is a **mixture of
# experts**: a router picks a few of many small networks for each token, and a bias on its scores keeps their load
# even. **Attention Residuals** replace the single residual stream: a layer's input is a weighted mean, with weights
# computed from the token, of the sums that earlier blocks of layers left and of the block under way.
#
# `k3_tiny` has all of these parts at small sizes. Here it is made smaller still, with bytes for tokens. A config is
# made of frozen dataclasses, so a change is a `replace`.

# %%
steps = 80

base = load_config("k3_tiny")
config = replace(
    base,
    name="notebook",
    model=replace(base.model, vocab_size=320, hidden_size=96, num_layers=5, mla_layers=(3, 4), attn_res_block_size=3),
    data=replace(
        base.data, sequence_length=256, batch_size=8, validation_fraction=0.005, tokenizer=TokenizerConfig(kind="bytes")
    ),
    train=replace(base.train, steps=steps, eval_every=20, eval_tokens=20_000, sample_tokens=100),
)

# %% [markdown]
# `report` lists every parameter, layers of one kind together, without allocating any. In the pattern, K is KDA and M
# is MLA. The command `kimi-jax inspect k3` prints the same for the released 2.78 T parameters.

# %%
print(sizes.report(config))

# %% [markdown]
# ## Training
#
# Matrices are trained by Muon, per head in attention; the rest by AdamW. The first seconds go into compiling the step.
# An untrained model gives each of the 320 tokens about the same probability, which costs log2(320) = 8.3 bits a byte.
#
# Interrupt the kernel and the run saves its state; run the cell again and it goes on. A finished run prints its
# summary again.

# %%
result = run_training(config)

# %% [markdown]
# `xz -9` compresses the same validation text; it is there for scale. A model this small needs more than 80 steps to
# come near it.
#
# ## Curves
#
# The run's folder holds `metrics.jsonl`, one record a line: `train` for each step, `eval`, and one `final`.

# %%
# %matplotlib inline

folder = Path(config.train.runs_dir) / config.name
records = list(metrics.read(folder / "metrics.jsonl"))
trained = [record for record in records if record["kind"] == "train"]
evaluated = [record for record in records if record["kind"] in ("eval", "final")]


def column(rows, name):
    return np.array([row[name] for row in rows])


figure, (bits, norm, logit) = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
at = column(trained, "step")
bits.plot(at, column(trained, "bits_per_byte"), lw=1, label="training, each step")
bits.plot(column(evaluated, "step"), column(evaluated, "bits_per_byte"), "o-", ms=4, label="validation")
bits.axhline(result["xz_bits_per_byte"], color="gray", ls="--", lw=1, label="xz -9")
bits.set(title="Loss", ylabel="bits per byte", ylim=(0, None))
bits.legend(fontsize=8)
norm.plot(at, column(trained, "grad_norm"), lw=1)
norm.set(title="Gradient", ylabel="norm over all parameters", ylim=(0, None))
logit.plot(at, column(trained, "max_logit"), lw=1)
logit.set(title="Attention", ylabel="largest logit of any MLA head", ylim=(0, None))
for axis in (bits, norm, logit):
    axis.set_xlabel("step")
    axis.grid(alpha=0.3)
plt.show()

# %% [markdown]
# A logit above 100 would make QK-Clip scale down the query and key weights of its head; this run stays far below.
#
# ## Expert load
#
# `expert_load` counts how often each expert of each mixture layer was chosen in a step. Divided by the layer's mean, 1
# is even. The largest quotient less 1 is the *max violation*. After each step, Quantile Balancing sets the bias of
# every router to the one that would have spread that step's tokens evenly. What is left is how far the next step
# differs: much while the weights move fast, little as the learning rate falls.

# %%
load = column(trained, "expert_load")  # [steps, moe layers, experts]
share = load / load.mean(axis=-1, keepdims=True)
layers = config.model.moe_layers

figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained", gridspec_kw={"width_ratios": [1, 1, 1.1]})
for axis, number in zip(axes, (0, -1), strict=False):
    image = axis.imshow(share[number], cmap="coolwarm", vmin=0, vmax=2, aspect="auto")
    axis.set(title=f"Step {at[number]}", xlabel="expert", xticks=range(0, share.shape[-1], 3))
    axis.set(ylabel="layer", yticks=range(len(layers)), yticklabels=layers)
figure.colorbar(image, ax=axes[:2], label="load / mean of layer", extend="max")
for row, layer in enumerate(layers):
    axes[2].plot(at, share[:, row].max(axis=-1) - 1, lw=1, label=f"layer {layer}")
axes[2].set(title="Max violation", xlabel="step", ylabel="largest load / mean - 1", ylim=(0, None))
axes[2].grid(alpha=0.3)
axes[2].legend(fontsize=8)
plt.show()

# %% [markdown]
# ## Generation
#
# A checkpoint opens with its config and its tokenizer. Prompts of different lengths share a batch, and each is
# continued as if it were alone. Temperature 0 takes the likeliest token each time, and a model this little trained then
# repeats itself; at 0.8, `top_p` leaves out the unlikely tail.

# %%
model, _, tokenizer = open_model(folder)
prompts = ["def ", "import ", "class Parser:\n    def __init__(self"]
tokens = [[tokenizer.bos_id, *map(int, tokenizer.encode(prompt))] for prompt in prompts]
greedily = Sampling(max_new_tokens=64, stop=tokenizer.stop_ids)
greedy = generate(model, tokens, greedily)
drawn = generate(model, tokens, replace(greedily, temperature=0.8, top_p=0.95, seed=0))
for name, continuations in (("temperature 0", greedy), ("temperature 0.8", drawn)):
    for prompt, continuation in zip(prompts, continuations, strict=True):
        print(f"--- {name}\n{prompt}{tokenizer.decode(continuation)}")

# %% [markdown]
# ## To go on
#
# - **Train longer.** `steps` may rise; the run then continues from its checkpoint, on the longer schedule. Any other
#   model, data or optimizer needs another `name`, or `run_training(config, restart=True)`.
# - **Train the full `k3_tiny`.** `python train_main.py k3_tiny` in a terminal, or `run_training(base)` here.
# - **Train on your text.** `data=replace(base.data, sources=(Source(kind="text", path="folder", glob="**/*.txt"),))`
#   with `Source` from `kimi_jax.config`; `.jsonl` and `.parquet` work too.
# - **Evaluate.** `runs.evaluate(folder, source=Source(kind="text", path="some.txt"))` gives bits per byte.
# - **Read on.** `README.md` says where each part lies; `kimi_jax/model/kimi.py` is where to begin.
