"""Synthetic records with known gaps."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from seqjax.study.runs.record import Blocks, Point, Record, Records

SHARES = (0.5, 0.65, 0.8, 1.0)
TOKENS = 100_000_000


def loss_at(last: float, share: float) -> float:
    """Return a run's in-domain loss at a share of its tokens."""
    return last - 0.25 * float(np.log2(share))


def curve(x: float) -> float:
    """Return the reference's OOD loss at an in-domain loss."""
    return 1.0 + 1.1 * x + 0.3 * (x - 3.0) ** 2


def run(
    model: str,
    *,
    last: float = 3.0,
    gap: float = 0.0,
    rate: float = 1.0,
    seed: int = 0,
    slope: float = 0.0,
    shares: Sequence[float] = SHARES,
    of_end: Callable[[float], float] = lambda share: 0.0,
    metadata: Mapping[str, object] | None = None,
    tokens: int = TOKENS,
) -> Record:
    """Return a run with height gap + slope * log2(rate) + of_end(share) above `curve`.

    The height is the same in both OOD domains."""
    points = []
    for share in shares:
        x = loss_at(last, share)
        y = curve(x) + gap + slope * float(np.log2(rate)) + of_end(share)
        losses = {"c4": x - 0.1, "web": x + 0.1, "arxiv": y + 0.2, "github": y - 0.2}
        points.append(Point(round(1000 * share), round(tokens * share), x - 0.2, losses, {}))
    label = f"{model}, rate {rate:g}, seed {seed}"
    return Record(label, model, seed, rate, 1.0, points, points, dict(metadata or {}))


def records(runs: Sequence[Record], *, references: Sequence[str] = ("reference",), blocks: int = 0, **more) -> Records:
    """Return a study with these runs.

    With `blocks`, every domain has this number of documents, and their mean is the run's loss. A document shifts all
    runs by one common amount, and each run by a smaller random amount.
    """
    end_records, losses = [], {domain: [] for domain in ("c4", "web", "arxiv", "github")}
    spread = np.linspace(-1.0, 1.0, blocks) if blocks else np.zeros(0)
    rng = np.random.default_rng(0)
    for source in runs:
        model_spread = rng.permutation(spread)
        ends = []
        for point in source.ends:
            for domain, loss in point.domains.items():
                losses[domain].append(loss + 0.1 * spread + 0.05 * model_spread)
            ends.append(point._replace(row=len(losses["c4"]) - 1))
        end_records.append(
            Record(source.label, source.model, source.seed, source.rate, 1.0, ends, ends, source.metadata)
        )
    units = {domain: np.arange(blocks) for domain in losses}
    return Records(
        title="t",
        references=tuple(references),
        domains=("arxiv", "github"),
        against=("c4", "web"),
        runs=end_records,
        missing={},
        blocks=Blocks(units, {domain: np.array(rows) for domain, rows in losses.items()}) if blocks else None,
        **more,
    )
