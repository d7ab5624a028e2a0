"""Figure 3(a): Mamba-1 with full, one or no decay, and no decay or convolution.

    seqjax study --study=figure3a:demo --out=runs/figure3a      small, paper: the same command with that size

Paper: arXiv 2505.18522. Results: lab/results/index.md
"""

from seqjax import presets

MODELS = {
    "Mamba-1": "mamba1",
    "Mamba-1, one decay": "ablations/mamba1_one_decay",
    "Mamba-1, no decay": "ablations/mamba1_no_decay",
    "Mamba-1, no decay, no convolution": "ablations/mamba1_no_decay_no_conv",
}


def get_study(size="demo"):
    """Return the study for a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    return paper.study("Figure 3(a): Mamba-1 at 110M", MODELS, size=size, references=("Mamba-1",))
