"""Six 110M models, including Top-1 Chunk, trained and tested on all domains.

    seqjax study --study=mixed_six:demo --out=runs/mixed_six      small, paper: the same command with that size

It shares runs with figures 1(a) and 8.

Results: lab/results/index.md
"""

from seqjax import presets


def get_study(size="demo"):
    """Return the study for a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    return paper.study("Six models at 110M, mixed regime", paper.SIX, size=size, regime="mixed")
