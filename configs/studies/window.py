"""The effect of the window size: Transformer++ at 110M with windows of 32 to 1,024 tokens and of all 2,048.

    seqjax study --study=window --out=runs/window

arXiv 2505.18522, section 3, with the paper's 100B tokens per run unless ARGUMENT says less. Not run.
"""

from seqjax import presets

ARGUMENT = "110m,limited"


def get_study():
    """Return the title, references, domains and runs."""
    window = presets.load("ablations/window")
    return {
        "title": "Transformer++ at 110M over windows",
        "references": ("full",),
        "domains": ("arxiv", "github", "stackexchange"),
        "runs": {
            width: {"workdir": f"runs/window/{width}", "config": window.get_config(f"{width},{ARGUMENT}")}
            for width in window.SWEEP
        },
    }
