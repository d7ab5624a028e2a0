"""Figure 1(b): twelve architectures at 110M trained on CommonCrawl and C4 and tested beyond.

    seqjax study --study=figure1b:demo --out=runs/figure1b      small, paper: the same command with that size

The size `small` takes the runs of studies/limited_110m, which also have seeds, learning rates and schedules.

Paper: arXiv 2505.18522. Results: lab/results/limited_110m, lab/results/index.md
"""

from seqjax import presets


def get_study(size="demo"):
    """Return the study of a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    return paper.study("Figure 1(b): 110M, limited regime", paper.OF_110M, size=size, replicates=True)
