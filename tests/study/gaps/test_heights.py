"""Gaps at equal in-domain loss and rate, against known gaps and plain loops."""

from collections import defaultdict

import numpy as np
import pytest

from seqjax.study.gaps import documents, heights
from seqjax.study.gaps.heights import Ends, ModelGap
from tests.study.gaps.studies import SHARES, loss_at


def ends(label, rate, seed, x, y):
    x, y = np.array([x]), np.array(y)[None, :, None] if np.ndim(y) == 1 else np.array(y)[None]
    return Ends(f"{label} {rate} {seed}", seed, rate, x, y, np.array(SHARES[-x.shape[1] :]) * 1e8)


def measured(models, reference="reference", best=1.0, **more):
    return heights.measure(models, reference, best, **more)


def known(label, *, gap=0.0, rate=1.0, seed=0, last=3.0, slope=0.0, shares=SHARES):
    x = np.array([loss_at(last, share) for share in shares])
    return ends(label, rate, seed, x, 1 + 1.1 * x + 0.3 * (x - 3) ** 2 + gap + slope * np.log2(rate))


def test_gap_and_slope_are_exact_without_noise():
    models = {
        "reference": [known("reference", rate=r, seed=s, slope=-0.05) for r, s in ((1, 0), (2, 0), (1, 1), (1, 2))],
        "same": [known("same", rate=r, slope=-0.05, last=3.02) for r in (1, 2)],
        "worse": [known("worse", rate=r, gap=0.2, slope=-0.05, last=3.1, shares=(0.8, 1.0)) for r in (2, 4)],
        "better": [known("better", rate=2, gap=-0.1, slope=-0.05, last=2.9)],
    }
    gaps = measured(models)
    assert gaps.is_adjusted and gaps.slopes.keys() == {"reference", "same", "worse"}
    np.testing.assert_allclose(gaps.c, -0.05, atol=1e-12)
    for name, gap in (("same", 0.0), ("worse", 0.2)):
        np.testing.assert_allclose(gaps.by_model[name].mean, gap, atol=1e-12)
    # An end of the better model lies 0.02 below the reference's: the tangent differs there by 0.3 * 0.02 ** 2.
    assert 0 < gaps.by_model["better"].mean[0, 0] + 0.1 < 0.3 * 0.02**2
    assert gaps.by_model["worse"].octaves == pytest.approx(1.5 - 1 / 6)


def test_runs_are_read_within_reach_of_the_reference():
    models = {"reference": [known("reference", seed=s) for s in range(2)]}
    models["reached"] = [known("reached", gap=-0.1, last=2.8)]  # its end at 50% lies at 3.05, above 3.0
    models["just below"] = [known("just below", gap=-0.1, last=2.96, shares=(1.0,))]
    models["far below"] = [known("far below", gap=-0.1, last=2.9, shares=(1.0,))]
    models["above"] = [known("above", gap=0.1, last=3.29, shares=(1.0,))]  # the reference's first end is 3.25
    models["far above"] = [known("far above", gap=0.1, last=3.31, shares=(1.0,))]
    gaps = measured(models).by_model
    # Its next end lies 0.045 below the reference's, where the tangent differs from the curve by 0.3 * 0.045 ** 2.
    assert gaps["reached"].loss == pytest.approx(3.0)
    assert gaps["reached"].mean == pytest.approx(-0.1, abs=0.3 * 0.045**2)
    assert gaps["just below"].loss == pytest.approx(2.96) and gaps["just below"].beyond == pytest.approx(0.04)
    assert gaps["above"].beyond == pytest.approx(0.04)
    assert gaps["far below"] == gaps["far above"] == heights.NO_REACH


def test_curve_continues_as_tangent_past_its_ends():
    runs = [known("reference", seed=s) for s in range(2)]
    curve = heights.fit(runs)
    inside, step = curve.at(np.array([[3.25 - 1e-6, 3.25]])), curve.at(np.array([[3.25, 3.45]]))
    slope = (inside[0, 1] - inside[0, 0]) / 1e-6
    np.testing.assert_allclose(step[0, 1] - step[0, 0], 0.2 * slope, atol=1e-4)


def test_two_ends_give_a_line_and_one_end_a_constant():
    runs = [known("reference", seed=s, shares=(0.8, 1.0)) for s in range(2)]
    assert heights.fit(runs).quadratic == 0
    run = known("a", shares=(1.0,), gap=0.3)
    at = np.array([[2.5, 3.0, 3.5]])
    assert np.ptp(heights.height(run, heights.fit(runs), at)) == 0


def test_fewer_than_three_slopes_compare_common_rates_only():
    models = {
        "reference": [known("reference", rate=r, slope=-0.1) for r in (1, 2)],
        "same": [known("same", rate=r, slope=-0.1, gap=0.07) for r in (2, 4)],
        "apart": [known("apart", rate=4, slope=-0.1)],
    }
    gaps = measured(models)
    assert not gaps.is_adjusted and not gaps.c.any()
    same = gaps.by_model["same"]
    assert same.rates == ((2,), (2,)) and same.octaves == 0
    np.testing.assert_allclose(same.mean, 0.07, atol=1e-12)
    assert gaps.by_model["apart"] == heights.NO_RATE


def test_unequal_seeds_at_common_rates_are_compared_rate_by_rate():
    # The reference ran both rates with all seeds, the model one rate with seeds 1 and 2: no slope may enter the gap.
    models = {
        "reference": [known("reference", rate=r, seed=s, slope=-0.1) for r in (1, 2) for s in range(3)],
        "model": [known("model", rate=r, seed=s, slope=-0.1, gap=0.07) for r, s in ((1, 0), (2, 0), (1, 1), (1, 2))],
    }
    gap = measured(models).by_model["model"]
    assert gap.octaves == 0
    np.testing.assert_allclose(gap.mean, 0.07, atol=1e-12)


def random_study(seed):
    rng = np.random.default_rng(seed)
    models = {}
    for m, name in enumerate(("reference", "a", "b", "c", "d")):
        runs = []
        rates = [float(2**k) for k in sorted(rng.choice(4, size=rng.integers(1, 4), replace=False))]
        rates = rates if m else [1.0, 2.0]
        for rate in rates:
            for s in range(rng.integers(1, 4)):
                shares = SHARES[rng.integers(0, 3) :] if m else SHARES
                x = np.array([loss_at(3 + 0.03 * m, share) for share in shares]) + 0.01 * rng.normal(size=len(shares))
                y = 1 + 1.1 * x + 0.2 * (x - 3) ** 2 - 0.05 * np.log2(rate) + 0.03 * rng.normal(size=len(x))
                runs.append(ends(name, rate, s, x, np.stack([y, y + 0.01 * rng.normal(size=len(x))], -1)))
        models[name] = runs
    return models


def plain(models, reference, best):
    """Return the first quantity's gaps from loops, least squares and `np.interp`."""
    reference_runs = models[reference]
    x = np.concatenate([r.x[0] for r in reference_runs])
    y = np.concatenate([r.y[0, :, 0] for r in reference_runs])
    owner = np.concatenate([[i] * r.x.shape[1] for i, r in enumerate(reference_runs)])
    design = np.column_stack([np.eye(len(reference_runs))[owner], x, x**2])
    *_, b, q = np.linalg.lstsq(design, y, rcond=None)[0]

    def h(at):
        inside = np.clip(at, x.min(), x.max())
        return b * inside + q * inside**2 + (at - inside) * (b + 2 * q * inside)

    def u(run, at):
        order = np.argsort(run.x[0])
        return np.interp(at, run.x[0][order], (run.y[0, :, 0] - h(run.x[0]))[order])

    def seeds(runs):
        groups = defaultdict(list)
        for run in runs:
            groups[run.seed].append(run)
        return groups

    middle = np.mean([r.x[0, -1] for r in reference_runs if r.rate == best])
    slopes = []
    for runs in models.values():
        seed_slopes = []
        for group in seeds(runs).values():
            if len(group) > 1:
                at = max(r.x[0, -1] for r in group)
                seed_slopes.append(np.polyfit([np.log2(r.rate) for r in group], [u(r, at) for r in group], 1)[0])
        slopes += [np.mean(seed_slopes)] if seed_slopes else []
    c = np.mean(slopes) if len(slopes) > 2 else None
    assert c is not None, "the study has three models with two rates"

    def level(at):
        return np.mean([np.mean([u(r, at) - c * np.log2(r.rate) for r in g]) for g in seeds(reference_runs).values()])

    gaps = {}
    for name, runs in models.items():
        values = []
        for group in seeds(runs).values():
            run_gaps = []
            for run in group:
                at = min(max(run.x[0, -1], middle), run.x[0].max())
                if middle - 0.05 <= at <= x.max() + 0.05:
                    run_gaps.append(u(run, at) - c * np.log2(run.rate) - level(at))
            values += [np.mean(run_gaps)] if run_gaps else []
        gaps[name] = np.mean(values) if values else None
    return gaps, c


@pytest.mark.parametrize("seed", range(40))
def test_gaps_match_a_plain_implementation(seed):
    models = random_study(seed)
    measured_gaps = measured(models)
    if not measured_gaps.is_adjusted:
        assert len(measured_gaps.slopes) < 3
        return
    gaps, c = plain(models, "reference", 1.0)
    assert measured_gaps.c[0, 0] == pytest.approx(c, abs=1e-9)
    for name, gap in measured_gaps.by_model.items():
        assert isinstance(gap, ModelGap) or gaps[name] is None
        if isinstance(gap, ModelGap):
            assert gap.mean[0, 0] == pytest.approx(gaps[name], abs=1e-8)


def test_plain_implementation_covers_most_random_studies():
    assert sum(measured(random_study(seed)).is_adjusted for seed in range(40)) > 20


@pytest.mark.parametrize("seed", range(5))
def test_batched_draws_match_single_draws(seed):
    models, rng = random_study(seed), np.random.default_rng(seed)
    noise = {run.label: rng.normal(size=(3, run.x.shape[1])) * 0.01 for runs in models.values() for run in runs}

    def moved(run, draws):
        shift = noise[run.label][draws]
        return run._replace(x=run.x + shift, y=run.y - shift[..., None])

    among = {name: tuple(run.label for run in runs) for name, runs in models.items()}
    batched = measured({n: [moved(r, slice(None)) for r in runs] for n, runs in models.items()}, among=among)
    for i in range(3):
        single = measured({n: [moved(r, slice(i, i + 1)) for r in runs] for n, runs in models.items()}, among=among)
        for name, gap in single.by_model.items():
            if isinstance(gap, ModelGap):
                np.testing.assert_allclose(batched.by_model[name].mean[i], gap.mean[0], atol=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_gaps_are_invariant_to_common_shifts(seed):
    models = random_study(seed)

    def gaps(change):
        moved = {name: [change(run) for run in runs] for name, runs in models.items()}
        best = change(models["reference"][0]).rate
        by_model = measured(moved, best=best).by_model
        return {name: gap.mean if isinstance(gap, ModelGap) else gap for name, gap in by_model.items()}

    original = gaps(lambda run: run)
    for change in (
        lambda run: run._replace(y=run.y + 0.7),
        lambda run: run._replace(y=run.y + 0.3 * run.x[..., None]),  # a line in x is part of the curve
        lambda run: run._replace(rate=run.rate * 8),
        lambda run: run._replace(x=run.x + 0.5),
    ):
        shifted = gaps(change)
        for name, gap in original.items():
            if isinstance(gap, str):
                assert shifted[name] == gap
            else:
                np.testing.assert_allclose(shifted[name], gap, atol=1e-8)


def test_draws_average_to_the_data():
    from tests.study.gaps.studies import records, run

    study = records([run("reference", seed=s) for s in range(2)], blocks=8)
    data = documents.measured_ends(study, study.runs[0])
    drawn = documents.drawn_ends(study, study.runs[0])
    assert drawn is not None and drawn.x.shape == (documents.DRAWS, 4) and drawn.y.shape == (documents.DRAWS, 4, 3)
    np.testing.assert_allclose(drawn.x.mean(0), data.x[0], atol=0.02)
    assert drawn.x.std(0).min() > 0.001
    np.testing.assert_array_equal(data.y[..., 0], data.y[..., 1:].mean(-1))
