"""Estimate a study's cost: `seqjax study --study=FILE --dry_run`.

A run's speed comes from the first source that has it:

    1. the study's runs with the same model so far (median)
    2. seqjax/training/recorded_speeds.json, on the device named there: a model with equal parameters and FLOPs
    3. the same file: a model with the same mixer, and parameters and FLOPs within 5%
    4. a few steps timed on this machine, if this takes only seconds

An evaluation takes a third of the training time for the same number of tokens, because it has no backward pass.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from seqjax.data import regimes
from seqjax.models import Model, flops
from seqjax.study.runs.runner import Run
from seqjax.terminal import StatusLine, duration
from seqjax.training import dry_run
from seqjax.training.dry_run import Measured

EVALUATION = 1 / 3  # of the training time per token: there is no backward pass
EXACTLY, ALIKE = 0.0, 0.05  # largest relative differences in parameters and FLOPs: same model, similar model


class Estimate(NamedTuple):
    """Hold a run's remaining steps, tokens, training FLOPs and seconds.

    The seconds are for a run on the devices of its source; None if no speed is known. `source` names the speed's
    source.
    """

    steps: int
    tokens: int
    flops: float
    seconds: float | None
    source: str


def estimate_run(run: Run, runs: Sequence[Run], *, measured: Mapping[str, Measured] | None = None) -> Estimate | None:
    """Return a run's remaining work; None if it is only read.

    `runs` are the study's runs, for their speeds. `measured` has step speeds on this machine by model, for models
    without a recorded speed.
    """
    if run.config is None:
        return None
    config, train = run.config, run.config.train
    model = Model(config.model, max_len=train.seq_len)
    per_token = flops.flops_per_token(model, train.seq_len)
    done, total = run.progress
    steps = 0 if run.complete else total - done
    tokens = steps * train.batch_size * train.seq_len
    same_model = [other for other in runs if other.model == run.model]
    seen = [row["tokens_per_s"] for other in same_model if (row := other.last_row())]
    if seen:
        speed, source = sorted(seen)[len(seen) // 2], "its runs so far"
    else:
        speed, source = None, ""
        for within, description in ((EXACTLY, "recorded"), (ALIKE, "recorded with other settings of the mixer")):
            recorded = dry_run.recorded_speed(
                config, n_params=flops.n_params(model), per_token=per_token, device=None, within=within
            )
            if recorded is not None:
                speed, source = recorded.tokens_per_s, f"{description} on one {recorded.device}"
                break
        timed = (measured or {}).get(run.model)
        if speed is None and timed is not None and timed.tokens_per_s is not None:
            speed, source = timed.tokens_per_s, dry_run.TIMED
    # At each end of a run with `train.ends`; ends that the run has passed count too, so this is an upper bound.
    n_evaluations = max(1, len(train.ends)) + (tokens // config.eval.every if config.eval.every else 0)
    domains = config.data.eval_domains or regimes.REGIMES[config.data.regime].eval
    evaluated = n_evaluations * len(domains) * config.eval.tokens if steps else 0
    seconds = None if speed is None else (tokens + EVALUATION * evaluated) / speed
    return Estimate(steps, tokens, tokens * per_token, seconds, source)


def report(runs: Sequence[Run], *, jobs: int) -> str:
    """Return a table with the remaining work per run and in total.

    `jobs` runs train at the same time. It also lists models that do not fit on this machine. A model without a recorded
    speed is timed for a few steps, if they take seconds.
    """
    width = max(len(run.label) for run in runs)
    measured = _measured(runs)
    lines, estimates = [], []
    for run in runs:
        estimate = estimate_run(run, runs, measured=measured)
        if estimate is None:
            lines.append(f"{run.index:>4}  {run.label:<{width}}  read only")
            continue
        estimates.append(estimate)
        if not estimate.steps:
            lines.append(f"{run.index:>4}  {run.label:<{width}}  complete")
            continue
        time = "time unknown" if estimate.seconds is None else f"{duration(estimate.seconds)} ({estimate.source})"
        lines.append(
            f"{run.index:>4}  {run.label:<{width}}  {estimate.steps:>7,} steps {estimate.tokens / 1e6:>10,.1f}M tokens "
            f"{estimate.flops:>9.2g} FLOPs  {time}"
        )
    unfinished = [estimate for estimate in estimates if estimate.steps]
    known = [estimate.seconds for estimate in unfinished if estimate.seconds is not None]
    total = f"{len(unfinished)} of {len(runs)} runs left, {sum(e.tokens for e in unfinished) / 1e6:,.1f}M tokens"
    if known:
        n_unknown = len(unfinished) - len(known)
        without = f", excluding {n_unknown} with unknown speed" if n_unknown else ""
        at_a_time = "one run at a time" if jobs == 1 else f"{jobs} runs at a time"
        total += (
            f", {sum(known) / 3600:.1f} device hours{without}; about {duration(sum(known) / jobs)} with {at_a_time}"
        )
    return "\n".join([*lines, total, *(f"{model}: {m.excess}" for model, m in measured.items() if m.excess)])


def _measured(runs: Sequence[Run]) -> dict[str, Measured]:
    """Return measurements on this machine, by model, for models with work left.

    A model is timed only if no run and no record has its speed.
    """
    by_model = dict[str, Measured]()
    for run in runs:
        estimate = estimate_run(run, runs) if run.model not in by_model else None
        if run.config is not None and estimate is not None and estimate.steps:
            show = functools.partial(_show, run.model)
            by_model[run.model] = dry_run.measure(run.config, timed=estimate.seconds is None, say=show)
    return by_model


def _show(model: str, text: str) -> None:
    StatusLine().say(f"{model}: {text}")
