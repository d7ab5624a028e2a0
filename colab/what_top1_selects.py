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
# In Top-1 Chunk a query attends to its own chunk of the text and to one earlier chunk, which it selects. This notebook
# trains a small model and looks at what was selected: which chunk, how far back, and what is written there. Two CPU
# cores take a few minutes.
#
# The first cell installs seqjax, unless it is installed already: from a wheel beside the notebook, or from its
# repository.

# %%
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = "https://github.com/OWNER/seqjax"  # a placeholder: write the address of the repository here

if importlib.util.find_spec("seqjax") is None:
    extra = "[cuda12]" if shutil.which("nvidia-smi") else ""
    wheels = sorted(Path.cwd().glob("seqjax-*.whl"))  # one beside the notebook comes first
    package = f"seqjax{extra} @ {wheels[-1].as_uri() if wheels else f'git+{REPOSITORY}'}"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package], check=True)

# %% tags=["parameters"]
CONFIG = "top1_chunk:demo"  # a config of Top-1 Chunk and a size; `debug` takes seconds and has learned next to nothing
WORKDIR = "runs/selection"
DOMAIN = "python"  # the text that is looked at; the demo model is trained on `prose` and `doctest`
N_BLOCKS = 8  # of held-out text per domain

# %% [markdown]
# ## Train
#
# As in `quickstart.ipynb`. Interrupt it and run it again: training goes on where it was.

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
# `queries_and_keys` runs the model over held-out text and returns what each layer scores. `select_chunk` is the
# selection that the model itself uses. There are two rules:
#
# * **exact**: the chunk with the largest share of the softmax over the whole past. Every past key is scored.
# * **approx**: the chunk whose mean key fits the query best. One key per chunk is scored, which is cheaper.
#
# Letters at the end of a name are dimensions: L layers, B blocks of text, T positions, H heads.

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
    scored[domain] = tuple(jnp.concatenate(parts) for parts in zip(*layers, strict=True))  # layers and blocks: one axis

chosen_LBTH = {
    rule: per_layer(kernels_pallas.select_chunk(*scored[DOMAIN], chunk_size=chunk, selection=rule))
    for rule in ("exact", "approx")
}
own_T = np.arange(seq_len) // chunk  # the chunk that a query is in
distances = np.arange(1, own_T[-1] + 1)
print(f"{n_layers} layers of {n_heads} heads; {seq_len} tokens in {own_T[-1] + 1} chunks of {chunk}")
print(f"the model was trained with selection={mixer.selection!r}")

# %% [markdown]
# ## Which chunk each query chose
#
# One block of text. Each panel is a head; the position of the query goes to the right, the chosen chunk upwards. The
# grey stairs are the query's own chunk, which it always sees. Blue: both rules choose this chunk. Orange: exact chooses
# it and approx another one. A long bar is a stretch of queries that keep to a chunk; short marks are queries that each
# choose for themselves.
#
# After the demo's training most heads choose anew with almost every token. In many of them there are longer bars just
# below the stairs: the first queries of a chunk, which see little of their own, take the one before it.

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
# Left: the distance from the query's chunk to the chosen one, by the rule that the model was trained with. The dotted
# line is a choice at random among the past chunks. Right: the share of queries for which exact and approx choose the
# same chunk, among queries with at least two to choose from.
#
# After the demo's training the chunk just before is chosen more often than chance would have it, and the two rules
# agree far more often than chance: a mean key is a fair summary of its chunk, and not more.

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
# Left: the entropy of the softmax that each query would have over its whole past, which is what the exact rule ranks
# chunks by. It is 0 where all weight is on one token and ln(i + 1) where position i spreads it evenly; shown is the
# share of that. Solid lines are domains that the model was trained on. (Figure 4 of the paper shows this entropy for
# softmax attention, and `seqjax evaluate --workdir=DIR --entropy` measures it. Top-1's own weights are over two chunks
# alone, so that command does not take them.)
#
# Right: where that weight lies. Top-1 keeps the part in the own chunk and in the chosen one, and drops the rest.
#
# After the demo's training the layers differ and the domains hardly do: their lines lie on each other. The weight on
# the past is spread widely, so the chosen chunk has only little more of it than an even split would give. That is what
# a few minutes of training teach; run it longer and look again.

# %%
entropy_LBTH = {domain: per_layer(jax.jit(attention_entropy)(*both)) for domain, both in scored.items()}
most_T1 = np.log(np.arange(2, seq_len + 1))[:, None]  # at position 0 there is one token
relative_L = {domain: (e[:, :, 1:] / most_T1).mean((1, 2, 3)) for domain, e in entropy_LBTH.items()}


def chunk_weights(both):
    """Return the weight of every chunk in the softmax over the past, [T, H, chunks], of one sequence."""
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
later = own_T > 0  # in the first chunk there is nothing to choose

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
# ## What is written there
#
# For each layer the query that is surest among those in the second half of their chunk, which have text of their own
# to look at: the one whose chosen chunk has the largest weight. The first line ends with the token of the query,
# between marks. The second is the chosen chunk, with marks around the token that gets the most weight there. These are
# the clearest cases and not the usual ones. A token is a byte here, and ⏎ is the end of a line.


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
# ## From here
#
# * Train longer, or with the other rule, in another `WORKDIR`: `CONFIG =
#   "top1_chunk:demo,train.steps=3000,model.mixer.selection=approx"`.
# * Any run or imported model with attention: `seqjax.load`, then `queries_and_keys`.
# * `docs/mixers.md`: what Top-1 Chunk computes. `docs/kernels.md`: how the selection is made fast.
