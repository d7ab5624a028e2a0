"""Figure 3(c): Transformer++ with RoPE, ALiBi, absolute positions and none.

    seqjax study --study=figure3c:demo --out=runs/figure3c      small, paper: the same command with that size

Paper: arXiv 2505.18522. Results: lab/results/index.md
"""

from seqjax import presets

MODELS = {
    "Transformer++": "transformer_pp",
    "ALiBi": "ablations/position_alibi",
    "absolute positions": "ablations/position_absolute",
    "no positions": "ablations/position_none",
}


def get_study(size="demo"):
    """Return the study for a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    return paper.study("Figure 3(c): positions at 110M", MODELS, size=size, references=("Transformer++",))
