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
# A study trains several architectures on the same data and compares them out of domain. This notebook reads a finished
# one, draws it, and answers its question in words. Nothing is trained, so it takes seconds.
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
# `STUDY` is the directory of a study's results, that is, the `--out` of `seqjax study`. The one below is in the
# repository: seventeen models of 110M parameters. `MODELS` are drawn beside the references; `None` draws all.

# %% tags=["parameters"]
STUDY = "docs/results/limited_110m"
MODELS = ["Top-1 Chunk, exact", "Gated DeltaNet", "RWKV-7", "Mamba-2"]
MODEL = "Gated DeltaNet"  # about which the question is asked
REFERENCE = "Transformer++, QK norm"  # to which it is compared

# %% [markdown]
# It is looked for here and in the checkout that seqjax is installed from. An installed package has no results; then the
# repository is cloned.

# %%
from pathlib import Path

import seqjax

directory = next((d for d in (Path(STUDY), Path(seqjax.__file__).parents[1] / STUDY) if d.is_dir()), None)
if directory is None:
    subprocess.run(["git", "clone", "--quiet", "--depth=1", REPOSITORY, "seqjax_repository"], check=True)
    directory = Path("seqjax_repository") / STUDY
pictures = Path("runs/read_a_study")
pictures.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## What is in it
#
# `points.csv` has a line for every run, evaluation and domain. `runs.json` says what the runs were, and `blocks.npz`
# has the loss of every block of text, from which the intervals come. `records.read` takes all three.

# %%
import itertools

from seqjax.study import comparison, records

with (directory / "points.csv").open() as file:
    print(*itertools.islice(file, 8), sep="")

study = records.read(directory)
n_points = sum(len(run.points) for run in study.runs)
print(study.title)
print(f"{len(study.runs)} runs of {len(comparison.models(study))} models, {n_points} evaluations")
print(f"in domain: {', '.join(study.against) or 'the training loss'}; out of domain: {', '.join(study.domains)}")

# %% [markdown]
# ## Loss out of domain over loss in domain
#
# A model that learns faster is better everywhere, and this says little about its architecture. So models are compared
# at the same loss in domain, however many tokens each of them needed to get there. In domain is held-out text of the
# domains that were trained on, or the training loss in a study that names no such domains.
#
# Training goes from left to right. Of two lines in the upper row, the higher one belongs to the model that does worse
# out of domain at equal loss in domain. The other rows show how much worse, one for each reference.

# %%
from IPython.display import Image, Markdown, display

from seqjax.study import figures

figures.against_loss_in_domain(pictures / "losses.png", study, models=MODELS)
display(Image(pictures / "losses.png"))

# %% [markdown]
# ## The gaps
#
# At the lowest loss in domain that a model and the reference both reached: the distance between their lines, in nats
# per token. Positive is worse. With several seeds, ± is half of the 95% interval over other documents and other seeds.
# With one seed it covers other documents alone, and another seed may move the gap further.

# %%
from seqjax.study import tables

display(Markdown(tables.gap_table(study, REFERENCE)))

# %% [markdown]
# The same for every model and reference, as a picture. A filled circle has several seeds. Diamonds and stars ask
# whether something other than the architecture explains the gap: the learning rate, or a schedule that has ended.

# %%
from seqjax.study import forest

forest.gaps(pictures / "gaps.png", study)
display(Image(pictures / "gaps.png"))

# %% [markdown]
# ## The question in words
#
# Does the model cost base capabilities, in comparison with the reference? The sentences are made from the numbers
# above, so ask about any other pair.

# %%
import textwrap

from seqjax.study.verdict import verdict

print(f"Does {MODEL} cost base capabilities?\n")
print(textwrap.fill(verdict(study, MODEL, REFERENCE), width=100))

# %% [markdown]
# Would the loss in domain have told? Here are the models that end with a lower one than the reference, and what they
# do out of domain.

# %%
import numpy as np

ends = {
    model: np.mean([run.losses_in_domain(study.against)[-1] for run in comparison.common_runs(study, model)])
    for model in comparison.models(study)
}
quantity = comparison.main_quantity(study)
rows = [row for row in comparison.compare(study, REFERENCE) if row.lowest and ends[row.model] < ends[REFERENCE]]
n_worse = 0
for row in rows:
    gap = row.lowest.estimates[quantity]
    sign = "worse" if gap.gap > 0 else "better"
    said = {None: f"{sign}, no interval", False: "cannot be told apart", True: sign}[gap.differs]
    n_worse += said == "worse"
    inside = ends[row.model] - ends[REFERENCE]
    print(f"{row.model:<26} in domain {inside:+.3f}, out of domain {gap.gap:+.3f}: {said}; seeds: {row.lowest.seeds}")
print(f"\nOf {len(rows)} models that end lower in domain than {REFERENCE}, {n_worse} are worse out of domain.")

# %% [markdown]
# ## From here
#
# * All tables: `gaps.md` in the directory of the study. How gaps and intervals are computed: `docs/protocol.md`.
# * A study of your own, minutes a run on two CPU cores: `seqjax study --study=figure1b:demo --out=runs/figure1b`. Then
#   `STUDY = "runs/figure1b"`, and its models as `MODELS`, `MODEL` and `REFERENCE`.
# * A page with lines to switch and to point at: `seqjax study --analyse=runs/figure1b --page`.
