"""Figure 4: the entropy of attention against the temperature of its softmax.

    seqjax study --study=figure4:demo --out=runs/figure4      small, paper: the same command with that size

The runs are those of figure 3(f); sweep.png shows the entropy of each domain and the gap over the temperature.

Paper: arXiv 2505.18522. Results: lab/results/figure4
"""

from seqjax import presets


def get_study(size="demo"):
    """Return the study of a size: demo, small or paper."""
    study = presets.load("studies/figure3f").get_study(size)
    return study | {"title": study["title"].replace("3(f)", "4"), "sweep": "model.mixer.temperature"}
