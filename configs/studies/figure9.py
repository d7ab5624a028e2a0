"""Figure 9: figure 2(a) with Top-1 Element (1.3B, mixed regime).

    seqjax study --study=figure9:demo --out=runs/figure9      small, paper: the same command with that size

Paper: arXiv 2505.18522. Results: lab/results/index.md
"""

from seqjax import presets


def get_study(size="demo"):
    """Return the study for a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    models = (*paper.OF_1B3, "Top-1 Element")
    return paper.study("Figure 9: 1.3B, mixed regime", models, size=size, regime="mixed", scale="1b3")
