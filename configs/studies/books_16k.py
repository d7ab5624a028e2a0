r"""Figure 7 at 16,384 tokens: 110M models on books, and loss by position.

    seqjax prepare --source=CORPUS --out=data/books-16384 --tokenizer=mixtral --seq_len=16384 \
                   --domains=book,arxiv,github
    seqjax study --study=books_16k --out=runs/books_16k --jobs=2
    seqjax repeats --workdir=runs/books_16k/Mamba-2 --lengths=2048,16384

The paper trains on CommonCrawl and C4, which contain hardly any document of this length; books contain hundreds. Here
held-out books are in domain, arXiv and GitHub out of domain. Each model has one run with a WSD schedule, at its best
learning rate in trunks_110m. `seqjax repeats` and `seqjax niah` read the checkpoints. The results' leaderboard.md has
the losses by position and by distance to the repeated token. The RWKV-7 shell, at its learning rate in limited_110m,
puts RWKV-7's block around attention with QK norm; it shows how much of RWKV-7's loss comes from the block. Runs with
convolution use the learning rate at which attention with convolution is best.

Paper: arXiv 2505.18522, figure 7. Results: lab/results/books_16k
"""

# Differences due to the length: 102M tokens, and a RoPE base between 1e4 (2,048 tokens) and 1e6 (102,400 tokens).
SHORT = "train.steps=1560,train.batch_size=4,optim.warmup_steps=150,eval.tokens=655360"
BASE = "model.mixer.rope_base=1e5"
LR = 1e-3
REFERENCE = "Transformer++, QK norm"


def models(base):
    """Return each model's config and its learning rate as a multiple of LR.

    Models with RoPE get the settings `base`.
    """
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
    """Return the title, references, domains and runs of `models` at `seq_len` tokens.

    The runs are kept in runs/`name`.
    """
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
    # QK norm limits the initial scores to 8 at any length. These runs are attention without it, attention with scores
    # of at most 32, and attention in RWKV-7's block, with and without its token shift.
    attention, normed = f"transformer_pp:110m,{BASE}", f"transformer_pp:110m,{BASE},model.mixer.qk_norm=True"
    shell = f"rwkv7_shell:110m,{BASE},model.mixer.core=full,model.mixer.qk_norm=True"
    full = {
        "Transformer++": (attention, 1),
        "Transformer++, temperature 0.25": (f"{attention},model.mixer.temperature=0.25", 1),
        "RWKV-7 shell, full attention": (shell, 1),
        "RWKV-7 shell, full attention, no shift": (f"{shell},model.mixer.token_shift=False", 1),
    }
    # Mixers that score keys, with the convolution of Gated DeltaNet and Mamba-2.
    conv = {
        "Transformer++, QK norm, conv": (f"{normed},model.mixer.conv=True", 2),
        "Top-1 Chunk, exact, conv": (f"top1_chunk:110m,{BASE},model.mixer.conv=True", 2),
        "W=256, QK norm, conv": (f"{normed},model.mixer.window=256,model.mixer.conv=True", 2),
    }
    return study("books_16k", models(BASE) | full | conv, seq_len=16384, common=SHORT)
