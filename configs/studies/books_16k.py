r"""Figure 7 at 16,384 tokens: 110M models trained on books, and what they lose with the place in a long sequence.

    seqjax prepare --source=CORPUS --out=data/books-16384 --tokenizer=mixtral --seq_len=16384 \
                   --domains=book,arxiv,github
    seqjax study --study=books_16k --out=runs/books_16k --jobs=2
    seqjax repeats --workdir=runs/books_16k/Mamba-2 --lengths=2048,16384

The paper trains on CommonCrawl and C4, which have hardly a document of that length; books have hundreds. So held-out
books are in domain here, arXiv and GitHub outside. One trunk with a cooldown at its end for each model, at the rate
that is its best in trunks_110m, and checkpoints, which `seqjax repeats` and `seqjax niah` read. gaps.md of the results
has the losses by position, and by the distance of what a token repeats.

Paper: arXiv 2505.18522, figure 7. Results: docs/results/books_16k
"""

STEPS = 1560  # of 4 x 16,384 tokens: 102M
COMMON = (
    f"data.path=data/books-16384,data.train_domains=('book',),data.eval_domains=('book','arxiv','github'),"
    f"train.seq_len=16384,train.steps={STEPS},train.batch_size=4,train.accumulate=1,train.ends=(1.0,),"
    "optim.warmup_steps=150,eval.every=0,eval.tokens=655360,checkpoint.every=0,log.sample_tokens=0"
)
BASE = "model.mixer.rope_base=1e5"  # between the 1e4 of 2,048 tokens and the 1e6 of 102,400
ATTENTION = f"transformer_pp:110m,model.mixer.qk_norm=True,{BASE}"
TOP1 = f"top1_chunk:110m,{BASE}"
LR = 1e-3
MODELS = {  # config, and rate as a multiple of LR
    "Transformer++, QK norm": (ATTENTION, 1),
    "Top-1 Chunk, exact": (TOP1, 1),
    "Top-1 Chunk, best key": (f"{TOP1},model.mixer.selection=best_key", 1),
    "Top-1 Chunk, shortlist": (f"{TOP1},model.mixer.selection=shortlist", 1),
    "Top-1 Chunk, approx": (f"{TOP1},model.mixer.selection=approx", 1),
    "W=256, QK norm": (f"{ATTENTION},model.mixer.window=256", 1),
    "Gated DeltaNet": ("gated_deltanet:110m", 2),
    "RWKV-7": ("rwkv7:110m", 2),
    "Mamba-2": ("mamba2:110m", 4),
}


def get_study():
    """Return the title, references, domains and runs."""
    runs = {
        model: {
            "workdir": f"runs/books_16k/{model}".replace(" ", "_"),
            "config": f"{config},{COMMON},optim.lr={rate * LR:g}",
            "model": model,
            "rate": rate,
        }
        for model, (config, rate) in MODELS.items()
    }
    return {
        "title": "110M parameters, 16,384 tokens, trained on books",
        "references": ("Transformer++, QK norm",),
        "against": ("book",),
        "domains": ("arxiv", "github"),
        "runs": runs,
    }
