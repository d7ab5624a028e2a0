"""Checks of the values of a config, alone and in combination; `seqjax.config` calls them.

Types, allowed values and unknown keys are checked when the config is parsed. A mixer checks its own settings in its
constructor.
"""

import math
import operator
from typing import Any

from seqjax import mixers
from seqjax.errors import UserError

SEED = (0, 1 << 32)  # JAX uses so many bits of a seed
# Setting -> (lower bound, inclusive; upper bound, exclusive). None is not checked, where a setting may be None.
BOUNDS: dict[str, tuple[float, float]] = {
    "model.dim": (1, math.inf),
    "model.n_layers": (1, math.inf),
    "model.vocab_size": (1, math.inf),
    "model.loss_chunk": (1, math.inf),
    "model.mlp.dim": (1, math.inf),
    "model.norm_eps": (0, 1),
    "data.seed": SEED,
    "data.workers": (0, 1025),
    "train.steps": (1, math.inf),
    "train.batch_size": (1, math.inf),
    "train.seq_len": (1, math.inf),
    "train.per_device_batch_size": (1, math.inf),
    "train.accumulate": (1, math.inf),
    "train.seed": SEED,
    "optim.lr": (0, math.inf),
    "optim.b1": (0, 1),
    "optim.b2": (0, 1),
    "optim.eps": (0, math.inf),
    "optim.weight_decay": (0, math.inf),
    "optim.clip_norm": (0, math.inf),
    "optim.warmup_steps": (0, math.inf),
    "optim.final_lr": (0, math.inf),
    "optim.cooldown": (0, 1),
    "eval.every": (0, math.inf),
    "eval.tokens": (1, math.inf),
    "eval.batch_size": (1, math.inf),
    "eval.seed": SEED,
    "eval.entropy_tokens": (0, math.inf),
    "checkpoint.every": (0, math.inf),
    "checkpoint.keep": (1, math.inf),
    "checkpoint.keep_period": (1, math.inf),
    "log.every": (1, math.inf),
    "log.profile_start": (1, math.inf),
    "log.profile_steps": (1, math.inf),
    "log.sample_tokens": (0, math.inf),
}

# The meaning of None for those of the settings above that may be None, for the message.
NONE = {
    "model.mlp.dim": "the usual multiple of config.model.dim",
    "train.per_device_batch_size": "no limit",
    "train.accumulate": "as few as config.train.per_device_batch_size allows",
    "eval.batch_size": "as many as a training micro-batch",
    "checkpoint.keep_period": "only the newest",
    "log.profile_start": "no profile",
}


def check(config: Any) -> None:
    """Raise `UserError`, naming the key and the fix, if the values of a `Config` are invalid."""
    model, train, data = config.model, config.train, config.data
    for path, (low, high) in BOUNDS.items():
        value = operator.attrgetter(path)(config)
        if value is not None and not low <= value < high:
            upper = f" and less than {high}" if high < math.inf else "" if math.isfinite(value) else " and finite"
            none = f"; None is for {NONE[path]}" if path in NONE else ""
            raise UserError(f"config.{path} must be at least {low}{upper}, not {value}{none}.")
    if config.optim.clip_norm == 0:
        raise UserError("config.optim.clip_norm=0 would stop every step; None is for no clipping.")
    every, period = config.checkpoint.every, config.checkpoint.keep_period
    if period is not None and (not every or period % every):
        raise UserError(
            f"config.checkpoint.keep_period={period} keeps what is saved, so it must be a multiple of "
            f"config.checkpoint.every={every}."
        )
    if train.ends:
        _check_ends(config)
    if train.accumulate is not None and train.batch_size % train.accumulate:
        raise UserError(
            f"config.train.batch_size={train.batch_size} must be a multiple of "
            f"config.train.accumulate={train.accumulate}."
        )
    if data.corpus in ("blocks", "stream") and not data.path:
        raise UserError(
            f"config.data.corpus={data.corpus!r} needs config.data.path: the directory that "
            "`seqjax prepare` wrote (blocks) or that holds the shards (stream)."
        )
    if bool(data.tfds) != (data.corpus == "tfds"):
        raise UserError(
            "config.data.corpus='tfds' and config.data.tfds, the datasets that it reads, belong together: give both, "
            "--config.data.corpus=tfds --config.data.tfds=\"('slim_pajama',)\" for instance, or neither."
        )
    if data.weights and len(data.weights) != len(data.train_domains):
        raise UserError(
            f"config.data.weights has {len(data.weights)} values for {len(data.train_domains)} "
            "config.data.train_domains; name both, one weight per domain."
        )
    if model.n_layers % len(model.mixers):
        raise UserError(
            f"config.model.mixer has {len(model.mixers)} mixers, which do not divide config.model.n_layers="
            f"{model.n_layers}; repeat or list them so that they do."
        )
    # A mixer checks its own settings, e.g. that its chunk fits the sequence.
    for i, mixer in enumerate(model.mixers):
        try:
            mixers.check(mixer, dim=model.dim, n_layers=model.n_layers, seq_len=train.seq_len)
        except UserError as error:
            if not isinstance(model.mixer, tuple):
                raise
            # The mixer does not know its index among several.
            text = str(error).replace("config.model.mixer.", f"config.model.mixer[{i}].")
            raise UserError(text) from error


def _check_ends(config: Any) -> None:
    """Raise `UserError` unless the run's ends ascend to its last step and every cooldown begins after warm-up."""
    ends, steps = config.train.ends, config.train.steps
    cooldown, warmup = config.optim.cooldown, config.optim.warmup_steps
    last = [round(share * steps) for share in ends]
    if not (ends[0] > 0 and ends[-1] == 1 and last == sorted(set(last))):
        raise UserError(
            f"config.train.ends={ends}: give shares of config.train.steps={steps} that ascend to 1, each at a step of "
            "its own, such as (0.5, 0.65, 0.8, 1)."
        )
    if cooldown == 0:
        raise UserError(
            "config.optim.cooldown=0 would end config.train.ends at the full learning rate; give the share of the "
            "steps up to an end over which it decays, such as 0.2."
        )
    first = last[0] - max(1, round(cooldown * last[0]))
    if first < max(1, warmup):
        raise UserError(
            f"The cooldown to the first of config.train.ends={ends} begins after step {first}, which overlaps with the "
            f"warm-up of config.optim.warmup_steps={warmup}. Give a later first end, a shorter warm-up, or a smaller "
            f"config.optim.cooldown than {cooldown}."
        )
