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
# Train a small Top-1 Chunk language model, look at what it learned in and out of its training domains, and let it
# write. Two CPU cores take a few minutes; the text it trains on is already on the machine.
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

# %% [markdown]
# ## What to train
#
# A config's name and a size, as the command `seqjax train --config=...` takes them. `demo` takes minutes, `debug`
# seconds. Try `transformer_pp:demo` or `mamba2:demo` afterwards, each in a directory of its own.

# %% tags=["parameters"]
CONFIG = "top1_chunk:demo"
WORKDIR = "runs/first"

# %% [markdown]
# ## Train
#
# The model is evaluated in every domain as it goes: `prose` and `doctest` are what it trains on, the other three it
# never sees. Interrupt the cell whenever you like and run it again: training goes on where it was.
#
# The line that begins with `Kernels:` names the implementation that runs. On an A100 or a later GPU it is `triton`. The
# Triton kernels need compute capability 8.0, so on a CPU, and on Colab's free T4 (7.5), it is `xla`: the same model
# with the same results, in plain XLA.

# %%
from seqjax import presets
from seqjax.config import from_config_dict
from seqjax.training.loop import train

finished = train(from_config_dict(presets.read_config(CONFIG)), WORKDIR)

# %% [markdown]
# ## The report
#
# Training ends with a table: a loss in nats per token for every domain (a token is a byte here). The workdir keeps it
# in `report.md`, with a picture. The gap between the solid lines and the dashed ones is what seqjax is about: mixers
# that look alike in domain differ out of domain.

# %%
from pathlib import Path

from IPython.display import Image

Image(Path(WORKDIR) / "report.png")

# %% [markdown]
# ## Generate
#
# `seqjax.load` takes the directory of any run. After some minutes of training the text has the shape of words and
# little more.

# %%
import seqjax

m = seqjax.load(WORKDIR)
print("def " + m.generate("def ", max_new_tokens=200, temperature=0.8, seed=1))

# %% [markdown]
# The loss of a text tells what the model finds likely, in nats per token:

# %%
for text in ("The function returns the number of elements.", "elements of number the returns function The."):
    print(f"{m.loss(text):.2f}  {text}")

# %% [markdown]
# ## Which kernels run here
#
# Naming an implementation that cannot run is an error, which gives the reason of each one. Without a name, the fastest
# that can is taken.

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
# ## From here
#
# * `your_mixer.ipynb`, beside this notebook: a mixer of your own, checked and trained.
# * `docs/quickstart.md`: real data, larger models, several GPUs, studies.
# * In a terminal the same is `seqjax train --config=top1_chunk --workdir=runs/first`, then `seqjax generate
#   --workdir=runs/first`.
