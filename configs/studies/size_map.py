"""Gaps by model size and tokens per parameter: six models at one width and depth.

    seqjax study --study=size_map:256x6 --out=lab/results/size_map_256x6 --jobs=4

Sizes are width x layers: 128x4, 256x6, 512x8 and 768x12. A size trains for 20 tokens per parameter (embeddings
included), but at most for 404M tokens, which is four passes over CommonCrawl, C4, Wikipedia and books. Each run has a
constant rate, with cooldowns to ends at 1, 5 and 20 tokens per parameter where its tokens suffice, and at 50, 65 and
80% of its tokens. Every model has three learning rates; lab/results/queue.csv has the order of the runs.
"""

from seqjax import presets

TRUNKS = presets.load("studies/trunks_110m")
PUBLISHED, SAME_BLOCK = TRUNKS.PUBLISHED, TRUNKS.SAME_BLOCK
MODELS = (PUBLISHED, SAME_BLOCK, "Top-1 Chunk, exact", "Gated DeltaNet", "Mamba-2", "W=256, QK norm")
IN_DOMAIN = ("commoncrawl", "c4", "wikipedia", "book")
OOD = ("arxiv", "github", "stackexchange")
SEEDS = (0, 1, 2)
TOKENS = 404_000_000
SEQ_LEN = 2048


# Width x layers -> MLP width (8/3 of the width, a multiple of 8), parameters of attention as published, sequences per
# step, learning rates.
SIZES = {
    "128x4": (344, 4_900_000, 8, (4e-3, 8e-3, 1.6e-2)),
    "256x6": (688, 12_900_000, 16, (2e-3, 4e-3, 8e-3)),
    "512x8": (1368, 41_600_000, 32, (1e-3, 2e-3, 4e-3)),
    "768x12": (2048, 109_500_000, 32, (5e-4, 1e-3, 2e-3)),
}


def shape(model, dim, layers, mlp_dim):
    """Return the settings of a model at a size."""
    layers = layers * (2 if model == "Mamba-2" else 1)
    text = f"model.dim={dim},model.n_layers={layers}"
    if model == "Mamba-2":
        return text  # no MLP; its heads follow from the width
    heads = dim // (128 if model == "Gated DeltaNet" else 64)
    return f"{text},model.mlp.dim={mlp_dim},model.mixer.heads={heads}"


def ends(parameters, tokens):
    """Return the ends of a run, as fractions of its tokens."""
    budgets = {round(n * parameters / tokens, 3) for n in (1, 5, 20)}
    budgets = {end for end in budgets if end < 0.97}
    late = {end for end in (0.5, 0.65, 0.8, 1.0) if all(abs(end - other) > 0.03 for other in budgets)}
    return tuple(sorted(budgets | late))


def get_study(size="256x6"):
    """Return the study of a size."""
    dim, layers = map(int, size.split("x"))
    mlp_dim, parameters, batch_size, rates = SIZES[size]
    per_step = batch_size * SEQ_LEN
    steps = min(20 * parameters, TOKENS) // per_step
    common = (
        f"data.path=data/mixtral-2048,train.steps={steps},train.batch_size={batch_size},train.accumulate=1,"
        "optim.warmup_steps=150,eval.every=0,eval.tokens=655360,checkpoint.every=0,checkpoint.ends=none,"
        f"log.sample_tokens=0,data.train_domains={IN_DOMAIN},data.eval_domains={IN_DOMAIN + OOD},"
        f"train.ends={ends(parameters, steps * per_step)}"
    )
    runs = {}
    for seed in SEEDS:
        for model in MODELS:
            for rate in rates:
                label = f"{model}, rate {rate:g}" + (f", seed {seed}" if seed else "")
                settings = f"{common},optim.lr={rate:g},train.seed={seed},data.seed={seed}"
                runs[label] = {
                    "workdir": f"runs/size_map/{size}/{label}".replace(" ", "_"),
                    "config": f"{TRUNKS.MODELS[model]},{shape(model, dim, layers, mlp_dim)},{settings}",
                    "model": model,
                    "rate": rate,
                    "seed": seed,
                }
    return {
        "title": f"Gaps by size and tokens: {size}",
        "references": (PUBLISHED, SAME_BLOCK),
        "against": IN_DOMAIN,
        "domains": OOD,
        "runs": runs,
    }
