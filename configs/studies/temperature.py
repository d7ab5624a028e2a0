"""The effect of the sharpness of attention: Transformer++ at 110M with unit queries and keys at fixed temperatures.

    seqjax study --study=temperature --out=runs/temperature

arXiv 2505.18522, section 3, with the paper's 100B tokens per run unless ARGUMENT says less; the temperatures are ours.
Every run ends with the entropy of its attention (docs/protocol.md). Not run.
"""

from seqjax import presets

ARGUMENT = "110m,limited"
SWEEP = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.125)


def get_study():
    """Return the title, references, domains and runs."""
    temperature = presets.load("ablations/temperature")
    return {
        "title": "Transformer++ at 110M, unit queries and keys at fixed temperatures",
        "references": ("temperature 1.0",),
        "domains": ("arxiv", "github", "stackexchange"),
        "runs": {
            f"temperature {t}": {
                "workdir": f"runs/temperature/{t}",
                "config": temperature.get_config(f"{ARGUMENT},model.mixer.temperature={t}"),
            }
            for t in SWEEP
        },
    }
