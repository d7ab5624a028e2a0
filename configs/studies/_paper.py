"""Shared parts of the paper's studies: sizes, labelled models, run paths.

The paper is arXiv 2505.18522.

    paper = presets.load("studies/_paper")
    return paper.study("Figure 1(b)", models, size=size, regime="limited")

Three sizes:

    demo   a model with two layers of width 64, 100 steps of 2,048 bytes from the built-in corpus. A window is an eighth
           of the sequence. This size only shows that the study runs.
    small  the settings of studies/limited_110m, 104M tokens of data/mixtral-2048
    paper  the paper's settings, 100B tokens of data/slimpajama-2048 or data/slimpajama-102400

Each study has a scale from the paper: 110m, 1b3 or 100k. A run's directory follows from size, scale, regime and
label, so studies with the same runs share them, and nothing is trained twice. The size `small` reuses the runs of
studies/limited_110m.
"""

from seqjax import presets

LIMITED = presets.load("studies/limited_110m")
_SMALL = f"data.seed=0,train.seed=0,{LIMITED.COMMON}"
_LONG = "eval.path=('data/long-102400','data/automathtext-102400'),data.eval_domains=('commoncrawl','c4')"
_DEMO = (
    "debug,optim.warmup_steps=10,train.steps=100,eval.every=40000,eval.tokens=8192,eval.batch_size=8,"
    "checkpoint.every=0,log.sample_tokens=0,log.tensorboard=False"
)

# size -> scale -> text after a config's name. As in the paper, the 1.3B learning rate is a quarter of the 110M rate.
SIZES = {
    "demo": {
        "110m": f"{_DEMO},train.seq_len=256,train.batch_size=8",
        "1b3": f"{_DEMO},train.seq_len=256,train.batch_size=8",
        "100k": f"{_DEMO},train.seq_len=1024,train.batch_size=2,eval.batch_size=2",
    },
    "small": {
        "110m": f"110m,{_SMALL},optim.lr={LIMITED.LR:g},train.steps={LIMITED.STEPS}",
        "1b3": f"1b3,{_SMALL},optim.lr={LIMITED.LR / 4:g},train.steps={LIMITED.STEPS},train.accumulate=None",
        "100k": (
            "135m_100k,data.path=data/mixtral-102400,train.batch_size=4,train.steps=250,"
            f"optim.lr={LIMITED.LR:g},optim.warmup_steps=25,eval.every=16000000,eval.tokens=1024000,{_LONG},"
            "checkpoint.every=50,log.sample_tokens=0"
        ),
    },
    "paper": {"110m": "110m", "1b3": "1b3", "100k": f"135m_100k,{_LONG}"},
}
TITLES = {"demo": "demo, not this scale: two layers of width 64"}
WINDOW = {"demo": 32, "small": 256, "paper": 256}  # the window of models labelled W=256
DOMAINS = {
    # size -> (training domains of the limited regime, its OOD domains, other domains)
    "demo": (("prose", "doctest"), ("math_docs", "python", "c_code"), ()),
    "small": (("commoncrawl", "c4"), ("arxiv", "github", "stackexchange"), ("book", "wikipedia")),
    "paper": (("commoncrawl", "c4"), ("arxiv", "github", "stackexchange"), ("book", "wikipedia")),
}
REFERENCES = ("Transformer++", "Transformer++, QK norm")

# label -> config name and differences; models of limited_110m keep their labels
MODELS = {label: text.replace(":110m", "") for label, text in LIMITED.RUNS.items()}
# The architectures of figures 1 and 2, and the references with and without QK norm.
OF_110M = (
    *REFERENCES, "Transformer", "W=256", "Based", "Mamba-1", "Mamba-2", "RWKV-5", "RWKV-6", "RWKV-7", "DeltaNet",
    "Gated DeltaNet",
)  # fmt: skip
OF_1B3 = (*REFERENCES, "W=256", "Mamba-1", "Mamba-2")
TOP1 = ("Top-1 Element", "Top-1 Chunk, exact", "Top-1 Chunk, approx")
SIX = (*REFERENCES, "Top-1 Element", "Top-1 Chunk, exact", "Mamba-2", "RWKV-7")


def study(
    title,
    models,
    *,
    size,
    regime="limited",
    scale="110m",
    references=REFERENCES,
    replicates=False,
    settings="",
    folder="",
    **more,
):
    """Return a study.

    Args:
        title: Its title, to which the size is added.
        models: Labels of `MODELS`, or a dict label -> config name and differences, "NAME[,key=value ...]".
        size: demo, small or paper.
        regime: limited tests OOD domains at equal held-out loss on the training domains. mixed tests the training
            domains at equal training loss, as in the paper.
        scale: 110m, 1b3 or 100k.
        references: Models that the gaps refer to.
        replicates: Add limited_110m's seeds, learning rates and schedules, at the size that reuses its runs.
        settings: Differences in all runs, "key=value[,key=value ...]"; such runs need a separate `folder`.
        folder: Directory of the runs within the directory of size and scale, by default the regime.
        **more: Other fields of a study; they replace the fields made here.
    """
    trained, tested, others = domains(size)
    named = models if isinstance(models, dict) else {label: MODELS[label] for label in models}
    has_runs = (size, scale, regime, settings) == ("small", "110m", "limited", "")
    existing = LIMITED.get_study()["runs"] if has_runs else {}
    runs = {}
    for label, model in named.items():
        recorded_runs = {name: run for name, run in existing.items() if run["model"] == label}
        if recorded_runs:
            runs |= recorded_runs if replicates else {label: recorded_runs[label]}
            continue
        shown = label.replace("W=256", f"W={WINDOW[size]}")
        name, _, different = model.replace("window=256", f"window={WINDOW[size]}").partition(",")
        parts = [f"{name}:{SIZES[size][scale]}", regime, different, settings]
        runs[shown] = {
            "workdir": f"runs/paper/{size}/{_directory(size, scale)}/{folder or regime}/{_slug(shown)}",
            "config": ",".join(filter(None, parts)),
        }
    limited = regime == "limited"
    about = {
        "title": f"{title} ({TITLES.get(size, size)})",
        "references": references,
        "domains": tested if limited else (*trained, *tested, *others),
        "against": trained if limited else (),
        "runs": runs,
    }
    return about | more


def domains(size):
    """Return the limited regime's training domains, its OOD domains, and the rest."""
    return presets.pick(DOMAINS, size, kind="size of the study")


def _directory(size, scale):
    """Return the first scale with the same settings: equal scales share their runs."""
    return next(name for name, settings in SIZES[size].items() if settings == SIZES[size][scale])


def _slug(label):
    words = "".join(c if c.isalnum() else " " for c in label.lower().replace("++", "pp")).split()
    return "-".join(words)
