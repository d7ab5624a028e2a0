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
# # seqjax in ten minutes
#
# Train a small Top-1 Chunk language model, compare its losses in and out of domain, and generate text. This takes a few
# minutes on two CPU cores. The training text comes from installed packages, so nothing is downloaded.
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

# %% [markdown]
# ## Choose a config
#
# `CONFIG` is a config name and a size, as in `seqjax train --config=...`. `demo` takes minutes, `debug` takes seconds.
# Afterwards, try `transformer_pp:demo` or `mamba2:demo` with another `WORKDIR`.

# %% tags=["parameters"]
CONFIG = "top1_chunk:demo"
WORKDIR = "runs/first"

# %% [markdown]
# ## Train
#
# During training, the model is evaluated in all domains. It trains on `prose` and `doctest` and never sees the other
# three. You can interrupt the cell at any time; run it again to resume.
#
# The line `Kernels: ...` shows the implementation in use. On an A100 or H100 it is `triton`. The Triton kernels need
# compute capability 8.0, so a CPU or Colab's free T4 (7.5) uses `xla`: the same model in plain XLA.

# %%
from seqjax import presets
from seqjax.config import from_config_dict
from seqjax.training.loop import train

finished = train(from_config_dict(presets.read_config(CONFIG)), WORKDIR)

# %% [markdown]
# ## The report
#
# Training ends with a table of losses per domain, in nats per token (here, a token is a byte). The workdir has the
# table and a picture in `report.md`. Solid lines are training domains, dashed lines are out of domain. seqjax studies
# this difference: mixers with similar in-domain losses can have different out-of-domain losses.

# %%
from pathlib import Path

from IPython.display import Image

Image(Path(WORKDIR) / "report.png")

# %% [markdown]
# ## Generate
#
# `seqjax.load` loads any run from its directory. After a few minutes of training, the text resembles words and little
# more.

# %%
import seqjax

m = seqjax.load(WORKDIR)
print("def " + m.generate("def ", max_new_tokens=200, temperature=0.8, seed=1))

# %% [markdown]
# The loss of a text, in nats per token, is lower for text that the model finds more likely:

# %%
for text in ("The function returns the number of elements.", "elements of number the returns function The."):
    print(f"{m.loss(text):.2f}  {text}")

# %% [markdown]
# ## See which kernels run here
#
# An explicitly requested implementation that cannot run is an error, and the message gives the reasons. By default, the
# first implementation that can run is used.

# %%
import jax

import kernels_pallas

q = jax.random.normal(jax.random.key(0), (1, 256, 4, 32))
try:
    kernels_pallas.top1_chunk_attention(q, q, q, chunk_size=64, implementation="triton")
    print("The Triton kernels run on this", jax.devices()[0].device_kind)
except kernels_pallas.BackendError as error:
    print(error)

# %% [markdown]
# ## Next steps
#
# * `your_mixer.ipynb` in this directory: write, check and train your own mixer.
# * `docs/quickstart.md`: real data, larger models, several GPUs, studies.
# * In a terminal: `seqjax train --config=top1_chunk --workdir=runs/first`, then `seqjax generate --workdir=runs/first`.
