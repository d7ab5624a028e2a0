r"""Figure 7: RWKV-7, Mamba-2 and four attention cores in RWKV-7's block at 100k.

    seqjax study --study=figure7:demo --out=runs/figure7      small, paper: the same command with that size

The sizes `small` and `paper` have T = 102,400: they train on blocks of 102,401 tokens and test on documents that fill a
block, i.e. the first 102,399 tokens of each longer document in arXiv, GitHub and, instead of StackExchange,
AutoMathText. The training corpus of `small` is in data/mixtral-102400, the training corpus of `paper` in
data/slimpajama-102400; docs/data.md has the options for other sources.

    seqjax prepare --source=CORPUS --out=data/mixtral-102400 --tokenizer=mixtral --seq_len=102400
    seqjax prepare --source=CORPUS --out=data/long-102400 --tokenizer=mixtral --seq_len=102400 \
                   --domains=arxiv,github --min_tokens=102399 --max_tokens=102399
    seqjax prepare --source=AutoMathText/data --out=data/automathtext-102400 --tokenizer=mixtral --seq_len=102400 \
                   --domain=math --min_tokens=102399 --max_tokens=102399

`demo` uses sequences of 1,024 bytes from the built-in corpus and none of these sets.

Paper: arXiv 2505.18522. Results: lab/results/index.md
"""

from seqjax import presets

REFERENCE = "RWKV-7 shell, full attention"
MODELS = {
    REFERENCE: "rwkv7_shell,model.mixer.core=full",
    "RWKV-7 shell, Top-1 exact": "rwkv7_shell,model.mixer.core=top1_exact",
    "RWKV-7 shell, Top-1 approx": "rwkv7_shell,model.mixer.core=top1_approx",
    "RWKV-7 shell, W=256": "rwkv7_shell,model.mixer.core=window,model.mixer.window=256",
    "RWKV-7": "rwkv7",
    "Mamba-2": "mamba2",
}
TESTED = ("long-102400.arxiv", "long-102400.github", "automathtext-102400.math")


def get_study(size="demo"):
    """Return the study for a size: demo, small or paper."""
    paper = presets.load("studies/_paper")
    tested = {} if size == "demo" else {"domains": TESTED}
    return paper.study("Figure 7: 135M at 100k", MODELS, size=size, scale="100k", references=(REFERENCE,), **tested)
