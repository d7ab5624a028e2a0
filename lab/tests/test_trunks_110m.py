"""Test the gaps of lab/results/trunks_110m against an independent implementation.

Runs with ends at 50, 65, 80 and 100% are newer than these numbers and are left out.
"""

import dataclasses
from pathlib import Path

import pytest

from seqjax.study.gaps import classes, compare, with_copies
from seqjax.study.runs import files

STUDY = Path(__file__).parents[1] / "results" / "trunks_110m"
PUBLISHED, SAME_BLOCK = "Transformer++, QK norm", "Transformer++, QK norm, conv"
# Model: gap to attention with the same block, half-interval, gap as tuned, verdict, copy share; then gap, half-interval
# and needs against attention as published.
KNOWN = {
    PUBLISHED: (0.087, 0.057, 0.12, "costs", 0.47, None),
    "Top-1 Chunk, best key": (0.110, 0.041, 0.14, "costs", 0.48, (0.025, 0.049, "more than 9 seeds of both")),
    "FoX": (0.113, 0.048, 0.15, "costs", 0.49, (0.025, 0.050, "more than 9 seeds of both")),
    "Top-1 Chunk, exact": (0.125, 0.047, 0.16, "costs", 0.49, (0.042, 0.050, "more than 9 seeds of both")),
    "Top-1 Chunk, shortlist": (0.145, 0.045, 0.18, "costs", 0.54, (0.058, 0.050, "6 more seeds of both")),
    "Transformer++": (0.169, 0.049, 0.21, "costs", 0.47, (0.071, 0.050, "3 more seeds of both")),
    "KDA, attention 1 in 4": (0.202, 0.085, 0.20, "costs", 0.63, (0.124, 0.081, "6 more seeds of both at one rate")),
    "W=256, QK norm": (0.238, 0.044, 0.27, "costs", 0.57, (0.152, 0.050, "")),
    "KDA": (0.247, 0.035, 0.25, "costs", 0.69, (0.169, 0.060, "")),
    "Gated DeltaNet": (0.274, 0.075, 0.27, "costs", 0.62, (0.186, 0.068, "")),
    "Mamba-2": (0.521, 0.063, 0.47, "costs", 0.66, (0.440, 0.092, "")),
    "Mamba-3": (0.599, 0.048, 0.59, "costs", 0.71, (0.521, 0.064, "")),
}
LATER = [0.5, 0.65, 0.8, 1.0]


@pytest.fixture(scope="module")
def study():
    records = files.read(STUDY)
    runs = [run for run in records.runs if run.metadata["config"]["train"]["ends"] != LATER]
    return dataclasses.replace(records, runs=runs)


@pytest.fixture(scope="module")
def rows(study):
    sums = classes.read(STUDY)
    return {
        name: {row.model: row for row in with_copies(compare(study, name), study, sums)}
        for name in (SAME_BLOCK, PUBLISHED)
    }


@pytest.mark.parametrize("model", KNOWN)
def test_three_seed_models(rows, model):
    gap, half, as_tuned, word, copy, published = KNOWN[model]
    row = rows[SAME_BLOCK][model]
    # The intervals include the bootstrap, whose draws differ.
    assert row.gap.value == pytest.approx(gap, abs=6e-4) and row.gap.half == pytest.approx(half, abs=1.5e-3)
    assert row.as_tuned == pytest.approx(as_tuned, abs=6e-3) and row.copy == pytest.approx(copy, abs=6e-3)
    assert row.verdict.word == word and row.seeds == 3
    if published is not None:
        row = rows[PUBLISHED][model]
        assert row.gap.value == pytest.approx(published[0], abs=6e-4)
        assert row.gap.half == pytest.approx(published[1], abs=1.5e-3)
        assert row.verdict.needs == published[2] and row.verdict.word == ("undecided" if published[2] else "costs")


def test_one_seed_models(rows):
    counts = []
    for name in (SAME_BLOCK, PUBLISHED):
        single = [row for row in rows[name].values() if row.gap is not None and row.seeds == 1]
        counts.append((sum(row.verdict.word == "costs" for row in single), len(single)))
    assert counts == [(11, 18), (11, 17)]
    assert rows[PUBLISHED]["RWKV-7"].verdict.needs == "ends from 50%"


def test_convolution_gains(rows):
    row = rows[PUBLISHED][SAME_BLOCK]
    assert row.gap.value == pytest.approx(-0.086, abs=6e-4) and row.gap.half == pytest.approx(0.056, abs=1.5e-3)
    assert row.verdict.word == "gains" and row.trend == "shrinks"


def test_other_references(study):
    exact = {row.model: row for row in compare(study, "KDA")}["Top-1 Chunk, exact"]
    assert exact.gap.value == pytest.approx(-0.123, abs=6e-4) and exact.verdict.word == "gains"
    single = dataclasses.replace(study, references=("Gated DeltaNet",))
    exact = {row.model: row for row in compare(single, "Gated DeltaNet")}["Top-1 Chunk, exact"]
    assert exact.gap.value == pytest.approx(-0.144, abs=6e-4) and exact.gap.half == pytest.approx(0.079, abs=1.5e-3)
    assert exact.as_tuned == pytest.approx(-0.105, abs=6e-4) and exact.verdict.word == "no cost above 0.05"
