"""Figure 8: figure 1(a) with Top-1 Element (110M, mixed regime).

    seqjax study --study=figure8:demo --out=runs/figure8      small, paper: the same command with that size

Paper: arXiv 2505.18522. Results: lab/results/index.md
"""

from seqjax import presets


def get_study(size="demo"):
    """Return the study for a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    models = (*paper.OF_110M, "Top-1 Element")
    return paper.study("Figure 8: 110M, mixed regime", models, size=size, regime="mixed")
