"""Figure 3(d): Transformer++ with sliding windows, and with full attention.

    seqjax study --study=figure3d:demo --out=runs/figure3d      small, paper: the same command with that size

The paper's widths are not legible in our copy; these widths are ours. The sequence has 256 tokens at size `demo`,
otherwise 2,048.

Paper: arXiv 2505.18522. Results: lab/results/index.md
"""

from seqjax import presets

WIDTHS = {"demo": (8, 16, 32, 64, 128), "small": (32, 64, 128, 256, 512, 1024), "paper": (32, 64, 128, 256, 512, 1024)}


def get_study(size="demo"):
    """Return the study for a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    widths = presets.pick(WIDTHS, size, kind="size of the study")
    models = {"Transformer++": "transformer_pp"}
    models |= {f"W={width}": f"transformer_pp,model.mixer.window={width}" for width in widths}
    return paper.study(
        "Figure 3(d): windows at 110M",
        models,
        size=size,
        references=("Transformer++",),
        sweep="model.mixer.window",
    )
