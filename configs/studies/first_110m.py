"""The runs of docs/results/first_110m.md: Transformer++ and Top-1 Chunk at 110M, read from their recorded metrics.

    seqjax study --study=first_110m --out=docs/results/first_110m

To train them, give each run its "config", e.g.
`presets.load("transformer_pp").get_config("110m,data.path=...,train.steps=1580,...")`.
"""

RESULTS = "docs/results/first_110m"


def get_study():
    """Return the title, references, domains and runs."""
    return {
        "title": "110M parameters, 104M tokens (two passes) of CommonCrawl- and C4-like text",
        "references": ("Transformer++", "Transformer++, QK norm"),
        # Measured at the step of the evaluation, whereas the training loss is a mean over the preceding 8M tokens.
        "against": ("commoncrawl", "c4"),
        "domains": ("arxiv", "github", "stackexchange"),
        "runs": {
            "Transformer++": {"workdir": f"{RESULTS}/transformer_pp"},
            "Transformer++, QK norm": {"workdir": f"{RESULTS}/transformer_pp_qk_norm"},
            "Top-1 Chunk, exact": {"workdir": f"{RESULTS}/top1_chunk_exact"},
            "Top-1 Chunk, approx": {"workdir": f"{RESULTS}/top1_chunk_approx"},
        },
    }
