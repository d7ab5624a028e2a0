"""Bootstrap draws of the evaluated text: every run's losses on documents, or sources, drawn with replacement.

The documents of each domain, in and out of domain, are a sample. Blocks of a document belong together, and so do
documents of a source (a repository, a site), so the largest known unit is drawn. A draw gives all runs the same units,
and each gap is measured again on it.
"""

import functools
from collections.abc import Sequence

import numpy as np

from seqjax.study.gaps.heights import Ends
from seqjax.study.runs.record import Point, Record, Records, in_domain, losses

DRAWS = 200


def of_data(records: Records, run: Record) -> Ends:
    """Return the ends of a run as measured: a single draw."""
    x = in_domain(run.ends, records.against)
    return _ends(records, run, x[None], losses(run.ends, records.domains)[None])


def of_draws(records: Records, run: Record) -> Ends | None:
    """Return the ends of a run on `DRAWS` draws of the text; None if losses of its blocks are not known."""
    drawn = _drawn(records)
    found = {domain: [_of_point(drawn, domain, point) for point in run.ends] for domain in drawn}
    if not found or any(loss is None for of_domain in found.values() for loss in of_domain):
        return None
    by_domain = {domain: np.stack([loss for loss in of if loss is not None], 1) for domain, of in found.items()}
    if records.against:
        x = np.mean([by_domain[domain] for domain in records.against], axis=0)
    else:  # a training loss has no documents
        x = np.tile(in_domain(run.ends, ()), (DRAWS, 1))
    return _ends(records, run, x, np.stack([by_domain[domain] for domain in records.domains], -1))


def _of_point(drawn: dict[str, np.ndarray], domain: str, point: Point) -> np.ndarray | None:
    if not 0 <= point.row < len(drawn[domain]):
        return None
    loss = drawn[domain][point.row]
    return None if np.isnan(loss).any() else loss


def _ends(records: Records, run: Record, x_DE: np.ndarray, y_DEN: np.ndarray) -> Ends:
    """Return ends whose quantities are the mean over domains and, if there are several, each domain."""
    n = len(records.domains)
    y_DEQ = np.concatenate([y_DEN.mean(-1, keepdims=True), y_DEN], -1) if n > 1 else y_DEN
    return Ends(run.label, run.seed, run.rate, x_DE, y_DEQ, np.array([p.tokens for p in run.ends], float))


@functools.lru_cache(maxsize=4)
def _drawn(records: Records) -> dict[str, np.ndarray]:
    """Return the loss of every evaluation on every draw, domain -> [evaluations, D]; {} without losses of blocks."""
    if records.blocks is None:
        return {}
    rng = np.random.default_rng(0)
    found = {}
    for domain in dict.fromkeys((*records.against, *records.domains)):
        _, of_block = np.unique(records.blocks.units[domain], return_inverse=True)
        n = int(of_block.max()) + 1
        counts = rng.multinomial(n, np.full(n, 1 / n), size=DRAWS)
        weights = counts[:, of_block] + 1e-12  # a draw always has text
        found[domain] = records.blocks.losses[domain] @ (weights / weights.sum(1, keepdims=True)).T
    return found


def freedom(records: Records) -> float:
    """Return the degrees of freedom of a variance over draws: one less than the units of the domain with the fewest."""
    if records.blocks is None:
        return DRAWS - 1
    return min(DRAWS, *(len(np.unique(units)) for units in records.blocks.units.values())) - 1


def variance(values: Sequence[float] | np.ndarray) -> float:
    """Return the variance of a quantity over the draws."""
    return float(np.var(values, ddof=1))
