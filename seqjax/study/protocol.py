"""Compares architectures by the gap between their domain losses at the same training loss.

A lower out-of-domain loss may only mean that a model has learned its training set better; the protocol (arXiv
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
    """One evaluation of a run; losses are in nats per token."""

    step: int
    tokens: int
    train_loss: float
    domains: dict[str, float]


def read_points(workdir: str | Path, *, against: Sequence[str] = ()) -> list[Point]:
    """Return the evaluations of a run so far, in order.

    `train_loss` is the mean over the steps since the previous evaluation, so for a model that learns fast it lags
    behind the domain losses, which belong to the last of those steps. `against` names domains (held-out data of the
    training domains) whose mean loss takes its place; it is measured at the same step, so it has no such lag.

    Raises `UserError` if `workdir` is not a run or has no evaluation yet.
    """
    workdir = Path(workdir)
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
    """Return a domain's loss, linearly interpolated, at a training loss; None outside the range of the run."""
    order = sorted(points, key=lambda p: p.train_loss)
    x = [p.train_loss for p in order]
    if not x[0] <= train_loss <= x[-1]:
        return None
    return float(np.interp(train_loss, x, [p.domains[domain] for p in order]))


def common_losses(runs: dict[str, list[Point]], *, count: int = 4) -> list[float]:
    """Return `count` training losses in the range that all runs share, down to the lowest that all of them reached.

    Raises `UserError` if they share no training loss.
    """
    low = max(min(p.train_loss for p in points) for points in runs.values())
    high = min(max(p.train_loss for p in points) for points in runs.values())
    if low > high:
        raise UserError("These runs have no training loss in common; train the worse ones longer.")
    # The early part, in which every model still learns word frequencies, is not informative.
    high = min(high, low + 0.5)
    return [float(x) for x in np.linspace(high, low, count)]


def gap_rows(
    runs: dict[str, list[Point]], domains: list[str], *, reference: str, count: int = 4
) -> list[dict[str, float | str]]:
    """Return a row per training loss and run: each domain's loss and its gap to the reference (nats, + is worse)."""
    rows = []
    for train_loss in common_losses(runs, count=count):
        reference_losses = {domain: loss_at(runs[reference], domain, train_loss) for domain in domains}
        for name, points in runs.items():
            row: dict[str, float | str] = {"train_loss": train_loss, "run": name}
            for domain in domains:
                loss = loss_at(points, domain, train_loss)
                base = reference_losses[domain]
                if loss is not None and base is not None:
                    row[domain], row[f"{domain}_gap"] = loss, loss - base
            rows.append(row)
    return rows
