# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What Top-1 Chunk selects
#
# In Top-1 Chunk, each query attends to its local chunk and to one selected past chunk. This notebook trains a small
# model and examines the selected chunks: their positions, distances and text. It takes a few minutes on two CPU cores.
#
# The first cell installs seqjax if it is missing: from a wheel in the notebook's directory, or from the repository.

# %%
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = "https://github.com/OWNER/seqjax"  # placeholder: set the repository address here

if importlib.util.find_spec("seqjax") is None:
    extra = "[cuda12]" if shutil.which("nvidia-smi") else ""
    wheels = sorted(Path.cwd().glob("seqjax-*.whl"))  # a wheel in this directory takes precedence
    package = f"seqjax{extra} @ {wheels[-1].as_uri() if wheels else f'git+{REPOSITORY}'}"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package], check=True)

# %% tags=["parameters"]
CONFIG = "top1_chunk:demo"  # a Top-1 Chunk config and size; `debug` takes seconds and learns almost nothing
WORKDIR = "runs/selection"
DOMAIN = "python"  # the domain to examine; the demo model trains on `prose` and `doctest`
N_BLOCKS = 8  # held-out text blocks per domain

# %% [markdown]
# ## Train
#
# As in `quickstart.ipynb`. You can interrupt the cell at any time; run it again to resume.

# %%
import seqjax
from seqjax import presets
from seqjax.config import from_config_dict
from seqjax.training.loop import train

finished = train(from_config_dict(presets.read_config(CONFIG)), WORKDIR)
m = seqjax.load(WORKDIR)

# %% [markdown]
# ## Queries, keys and choices
#
# `queries_and_keys` runs the model on held-out text and returns the queries and keys of each layer. `select_chunk` is
# the model's own selection. This notebook compares two rules:
#
# * **exact**: the chunk with the largest attention mass, the sum of exp(score). It scores every past key.
# * **approx**: the chunk with the largest product of the query and the chunk's mean key. It scores one key per chunk,
#   which is cheaper.
#
# Suffixes in names are dimensions: L layers, B text blocks, T positions, H heads.

# %%
import functools

import jax
import jax.numpy as jnp
import numpy as np

import kernels_pallas
from seqjax.data import open_corpus
from seqjax.models.entropy import queries_and_keys
from seqjax.ops.attention import attention_entropy

mixer, seq_len = m.config.model.mixer, m.config.train.seq_len
chunk, n_layers, n_heads = mixer.chunk_size, m.config.model.n_layers, mixer.heads
corpus = open_corpus(m.config.data, seq_len=seq_len, vocab_size=m.config.model.vocab_size)
forward = jax.jit(functools.partial(queries_and_keys, m.model))


def per_layer(x):
    return np.asarray(x).reshape(n_layers, -1, *x.shape[1:])


tokens, scored = {}, {}
for domain in corpus.eval_domains:
    tokens[domain] = corpus.eval_blocks(domain, count=N_BLOCKS).tokens[:, :seq_len].astype(np.int32)
    with jax.set_mesh(m.mesh):
        layers = forward(m.params, tokens[domain])
    scored[domain] = tuple(jnp.concatenate(parts) for parts in zip(*layers, strict=True))  # joins layers and blocks

chosen_LBTH = {
    rule: per_layer(kernels_pallas.select_chunk(*scored[DOMAIN], chunk_size=chunk, selection=rule))
    for rule in ("exact", "approx")
}
own_T = np.arange(seq_len) // chunk  # the chunk of each query
distances = np.arange(1, own_T[-1] + 1)
print(f"{n_layers} layers of {n_heads} heads; {seq_len} tokens in {own_T[-1] + 1} chunks of {chunk}")
print(f"the model was trained with selection={mixer.selection!r}")

# %% [markdown]
# ## Which chunk each query chose
#
# The plot shows one text block. Each panel is a head, with the query position on the horizontal axis and the chosen
# chunk on the vertical axis. The grey stairs are the local chunk, which is always visible. Blue: both rules choose this
# chunk. Orange: exact chooses this chunk, and approx chooses another. A long bar is a run of queries with the same
# choice; short marks are single queries.
#
# After the demo's training, most heads change their choice at almost every token. Many heads have longer bars just
# below the stairs: the first queries in a chunk have little local text, and choose the previous chunk.

# %%
import matplotlib.pyplot as plt

from seqjax.pictures import COLORS

LOOKS = {"approx chooses the same": COLORS[0], "approx chooses another": COLORS[1]}
size = (2.7 * n_heads + 0.6, 1.5 * n_layers + 0.9)
figure, axes = plt.subplots(
    n_layers, n_heads, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
)
positions = np.arange(seq_len)
for layer in range(n_layers):
    for head in range(n_heads):
        panel = axes[layer][head]
        panel.fill_between(positions, own_T - 0.5, own_T + 0.5, color="0.88", linewidth=0, step="mid")
        exact_T, approx_T = (chosen_LBTH[rule][layer, 0, :, head] for rule in ("exact", "approx"))
        for color, same in zip(LOOKS.values(), (True, False), strict=True):
            shown = (own_T > 0) & ((exact_T == approx_T) == same)
            panel.plot(positions[shown], exact_T[shown], "|", color=color, markersize=6, markeredgewidth=0.8)
        panel.set_title(f"layer {layer}, head {head}", loc="left", fontsize=9)
        panel.set_yticks(range(0, own_T[-1] + 1, max(1, len(distances) // 3)))
        panel.spines[["top", "right"]].set_visible(False)
figure.supxlabel("position of the query", fontsize=10)
figure.supylabel("chosen chunk", fontsize=10)
handles = [plt.Line2D([], [], marker="s", linestyle="none", color=color, label=label) for label, color in LOOKS.items()]
handles.append(plt.Line2D([], [], marker="s", linestyle="none", color="0.88", label="own chunk"))
figure.legend(handles=handles, frameon=False, fontsize=9, loc="outside upper right", ncols=3)
plt.show()

# %% [markdown]
# ## How far back, and how often both rules agree
#
# Left: the distance from the query's chunk to the chosen chunk, with the model's training rule. The dotted line is a
# random choice among past chunks. Right: the fraction of queries for which exact and approx choose the same chunk,
# among queries with at least two past chunks.
#
# After the demo's training, the previous chunk is chosen more often than by chance. Both rules agree far more often
# than by chance, but not always: a mean key is a fair summary of its chunk.

# %%
back_LBTH = own_T[:, None] - chosen_LBTH[mixer.selection]
can_choose = own_T >= 2
# A query in chunk n chooses each of 1 to n chunks back with probability 1/n.
at_random = np.array([np.mean((own_T[own_T > 0] >= d) / own_T[own_T > 0]) for d in distances])
agree_LH = (chosen_LBTH["exact"] == chosen_LBTH["approx"])[:, :, can_choose].mean((1, 2))
chance = np.mean(1 / own_T[can_choose])

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
for layer, marker in zip(range(n_layers), "osD^v<>Pp*hX" * n_layers, strict=False):
    back = back_LBTH[layer][:, own_T > 0]
    shares = [np.mean(back == d) for d in distances]
    left.plot(distances, shares, marker=marker, markersize=4, color=COLORS[layer % len(COLORS)], label=f"layer {layer}")
left.plot(distances, at_random, ":", color="0.3", label="at random")
left.set_xlabel("chunks back")
left.set_ylabel("share of queries")
left.set_ylim(bottom=0)
left.set_title("how far back", loc="left", fontsize=10)
left.legend(frameon=False, fontsize=9)
left.spines[["top", "right"]].set_visible(False)
image = right.imshow(agree_LH, cmap="cividis", vmin=0, vmax=1, aspect="auto")
for layer, head in np.ndindex(agree_LH.shape):
    shade = "white" if agree_LH[layer, head] < 0.6 else "black"
    right.text(head, layer, f"{agree_LH[layer, head]:.0%}", ha="center", va="center", color=shade)
right.set_xticks(range(n_heads), [f"head {head}" for head in range(n_heads)])
right.set_yticks(range(n_layers), [f"layer {layer}" for layer in range(n_layers)])
right.set_title(f"exact and approx agree (at random: {chance:.0%})", loc="left", fontsize=10)
figure.colorbar(image, ax=right, format=lambda share, _: f"{share:.0%}")
plt.show()

far = np.mean(back_LBTH[:, :, own_T > 0] == 1)
print(f"{far:.0%} of the queries choose the chunk just before their own; at random it would be {at_random[0]:.0%}.")
low, high = agree_LH.min(), agree_LH.max()
print(f"Both rules agree for {agree_LH.mean():.0%} of the queries: {low:.0%} to {high:.0%} by head.")

# %% [markdown]
# ## How sharp the choice is
#
# Left: the entropy of the full softmax over the past. The exact rule ranks chunks by the weights of this softmax. The
# entropy is 0 if one token has all weight, and ln(i + 1) if position i weights all tokens equally; the plot shows the
# fraction of ln(i + 1). Solid lines are training domains. (Figure 4 in the paper shows this entropy for softmax
# attention, and `seqjax evaluate --workdir=DIR --entropy` measures it. That command refuses Top-1 Chunk, because its
# weights only cover two chunks.)
#
# Right: the distribution of that weight. Top-1 keeps the weight in the local chunk and the chosen chunk, and drops the
# rest.
#
# After the demo's training, the layers differ, but the domains hardly differ: their lines overlap. The weight on the
# past is spread widely, so the chosen chunk has only slightly more weight than an even split. This is the result of a
# few minutes of training; train longer and compare.

# %%
entropy_LBTH = {domain: per_layer(jax.jit(attention_entropy)(*both)) for domain, both in scored.items()}
most_T1 = np.log(np.arange(2, seq_len + 1))[:, None]  # position 0 only has one token
relative_L = {domain: (e[:, :, 1:] / most_T1).mean((1, 2, 3)) for domain, e in entropy_LBTH.items()}


def chunk_weights(both):
    """Return each chunk's weight in the softmax over the past, [T, H, chunks], for one sequence."""
    q_THK, k_TGK = both
    k_THK = jnp.repeat(k_TGK, n_heads // k_TGK.shape[1], axis=1)
    s_THS = jnp.einsum("thk,shk->ths", q_THK, k_THK, preferred_element_type=jnp.float32) * q_THK.shape[-1] ** -0.5
    p_THS = jax.nn.softmax(jnp.where(jnp.tri(seq_len, dtype=bool)[:, None], s_THS, -jnp.inf), axis=-1)
    p_THS = jnp.pad(p_THS, ((0, 0), (0, 0), (0, -seq_len % chunk)))
    return p_THS.reshape(seq_len, n_heads, -1, chunk).sum(-1)


weights_LBTHc = per_layer(jax.jit(lambda both: jax.lax.map(chunk_weights, both))(scored[DOMAIN]))
model_choice_LBTH = chosen_LBTH[mixer.selection]


def weight_of(chunks):
    chunks = np.broadcast_to(np.maximum(chunks, 0), weights_LBTHc.shape[:-1])
    return np.take_along_axis(weights_LBTHc, chunks[..., None], axis=-1)[..., 0]


in_own_LBTH, in_chosen_LBTH = weight_of(own_T[:, None]), weight_of(model_choice_LBTH)
later = own_T > 0  # queries in the first chunk have no choice

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
for i, (domain, shares) in enumerate(relative_L.items()):
    line = "-" if corpus.side(domain) == "in domain" else "--"
    left.plot(range(n_layers), shares, line, marker="o", markersize=4, color=COLORS[i % len(COLORS)], label=domain)
left.set_ylabel("entropy, share of ln(i + 1)")
left.set_ylim(0, 1)
left.set_title("entropy over the whole past", loc="left", fontsize=10)
bottom = np.zeros(n_layers)
for label, shares, color in (("own chunk", in_own_LBTH, "0.8"), ("chosen chunk", in_chosen_LBTH, COLORS[0])):
    height = shares[:, :, later].mean((1, 2, 3))
    right.bar(range(n_layers), height, bottom=bottom, color=color, width=0.6, label=label)
    bottom += height
rest = {"color": "white", "edgecolor": "0.6", "label": "the rest, dropped"}
right.bar(range(n_layers), 1 - bottom, bottom=bottom, width=0.6, **rest)
right.set_ylabel("share of the weight")
right.set_title(f"where the weight lies ({DOMAIN})", loc="left", fontsize=10)
for panel in (left, right):
    panel.set_xticks(range(n_layers))
    panel.set_xlabel("layer")
    panel.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    panel.spines[["top", "right"]].set_visible(False)
plt.show()

even = np.mean(1 / own_T[later])
for layer in range(n_layers):
    of_past = (in_chosen_LBTH[layer] / np.maximum(1 - in_own_LBTH[layer], 1e-9))[:, later].mean()
    print(f"layer {layer}: the chosen chunk has {of_past:.0%} of the weight on past chunks, an even split {even:.0%}")

# %% [markdown]
# ## The selected text
#
# For each layer, this prints the query with the largest weight on its chosen chunk. Only queries in the second half of
# their chunk count, because they have enough local text. The first line ends with the query's token, between marks. The
# second line is the chosen chunk, with marks around its token with the largest weight. These are the clearest cases,
# not typical ones. A token is a byte here, and ⏎ is a line break.


# %%
def text_of(ids):
    return m.tokenizer.decode(ids).replace("\n", "⏎")


def marked(ids, at):
    return f"{text_of(ids[:at])}»{text_of(ids[at : at + 1])}«{text_of(ids[at + 1 :])}"


queries_LBTHK, keys_LBTGK = (per_layer(x.astype(jnp.float32)) for x in scored[DOMAIN])
candidate_T = (own_T >= 2) & (np.arange(seq_len) % chunk >= chunk // 2)
for layer in range(n_layers):
    sure_BTH = np.where(candidate_T[:, None], in_chosen_LBTH[layer], 0)
    block, at, head = np.unravel_index(np.argmax(sure_BTH), sure_BTH.shape)
    choice, start = model_choice_LBTH[layer, block, at, head], own_T[at] * chunk
    past = slice(choice * chunk, (choice + 1) * chunk)
    group = head // (n_heads // keys_LBTGK.shape[3])
    seen = int(np.argmax(keys_LBTGK[layer, block, past, group] @ queries_LBTHK[layer, block, at, head]))
    ids, share = tokens[DOMAIN][block].tolist(), sure_BTH[block, at, head]
    print(f"layer {layer}, head {head}: chunk {choice} of the {own_T[at]} before has {share:.0%} of all weight")
    print(f"  query   {marked(ids[start : at + 1], at - start)}")
    print(f"  chosen  {marked(ids[past], seen)}\n")

# %% [markdown]
# ## Next steps
#
# * Train longer, or with the other rule, in another `WORKDIR`: `CONFIG =
#   "top1_chunk:demo,train.steps=3000,model.mixer.selection=approx"`.
# * Examine another run or an imported model with attention: `seqjax.load`, then `queries_and_keys`.
# * `docs/mixers.md` defines Top-1 Chunk. `docs/kernels.md` explains how the selection is computed fast.
