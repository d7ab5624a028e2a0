"""Figure 6(b): Top-1 Element and Top-1 Chunk at 1.3B, limited regime.

    seqjax study --study=figure6b:demo --out=runs/figure6b      small, paper: the same command with that size

The models are trained on CommonCrawl and C4 and tested OOD. The study shares the runs of figure 2(b).

Paper: arXiv 2505.18522. Results: lab/results/index.md
"""

from seqjax import presets


def get_study(size="demo"):
    """Return the study for a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    models = (*paper.OF_1B3, *paper.TOP1)
    return paper.study("Figure 6(b): Top-1 at 1.3B, limited regime", models, size=size, scale="1b3")
