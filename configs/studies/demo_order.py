"""Eight mixers and both references at size demo: does 110M rank them equally?

    seqjax study --study=demo_order --out=DIR --jobs=2

Each mixer has one seed per learning rate, on a grid that is extended if the best rate is at its edge, and more seeds at
the best rate. An earlier version of `seqjax judge --config=NAME:demo` trained these runs.

Results: lab/results/demo_order
"""

LR = 4e-3
COMMON = (
    "limited,eval.every=0,checkpoint.keep=1,checkpoint.ends=none,log.sample_tokens=0,log.tensorboard=False,"
    "train.steps=150,eval.tokens=16384"
)
PUBLISHED, SAME_BLOCK = "Transformer++, QK norm", "Transformer++, QK norm, conv"
ENDS, TENTHS = (0.5, 0.8, 1.0), (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# Model -> its config, the learning rates tried, and the best of them, as multiples of LR.
MODELS = {
    PUBLISHED: ("transformer_pp:demo,model.mixer.qk_norm=True", (1,), 1),
    SAME_BLOCK: ("transformer_pp:demo,model.mixer.qk_norm=True,model.mixer.conv=True", (1,), 1),
    "Transformer++": ("transformer_pp:demo", (0.5, 1, 2), 1),
    "Top-1 Chunk, exact": ("top1_chunk:demo", (0.5, 1, 2), 1),
    "Top-1 Chunk, approx": ("top1_chunk:demo,model.mixer.selection=approx", (0.25, 0.5, 1, 2), 0.5),
    "Top-1 Element": ("top1_element:demo", (0.125, 0.25, 0.5, 1, 2), 0.25),
    "W=256, QK norm": ("transformer_pp:demo,model.mixer.qk_norm=True,model.mixer.window=256", (0.25, 0.5, 1, 2), 0.5),
    "Gated DeltaNet": ("gated_deltanet:demo", (0.25, 0.5, 1, 2), 0.5),
    "RWKV-7": ("rwkv7:demo", (0.5, 1, 2, 4), 2),
    "Mamba-2": ("mamba2:demo", (0.5, 1, 2), 1),
}
SEEDS = (0, 1, 2)


def get_study():
    """Return the title, references, domains and runs."""
    runs = {}
    for model, (config, rates, best) in MODELS.items():
        for rate, seed in [(rate, 0) for rate in rates] + [(best, seed) for seed in SEEDS[1:]]:
            # A model that ends clearly above the references in domain needs only the last end of further seeds.
            ends = TENTHS if model in (PUBLISHED, SAME_BLOCK) else ENDS
            ends = (1.0,) if model == "Top-1 Element" and seed else ends
            label = f"{model}, rate {rate * LR:g}, seed {seed}"
            own = f"optim.lr={rate * LR:g},train.ends={ends},train.seed={seed},data.seed={seed}"
            runs[label] = {
                "workdir": f"runs/demo_order/{label}".replace(" ", "_"),
                "config": f"{config},{COMMON},{own}",
                "model": model,
                "seed": seed,
                "rate": rate,
            }
    return {
        "title": "Eight mixers at the size demo",
        "references": (PUBLISHED, SAME_BLOCK),
        "against": ("prose", "doctest"),
        "domains": ("math_docs", "python", "c_code"),
        "runs": runs,
    }
