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
# # Read a study
#
# A study trains several architectures on the same data and compares their out-of-domain (OOD) losses. This notebook
# reads a finished study, plots it, and states the result in words. It trains nothing and takes seconds.
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
# ## Choose a study
#
# `STUDY` is a study's results directory, the `--out` of `seqjax study`. An empty string selects the example that is
# installed with seqjax: six models from a study with 31 models, each with 110M parameters. `MODELS` are plotted
# together with the references; `None` plots all models.

# %% tags=["parameters"]
STUDY = ""
MODELS = ["Top-1 Chunk, exact", "W=256, QK norm", "Gated DeltaNet", "Mamba-2"]
MODEL = "Gated DeltaNet"  # the model to assess
REFERENCE = "Transformer++, QK norm, conv"  # the model to compare with

# %%
from pathlib import Path

import seqjax

directory = Path(STUDY) if STUDY else Path(seqjax.__file__).parent / "study" / "example"
pictures = Path("runs/read_a_study")
pictures.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## Read its files
#
# `points.csv` has one line per run, evaluation and domain. `runs.json` describes the runs. `blocks.npz` has the loss of
# each text block, so that intervals also cover the choice of text. It is large, and the installed example omits it.
# `files.read` reads the available files.

# %%
import itertools

from seqjax.study.runs import files

with (directory / "points.csv").open() as file:
    print(*itertools.islice(file, 8), sep="")

study = files.read(directory)
n_points = sum(len(run.points) for run in study.runs)
print(study.title)
print(f"{len(study.runs)} runs of {len(study.models)} models, {n_points} evaluations")
print(f"in domain: {', '.join(study.against) or 'the training loss'}; OOD: {', '.join(study.domains)}")

# %% [markdown]
# ## OOD loss over in-domain loss
#
# A model that learns faster has a lower loss everywhere, which says little about its architecture. Models are therefore
# compared at equal in-domain loss, even if they needed different numbers of tokens. The in-domain loss is measured on
# held-out text from the training domains. A study without such domains uses the training loss.
#
# Training proceeds from left to right. At the same in-domain loss, the higher line has the higher OOD loss.

# %%
from IPython.display import Image, Markdown, display

from seqjax.study.report import figures

figures.against_loss_in_domain(pictures / "losses.png", study, models=MODELS)
display(Image(pictures / "losses.png"))

# %% [markdown]
# ## The gaps
#
# A model's gap is its OOD loss minus the reference's OOD loss, at equal in-domain loss and matched learning rates, in
# nats per token. Positive is worse. ± is half of the 95% confidence interval over seeds, learning rates and text; a
# model with one seed has no interval. The column "as tuned" compares both models at their own best learning rates. The
# verdict is "costs", "gains", "no cost above 0.05", or "undecided" with the missing runs. `*` marks a provisional
# verdict: a best learning rate is the only one or at the edge of the tried rates.

# %%
from seqjax.study import gaps
from seqjax.study.report import tables

rows = gaps.compare(study, REFERENCE)
display(Markdown(tables.gap_table(study, rows)))

# %% [markdown]
# The gaps to all references as a picture. Filled circles have several seeds.

# %%
from seqjax.study.report import forest

forest.gaps(pictures / "gaps.png", study)
display(Image(pictures / "gaps.png"))

# %% [markdown]
# ## The result in words
#
# Does the model cost base capabilities compared with the reference? The sentences are generated from the numbers above.
# Change `MODEL` and `REFERENCE` to compare another pair.

# %%
import textwrap

from seqjax.study.report import words

print(f"Does {MODEL} cost base capabilities?\n")
print(textwrap.fill(words.verdict(study, MODEL, REFERENCE), width=100))

# %% [markdown]
# Would the in-domain loss have predicted this? The next cell lists the models that match or beat the reference's
# in-domain loss after equal tokens, with their verdicts.

# %%
lower = [row for row in rows if row.at_equal_tokens and row.at_equal_tokens.inside.value <= 0]
for row in lower:
    gap = row.gap.text() if row.gap else "no gap"
    print(f"{row.model:<30} in domain {row.at_equal_tokens.inside.text()}, gap {gap}: {row.text}")
n_costs = sum(row.verdict.word == "costs" for row in lower)
print(
    f"\nModels with an in-domain loss not above {REFERENCE}: {len(lower)}, of which {n_costs} cost base capabilities."
)

# %% [markdown]
# ## Next steps
#
# * All tables: `seqjax study --analyse=DIR` writes `leaderboard.md` into a study's directory. `docs/protocol.md`
#   explains how gaps are computed. All 31 models are in `lab/results/trunks_110m` in the repository.
# * Your own study, with minutes per run on two CPU cores: `seqjax study --study=figure1b:demo --out=runs/figure1b`.
#   Then set `STUDY = "runs/figure1b"`, and choose `MODELS`, `MODEL` and `REFERENCE` from its models.
# * An interactive page: `seqjax study --analyse=runs/figure1b --page`.
