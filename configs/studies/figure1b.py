"""Figure 1(b): twelve 110M architectures, limited regime.

    seqjax study --study=figure1b:demo --out=runs/figure1b      small, paper: the same command with that size

The models are trained on CommonCrawl and C4 and tested OOD. The size `small` uses the runs of studies/limited_110m,
with several seeds, learning rates and schedules.

Paper: arXiv 2505.18522. Results: lab/results/limited_110m, lab/results/index.md
"""

from seqjax import presets


def get_study(size="demo"):
    """Return the study for a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    return paper.study("Figure 1(b): 110M, limited regime", paper.OF_110M, size=size, replicates=True)
