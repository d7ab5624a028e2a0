"""Verdicts at their thresholds, with both gaps, and needs of undecided gaps."""

import numpy as np
import pytest

from seqjax.study.gaps import verdicts
from seqjax.study.gaps.statistics import Part
from seqjax.study.gaps.verdicts import Candidate


def candidate(gap, error=0.01, *, as_tuned=None, seeds=3, rate=0.0):
    side = Part(seeds * error**2 / 2, 20.0)
    rest = (Part(rate, 5.0), Part(0.0, 1.0), Part(0.0, 199.0))
    return Candidate(gap, gap if as_tuned is None else as_tuned, (side, side), (seeds, seeds), rest, (side, side))


def words(*gaps, several=None, limit=0.05):
    decided = verdicts.decide(gaps, [True] * len(gaps) if several is None else several, limit=limit)
    return [verdict.word for verdict in decided]


def test_verdict_words():
    none = verdicts.no_cost(0.05)
    assert words(candidate(0.1)) == ["costs"] and words(candidate(-0.1)) == ["gains"]
    assert words(candidate(0.005)) == [none] and words(candidate(0.03, 0.02)) == ["undecided"]
    # One seed may show a cost, but not the absence of a cost.
    assert words(candidate(0.005), candidate(0.1), several=[False, False]) == ["undecided", "costs"]
    assert words(candidate(0.005, 0.003), limit=0.05 / 3) == [verdicts.no_cost(0.05 / 3)]


def test_the_less_favourable_reading_is_tested():
    assert words(candidate(0.1, as_tuned=0.01)) == ["undecided"]  # maybe no cost as tuned
    assert words(candidate(-0.1, as_tuned=0.01)) == [verdicts.no_cost(0.05)]  # maybe no gain as tuned
    assert words(candidate(0.0, as_tuned=0.045)) == ["undecided"]
    assert candidate(0.1, as_tuned=-0.1).p() == 1.0


def test_gains_and_costs_in_one_family():
    none = verdicts.no_cost(0.05)
    family = [candidate(-0.1), candidate(0.1), candidate(0.005), candidate(-0.1, as_tuned=-0.04), candidate(-0.005)]
    assert words(*family) == ["gains", "costs", none, "gains", none]
    assert words(candidate(-0.1), several=[False]) == ["gains"]  # one seed may gain, too
    assert words(candidate(-0.1, as_tuned=0.0)) == words(candidate(0.0, as_tuned=-0.1)) == [none]
    assert words(candidate(-0.1, as_tuned=0.1)) == ["undecided"]


def test_gains_and_costs_use_the_same_test():
    """At 5%, two-sided: 2.15 standard errors are significant and 1.9 are not."""
    assert words(candidate(-0.0215)) == ["gains"] and words(candidate(0.0215)) == ["costs"]
    assert words(candidate(-0.019)) != ["gains"] and words(candidate(0.019)) != ["costs"]
    assert candidate(-0.02).p() == pytest.approx(candidate(0.02).p())
    assert candidate(-0.1, as_tuned=-0.02).p() == pytest.approx(candidate(-0.02).p())


def test_verdicts_are_corrected_for_many_models():
    assert words(candidate(0.024)) == ["costs"]
    assert words(*[candidate(0.024)] * 8) == ["undecided"] * 8


def test_p_value_is_two_sided():
    from scipy import stats

    assert candidate(0.02).p() == pytest.approx(2 * stats.t.sf(2.0, 40.0))


def test_needs_escalate_from_model_to_both_to_one_rate():
    def needs(one):
        return verdicts.decide([one], [True], limit=0.05)[0].needs

    assert needs(candidate(0.1)) == ""
    assert needs(candidate(0.11, 0.06)._replace(counts=(2, 9))) == "5 more seeds"
    assert needs(candidate(0.08, 0.04)) == "4 more seeds of both"
    assert needs(candidate(0.08, 0.02, rate=0.035**2)) == "1 more seed of both at one rate"
    assert needs(candidate(0.03, 0.05)) == "more than 9 seeds of both"


def test_needed_seeds_reach_80_percent_power():
    """Simulate studies with the needed seeds and a true gap equal to the estimate."""
    sd, gap, seeds = 0.03, 0.045, 3
    side = Part(sd**2, 1e9)
    one = Candidate(gap, gap, (side, side), (seeds, seeds), (Part(0.0, 1e9),) * 3, (side, side))
    needs = verdicts.decide([one], [True], limit=0.02)[0].needs
    extra = int(needs.split()[0])
    rng = np.random.default_rng(0)

    def share(n):
        error = sd * np.sqrt((1 / n if "both" in needs else 1 / seeds) + 1 / n)
        return ((gap + error * rng.normal(size=20_000)) / error > 1.96).mean()

    assert share(seeds + extra) > 0.79 > share(seeds + extra - 1) - 0.02
