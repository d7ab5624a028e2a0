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
# # Your own mixer
#
# Write a sequence mixer in a cell, check it, and compare it with Transformer++. This takes a few minutes on two CPU
# cores.
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
SIZE = "debug,train.steps=300,eval.every=15_000,log.every=5"  # size and settings; `demo` takes minutes per model
RUNS = "runs"
JUDGED = "debug"  # size and settings for the judgement at the end
SEEDS = 1

# %% [markdown]
# ## The mixer
#
# An exponential moving average with input-dependent rates, a simple relative of Mamba:
#
# $$h_t = a_t \odot h_{t-1} + (1 - a_t) \odot u_t, \qquad y_t = W_o\,(h_t \odot \mathrm{silu}(g_t)),$$
#
# where $u_t$, $g_t$ and the logits of $a_t$ are projections of $x_t$. A mixer needs three methods: `__call__` for whole
# sequences (parallel form, training), and `init_cache` and `step` for single tokens (recurrent form, decoding). The
# base class provides defaults for the rest.
#
# This mixer is plain JAX and runs on any device. seqjax's Triton kernels need compute capability 8.0; on a CPU or
# Colab's free T4 (7.5), mixers with such kernels run in plain XLA.

# %%
from typing import NamedTuple

import jax
import jax.numpy as jnp

import seqjax
from seqjax.mixers import base
from seqjax.nn import Linear, residual_init


class Cache(NamedTuple):
    h_BE: jax.Array


@seqjax.mixers.register("gated_ema")
class GatedEma(base.Mixer):
    """An exponential moving average with input-dependent rates and an output gate."""

    def __init__(
        self,
        dim,
        *,
        expand: int = 2,
        slowest: float = 4.0,  # bias of the rates' logits: about 1 / (1 - sigmoid(4)) = 55 tokens of memory
        layer=base.Layer(),
        rngs,
    ):
        self.width, self.slowest = expand * dim, slowest
        self.up = Linear(dim, self.width, axes=("embed", "mlp"), rngs=rngs)
        self.gate = Linear(dim, self.width, axes=("embed", "mlp"), rngs=rngs)
        self.rate = Linear(dim, self.width, axes=("embed", "mlp"), rngs=rngs)
        self.out = Linear(self.width, dim, axes=("mlp", "embed"), init=residual_init(layer.n_layers), rngs=rngs)

    def project(self, x):
        """Return the decays a and the inputs (1 - a) u, in float32, and the gate."""
        spread = jnp.linspace(-self.slowest, self.slowest, self.width)
        a = jax.nn.sigmoid(self.rate(x).astype(jnp.float32) + spread)
        return a, (1 - a) * self.up(x).astype(jnp.float32), jax.nn.silu(self.gate(x))

    def __call__(self, x_BTD):
        a_BTE, u_BTE, gate_BTE = self.project(x_BTD)

        def combine(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        _, h_BTE = jax.lax.associative_scan(combine, (a_BTE, u_BTE), axis=1)
        return self.out(h_BTE.astype(x_BTD.dtype) * gate_BTE)

    def init_cache(self, batch, max_len, dtype):
        return Cache(jnp.zeros((batch, self.width), jnp.float32))

    def step(self, x_BD, cache):
        a_BE, u_BE, gate_BE = self.project(x_BD)
        h_BE = a_BE * cache.h_BE + u_BE
        return self.out(h_BE.astype(x_BD.dtype) * gate_BE), Cache(h_BE)

    def flops_per_token(self, seq_len):
        return 3 * self.width


# %% [markdown]
# ## Check it
#
# `check_mixer` runs the contract tests: causality (by changed tokens and by gradients), `step` against the parallel
# form, rematerialisation, bfloat16, the FLOP count, and a short training run. An error states which test failed, where,
# and by how much. Try it: write `cache.h_BE + u_BE` in `step`, and run both cells again.

# %%
seqjax.testing.check_mixer(GatedEma)

# %% [markdown]
# ## Train it and Transformer++
#
# Both models have the same size, data and schedule. `presets.get_config` replaces the mixer in Transformer++ with the
# mixer of the given name.

# %%
from pathlib import Path

from seqjax import presets
from seqjax.config import from_config_dict
from seqjax.training.loop import train

CONFIGS = {
    "gated_ema": presets.get_config(SIZE, name="gated_ema", mixer={"name": "gated_ema"}),
    "transformer_pp": presets.read_config(f"transformer_pp:{SIZE}"),
}
workdirs = {name: Path(RUNS) / f"{name}-debug" for name in CONFIGS}
for name, config in CONFIGS.items():
    train(from_config_dict(config), workdirs[name])

# %% [markdown]
# ## Compare the losses
#
# Each run writes its numbers to `metrics.jsonl`. Left: training loss. Right: out-of-domain loss on Python and C source,
# which neither model has seen. The models are tiny and the runs short, so the curves only illustrate the method.

# %%
import matplotlib.pyplot as plt

from seqjax.training import metrics

rows = {name: metrics.read(workdir) for name, workdir in workdirs.items()}
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for (name, run), color in zip(rows.items(), ("tab:blue", "tab:orange"), strict=True):
    steps = [row for row in run if "tokens_per_s" in row]
    left.plot([row["tokens"] / 1e3 for row in steps], [row["train/loss"] for row in steps], color=color, label=name)
    evaluations = [row for row in run if "eval/python/loss" in row]
    for domain, style in (("python", "-"), ("c_code", "--")):
        losses = [row[f"eval/{domain}/loss"] for row in evaluations]
        tokens = [row["tokens"] / 1e3 for row in evaluations]
        right.plot(tokens, losses, style, marker="o", markersize=3, color=color, label=f"{name}, {domain}")
left.set_title("training (prose, doctest)", loc="left")
right.set_title("out of domain", loc="left")
for axes in (left, right):
    axes.set_xlabel("training tokens (thousands)")
    axes.set_ylabel("loss (nats per byte)")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# Each run's full table is in its `report.md`. The class is registered in this process, so its run loads directly:

# %%
m = seqjax.load(workdirs["gated_ema"])
print("The " + m.generate("The ", max_new_tokens=100, seed=1))

# %% [markdown]
# ## Judge it
#
# `seqjax.judge` trains the mixer and attention at the same learning rates, compares them at equal in-domain loss, and
# returns the result as a sentence (`docs/judge.md`). Each run is a separate process, so the mixer must be in a file:
# the cell above plus a config. One seed and 20 steps at this size only show how to read the output; they say nothing
# about the mixer. `JUDGED = "demo"` with `SEEDS = 3` takes about an hour on two CPU cores.

# %%
cell = next(cell for cell in In if "class GatedEma" in cell and "init_cache" in cell)
config = """

def get_config(arg=""):
    from seqjax import presets

    return presets.get_config(arg, name="gated_ema", mixer={"name": "gated_ema"})
"""
Path("gated_ema.py").write_text(cell + config)
judged = seqjax.judge(f"gated_ema.py:{JUDGED}", out=f"{RUNS}/judge", references=f"{RUNS}/attention", seeds=SEEDS)
print(judged.sentence)

# %% [markdown]
# The same result as data, one row per reference: attention as published, and attention with the short convolution that
# recurrent mixers have. The directory `judged.out` contains `judge.md` with pictures and tables.

# %%
for reference, row in judged.rows.items():
    gap = "not measured" if row.gap is None else f"{row.gap.text()} nats per token OOD"
    faster = judged.costs[judged.model].tokens_per_s / judged.costs[reference].tokens_per_s
    print(f"{reference:<32}{row.text}; gap {gap}; trains {faster:.1f} times as fast")
for remark in judged.remarks:
    print(f"* {remark}")

# %% [markdown]
# ## Next steps
#
# * Train and evaluate the mixer file from any directory: `seqjax train --config=./gated_ema.py:debug`, and `seqjax
#   evaluate --workdir=DIR --allow-code=gated_ema`.
# * `docs/add_a_mixer.md`: the full contract, other block shapes, and your own axes and kernels.
# * `SIZE = "demo"`: larger models. Gaps at this size do not predict gaps at `110m` (`docs/judge.md`).
