"""Near-best rates, the grid's edge, and the rate to run next."""

import pytest

from seqjax.study.gaps import rates, shown_runs
from tests.study.gaps.studies import records, run


def study(losses, seeds=(0,)):
    """Return a study with a model that has these last in-domain losses, by rate."""
    return records([run("reference")] + [run("m", rate=r, last=x, seed=s) for r, x in losses.items() for s in seeds])


def test_near_best_rates_and_the_best():
    m_rates = rates(study({1: 3.01, 2: 3.0, 4: 3.02, 8: 3.04}), "m")
    assert m_rates.best == 2 and m_rates.near == (1, 2, 4) and m_rates.edge == "" and m_rates.next_rate() is None
    assert m_rates.by_rate[4] == (1, pytest.approx(3.02), pytest.approx(m_rates.by_rate[4][2]))


@pytest.mark.parametrize(
    ("losses", "edge", "next_rate"),
    [({1: 3.0, 2: 3.1}, "lowest", 0.5), ({1: 3.1, 2: 3.0}, "highest", 4), ({2: 3.0}, "only", 4)],
)
def test_grid_edge_sets_the_next_rate(losses, edge, next_rate):
    m_rates = rates(study(losses), "m")
    assert (m_rates.edge, m_rates.next_rate()) == (edge, next_rate)


def test_single_rate_tries_the_reference_rate_next():
    m_rates = rates(study({2: 3.0}), "m")
    assert m_rates.next_rate(1.0) == 1.0 and m_rates.next_rate(2.0) == 4.0


def test_rates_are_compared_on_common_seeds():
    runs = [run("m", rate=1, last=3.0, seed=0), run("m", rate=2, last=2.99, seed=0), run("m", rate=1, last=2.9, seed=1)]
    assert rates(records([run("reference"), *runs]), "m").best == 2


def test_shown_rate_has_the_most_seeds():
    runs = [run("m", rate=1, last=3.01, seed=s) for s in (2, 0, 1)] + [run("m", rate=2, last=3.0)]
    shown = shown_runs(records([run("reference"), *runs]), "m")
    assert [(record.rate, record.seed) for record in shown] == [(1, 0), (1, 1), (1, 2)]
    assert shown_runs(records([run("reference")]), "m") == []
