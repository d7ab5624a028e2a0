"""Figure 6(a): Top-1 Element and Top-1 Chunk at 110M, limited regime.

    seqjax study --study=figure6a:demo --out=runs/figure6a      small, paper: the same command with that size

The models are trained on CommonCrawl and C4 and tested OOD. The size `small` uses the runs of studies/limited_110m,
with several seeds, learning rates and schedules.

Paper: arXiv 2505.18522. Results: lab/results/limited_110m, lab/results/index.md
"""

from seqjax import presets


def get_study(size="demo"):
    """Return the study for a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    models = (*paper.OF_1B3, *paper.TOP1)
    return paper.study("Figure 6(a): Top-1 at 110M, limited regime", models, size=size, replicates=True)
