"""Two models at three learning rates, read at decayed ends: the first runs of protocol 2 (docs/protocol.md).

    seqjax study --study=trunks_110m --out=docs/results/trunks_110m --jobs=2

The settings of limited_110m but for the schedule: a trunk with a constant rate, and a cooldown over the last fifth of
the steps up to every end.

Results: docs/results/trunks_110m
"""

STEPS = 1580
LR = 1e-3
COMMON = (
    f"data.path=data/mixtral-2048,train.steps={STEPS},train.batch_size=32,train.accumulate=1,optim.warmup_steps=150,"
    "eval.every=0,eval.tokens=655360,checkpoint.every=0,checkpoint.ends=none,log.sample_tokens=0"
)
MODELS = {
    "Transformer++, QK norm": "transformer_pp:110m,model.mixer.qk_norm=True",
    "Gated DeltaNet": "gated_deltanet:110m",
}
# Rate, as a multiple of LR -> ends. A curve of six ends tells how well one is interpolated from the others.
ENDS = {
    "Transformer++, QK norm": {0.5: (0.8, 1.0), 1: (0.5, 0.6, 0.7, 0.8, 0.9, 1.0), 2: (0.8, 1.0)},
    "Gated DeltaNet": {0.5: (0.8, 1.0), 1: (0.65, 0.8, 1.0), 2: (0.8, 1.0)},
}


def get_study():
    """Return the title, references, domains and runs."""
    runs = {}
    for model, of_rate in ENDS.items():
        for rate, ends in of_rate.items():
            label = f"{model}, rate {rate * LR:g}"
            runs[label] = {
                "workdir": f"runs/trunks_110m/{len(runs):02d}",
                "config": f"{MODELS[model]},{COMMON},optim.lr={rate * LR:g},train.ends={ends}",
                "model": model,
                "rate": rate,
            }
    return {
        "title": "110M parameters, limited regime: trunks and their ends",
        "references": ("Transformer++, QK norm",),
        "against": ("commoncrawl", "c4"),
        "domains": ("arxiv", "github", "stackexchange"),
        "runs": runs,
    }
