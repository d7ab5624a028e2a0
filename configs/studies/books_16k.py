r"""Figure 7 at 16,384 tokens: 110M models trained on books, and what they lose with the place in a long sequence.

    seqjax prepare --source=CORPUS --out=data/books-16384 --tokenizer=mixtral --seq_len=16384 \
                   --domains=book,arxiv,github
    seqjax study --study=books_16k --out=runs/books_16k --jobs=2
    seqjax repeats --workdir=runs/books_16k/Mamba-2 --lengths=2048,16384

The paper trains on CommonCrawl and C4, which have hardly a document of that length; books have hundreds. So held-out
books are in domain here, arXiv and GitHub outside. Each model has one run with a constant rate and a cooldown at its
end, at its best rate in trunks_110m. `seqjax repeats` and `seqjax niah` read the checkpoints. leaderboard.md of the
results has the losses by position, and by the distance of what a token repeats. RWKV-7's shell, at the rate of
limited_110m, has its block around attention with QK norm: what of RWKV-7's loss is the block's. Runs with the
convolution have the rate at which attention with it is best.

Paper: arXiv 2505.18522, figure 7. Results: lab/results/books_16k
"""

# What differs with the length: 102M tokens, and RoPE's base between the 1e4 of 2,048 tokens and the 1e6 of 102,400.
SHORT = "train.steps=1560,train.batch_size=4,optim.warmup_steps=150,eval.tokens=655360"
BASE = "model.mixer.rope_base=1e5"
LR = 1e-3
REFERENCE = "Transformer++, QK norm"


def models(base):
    """Return each model's config, and its rate as a multiple of LR, with the settings `base` where it has RoPE."""
    attention = f"transformer_pp:110m,model.mixer.qk_norm=True,{base}"
    top1 = f"top1_chunk:110m,{base}"
    shell = f"rwkv7_shell:110m,model.mixer.qk_norm=True,{base}"
    return {
        REFERENCE: (attention, 1),
        "Top-1 Chunk, exact": (top1, 1),
        "Top-1 Chunk, best key": (f"{top1},model.mixer.selection=best_key", 1),
        "Top-1 Chunk, shortlist": (f"{top1},model.mixer.selection=shortlist", 1),
        "Top-1 Chunk, approx": (f"{top1},model.mixer.selection=approx", 1),
        "W=256, QK norm": (f"{attention},model.mixer.window=256", 1),
        "Gated DeltaNet": ("gated_deltanet:110m", 2),
        "RWKV-7": ("rwkv7:110m", 2),
        "Mamba-2": ("mamba2:110m", 4),
        "RWKV-7 shell, Top-1 exact": (shell, 1),
        "RWKV-7 shell, W=256": (f"{shell},model.mixer.core=window,model.mixer.window=256", 1),
    }


def study(name, models, *, seq_len, common, references=(REFERENCE,)):
    """Return the title, references, domains and runs of `models` at `seq_len` tokens, which are kept in runs/`name`."""
    common = (
        f"data.path=data/books-{seq_len},data.train_domains=('book',),data.eval_domains=('book','arxiv','github'),"
        f"train.seq_len={seq_len},train.accumulate=1,train.ends=(1.0,),eval.every=0,checkpoint.every=0,"
        f"log.sample_tokens=0,{common}"
    )
    runs = {
        model: {
            "workdir": f"runs/{name}/{model}".replace(" ", "_"),
            "config": f"{config},{common},optim.lr={rate * LR:g}",
            "model": model,
            "rate": rate,
        }
        for model, (config, rate) in models.items()
    }
    return {
        "title": f"110M parameters, {seq_len:,} tokens, trained on books",
        "references": references,
        "against": ("book",),
        "domains": ("arxiv", "github"),
        "runs": runs,
    }


def get_study():
    """Return the study at 16,384 tokens."""
    # QK norm bounds a score to 8 at first, whatever the length: attention without it, and with scores of 32 at most.
    # And attention in RWKV-7's block, whole and without its token shift.
    attention, normed = f"transformer_pp:110m,{BASE}", f"transformer_pp:110m,{BASE},model.mixer.qk_norm=True"
    shell = f"rwkv7_shell:110m,{BASE},model.mixer.core=full,model.mixer.qk_norm=True"
    full = {
        "Transformer++": (attention, 1),
        "Transformer++, temperature 0.25": (f"{attention},model.mixer.temperature=0.25", 1),
        "RWKV-7 shell, full attention": (shell, 1),
        "RWKV-7 shell, full attention, no shift": (f"{shell},model.mixer.token_shift=False", 1),
    }
    # What looks at keys, with the convolution that Gated DeltaNet and Mamba-2 have.
    conv = {
        "Transformer++, QK norm, conv": (f"{normed},model.mixer.conv=True", 2),
        "Top-1 Chunk, exact, conv": (f"top1_chunk:110m,{BASE},model.mixer.conv=True", 2),
        "W=256, QK norm, conv": (f"{normed},model.mixer.window=256,model.mixer.conv=True", 2),
    }
    return study("books_16k", models(BASE) | full | conv, seq_len=16384, common=SHORT)
