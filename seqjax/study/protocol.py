"""Runs -> (training loss, domain losses) pairs -> the gap between architectures where their training losses agree.

A lower loss out of domain may only mean that a model has learned its training set better; the protocol (arXiv
2505.18522) therefore compares models at the same training loss, whatever number of tokens each needed to get there.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from seqjax.errors import UserError
from seqjax.training import metrics


class Point(NamedTuple):
    """One evaluation of a run."""

    step: int
    tokens: int
    train_loss: float
    domains: dict[str, float]


def read_points(workdir: Path, *, against: Sequence[str] = ()) -> list[Point]:
    """The evaluations that a run has made so far, in order.

    `train_loss` is the mean over the steps since the evaluation before, so of a model that learns fast it lags behind
    the domain losses, which belong to the last of those steps. `against` names domains (the held-out ones of training)
    whose mean loss takes its place: measured at the same step, it favours no pace.
    """
    if not (workdir / "metrics.jsonl").exists():
        raise UserError(f"{workdir} is not a run: it has no metrics.jsonl.")
    points = []
    for row in metrics.read(workdir):
        domains = {key.split("/")[1]: value for key, value in row.items() if re.fullmatch("eval/[^/]+/loss", key)}
        if domains:
            at = float(np.mean([domains[name] for name in against])) if against else row["train/loss"]
            points.append(Point(row["step"], row["tokens"], at, domains))
    if not points:
        raise UserError(f"{workdir} has no evaluation yet; let it reach its first (config.eval.every).")
    return points


def loss_at(points: list[Point], domain: str, train_loss: float) -> float | None:
    """A domain's loss where the training loss was `train_loss`, linear in between; None outside the run."""
    order = sorted(points, key=lambda p: p.train_loss)
    x = [p.train_loss for p in order]
    if not x[0] <= train_loss <= x[-1]:
        return None
    return float(np.interp(train_loss, x, [p.domains[domain] for p in order]))


def common_losses(runs: dict[str, list[Point]], *, count: int = 4) -> list[float]:
    """`count` training losses that every run has passed through, down to the lowest that all of them reached."""
    low = max(min(p.train_loss for p in points) for points in runs.values())
    high = min(max(p.train_loss for p in points) for points in runs.values())
    if low > high:
        raise UserError("These runs have no training loss in common; train the worse ones longer.")
    # the early part, where every model still learns the frequencies of words, says little
    high = min(high, low + 0.5)
    return [float(x) for x in np.linspace(high, low, count)]


def gap_rows(
    runs: dict[str, list[Point]], domains: list[str], *, reference: str, count: int = 4
) -> list[dict[str, float | str]]:
    """Per training loss and run: each domain's loss, and how far it is from the reference's (nats, + is worse)."""
    rows = []
    for train_loss in common_losses(runs, count=count):
        base = {domain: loss_at(runs[reference], domain, train_loss) for domain in domains}
        for name, points in runs.items():
            row: dict[str, float | str] = {"train_loss": train_loss, "run": name}
            for domain in domains:
                loss = loss_at(points, domain, train_loss)
                zero = base[domain]
                if loss is not None and zero is not None:
                    row[domain], row[f"{domain}_gap"] = loss, loss - zero
            rows.append(row)
    return rows
