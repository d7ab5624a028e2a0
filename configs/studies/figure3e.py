"""Figure 3(e): Transformer++ with trained constant keys, or queries and keys.

    seqjax study --study=figure3e:demo --out=runs/figure3e      small, paper: the same command with that size

The constants are position tables and do not depend on the text.

Paper: arXiv 2505.18522. Results: lab/results/index.md
"""

from seqjax import presets

MODELS = {
    "Transformer++": "transformer_pp",
    "constant keys": "ablations/const_k",
    "constant queries and keys": "ablations/const_qk",
}


def get_study(size="demo"):
    """Return the study for a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    return paper.study("Figure 3(e): constants at 110M", MODELS, size=size, references=("Transformer++",))
