"""Train 110M models at several learning rates, with evaluations after cooldowns (docs/protocol.md).

    seqjax study --study=trunks_110m --out=lab/results/trunks_110m --jobs=2

Settings as in limited_110m, with a WSD schedule: a constant learning rate, and a cooldown over the last fifth of the
steps to each end. --partial adds finished runs to the results, so the study can grow.

Results: lab/results/trunks_110m
"""

STEPS = 1580
LR = 1e-3
COMMON = (
    f"data.path=data/mixtral-2048,train.steps={STEPS},train.batch_size=32,train.accumulate=1,optim.warmup_steps=150,"
    "eval.every=0,eval.tokens=655360,checkpoint.every=0,checkpoint.ends=none,log.sample_tokens=0"
)
PUBLISHED, SAME_BLOCK = "Transformer++, QK norm", "Transformer++, QK norm, conv"
MODELS = {
    PUBLISHED: "transformer_pp:110m,model.mixer.qk_norm=True",
    "Gated DeltaNet": "gated_deltanet:110m",
    SAME_BLOCK: "transformer_pp:110m,model.mixer.qk_norm=True,model.mixer.conv=True",
    "Mamba-2": "mamba2:110m",
    "Top-1 Chunk, exact": "top1_chunk:110m",
    "W=256, QK norm": "transformer_pp:110m,model.mixer.qk_norm=True,model.mixer.window=256",
    "RWKV-7": "rwkv7:110m",
    "Transformer++": "transformer_pp:110m",
    "DeltaNet": "deltanet:110m",
    "RWKV-6": "rwkv6:110m",
    "Based": "based:110m",
    "Top-1 Chunk, approx": "top1_chunk:110m,model.mixer.selection=approx",
    "GLA": "gla:110m",
    "KDA": "kda:110m",
    "Gated DeltaProduct": "gated_deltaproduct:110m",
    "RWKV-5": "rwkv5:110m",
    "Top-1 Chunk, best key": "top1_chunk:110m,model.mixer.selection=best_key",
    "Top-1 Chunk, shortlist": "top1_chunk:110m,model.mixer.selection=shortlist",
    "Top-1 Chunk, approx, k=4": "top1_chunk:110m,model.mixer.selection=approx,model.mixer.top_k=4",
    "Top-1 Chunk, best key, k=4": "top1_chunk:110m,model.mixer.selection=best_key,model.mixer.top_k=4",
    # 4 chunks of 32 keys: as many selected keys as k=1; the local chunk is a quarter as long
    "Top-1 Chunk, best key, 32, k=4": "top1_chunk:110m,model.mixer.selection=best_key,model.mixer.top_k=4,"
    "model.mixer.chunk_size=32",
    "FoX": "fox:110m",
    "mLSTM": "mlstm:110m",
    "Mamba-3": "mamba3:110m",
    "Log-linear Mamba-2": "log_linear_mamba2:110m",
    "KDA, attention 1 in 4": f"kda:110m,model.mixer={(*[{'name': 'kda', 'heads': 6}] * 3, {'name': 'transformer_pp'})}",
    "MoBA": "moba:110m",
    "NSA": "nsa:110m",
    "PaTH": "path:110m",
    "Gated DeltaNet-2": "kda:110m,model.mixer.heads=12,model.mixer.channel_gates=True,model.mlp.dim=1536",
    # heads as in the public code; parameters and state as in KDA
    "Gated DeltaNet-2, heads of 128": "kda:110m,model.mixer.channel_gates=True,model.mlp.dim=1536",
}
TENTHS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# Model -> rate, as a multiple of LR -> ends. A curve of six ends shows the interpolation error between ends. Both
# references have one: most models end at a higher in-domain loss, so they are compared with a point between ends.
ENDS = {
    PUBLISHED: {0.5: (0.8, 1.0), 1: TENTHS, 2: (0.8, 1.0)},
    "Gated DeltaNet": {0.5: (0.8, 1.0), 1: (0.65, 0.8, 1.0), 2: (0.8, 1.0), 4: (0.8, 1.0)},
    SAME_BLOCK: {0.5: (1.0,), 1: TENTHS, 2: TENTHS, 4: (1.0,)},
    "Mamba-2": {2: (1.0,), 4: (1.0,), 8: (0.8, 1.0)},
    "Top-1 Chunk, exact": {0.5: (1.0,), 1: (0.8, 1.0), 2: (0.8, 1.0)},
    "W=256, QK norm": {0.5: (1.0,), 1: (1.0,), 2: (1.0,)},
    "RWKV-7": {1: (0.8, 1.0), 2: (0.8, 1.0)},
    "Transformer++": {0.5: (1.0,), 1: (1.0,)},
    "DeltaNet": {2: (1.0,)},
    "RWKV-6": {2: (1.0,)},
    "Based": {1: (1.0,), 2: (1.0,)},
    "Top-1 Chunk, approx": {1: (1.0,), 2: (1.0,)},
    "GLA": {2: (1.0,)},
    "KDA": {1: (1.0,), 2: (0.65, 0.8, 1.0)},
    "Gated DeltaProduct": {2: (1.0,)},
    "RWKV-5": {2: (1.0,)},
    "Top-1 Chunk, best key": {1: (0.8, 1.0), 2: (0.8, 1.0)},
    "Top-1 Chunk, shortlist": {1: (0.8, 1.0), 2: (0.8, 1.0)},
    "Top-1 Chunk, approx, k=4": {1: (0.8, 1.0)},
    "Top-1 Chunk, best key, k=4": {1: (0.8, 1.0)},
    "Top-1 Chunk, best key, 32, k=4": {1: (0.8, 1.0)},
    "FoX": {1: (0.8, 1.0), 2: (1.0,)},
    "mLSTM": {2: (1.0,)},
    "Mamba-3": {2: (0.8, 1.0), 4: (0.8, 1.0)},
    "KDA, attention 1 in 4": {1: (1.0,), 2: (0.65, 0.8, 1.0)},
    "MoBA": {1: (0.8, 1.0)},
    "NSA": {1: (0.8, 1.0)},
    "PaTH": {1: (0.8, 1.0)},
    "Gated DeltaNet-2": {2: (0.65, 0.8, 1.0)},
    "Gated DeltaNet-2, heads of 128": {2: (0.65, 0.8, 1.0)},
    "Log-linear Mamba-2": {4: (0.8, 1.0)},
}
# More seeds, each at the best rate, with the ends that a comparison at equal loss reads.
SEEDS = (1, 2)
BEST = {
    PUBLISHED: (1, (0.8, 1.0)),
    "Gated DeltaNet": (2, (0.65, 0.8, 1.0)),
    SAME_BLOCK: (2, TENTHS[2:]),
    "Mamba-2": (4, (0.8, 1.0)),
    "Top-1 Chunk, exact": (1, (0.8, 1.0)),
    "W=256, QK norm": (1, (1.0,)),
    "Transformer++": (1, (1.0,)),
    "Top-1 Chunk, best key": (1, (0.8, 1.0)),
    "Top-1 Chunk, shortlist": (1, (0.8, 1.0)),
    "KDA": (2, (0.65, 0.8, 1.0)),
    "KDA, attention 1 in 4": (2, (0.65, 0.8, 1.0)),
    "FoX": (1, (0.8, 1.0)),
    "Mamba-3": (2, (0.8, 1.0)),
}
# Seeds at a rate that was best before another rate ran.
MORE = {"FoX": (2, (1.0,))}
# Runs of the references with the ends of all new runs: model, rate and seed. First each reference at the other's best
# rate, so that models at either rate have both references; then each at its best rate, up to nine seeds.
NEW_ENDS = (0.5, 0.65, 0.8, 1.0)
REFERENCES = (
    *((SAME_BLOCK, 1, seed) for seed in SEEDS),
    *((PUBLISHED, 2, seed) for seed in SEEDS),
    *((model, BEST[model][0], seed) for seed in range(3, 9) for model in (SAME_BLOCK, PUBLISHED)),
)
# Further runs with these ends: seeds of Top-1 Chunk at twice its best rate; models at half or twice a best rate that is
# at the edge of the rates tried; RWKV-7, Mamba-2 and the window, whose gaps need earlier ends; seeds of the two models
# that had a lower gap than published attention with one seed.
FURTHER = (
    *((f"Top-1 Chunk, {how}", 2, seed) for how in ("exact", "best key", "shortlist") for seed in SEEDS),
    ("FoX", 0.5, 0),
    ("Mamba-3", 1, 0),
    ("KDA", 4, 0),
    ("KDA, attention 1 in 4", 4, 0),
    *(("RWKV-7", 2, seed) for seed in (1, 2, 3)),
    *((model, BEST[model][0], seed) for model in ("Mamba-2", "W=256, QK norm") for seed in (3, 4)),
    *((f"Top-1 Chunk, best key, {how}", 1, seed) for seed in SEEDS for how in ("32, k=4", "k=4")),
)

# 16 x 2,048 tokens in one run on one H200, with the newest kernels: benchmarks/results/train_step.json. The runs of
# the study used slower kernels.
SPEEDS = {
    "MoBA": 549_948,
    "GLA": 546_269,
    "Transformer++": 545_151,
    "Top-1 Chunk, approx": 543_211,
    "Top-1 Chunk, best key": 541_593,
    "Top-1 Chunk, exact": 532_203,
    "DeltaNet": 517_108,
    "RWKV-5": 516_062,
    "Gated DeltaNet": 506_522,
    "mLSTM": 491_531,
    "Gated DeltaProduct": 469_180,
    "FoX": 464_881,
    "Based": 464_125,
    "KDA": 452_020,
    "NSA": 449_595,
    "RWKV-6": 426_607,
    "Gated DeltaNet-2": 413_967,
    "Mamba-3": 387_343,
    "RWKV-7": 384_298,
    "Mamba-2": 359_433,
    "PaTH": 330_221,
    "Log-linear Mamba-2": 293_718,
}
# One sequence of 102,400 tokens at 135M parameters, untied embeddings: train_step_135m_100k_selection.json, and
# train_step_135m_100k_recurrent.json for recurrent models.
LONG_SPEEDS = {
    "Transformer++": 60_383,
    "Top-1 Chunk, exact": 237_901,
    "Top-1 Chunk, best key": 283_858,
    "Top-1 Chunk, shortlist": 464_780,
    "Top-1 Chunk, approx": 515_547,
    "RWKV-7": 307_676,
    "Gated DeltaNet": 370_035,
    "Mamba-2": 321_172,
}


def get_study():
    """Return the title, references, domains and runs."""
    runs = {}
    first = [(model, rate, 0, ends) for model, of_rate in ENDS.items() for rate, ends in of_rate.items()]
    best = (*BEST.items(), *MORE.items())
    more = [(model, rate, seed, ends) for seed in SEEDS for model, (rate, ends) in best]
    new = [(model, rate, seed, NEW_ENDS) for model, rate, seed in (*REFERENCES, *FURTHER)]
    for model, rate, seed, ends in first + more + new:
        label = f"{model}, rate {rate * LR:g}" + (f", seed {seed}" if seed else "")
        own = f"optim.lr={rate * LR:g},train.seed={seed},data.seed={seed},train.ends={ends}"
        runs[label] = {
            "workdir": f"runs/trunks_110m/{label}".replace(" ", "_"),
            "config": f"{MODELS[model]},{COMMON},{own}",
            "model": model,
            "rate": rate,
            "seed": seed,
        }
    return {
        "title": "110M parameters, trained on web text only",
        "references": (PUBLISHED, SAME_BLOCK),
        "against": ("commoncrawl", "c4"),
        "domains": ("arxiv", "github", "stackexchange"),
        "speeds": {
            "2,048 tokens, same kernels": {"card": "NVIDIA H200", "length": 2_048, "tokens_per_s": SPEEDS},
            "102,400 tokens, 135m": {"card": "NVIDIA H200", "length": 102_400, "tokens_per_s": LONG_SPEEDS},
        },
        "runs": runs,
    }


def variants(name, changes, *, title, ends, beside=()):
    """Return the study `name`: models at their best rates, each followed by its variants.

    `changes` maps a model to its changed settings by label; `beside` lists models without changes. All runs have the
    first seed; runs with changed settings have the ends `ends`.
    """
    study, runs = get_study(), {}
    del study["speeds"]  # recorded for other models and unchanged settings
    for label, run in study["runs"].items():
        model = run["model"]
        if model not in (*changes, *beside) or run["seed"] or run["rate"] != BEST[model][0]:
            continue
        runs[label] = run
        for what, settings in changes.get(model, {}).items():
            own = label.replace(model, f"{model}, {what}")
            runs[own] = run | {
                "workdir": f"runs/{name}/{own}".replace(" ", "_"),
                "config": f"{run['config']},train.ends={ends},{settings}",
                "model": f"{model}, {what}",
            }
    return study | {"title": title, "runs": runs}
