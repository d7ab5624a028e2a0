"""Collect training speed, memory and decoding state for the judged models.

The runs measure speed and memory; the config determines the state.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seqjax.config import Config
from seqjax.files import write_json
from seqjax.models import Model
from seqjax.reading import read_json
from seqjax.study.judge.plan import Plan
from seqjax.study.runs.runner import Run

JOBS = "judge.json"  # in a workdir: how many runs trained at the same time on this host, this run included


@dataclasses.dataclass(frozen=True)
class Cost:
    """Hold a model's cost, as measured by its runs.

    Args:
        tokens_per_s: Median training speed; None if not measured.
        peak_gib: Peak device memory; None on a device that does not report it.
        state_bytes: Sequence length -> decoding state bytes for one sequence, at half the training length and at the
            full length.
        devices: The runs' devices.
        concurrent: Most runs that trained at the same time on one host. Each had its own GPU, but they share a CPU.
    """

    tokens_per_s: float | None
    peak_gib: float | None
    state_bytes: dict[int, int]
    devices: frozenset[str]
    concurrent: int

    @property
    def shared_cpu(self) -> bool:
        """Whether concurrent runs made each other slower."""
        return self.concurrent > 1 and self.devices <= {"cpu"}


def note_jobs(run: Run, *, jobs: int) -> None:
    """Record in a run's workdir how many runs train at the same time; keep the maximum."""
    path = Path(run.workdir) / JOBS
    recorded = _jobs(path) if path.is_file() else 1
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"jobs": max(jobs, recorded)})


def _jobs(path: Path) -> int:
    return read_json(path, {"jobs": int}, fix="delete it; it holds only the number of concurrent runs")["jobs"]


def cost(config: Config, runs: Iterable[Run]) -> Cost:
    """Return a model's cost from its runs so far."""
    speeds, peaks, devices, concurrent = list[float](), list[float](), set[str](), 1
    for run in runs:
        workdir = run.files
        rows = run.rows()
        speeds += [row["tokens_per_s"] for row in rows if row["tokens_per_s"]]
        peaks += [row["device_peak_gib"] for row in rows if row.get("device_peak_gib")]
        if rows and (workdir / "run.json").is_file():
            devices.add(read_json(workdir / "run.json", {"device?": str}).get("device", ""))
        if rows and (workdir / JOBS).is_file():
            concurrent = max(concurrent, _jobs(workdir / JOBS))
    return Cost(
        tokens_per_s=float(np.median(speeds)) if speeds else None,
        peak_gib=max(peaks, default=None),
        state_bytes=state_bytes(config, on_cpu=devices <= {"cpu"}),
        devices=frozenset(devices),
        concurrent=concurrent,
    )


def state_bytes(config: Config, *, on_cpu: bool) -> dict[int, int]:
    """Return decoding state bytes for one sequence, by sequence length.

    The lengths are half the training length and the training length.
    """
    settings, length = config.model, config.train.seq_len
    if settings.dtype == "auto":
        settings = dataclasses.replace(settings, dtype="float32" if on_cpu else "bfloat16")
    n_bytes = {}
    for n in (length // 2, length):
        model = Model(settings, max_len=n)
        cache = jax.eval_shape(lambda model=model, n=n: model.init_cache(1, n))
        n_bytes[n] = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    return n_bytes


def by_model(plan: Plan, runs: Sequence[Run]) -> dict[str, Cost]:
    """Return the costs of mixer and references from the runs trained here."""
    return {name: cost(config, (run for run in runs if run.model == name)) for name, config in plan.configs.items()}


def speeds(plan: Plan, runs: Sequence[Run]) -> dict[str, Any]:
    """Return the study's speed table.

    It is {} unless at least two models have a speed, all runs used the same kind of device, and none shared a CPU.
    """
    costs = by_model(plan, runs)
    measured = {
        name: model_cost.tokens_per_s for name, model_cost in costs.items() if model_cost.tokens_per_s is not None
    }
    devices = frozenset().union(*(model_cost.devices for model_cost in costs.values()))
    if len(measured) < 2 or len(devices) != 1 or any(model_cost.shared_cpu for model_cost in costs.values()):
        return {}
    (card,) = devices
    table = {"card": card, "length": plan.config.train.seq_len, "tokens_per_s": measured}
    return {"training speed of the runs (tokens/s)": table}


def speed_ratio(cost: Cost, reference: Cost) -> float | None:
    """Return a model's training speed relative to another model's.

    The result is None unless both were measured on the same device.
    """
    if cost.tokens_per_s is None or reference.tokens_per_s is None or cost.devices != reference.devices:
        return None
    return cost.tokens_per_s / reference.tokens_per_s if len(cost.devices) == 1 else None


def remarks(costs: Mapping[str, Cost]) -> list[str]:
    """Return sentences about limits of the measured costs."""
    sentences = []
    measured = {name: model_cost for name, model_cost in costs.items() if model_cost.tokens_per_s is not None}
    if len({model_cost.devices for model_cost in measured.values()}) > 1 or any(
        len(model_cost.devices) > 1 for model_cost in measured.values()
    ):
        named = "; ".join(f"{model}: {', '.join(sorted(model_cost.devices))}" for model, model_cost in measured.items())
        sentences.append(f"Speeds of runs on different devices cannot be compared ({named}).")
    if without := [name for name in costs if name not in measured]:
        sentences.append(f"The speed of {' and '.join(without)} was not measured here.")
    if shared := [model for model, model_cost in costs.items() if model_cost.shared_cpu]:
        sentences.append(
            f"Concurrent runs shared one CPU ({', '.join(shared)}), so their speeds are lower than for a single run."
        )
    return sentences
