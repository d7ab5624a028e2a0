"""Figure 3(f): Transformer++ with unit queries and keys at fixed temperatures.

    seqjax study --study=figure3f:demo --out=runs/figure3f      small, paper: the same command with that size

The paper's temperatures are not legible in our copy; these temperatures are ours. Every run ends with the entropy of
its attention (docs/protocol.md); figure4 draws it.

Paper: arXiv 2505.18522. Results: lab/results/figure4
"""

from seqjax import presets

TEMPERATURES = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.125)


def get_study(size="demo"):
    """Return the study for a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    models = {name: paper.MODELS[name] for name in paper.REFERENCES}
    models |= {f"temperature {t:g}": f"ablations/temperature,model.mixer.temperature={t}" for t in TEMPERATURES}
    return paper.study("Figure 3(f): temperatures at 110M", models, size=size)
