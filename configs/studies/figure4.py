"""Figure 4: attention entropy over the softmax temperature.

    seqjax study --study=figure4:demo --out=runs/figure4      small, paper: the same command with that size

The runs are figure 3(f)'s; sweep.png shows each domain's entropy and the gap over the temperature.

Paper: arXiv 2505.18522. Results: lab/results/figure4
"""

from seqjax import presets


def get_study(size="demo"):
    """Return the study for a size: demo, small or paper."""
    study = presets.load("studies/figure3f").get_study(size)
    return study | {"title": study["title"].replace("3(f)", "4"), "sweep": "model.mixer.temperature"}
