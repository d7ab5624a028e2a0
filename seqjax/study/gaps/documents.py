"""Draw bootstrap samples from the evaluated text.

The documents in each domain are a sample, in domain and OOD. Blocks from one document are dependent, and so are
documents from one source (a repository, a site). Therefore the largest known unit is drawn, with replacement. All runs
share the units of a draw, and each gap is measured again on every draw.
"""

import functools
from collections.abc import Sequence

import numpy as np

from seqjax.study.gaps.heights import Ends
from seqjax.study.runs.record import Point, Record, Records, in_domain, losses

DRAWS = 200


def measured_ends(records: Records, run: Record) -> Ends:
    """Return a run's ends as measured: a single draw."""
    x = in_domain(run.ends, records.against)
    return _ends(records, run, x[None], losses(run.ends, records.domains)[None])


def drawn_ends(records: Records, run: Record) -> Ends | None:
    """Return a run's ends on `DRAWS` text draws; None if its block losses are unknown."""
    drawn = _drawn(records)
    end_losses = {domain: [_point_losses(drawn, domain, point) for point in run.ends] for domain in drawn}
    if not end_losses or any(loss is None for drawn_losses in end_losses.values() for loss in drawn_losses):
        return None
    by_domain = {
        domain: np.stack([loss for loss in drawn_losses if loss is not None], 1)
        for domain, drawn_losses in end_losses.items()
    }
    if records.against:
        x = np.mean([by_domain[domain] for domain in records.against], axis=0)
    else:  # a training loss has no documents
        x = np.tile(in_domain(run.ends, ()), (DRAWS, 1))
    return _ends(records, run, x, np.stack([by_domain[domain] for domain in records.domains], -1))


def _point_losses(drawn: dict[str, np.ndarray], domain: str, point: Point) -> np.ndarray | None:
    if not 0 <= point.row < len(drawn[domain]):
        return None
    loss = drawn[domain][point.row]
    return None if np.isnan(loss).any() else loss


def _ends(records: Records, run: Record, x_DE: np.ndarray, y_DEN: np.ndarray) -> Ends:
    """Return ends with the domain mean and, for several domains, each domain."""
    n = len(records.domains)
    y_DEQ = np.concatenate([y_DEN.mean(-1, keepdims=True), y_DEN], -1) if n > 1 else y_DEN
    return Ends(run.label, run.seed, run.rate, x_DE, y_DEQ, np.array([p.tokens for p in run.ends], float))


@functools.lru_cache(maxsize=4)
def _drawn(records: Records) -> dict[str, np.ndarray]:
    """Return each evaluation's loss on every draw, domain -> [evaluations, D].

    The result is {} without block losses.
    """
    if records.blocks is None:
        return {}
    rng = np.random.default_rng(0)
    by_domain = {}
    for domain in dict.fromkeys((*records.against, *records.domains)):
        _, unit_index = np.unique(records.blocks.units[domain], return_inverse=True)
        n = int(unit_index.max()) + 1
        counts = rng.multinomial(n, np.full(n, 1 / n), size=DRAWS)
        weights = counts[:, unit_index]
        by_domain[domain] = records.blocks.losses[domain] @ (weights / weights.sum(1, keepdims=True)).T
    return by_domain


def freedom(records: Records) -> float:
    """Return the degrees of freedom for a variance over draws.

    They are the unit count in the domain with the fewest units, minus one.
    """
    if records.blocks is None:
        return DRAWS - 1
    return min(DRAWS, *(len(np.unique(units)) for units in records.blocks.units.values())) - 1


def variance(values: Sequence[float] | np.ndarray) -> float:
    """Return the variance over draws."""
    return float(np.var(values, ddof=1))
