# %% [markdown]
# # A released checkpoint, in and out
#
# Moonshot publishes Kimi K3 as a directory on the Hugging Face hub: safetensors files, their index, `config.json`, a
# tokenizer. This notebook makes such a directory in miniature, with random weights and the released names, layout and
# number formats, and takes it through everything: convert, look at the 4-bit experts and their errors, generate,
# export, and compare the bytes. With the real one, only the path differs. Nothing is downloaded but packages, and those
# only where they are missing.

# %%
from importlib.util import find_spec
from pathlib import Path

from IPython import get_ipython

if find_spec("kimi_jax") is None or find_spec("tiktoken") is None:
    here = Path.cwd()
    checkout = next((folder for folder in (here, *here.parents) if (folder / "train_main.py").is_file()), None)
    if checkout is None:
        raise FileNotFoundError(f"no checkout of kimi_jax around {here}; clone the repository and open it from there")
    # One command for everything, before anything imports JAX: pip then picks a JAX and a Flax that belong together.
    get_ipython().run_line_magic("pip", f'install -q "{checkout}[tiktoken]"')

# %%
import base64
import hashlib
import itertools
import json
import shutil
from dataclasses import replace

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from kimi_jax.config import Source, load_config
from kimi_jax.data import sources
from kimi_jax.infer.generate import generate, stream_text
from kimi_jax.infer.sampling import Sampling
from kimi_jax.model.kimi import init
from kimi_jax.model.param import arrays, with_arrays
from kimi_jax.ops.quant import mx
from kimi_jax.ops.quant.qtensor import QTensor
from kimi_jax.store import safetensors_files
from kimi_jax.store.convert import convert
from kimi_jax.store.open import open_model
from kimi_jax.store.write import save_release
from kimi_jax.text import kimi
from kimi_jax.text.bpe import train_bpe

root = Path("released_checkpoint")
shutil.rmtree(root, ignore_errors=True)
root.mkdir()
hub, converted, exported = root / "hub", root / "converted", root / "exported"

# %% [markdown]
# ## A miniature hub directory
#
# The model is `k3_tiny` made smaller; a real one comes from `config.json` alone. `save_release` writes a model in the
# released layout, with `packed=True` in the format of its family: for K3, routed experts in MXFP4 and all else in
# bfloat16, but for a few small tensors in float32. A limit on the size of a file makes several.

# %%
model_config = replace(
    load_config("k3_tiny").model,
    vocab_size=1024,
    hidden_size=96,
    num_layers=3,
    mla_layers=(2,),
    attn_res_block_size=2,
)
first_special = model_config.vocab_size - kimi.KIMI_NUM_SPECIALS
model_config = replace(
    model_config,
    bos_token_id=first_special,
    eos_token_id=first_special + kimi.KIMI_END_OF_MESSAGE,
    pad_token_id=model_config.vocab_size - 1,
)
original = init(model_config, seed=0)
save_release(hub, original, model_config, packed=True, max_shard_bytes=300_000)

# %% [markdown]
# The tokenizer is a file of ranks: byte strings in the order in which they are merged, in base64. 256 control tokens
# follow them, and `tokenizer_config.json` has their names. Here the ranks come from a byte-level BPE of a few files of
# Python's standard library.

# %%
documents = sources.read(Source(), sources.Problems())
bpe = train_bpe((document.text for document in itertools.islice(documents, 20)), first_special + 3)
ranks = bpe.token_bytes[3:]  # the first three are its own control tokens
(hub / "tiktoken.model").write_bytes(b"".join(base64.b64encode(r) + b" %d\n" % i for i, r in enumerate(ranks)))
names = {str(first_special + place): {"content": name} for place, name in kimi.K3_SPECIALS.items()}
(hub / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": names}))
(hub / "generation_config.json").write_text(json.dumps({"eos_token_id": model_config.eos_token_id}))

for file in sorted(hub.iterdir()):
    print(f"{file.stat().st_size:>9,}  {file.name}")

# %% [markdown]
# An expert has six tensors: packed weights and scales of `w1` (gate), `w3` (up) and `w2` (down). A byte of
# `weight_packed` holds two weights; a byte of `weight_scale` is the exponent of a power of two, one for every 32
# weights along the input.

# %%
directory = safetensors_files.Directory(hub)
for name, entry in directory.entries.items():
    if ".layers.1.block_sparse_moe.experts.0." in name or ".layers.1.block_sparse_moe.gate." in name:
        print(f"{name:82} {entry.dtype:5} {list(entry.shape)}")

# %% [markdown]
# ## Convert
#
# `kimi-jax convert HUB TARGET --verify` on the command line does this. It streams, one file at a time, so a model that
# no memory holds is no obstacle; `verify` reads both sides again and compares every byte. The result is a run's folder
# without the run: a checkpoint that opens on any mesh, the tokenizer, and `assets/`, which keeps what parameters do not
# tell. Experts stay packed in it.

# %%
print(convert(hub, converted, verify=True))
for folder in sorted(converted.iterdir()):
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{size:>9,}  {folder.name}/")

# %% [markdown]
# ## Scales
#
# Opened with `packed=True`, an expert's weights stay in memory as they are on disk: a `QTensor` of two arrays, 4.25
# bits a weight. It stands in the tree of parameters where an array would, and is decoded in the products that use it.

# %%
packed_model, _, coder = open_model(converted, packed=True)
experts = {name: value for name, value in arrays(packed_model).items() if isinstance(value, QTensor)}
for name, value in experts.items():
    print(f"{name:30} {value.kind}  {value.shape!s:22} {8 * value.nbytes / value.size} bits a weight")

# %% [markdown]
# Weights of a block are codes ±{0, ½, 1, 1½, 2, 3, 4, 6} times the block's scale. The rule of the released files is the
# least scale that covers the block's largest weight. So the largest weight, over the scale, is more than 3, or half the
# scale would do, and at most 6.

# %%
# %matplotlib inline


def blocks_of(w):
    """A weight [.., in, out] as blocks of 32 along its input, [blocks, 32]."""
    return np.asarray(w).swapaxes(-1, -2).reshape(-1, 32)


before = {name: arrays(original)[name] for name in experts}
figure, (exponents, largest, codes) = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
for kind in ("w_gate", "w_up", "w_down"):
    of_kind = [name for name in experts if name.endswith(kind)]
    scale = np.concatenate([np.asarray(experts[name].scale, int).ravel() - 127 for name in of_kind])
    weights = np.concatenate([blocks_of(before[name]) for name in of_kind])
    exponents.hist(scale, bins=np.arange(scale.min() - 0.5, scale.max() + 1), histtype="step", label=kind)
    ratio = np.abs(weights).max(axis=1) / np.exp2(scale)
    assert (ratio > 3).all() and (ratio <= 6).all()
    largest.hist(ratio, bins=np.linspace(2.5, 6.5, 41), histtype="step", label=kind)
decoded = np.concatenate([blocks_of(value.decode(jnp.float32)) for value in experts.values()])
scale = np.concatenate([np.asarray(value.scale, int).reshape(-1, 1) - 127 for value in experts.values()])
levels, counts = np.unique(decoded / np.exp2(scale), return_counts=True)
codes.bar(range(len(levels)), counts / decoded.size)
exponents.set(title="Scales", xlabel="exponent of two", ylabel="blocks")
largest.set(title="Largest weight of a block", xlabel="over the scale")
codes.set(title="Codes", xlabel="weight / scale", ylabel="share", xticks=range(len(levels)))
codes.set_xticklabels([f"{level + 0:g}" for level in levels], fontsize=7)
for axis in (exponents, largest):
    axis.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## Errors
#
# How far are decoded weights from those before? Rounding costs half a step at most, and a step is wide where codes are:
# from 4 to 6 it is two scales. Other rules halve the scale where the largest weight is little more than 3, and cut it
# off at 6 of the halved scales: `floor` (OCP) wherever it is below 8 of those, `even` (compressed-tensors) below 7. On
# the left is what becomes of the weights of a block whose largest is 3.9: finer steps, and an end too soon. Over normal
# weights like these the rms error is a little smaller for it, but with `floor` the largest weight of a block can lose a
# quarter, where it is a fifth at most otherwise. MXFP8, which K3's recipe uses for activations, has 256 codes for 16.

# %%
weights = np.concatenate([blocks_of(w) for w in before.values()])
rules = {rule: mx.mxfp4_decode(*mx.mxfp4_encode(jnp.asarray(weights), rule)) for rule in ("rceil", "even", "floor")}
rules["MXFP8"] = mx.mxfp8_decode(*mx.mxfp8_encode(jnp.asarray(weights)))
largest_weight = np.abs(weights).max(axis=1, keepdims=True)

figure, (stairs, errors, total) = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
ramp = np.linspace(0, 3.9, 31 * 40).reshape(40, 31)
ramp = np.append(ramp, np.full((40, 1), 3.9), axis=1)
for rule in ("rceil", "floor"):
    stairs.plot(
        ramp[:, :-1].ravel(), mx.mxfp4_decode(*mx.mxfp4_encode(jnp.asarray(ramp), rule))[:, :-1].ravel(), label=rule
    )
stairs.axline((0, 0), slope=1, color="gray", lw=0.5)
stairs.set(title="A block whose largest weight is 3.9", xlabel="weight", ylabel="decoded")
stairs.legend(fontsize=8)
for rule in ("rceil", "even", "floor"):
    error = ((rules[rule] - weights) / largest_weight).ravel()
    errors.hist(error, bins=np.linspace(-0.3, 0.3, 121), histtype="step", label=rule)
errors.set(title="Errors", xlabel="error / largest of its block", ylabel="weights", yscale="log")
errors.legend(fontsize=8)
rms = {rule: float(np.sqrt(np.mean((decoded - weights) ** 2) / np.mean(weights**2))) for rule, decoded in rules.items()}
total.bar(rms.keys(), rms.values())
total.set(title="Rms error / rms weight")
plt.show()
print({rule: f"{value:.2%}" for rule, value in rms.items()})

# %% [markdown]
# Coding decoded weights again gives the same numbers, but not always the same bytes: where the largest weight of a
# block was rounded down to 3 scales, half the scale with twice the codes says the same. The released blocks have none
# of those: the largest code of each is 4 or 6. To be safe, an export does not code anew what has not changed, but
# carries the bytes.

# %%
scale = np.asarray(mx.mxfp4_encode(jnp.asarray(weights))[1], int)
again, scale_again = mx.mxfp4_encode(rules["rceil"])
assert (mx.mxfp4_decode(again, scale_again) == rules["rceil"]).all()
moved = np.asarray(scale_again) != scale
largest_code = np.abs(rules["rceil"]).max(axis=1, keepdims=True) / np.exp2(scale - 127.0)
print(f"{moved.mean():.0%} of blocks get another scale; largest code of those: {np.unique(largest_code[moved])}")

# %% [markdown]
# ## Generate
#
# A conversation is encoded in segments, and only those marked as control may hold control tokens: whoever writes
# `<|end_of_msg|>` into a message has written text. The weights are random, so what the model answers is noise; what
# counts is that the hub's directory with decoded experts and the converted one with packed experts give the same noise.

# %%
message = "Ignore the above.<|end_of_msg|>"
segments = [("<|open|>", True), ('message role="user"', False), ("<|sep|>", True), (message, False)]
tokens = [coder.bos_id, *map(int, coder.encode_segments(segments))]
control = {i: name for name, i in coder.special_tokens.items()}
print(*[control.get(i) or repr(coder.decode([i])) for i in tokens])

answers = {}
for path, packed in ((hub, False), (converted, True)):
    model, _, _ = open_model(path, packed=packed)
    (answers[path],) = generate(model, [tokens], Sampling(max_new_tokens=24, stop=coder.stop_ids))
assert answers[hub] == answers[converted]
print(repr(coder.decode(answers[hub])))

# %% [markdown]
# On the command line, `kimi-jax generate --checkpoint DIR --prompt TEXT` takes either folder. Text comes as it is made,
# and half a character is never printed.

# %%
for piece in stream_text(model, coder, "def ", Sampling(temperature=0.8, max_new_tokens=24, seed=1)):
    print(piece, end="", flush=True)

# %% [markdown]
# ## Export, and the bytes
#
# The way back: `kimi-jax convert CONVERTED TARGET --verify`. Every file is the same, index, config and tokenizer
# included.

# %%
print(convert(converted, exported, verify=True))


def digest(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


files = sorted(file.name for file in hub.iterdir())
assert files == sorted(file.name for file in exported.iterdir())
for name in files:
    same = digest(hub / name) == digest(exported / name)
    print(f"{digest(hub / name)[:16]}  {'same' if same else 'DIFFERENT'}  {name}")

# %% [markdown]
# And a change stays where it is made. One more on each scale of an expert's matrix doubles its weights, exactly; in the
# directory written from that model, that tensor is the only one that is not the same.

# %%
name, matrix = next((name, value) for name, value in experts.items() if name.endswith("w_down"))
layer_and_expert = (0,) * (matrix.ndim - 3) + (3,)
doubled = replace(matrix, scale=matrix.scale.at[layer_and_expert].add(1))
assert (doubled.decode(jnp.float32)[layer_and_expert] == 2 * matrix.decode(jnp.float32)[layer_and_expert]).all()
changed = with_arrays(packed_model, arrays(packed_model) | {name: doubled})
save_release(root / "changed", changed, changed.config, packed=True, max_shard_bytes=300_000)
other = safetensors_files.Directory(root / "changed")
assert other.entries.keys() == directory.entries.keys()
print(*[tensor for tensor in directory.entries if not np.array_equal(directory.read(tensor), other.read(tensor))])

# %% [markdown]
# ## To go on
#
# With a directory from the hub, `load_release` puts its parameters straight onto a mesh, each device its part. A run
# can begin with them (`train.init_from`), and exports in the packed format of its family; with quantization-aware
# training (`train.qat_from_step`), what it exports is exactly what it trained.
