"""Figure 1(a): twelve 110M architectures trained and tested on all domains.

    seqjax study --study=figure1a:demo --out=runs/figure1a      small, paper: the same command with that size

As in the paper, the picture shows the domain mean at equal training loss. The runs are figure 8's without Top-1
Element.

Paper: arXiv 2505.18522. Results: lab/results/index.md
"""

from seqjax import presets


def get_study(size="demo"):
    """Return the study for a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    return paper.study("Figure 1(a): 110M, mixed regime", paper.OF_110M, size=size, regime="mixed")
