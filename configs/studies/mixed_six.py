"""Six models at 110M trained on all domains and tested on the same, among them Top-1 Chunk.

    seqjax study --study=mixed_six:demo --out=runs/mixed_six      small, paper: the same command with that size

Runs of figures 1(a) and 8 are shared.

Results: lab/results/index.md
"""

from seqjax import presets


def get_study(size="demo"):
    """Return the study of a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    return paper.study("Six models at 110M, mixed regime", paper.SIX, size=size, regime="mixed")
