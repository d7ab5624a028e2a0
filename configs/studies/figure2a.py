"""Figure 2(a): Transformer++, a window and Mamba at 1.3B trained on all domains and tested on the same.

    seqjax study --study=figure2a:demo --out=runs/figure2a      small, paper: the same command with that size

Its runs are those of figure 9 without Top-1 Element. At the size `demo` they are also those of figure 1(a), as there is
one scale.

Paper: arXiv 2505.18522. Results: lab/results/index.md
"""

from seqjax import presets


def get_study(size="demo"):
    """Return the study of a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    return paper.study("Figure 2(a): 1.3B, mixed regime", paper.OF_1B3, size=size, regime="mixed", scale="1b3")
