"""Figure 2(a): 1.3B Transformer++, window attention and Mamba, mixed regime.

    seqjax study --study=figure2a:demo --out=runs/figure2a      small, paper: the same command with that size

The models are trained and tested on all domains. The runs are figure 9's without Top-1 Element. At size `demo` they are
also figure 1(a)'s, because demo has only one scale.

Paper: arXiv 2505.18522. Results: lab/results/index.md
"""

from seqjax import presets


def get_study(size="demo"):
    """Return the study for a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    return paper.study("Figure 2(a): 1.3B, mixed regime", paper.OF_1B3, size=size, regime="mixed", scale="1b3")
