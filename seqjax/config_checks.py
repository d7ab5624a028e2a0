"""What the values of a config must be, alone and together; `seqjax.config` makes it and asks here.

Types and unknown keys are found where the config is parsed. A mixer checks what only it knows, in its `Config.check`.
"""

import math
import operator
from typing import Any

from seqjax.errors import UserError, nearest

# Setting -> least value, and what it must stay below.
BOUNDS: dict[str, tuple[float, float]] = {
    "model.dim": (1, math.inf),
    "model.n_layers": (1, math.inf),
    "model.vocab_size": (1, math.inf),
    "model.loss_chunk": (1, math.inf),
    "model.mlp.dim": (0, math.inf),
    "model.norm_eps": (0, 1),
    "data.workers": (0, math.inf),
    "train.steps": (1, math.inf),
    "train.batch_size": (1, math.inf),
    "train.seq_len": (1, math.inf),
    "train.accumulate": (1, math.inf),
    "optim.lr": (0, math.inf),
    "optim.b1": (0, 1),
    "optim.b2": (0, 1),
    "optim.eps": (0, math.inf),
    "optim.weight_decay": (0, math.inf),
    "optim.clip_norm": (0, math.inf),
    "optim.warmup_steps": (0, math.inf),
    "optim.final_lr": (0, math.inf),
    "eval.every": (0, math.inf),
    "eval.tokens": (1, math.inf),
    "eval.batch_size": (0, math.inf),
    "eval.seed": (0, math.inf),
    "eval.entropy_tokens": (0, math.inf),
    "checkpoint.every": (0, math.inf),
    "checkpoint.keep": (1, math.inf),
    "log.every": (1, math.inf),
    "log.profile_start": (0, math.inf),
    "log.profile_steps": (1, math.inf),
    "log.sample_tokens": (0, math.inf),
}


def check(config: Any) -> None:
    """Raise `UserError`, naming the key and the fix, where the values of a `Config` cannot work."""
    model, train, data = config.model, config.train, config.data
    _choice(model.mlp.kind, ("geglu", "swiglu", "gelu", "none"), "config.model.mlp.kind")
    _choice(model.norm, ("rmsnorm", "layernorm"), "config.model.norm")
    _choice(model.init, ("gpt", "rwkv"), "config.model.init")
    _choice(model.dtype, ("auto", "bfloat16", "float32"), "config.model.dtype")
    _choice(model.residual_dtype, ("compute", "float32"), "config.model.residual_dtype")
    _choice(model.remat, ("none", "full", "dots", "attention"), "config.model.remat")
    _choice(data.corpus, ("builtin", "blocks", "stream"), "config.data.corpus")
    _choice(data.tokenizer, ("byte", "mixtral"), "config.data.tokenizer")
    _choice(data.regime, ("limited", "mixed"), "config.data.regime")
    for path, (low, high) in BOUNDS.items():
        value = operator.attrgetter(path)(config)
        if not low <= value < high:
            upper = f" and less than {high}" if high < math.inf else ""
            raise UserError(f"config.{path} must be at least {low}{upper}, not {value}.")
    if train.batch_size % train.accumulate:
        raise UserError(
            f"config.train.batch_size={train.batch_size} must be a multiple of "
            f"config.train.accumulate={train.accumulate}."
        )
    if data.corpus != "builtin" and not data.path:
        raise UserError(
            f"config.data.corpus={data.corpus!r} needs config.data.path: the directory that "
            "`python -m seqjax.data.prepare` wrote (blocks) or that holds the jsonl.zst shards (stream)."
        )
    if data.weights and len(data.weights) != len(data.train_domains):
        raise UserError(
            f"config.data.weights has {len(data.weights)} values for {len(data.train_domains)} "
            "config.data.train_domains; name both, one weight per domain."
        )
    if model.pattern and model.n_layers % len(model.pattern):
        raise UserError(
            f"config.model.pattern has {len(model.pattern)} mixers, which do not divide config.model.n_layers="
            f"{model.n_layers}; repeat or list them so that they do."
        )
    # A mixer checks what only it knows, e.g. that its chunk fits the sequence.
    for mixer in model.pattern or (model.mixer,):
        if hasattr(mixer, "check"):
            mixer.check(dim=model.dim, seq_len=train.seq_len)


def _choice(value: str, known: tuple[str, ...], path: str) -> None:
    if value not in known:
        raise UserError(f"{path}={value!r} is not known.{nearest(value, known)}")
