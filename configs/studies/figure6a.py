"""Figure 6(a): Top-1 Element and Top-1 Chunk at 110M trained on CommonCrawl and C4 and tested beyond.

    seqjax study --study=figure6a:demo --out=runs/figure6a      small, paper: the same command with that size

The size `small` takes the runs of studies/limited_110m, which also have seeds, learning rates and schedules.

Paper: arXiv 2505.18522. Results: lab/results/limited_110m, lab/results/index.md
"""

from seqjax import presets


def get_study(size="demo"):
    """Return the study of a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    models = (*paper.OF_1B3, *paper.TOP1)
    return paper.study("Figure 6(a): Top-1 at 110M, limited regime", models, size=size, replicates=True)
