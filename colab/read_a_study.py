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
# reads a finished one, draws it, and answers its question in words. Nothing is trained, so it takes seconds.
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
# ## Which study
#
# `STUDY` is the directory of a study's results, that is, the `--out` of `seqjax study`. Empty, it is the study that is
# installed with seqjax: the runs of six models of a study of 31 models of 110M parameters. `MODELS` are drawn with the
# references; `None` draws all.

# %% tags=["parameters"]
STUDY = ""
MODELS = ["Top-1 Chunk, exact", "W=256, QK norm", "Gated DeltaNet", "Mamba-2"]
MODEL = "Gated DeltaNet"  # about which the question is asked
REFERENCE = "Transformer++, QK norm, conv"  # to which it is compared

# %%
from pathlib import Path

import seqjax

directory = Path(STUDY) if STUDY else Path(seqjax.__file__).parent / "study" / "example"
pictures = Path("runs/read_a_study")
pictures.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## What is in it
#
# `points.csv` has a line for every run, evaluation and domain. `runs.json` says what the runs were. `blocks.npz` has
# the loss of every block of text, from which intervals also cover the choice of the text; it is large, and the
# installed study has none. `files.read` reads what there is.

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
# A model that learns faster has a lower loss everywhere, which says little about its architecture. So models are
# compared at the same in-domain loss, however many tokens each of them needed. The in-domain loss is the loss of
# held-out text of the domains that were trained on, or the training loss in a study that names no such domains.
#
# Training goes from left to right. Of two lines, the higher one belongs to the model with the higher OOD loss at equal
# in-domain loss.

# %%
from IPython.display import Image, Markdown, display

from seqjax.study.report import figures

figures.against_loss_in_domain(pictures / "losses.png", study, models=MODELS)
display(Image(pictures / "losses.png"))

# %% [markdown]
# ## The gaps
#
# The gap of a model is its OOD loss minus the reference's at equal in-domain loss and equal learning rate, in nats per
# token. Positive is worse. ± is half of the 95% interval over seeds, learning rates and text; one seed has none. As
# tuned, each side has its own learning rates. The verdict is "costs", "gains", "no cost above 0.05" or "undecided" with
# what it needs; `*` marks a best learning rate that is the only one or at the edge of those tried.

# %%
from seqjax.study import gaps
from seqjax.study.report import tables

rows = gaps.compare(study, REFERENCE)
display(Markdown(tables.gap_table(study, rows)))

# %% [markdown]
# The same for every reference, as a picture. A filled circle has several seeds.

# %%
from seqjax.study.report import forest

forest.gaps(pictures / "gaps.png", study)
display(Image(pictures / "gaps.png"))

# %% [markdown]
# ## The question in words
#
# Does the model cost base capabilities, compared with the reference? The sentences are made from the numbers above, so
# ask about any other pair.

# %%
import textwrap

from seqjax.study.report import words

print(f"Does {MODEL} cost base capabilities?\n")
print(textwrap.fill(words.verdict(study, MODEL, REFERENCE), width=100))

# %% [markdown]
# Would the in-domain loss have told? Here are the models whose in-domain loss after equal tokens is not above the
# reference's, and their verdicts.

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
# ## From here
#
# * All tables: `seqjax study --analyse=DIR` writes `leaderboard.md` into the directory of a study. How gaps are
#   computed: `docs/protocol.md`. All 31 models: `lab/results/trunks_110m` in the repository.
# * A study of your own, minutes a run on two CPU cores: `seqjax study --study=figure1b:demo --out=runs/figure1b`. Then
#   `STUDY = "runs/figure1b"`, and its models as `MODELS`, `MODEL` and `REFERENCE`.
# * A page with lines to switch and to point at: `seqjax study --analyse=runs/figure1b --page`.
