"""Read evaluations and metadata from workdirs."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from seqjax.config import Config
from seqjax.errors import UserError
from seqjax.models import Model, flops
from seqjax.reading import Float, check, read_json
from seqjax.study.runs import identity, runner
from seqjax.study.runs.record import NATS, Point, Record, Unit
from seqjax.study.runs.runner import Run
from seqjax.training import metrics, origin, schedule
from seqjax.training.mirrors import readable

COST = ("mfu", "seconds", "device_peak_gib")  # from the newest metrics row
MEANS = ("equal", "natural")  # over OOD domains: unweighted, and weighted by corpus share
# Fields in a run's run.json and in runs.json.
METADATA = {"device?": str, "manifest?": (str, None), "test_sets?": {str: str}} | origin.FORM
NOT_BEGUN = "not begun"


def read_points(workdir: str | Path, *, unit: Unit = NATS) -> list[Point]:
    """Return a run's evaluations so far, in order, with domain losses in `unit`.

    The training loss and the recorded means are in nats per token; another unit has no means. `train_loss` is the mean
    over the steps since the previous evaluation, so it lags behind the domain losses if a model learns fast.

    Raises `UserError` if `workdir` is not a run or has no evaluation yet.
    """
    if not (readable(workdir) / "metrics.jsonl").exists():
        raise UserError(f"{workdir} is not a run: it has no metrics.jsonl.")
    points = []
    for row in metrics.read(workdir):
        values = {key: float(value) for key, value in row.items() if re.fullmatch(f"eval/[^/]+/{unit.field}", key)}
        if values:
            check(row, {"tokens": int, "train/loss": Float}, f"{workdir}/metrics.jsonl, step {row['step']}")
            domains = {key.split("/")[1]: value for key, value in values.items()}
            names = MEANS if unit == NATS else ()
            recorded = {name: row.get(f"eval_mean/out_of_domain/{name}") for name in names}
            means = {name: float(value) for name, value in recorded.items() if value is not None}
            points.append(Point(row["step"], row["tokens"], float(row["train/loss"]), domains, means))
    if not points:
        raise UserError(f"{workdir} has no evaluation yet; let it reach its first (config.eval.every).")
    return points


def progress(run: Run) -> str:
    """Return the missing part of a run, or "" if no evaluation is missing."""
    if run.ends:
        if not (lacking := run.lacking):
            return ""
        return NOT_BEGUN if not run.last_row() else f"no evaluation yet at the {_ends_text(lacking)}"
    try:
        step = read_points(run.workdir)[-1].step
    except UserError:
        return "no evaluation yet" if run.last_row() else NOT_BEGUN
    steps = run.config.train.steps if run.config is not None else step
    return "" if step >= steps else f"step {step} of {steps}"


def _ends_text(ends: Sequence[int]) -> str:
    return f"end{'s' * (len(ends) > 1)} after step {', '.join(map(str, ends))}"


def collect(runs: Sequence[Run], domains: Sequence[str], *, unit: Unit = NATS) -> list[Record]:
    """Return the records of runs: evaluations and metadata.

    Raises `UserError` if a run has no evaluation, if any end of a run with `train.ends` has none, or if an evaluation
    lacks one of `domains`. In nats per token, it also raises `UserError` if the known tokenizers, training data or test
    sets differ. In bits per byte these may differ; the study file then answers for equal test text.
    """
    records = [_collect(run, unit) for run in runs]
    for record in records:
        lacking = [domain for domain in domains if any(domain not in p.domains for p in record.points)]
        if lacking:
            known = ", ".join(record.points[-1].domains)
            raise UserError(f"{record.label} was not evaluated on {', '.join(lacking)}; it has losses of {known}.")
    if unit != NATS:
        return records
    tokenizers = [(r.label, r.metadata.get("config", {}).get("data", {}).get("tokenizer")) for r in records]
    if len({name for _, name in tokenizers if name}) > 1:
        named = ", ".join(f"{label}: {name}" for label, name in tokenizers if name)
        raise UserError(
            f"These runs have different tokenizers ({named}), so their losses in nats per token do not compare. "
            'Set unit="bits_per_byte" in the study file.'
        )
    sets = {domain.rpartition(".")[0] for domain in domains} - {""}
    _require_one([(record.label, record.metadata.get("manifest")) for record in records], "read different data")
    for name in sorted(sets):
        hashes = [(record.label, record.metadata.get("test_sets", {}).get(name)) for record in records]
        _require_one(hashes, f"were evaluated on different test sets {name!r}")
    return records


def _require_one(hashes: Sequence[tuple[str, str | None]], problem: str) -> None:
    """Raise `UserError` if the known data hashes differ; `hashes` has (label, hash)."""
    labels_by_hash: dict[str, list[str]] = {}
    for label, name in hashes:
        if name:
            labels_by_hash.setdefault(name, []).append(label)
    if len(labels_by_hash) > 1:
        groups = "; ".join(f"{', '.join(labels)}: manifest {name[:16]}" for name, labels in labels_by_hash.items())
        raise UserError(f"These runs {problem} and cannot be compared: {groups}. Compare each group separately.")


def _collect(run: Run, unit: Unit) -> Record:
    identity.require(run)
    metadata: dict[str, Any] = {}
    files, ends = run.files, run.ends
    for name in ("run.json", "config.json"):
        if (files / name).is_file():
            value = read_json(files / name, METADATA if name == "run.json" else runner.FORM)
            metadata |= value if name == "run.json" else {"config": value}
    metadata.pop("settings", None)  # a hash of config.json; the metadata has the content
    if run.config is not None:
        metadata |= _model_metadata(run.config, on_cpu=metadata.get("device") == "cpu")
    last = run.last_row()
    metadata |= {key: last[key] for key in COST if key in last}
    if speed := run.tokens_per_s():
        metadata["tokens_per_s"] = speed
    if entropy := _entropy(schedule.end_directory(files, ends[-1]) if ends else files):
        metadata["entropy"] = entropy
    if lacking := run.lacking:
        raise UserError(
            f"{run.label} has no evaluation at the {_ends_text(lacking)} ({run.workdir}); train it to the end, or "
            "compare the finished runs with --partial."
        )
    end_points = [read_points(schedule.end_directory(files, step), unit=unit)[-1] for step in ends]
    points = end_points or read_points(run.workdir, unit=unit)
    return Record(run.label, run.model, run.seed, run.rate, run.schedule, points, end_points or points[-1:], metadata)


def _entropy(workdir: Path) -> dict[str, dict[str, float]]:
    """Return the attention entropy from a run's last evaluation.

    The result maps domain -> field -> value; {} if it was not measured.
    """
    fields = ("entropy", "entropy_relative")
    entropies: dict[str, dict[str, float]] = {}
    for row in metrics.read(workdir) if (workdir / "metrics.jsonl").is_file() else ():
        for key, value in row.items():
            kind, *rest = key.split("/")
            if kind == "eval" and len(rest) == 2 and rest[1] in fields:
                entropies.setdefault(rest[0], {})[rest[1]] = value
    return entropies


def _model_metadata(config: Config, *, on_cpu: bool) -> dict[str, Any]:
    """Return parameters, training FLOPs per token, and decoding state bytes.

    The state is for one sequence after T tokens, in the dtype on the run's device: "auto" may differ on this machine.
    """
    settings = config.model
    if settings.dtype == "auto":
        settings = dataclasses.replace(settings, dtype="float32" if on_cpu else "bfloat16")
    model = Model(settings, max_len=config.train.seq_len)
    state = jax.eval_shape(lambda: model.init_cache(1, config.train.seq_len))
    return {
        "parameters": flops.n_params(model),
        "flops_per_token": flops.flops_per_token(model, config.train.seq_len),
        "state_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)),
    }
