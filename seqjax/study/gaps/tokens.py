"""Compute loss differences at equal tokens, and the speed-up to an equal OOD loss.

Both compare the shown runs of a model and its reference: the runs at the near-best rate with the most seeds.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seqjax.study.gaps import documents, statistics
from seqjax.study.gaps.rates import shown_runs
from seqjax.study.gaps.statistics import Estimate, Part
from seqjax.study.runs.record import Record, Records, in_domain, losses


class Difference(NamedTuple):
    """Hold the last-loss differences after equal tokens, in domain and OOD mean."""

    inside: Estimate
    outside: Estimate


def last(runs: Sequence[Record], records: Records) -> dict[int, tuple[float, float]]:
    """Return last losses by seed, in domain and OOD."""
    return {
        run.seed: (
            float(in_domain([run.last], records.against)[0]),
            float(losses([run.last], records.domains).mean()),
        )
        for run in runs
    }


def equal_tokens(records: Records, reference: str) -> dict[str, Difference]:
    """Return each model's difference to the reference.

    A model is included only if all runs on both sides have the same number of tokens.
    """
    sides = {model: shown_runs(records, model) for model in records.models}
    values = {model: last(runs, records) for model, runs in sides.items()}
    spreads = [statistics.spread([[v[i] for v in by_seed.values()] for by_seed in values.values()]) for i in (0, 1)]
    differences = {}
    for model, runs in sides.items():
        reference_runs = sides[reference]
        if model == reference or len({run.last.tokens for run in (*runs, *reference_runs)}) > 1:
            continue
        text_variances = _text_variances(records, runs, reference_runs)
        estimates = []
        for i, spread in enumerate(spreads):
            model_losses, reference_losses = ([v[i] for v in values[name].values()] for name in (model, reference))
            value = float(np.mean(model_losses) - np.mean(reference_losses))
            if len(model_losses) < 2 or spread is None:
                estimates.append(Estimate(value))
                continue
            sizes = [(spread.shrunk(side), len(side)) for side in (model_losses, reference_losses)]
            parts = [Part(part.variance / n, part.freedom) for part, n in sizes]
            total = statistics.combined([*parts, Part(text_variances[i], documents.freedom(records))])
            estimates.append(Estimate(value, total.variance**0.5, total.freedom))
        differences[model] = Difference(*estimates)
    return differences


def _text_variances(
    records: Records, model_runs: Sequence[Record], reference_runs: Sequence[Record]
) -> tuple[float, float]:
    """Return the text variances for the in-domain and OOD difference; zero if unknown."""
    drawn = [[documents.drawn_ends(records, run) for run in side] for side in (model_runs, reference_runs)]
    known = [[ends for ends in side if ends is not None] for side in drawn]
    if any(len(side) < len(runs) for side, runs in zip(known, (model_runs, reference_runs), strict=True)):
        return 0.0, 0.0
    x, y = ([np.mean([last_loss(ends) for ends in side], axis=0) for side in known] for last_loss in (_last_x, _last_y))
    return documents.variance(x[0] - x[1]), documents.variance(y[0] - y[1])


def _last_x(ends: documents.Ends) -> np.ndarray:
    return ends.x[:, -1]


def _last_y(ends: documents.Ends) -> np.ndarray:
    return ends.y[:, -1, 0]


class SpeedUp(NamedTuple):
    """Hold the ratio of training times to one OOD loss, reference over model.

    The loss is the higher of the two last OOD losses.

    Args:
        value: The ratio; above 1 the model is faster.
        low, high: The 95% interval; None for one seed.
        bound: "at least" or "at most" if the loss lies above every first end of the better side; else "".
        condition: The name of the speed table in the study.
    """

    value: float
    low: float | None
    high: float | None
    bound: str
    condition: str


def speed_up(records: Records, model: str, reference: str, difference: Difference | None) -> SpeedUp | None:
    """Return the speed-up to equal OOD loss; None without a matching speed table.

    The first speed table is used that has both models at the runs' sequence length. A table without a length is assumed
    to have the runs' length.

    The better side's token count comes from interpolation between its ends: OOD loss over log(tokens), averaged over
    the runs that reach the loss. The interval is exp(+-1.96 se / |dy / d log t|) times the value; se is the standard
    error of the OOD difference.
    """
    seq_len = shown_runs(records, model)[0].metadata.get("config", {}).get("train", {}).get("seq_len")
    fitting = {
        condition: table
        for condition, table in records.speeds.items()
        if model in table and reference in table and records.conditions.get(condition, ("", seq_len))[1] == seq_len
    }
    if not fitting or difference is None:
        return None
    condition, table = next(iter(fitting.items()))
    sides = [shown_runs(records, name) for name in (model, reference)]
    levels = [float(np.mean([y for _, y in last(side, records).values()])) for side in sides]
    loss, better = max(levels), int(levels[1] < levels[0])
    lines = [line for run in sides[better] if (line := _line(run, records)) is not None]
    reached = [at for line in lines if (at := _reach(*line, loss)) is not None]
    if not lines or not (reached or all(y[0] < loss for _, y in lines)):
        return None
    log_tokens = float(np.mean([at for at, _ in reached]) if reached else min(log_t[0] for log_t, _ in lines))
    full = sides[1 - better][0].last.tokens
    needed = (float(np.exp(log_tokens)), full) if better == 0 else (full, float(np.exp(log_tokens)))
    value = float((needed[1] / table[reference]) / (needed[0] / table[model]))
    bound = "" if reached else "at least" if better == 0 else "at most"
    slope = float(np.mean([slope for _, slope in reached])) if reached else 0.0
    if difference.outside.error is None or not slope:
        return SpeedUp(value, None, None, bound, condition)
    factor = float(np.exp(1.96 * difference.outside.error / abs(slope)))
    return SpeedUp(value, value / factor, value * factor, bound, condition)


def _reach(log_t: np.ndarray, y: np.ndarray, loss: float) -> tuple[float, float] | None:
    """Return log(tokens) at which a falling line reaches a loss, and its slope there.

    The result is None outside the line.
    """
    for i in range(len(y) - 1):
        if y[i] >= loss >= y[i + 1] and y[i] > y[i + 1]:
            slope = (y[i + 1] - y[i]) / (log_t[i + 1] - log_t[i])
            return float(log_t[i] + (loss - y[i]) / slope), float(slope)
    return None


def _line(run: Record, records: Records) -> tuple[np.ndarray, np.ndarray] | None:
    """Return log(tokens) and OOD loss at a run's ends; None for a run with one end."""
    if len(run.ends) < 2:
        return None
    return np.log([p.tokens for p in run.ends]), losses(run.ends, records.domains).mean(1)
