"""Simulate studies with known gaps; count coverage, false verdicts, power.

    python -m lab.simulation [--studies=300] [--cases=NAME,...] > lab/log/simulation.md

Each study has a reference and ten models with three seeds. The seed standard deviation is 0.027; rates of the same seed
share half of the variance. With a grid of n, each model tries a random window of n among four rates, with three seeds
at its best rate and one seed at the other rates. At equal in-domain loss, the OOD loss falls by 0.05 per doubling of
the rate. Documents add an error of 0.006, and each end independent noise of 0.006.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable

import numpy as np

from seqjax.study import gaps
from seqjax.study.runs.record import Blocks, Point, Record, Records

SHARES = (0.5, 0.65, 0.8, 1.0)
TOKENS = 100_000_000
SD, SLOPE, TEXT, UNITS = 0.027, -0.05, 0.006, 60
OF_END = 0.006  # standard deviation of an end relative to its run
N_MODELS, N_RATES = 11, 4
BEST = (0.05, 0.72, 0.2, 0.03)  # probability that each rate is a model's best; two models agree in 56%
NONE, COSTS = "no cost above 0.05", "costs"


@dataclasses.dataclass(frozen=True)
class Case:
    """Settings of a simulated study.

    `gap` is the true gap of all models to the reference.
    """

    name: str
    gap: float = 0.0
    grid: int = 2  # rates per model
    own_grids: tuple[int, ...] = ()  # rates per model, overrides `grid`
    seeds: int = 3
    reference_seeds: int = 0  # 0 = `seeds`
    one_seed: int = 0  # number of models with one seed
    spread: float = 1.0  # factor for the first model's seed deviation
    reference_spread: float = 1.0
    outlier: float = 0.0  # added to one seed of the first model
    reference_outlier: float = 0.0
    slopes: float = 0.0  # standard deviation of slopes between models
    relative: bool = False  # the rate acts relative to the model's optimum; the target is the gap as tuned
    trend: float = 0.0  # change in the gap per doubling of tokens
    rate_trend: float = 0.0  # change in the rate slope per doubling of tokens
    clusters: int = 1  # documents that share an effect; unknown to the statistic


CASES = (
    Case("one rate, equal spread", grid=0),
    Case("one rate", grid=0, gap=0.05),
    Case("one rate", grid=0, gap=0.12),
    *(Case(f"grid of {n}", grid=n, gap=gap) for n in (1, 2, 3, 4) for gap in (0.0, 0.05, 0.12)),
    Case("four models with a grid of 4, seven of 1", gap=0.12, own_grids=(4,) * 4 + (1,) * 7),
    *(Case("slopes vary between models by 0.02", grid=n, slopes=0.02) for n in (1, 2, 4)),
    Case("rate acts relative to the optimum, target as tuned", grid=4, relative=True),
    Case("rate acts relative to the optimum, target as tuned", grid=2, relative=True),
    Case("one model's spread x3", spread=3.0),
    Case("outlier seed +0.15 in one model", outlier=0.15),
    Case("reference's spread x3", reference_spread=3.0),
    Case("outlier seed +0.15 in the reference", reference_outlier=0.15),
    Case("trend -0.08 per doubling", gap=0.12, trend=-0.08),
    Case("rate slope changes by 0.06 per doubling", gap=0.12, rate_trend=0.06),
    Case("rate slope changes by 0.06 per doubling", gap=0.12, trend=-0.08, rate_trend=0.06),
    Case("two seeds", seeds=2),
    Case("two seeds, one model's spread x3", seeds=2, spread=3.0),
    Case("four models with one seed", gap=0.12, one_seed=4),
    Case("four models with one seed, one of them x3, one rate", grid=0, one_seed=4, spread=3.0),
    *(Case("five seeds", seeds=5, gap=gap) for gap in (0.0, 0.12)),
    *(Case("nine reference seeds", reference_seeds=9, gap=gap) for gap in (0.0, 0.08)),
    Case("documents' error 0.02, taken for 0.006", clusters=11),
)


def study(case: Case, rng: np.random.Generator) -> tuple[Records, np.ndarray]:
    """Return a simulated study and each model's slope, the reference first."""
    runs, rows_in, rows_out = list[Record](), list[np.ndarray](), list[np.ndarray]()
    units = np.arange(UNITS)
    shared = rng.normal(size=UNITS)
    best = rng.choice(N_RATES, size=N_MODELS, p=BEST)
    slopes = SLOPE + case.slopes * rng.normal(size=N_MODELS)
    for m in range(N_MODELS):
        is_reference = m == 0
        n = case.own_grids[m] if case.own_grids else case.grid
        first = rng.integers(max(0, best[m] - n + 1), min(best[m], N_RATES - n) + 1) if n and not case.relative else 0
        if case.relative and n:
            first = rng.integers(N_RATES - n + 1)
        tried = [1] if n == 0 else list(range(first, first + n))
        optimum = 1 if n == 0 else int(best[m])
        chosen = min(tried, key=lambda rate: abs(rate - optimum))
        spread = SD * (case.reference_spread if is_reference else case.spread if m == 1 else 1.0)
        seeds = (
            (case.reference_seeds or case.seeds)
            if is_reference
            else 1
            if m > N_MODELS - 1 - case.one_seed
            else case.seeds
        )
        if case.spread > 1 and case.one_seed:
            seeds = 1 if 1 <= m <= case.one_seed else case.seeds
        level = 2.95 + (0.0 if is_reference else rng.uniform(0.0, 0.08))
        # Text effects: documents add different amounts to different models.
        size = TEXT / np.sqrt(2) * np.sqrt(UNITS) * (0.02 / TEXT / np.sqrt(case.clusters) if case.clusters > 1 else 1.0)
        groups = rng.normal(size=-(-UNITS // case.clusters)).repeat(case.clusters)[:UNITS]
        own = size * groups
        own_in = 0.2 * size * rng.normal(size=UNITS)
        for seed in range(seeds):
            common = spread * np.sqrt(0.5) * rng.normal()
            common += (case.outlier * (m == 1) + case.reference_outlier * is_reference) * (seed == 0)
            for rate in tried if seed == 0 else [chosen]:
                noise = common + spread * np.sqrt(0.5) * rng.normal()
                rho = (rate - optimum) if case.relative else rate
                points = []
                for share in SHARES:
                    x = level + 0.008 * abs(rate - optimum) - 0.25 * np.log2(share) + 0.003 * rng.normal()
                    gap = 0.0 if is_reference else case.gap + case.trend * np.log2(share)
                    effect = (slopes[m] + case.rate_trend * np.log2(share)) * rho
                    y = 1.0 + x + 0.1 * (x - 3.0) ** 2 + gap + effect + noise + OF_END * rng.normal()
                    rows_in.append(x + 0.5 * shared + own_in)
                    rows_out.append(y + 0.5 * shared + own)
                    losses = {"in": float(rows_in[-1].mean()), "out": float(rows_out[-1].mean())}
                    points.append(Point(round(1000 * share), round(TOKENS * share), 0.0, losses, {}, len(rows_in) - 1))
                name = "reference" if is_reference else f"model {m}"
                runs.append(Record(f"{name} {rate} {seed}", name, seed, 2.0**rate, 1.0, points, points, {}))
    blocks = Blocks({"in": units, "out": units}, {"in": np.array(rows_in), "out": np.array(rows_out)})
    return Records("simulated", ("reference",), ("out",), ("in",), runs, {}, blocks), slopes


def count(case: Case, *, studies: int) -> dict[str, float]:
    """Return fractions over models and studies.

    `false` is the fraction of studies with a wrong verdict.
    """
    rng = np.random.default_rng(0)
    covered, costs, none, false, trends, with_gap = [], [], [], [], [], []
    first = list[bool]()
    for _ in range(studies):
        records, slopes = study(case, rng)
        wrong = False
        for row in gaps.compare(records, "reference"):
            with_gap.append(row.gap is not None)
            if row.gap is None:
                continue
            word, target = row.verdict.word, case.gap
            if case.slopes and row.mid_rate is not None:  # the gap at the rate halfway between both sides
                target += float((slopes[int(row.model.split()[1])] - slopes[0]) * np.log2(row.mid_rate))
            costs.append(word == COSTS)
            none.append(word == NONE)
            wrong |= (word == "gains" and target >= 0) or (word == COSTS and target <= 0)
            wrong |= word == NONE and target > 0.05 + 1e-9
            if row.gap.interval is not None:
                low, high = row.gap.interval
                if case.relative:
                    assert row.as_tuned is not None
                    low, high = (end + row.as_tuned - row.gap.value for end in (low, high))
                inside = low <= target <= high
                (first if row.model == "model 1" else covered).append(inside)
            if row.per_doubling is not None and row.per_doubling.interval is not None:
                low, high = row.per_doubling.interval
                trends.append(low <= case.trend <= high)
        false.append(wrong)
    mean: Callable[[list[bool]], float] = lambda values: float(np.mean(values)) if values else np.nan  # noqa: E731
    return {
        "coverage": mean([*covered, *first]),
        "first": mean(first),
        "false": mean(false),
        "costs": mean(costs),
        "none": mean(none),
        "trend": mean(trends),
        "with a gap": mean(with_gap),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=300)
    parser.add_argument("--cases", default="", help="parts of names, separated by commas")
    args = parser.parse_args()
    wanted = [part for part in args.cases.split(",") if part]
    header = "| case | grid | true gap | with a gap | coverage | of the first model | false | costs | no cost | trend |"
    sys.stdout.write(
        f"{args.studies} studies per case.\n\n{header}\n|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n"
    )
    for case in CASES:
        if wanted and not any(part in case.name for part in wanted):
            continue
        fractions = count(case, studies=args.studies)
        values = (fractions[key] for key in ("with a gap", "coverage", "first", "false", "costs", "none", "trend"))
        grid = "mixed" if case.own_grids else case.grid or "one rate"
        cells = " | ".join(f"{value:.3f}" for value in values)
        sys.stdout.write(f"| {case.name} | {grid} | {case.gap} | {cells} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
