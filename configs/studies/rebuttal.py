"""The rebuttal's table: Transformer++ and Top-1 Element, mixed regime.

    seqjax study --study=rebuttal:demo --out=runs/rebuttal      small, paper: the same command with that size

The models have 110M and 1.3B parameters and are trained on all domains. lab/results/index.md has the paper's numbers.
The runs are shared with figures 8 and 9. `demo` has one scale.

Paper: arXiv 2505.18522. Results: lab/results/index.md
"""

from seqjax import presets

TITLE = "The rebuttal's table: mixed regime"


def get_study(size="demo"):
    """Return the study for a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    models = (*paper.REFERENCES, "Top-1 Element")
    study, large = (paper.study(TITLE, models, size=size, regime="mixed", scale=scale) for scale in ("110m", "1b3"))
    if study["runs"] != large["runs"]:
        study["runs"] |= {f"{label}, 1.3B": run for label, run in large["runs"].items()}
        study["references"] += tuple(f"{label}, 1.3B" for label in paper.REFERENCES)
    return study
