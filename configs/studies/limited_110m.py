"""Base capabilities at 110M: 17 models trained on CommonCrawl and C4.

    seqjax study --study=limited_110m --out=lab/results/limited_110m --jobs=4

T = 2,048, 32 sequences per step, 1,580 steps (104M tokens), learning rate 1e-3, as in lab/results/first_110m.md. More
runs vary seeds, learning rates and schedules. The references trained for 40, 60 and 80% of the steps serve as earlier
ends of their full runs (docs/protocol.md).

Results: lab/results/limited_110m
"""

STEPS = 1580
LR = 1e-3
COMMON = (
    "data.path=data/mixtral-2048,train.batch_size=32,train.accumulate=1,optim.warmup_steps=150,"
    "eval.every=8000000,eval.tokens=655360,checkpoint.every=0,log.sample_tokens=0"
)
# In training order: the references and one model of each kind first.
RUNS = {
    "Transformer++": "transformer_pp:110m",
    "Transformer++, QK norm": "transformer_pp:110m,model.mixer.qk_norm=True",
    "Top-1 Chunk, exact": "top1_chunk:110m",
    "Mamba-2": "mamba2:110m",
    "Gated DeltaNet": "gated_deltanet:110m",
    "RWKV-7": "rwkv7:110m",
    "Mamba-1": "mamba1:110m",
    "RWKV-6": "rwkv6:110m",
    "Top-1 Chunk, approx": "top1_chunk:110m,model.mixer.selection=approx",
    "Top-1 Element": "top1_element:110m",
    "W=256, QK norm": "transformer_pp:110m,model.mixer.window=256,model.mixer.qk_norm=True",
    "DeltaNet": "deltanet:110m",
    "W=256": "transformer_pp:110m,model.mixer.window=256",
    "Transformer": "transformer:110m",
    "RWKV-5": "rwkv5:110m",
    "Based": "based:110m",
    "RWKV-7 shell, Top-1 exact": "rwkv7_shell:110m",
}
DECAYED = {"Transformer++": (0.8, 0.6, 0.4), "Transformer++, QK norm": (0.8, 0.6, 0.4)}
# These also run at half and three times the learning rate.
OF_RATES = (
    "Transformer++",
    "Transformer++, QK norm",
    "Top-1 Chunk, exact",
    "Mamba-2",
    "Top-1 Element",
    "W=256, QK norm",
    "Gated DeltaNet",
    "RWKV-7",
)
# Models that are best at three times the rate also run at six times.
RATES = {0.5: OF_RATES, 3.0: OF_RATES, 6.0: ("Mamba-2", "Gated DeltaNet", "RWKV-7", "Top-1 Element")}
# Other initial parameters and another data order, the same order for all models.
SEEDS = (1, 2)
OF_SEEDS = (*OF_RATES, "Top-1 Chunk, approx")
# At T = 102,400 with one sequence, 135m, on one H200: benchmarks/results/train_step_135m_100k.json, where Transformer++
# has no QK norm. RWKV-7 and Mamba-2 ran with later kernels on another H200: train_step_135m_100k_recurrent.json.
SPEEDS_100K = {
    "Transformer++": 59_308,
    "W=256": 574_020,
    "Top-1 Chunk, exact": 228_189,
    "Top-1 Chunk, approx": 484_059,
    "RWKV-7": 307_676,
    "Mamba-2": 321_172,
    "RWKV-7 shell, Top-1 exact": 204_649,
}


def get_study():
    """Return the title, references, domains and runs."""
    runs = {label: _run(label) for label in RUNS}
    for label, shares in DECAYED.items():
        runs |= {f"{label}, {share:.0%} of the steps": _run(label, schedule=share) for share in shares}
    for seed in SEEDS:
        runs |= {f"{label}, seed {seed}": _run(label, seed=seed) for label in OF_SEEDS}
    for rate, labels in RATES.items():
        runs |= {f"{label}, rate {rate * LR:g}": _run(label, rate=rate) for label in labels}
    return {
        "title": "110M parameters, limited regime: two passes over 52M tokens of CommonCrawl- and C4-like text",
        "references": ("Transformer++", "Transformer++, QK norm"),
        "against": ("commoncrawl", "c4"),
        "domains": ("arxiv", "github", "stackexchange"),
        "speeds": {
            "102,400 tokens, 135m": {"card": "NVIDIA H200", "length": 102_400, "tokens_per_s": SPEEDS_100K},
        },
        "runs": {
            label: {"workdir": f"runs/limited_110m/{index:02d}", **run}
            for index, (label, run) in enumerate(runs.items())
        },
    }


def _run(model, *, schedule=1.0, seed=0, rate=1.0):
    settings = f"optim.lr={rate * LR:g},train.steps={round(schedule * STEPS)},train.seed={seed},data.seed={seed}"
    return {
        "config": f"{RUNS[model]},{COMMON},{settings}",
        "model": model,
        "schedule": schedule,
        "seed": seed,
        "rate": rate,
    }
