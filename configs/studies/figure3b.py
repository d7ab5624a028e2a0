"""Figure 3(b): Mamba-2 with full, one or no decay, without convolution or norm.

    seqjax study --study=figure3b:demo --out=runs/figure3b      small, paper: the same command with that size

The model without convolution has no decay either; the model without norm has the full decay.

Paper: arXiv 2505.18522. Results: lab/results/index.md
"""

from seqjax import presets

MODELS = {
    "Mamba-2": "mamba2",
    "Mamba-2, one decay": "ablations/mamba2_one_decay",
    "Mamba-2, no decay": "ablations/mamba2_no_decay",
    "Mamba-2, no decay, no convolution": "ablations/mamba2_no_decay_no_conv",
    "Mamba-2, no norm": "ablations/mamba2_no_norm",
}


def get_study(size="demo"):
    """Return the study for a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    return paper.study("Figure 3(b): Mamba-2 at 110M", MODELS, size=size, references=("Mamba-2",))
