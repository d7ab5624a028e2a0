"""Figure 1(a): twelve architectures at 110M trained on all domains and tested on the same.

    seqjax study --study=figure1a:demo --out=runs/figure1a      small, paper: the same command with that size

The picture shows the mean over the domains at the training loss, as the paper does. Its runs are those of figure 8
without Top-1 Element.

Paper: arXiv 2505.18522. Results: lab/results/index.md
"""

from seqjax import presets


def get_study(size="demo"):
    """Return the study of a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    return paper.study("Figure 1(a): 110M, mixed regime", paper.OF_110M, size=size, regime="mixed")
