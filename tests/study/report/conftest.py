"""A synthetic study that has every kind of row."""

import pytest

from tests.study.gaps.studies import records, run

LR = 1e-3
SD = (0.0, 0.012, -0.009)  # gap offsets by seed


def side(model, gap, *, last=3.0, seeds=3, rates=(1.0, 2.0), parameters=100_000_000, **more):
    """Return a model's runs: all seeds at the first rate, seed 0 at the other rates."""
    runs = []
    for seed, rate in [(s, rates[0]) for s in range(seeds)] + [(0, rate) for rate in rates[1:]]:
        metadata = {
            "parameters": parameters,
            "commit": f"commit {seed}",
            "manifest": "m" * 8,
            "tokens_per_s": 1000.0 + 100 * len(model),
            "config": {"optim": {"lr": LR * rate}, "train": {"ends": [0.5, 1.0], "seed": seed, "seq_len": 2048}},
        }
        last_loss = last + 0.01 * abs(rate - rates[0])
        seed_gap = gap + SD[seed] * (1 + len(model) / 10)
        runs.append(
            run(model, last=last_loss, gap=seed_gap, rate=rate, seed=seed, slope=-0.05, metadata=metadata, **more)
        )
    return runs


@pytest.fixture(scope="session")
def known():
    """Return a study with all verdicts, a trend, and a missing gap."""
    runs = [
        *side("reference", 0.0),
        *side("dear", 0.3, last=3.02, parameters=104_000_000),
        *side("gain", -0.3, last=2.95),
        *side("same", 0.001, rates=(1.0,)),
        *side("shrinks", 0.4, of_end=lambda share: -0.2 * (share - 0.5)),
        *side("alone", 0.2, seeds=1, rates=(2.0,)),
        *side("far", 0.1, last=2.5, shares=(1.0,)),
    ]
    speeds = {"H200, 2,048 tokens": {"reference": 2000.0, "same": 1000.0}}
    conditions = {"H200, 2,048 tokens": ("H200", 2048)}
    return records(runs, blocks=20, speeds=speeds, conditions=conditions, name="known")
