"""Figure 2(b): Transformer++, a window and Mamba at 1.3B trained on CommonCrawl and C4 and tested beyond.

    seqjax study --study=figure2b:demo --out=runs/figure2b      small, paper: the same command with that size

At the size `demo` its runs are those of figure 1(b), as there is one scale.

Paper: arXiv 2505.18522. Results: lab/results/index.md
"""

from seqjax import presets


def get_study(size="demo"):
    """Return the study of a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    return paper.study("Figure 2(b): 1.3B, limited regime", paper.OF_1B3, size=size, scale="1b3")
