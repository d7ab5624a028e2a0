"""Figure 2(b): 1.3B Transformer++, window attention and Mamba, limited regime.

    seqjax study --study=figure2b:demo --out=runs/figure2b      small, paper: the same command with that size

The models are trained on CommonCrawl and C4 and tested OOD. At size `demo` the runs are figure 1(b)'s, because demo has
only one scale.

Paper: arXiv 2505.18522. Results: lab/results/index.md
"""

from seqjax import presets


def get_study(size="demo"):
    """Return the study for a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    return paper.study("Figure 2(b): 1.3B, limited regime", paper.OF_1B3, size=size, scale="1b3")
