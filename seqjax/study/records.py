"""The files of a finished study, which suffice to analyse it again.

    runs.json    the study (title, references, domains, against), what is missing, and per run what it was: config,
                 versions, commit, devices, data, speed, seconds
    points.csv   every evaluation of every run: the loss of each domain and the recorded means out of domain
    blocks.npz   the blocks of each domain ("DOMAIN/documents", [blocks]) and their losses ("DOMAIN/losses",
                 [evaluations, blocks], those of points.csv in order; nan for an evaluation left out)
    metrics.npz  every row of every run's metrics.jsonl, one array [rows] per field with nan where a row lacks it, and
                 the arrays "run" (labels) and "end" (the step of the end whose cooldown the row is of, else 0)

An analysis reads the first three, and classes.npz (seqjax/study/made_of.py); metrics.npz keeps the training curves when
the workdirs are gone. Tables and figures are always made from the result of `read`, so that they are the same, byte for
byte, wherever the files are.
"""

import csv
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seqjax.config import Config
from seqjax.models import Model, flops
from seqjax.reading import Float, read_arrays, read_json, read_table
from seqjax.study import runner
from seqjax.study.protocol import NATS, UNITS, Point, Record, Unit, read_points
from seqjax.study.runner import Run
from seqjax.training import eval_losses, metrics, origin, schedule
from seqjax.training.workdir import readable
from seqjax.utils import UserError, replacing, write_json

COLUMNS = {"run": str, "model": str, "seed": int, "rate": float, "schedule": float}
COLUMNS |= {"step": int, "tokens": int, "train_loss": Float, "domain": str, "loss": float}
COST = ("mfu", "seconds", "device_peak_gib")  # of the last logged steps
MEAN = "out_of_domain/"  # begins the "domain" of a recorded mean
# Of a run's run.json, and of runs.json.
METADATA = {"device?": str, "manifest?": (str, None), "test_sets?": {str: str}} | origin.FORM
RUN = {"model": str, "seed": int, "rate": float, "schedule": float, "config?": runner.FORM}
RUN |= dict.fromkeys(("tokens_per_s?", "device_peak_gib?", "state_bytes?", "flops_per_token?"), (float, None))
RUN |= origin.FORM
RUN |= {"entropy?": {str: {"entropy": float, "entropy_relative": float}}}
STUDY = {"title": str, "references": [str], "domains": [str], "against": [str], "unit?": tuple(UNITS), "sweep?": str}
STUDY |= {"speeds?": {str: {str: float}}, "protocol?": (1, 2)}
FORM = {"study": STUDY, "missing": {str: str}, "runs": {str: RUN}}
FIX = "put back a copy of it, or compare the runs again (`seqjax study --study=... --out=...`)"
NOT_BEGUN = "not begun"
Losses = dict[int, dict[str, np.ndarray]]  # step -> domain -> losses [blocks]
MAX_BYTES = 16 * 2**20  # of blocks.npz, which is committed with the results


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The loss of every evaluated block: `documents` [blocks] and `losses` [evaluations, blocks] per domain.

    `rows` has the label and the step of the evaluation in each row of `losses`.
    """

    documents: dict[str, np.ndarray]
    losses: dict[str, np.ndarray]
    rows: dict[tuple[str, int], int]


@dataclasses.dataclass(frozen=True, eq=False)  # so that comparisons of them can be remembered
class Records:
    """The data of a comparison.

    `missing` says what runs without results lack. `speeds` has the study file's speeds in addition to the runs' own,
    per condition and model in tokens/s, and `sweep` is the setting that the study varies. `protocol` is 2 if the runs
    are trunks, whose points are their decayed ends (docs/protocol.md).
    """

    title: str
    references: tuple[str, ...]
    domains: tuple[str, ...]
    against: tuple[str, ...]
    runs: list[Record]
    missing: dict[str, str]
    blocks: Blocks | None
    speeds: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    unit: Unit = NATS
    sweep: str = ""
    protocol: int = 1


def progress(run: Run) -> str:
    """Return the missing part of a run, or "" if it has all of its evaluations."""
    if run.ends:
        if not (lacking := run.lacking):
            return ""
        return NOT_BEGUN if not run.last_row() else f"no evaluation yet at the {_named(lacking)}"
    try:
        step = read_points(run.workdir)[-1].step
    except UserError:
        return "no evaluation yet" if run.last_row() else NOT_BEGUN
    steps = run.config.train.steps if run.config is not None else step
    return "" if step >= steps else f"step {step} of {steps}"


def _named(ends: Sequence[int]) -> str:
    return f"end{'s' * (len(ends) > 1)} after step {', '.join(map(str, ends))}"


def collect(runs: Sequence[Run], domains: Sequence[str], *, unit: Unit = NATS) -> list[Record]:
    """Return the evaluations and metadata of runs.

    Raises `UserError` if a run has no evaluation (at one of its ends if it has several), lacks the loss of one of
    `domains` or, in nats per token, differs from the others in tokenizer or data. It is also raised if only some of the
    runs have ends.
    """
    runner.protocol(runs)
    found = [_collect(run, unit) for run in runs]
    for record in found:
        lacking = [domain for domain in domains if any(domain not in p.domains for p in record.points)]
        if lacking:
            known = ", ".join(record.points[-1].domains)
            raise UserError(f"{record.label} was not evaluated on {', '.join(lacking)}; it has losses of {known}.")
    if unit != NATS:
        return found
    tokenizers = [(r.label, r.metadata.get("config", {}).get("data", {}).get("tokenizer")) for r in found]
    if len({name for _, name in tokenizers if name}) > 1:
        named = ", ".join(f"{label}: {name}" for label, name in tokenizers if name)
        raise UserError(
            f"These runs have different tokenizers ({named}), and nats per token of one are not those of another; "
            'compare them with unit="bits_per_byte" in the study file.'
        )
    sets = {domain.rpartition(".")[0] for domain in domains} - {""}
    _require_one([(record.label, record.metadata.get("manifest")) for record in found], "read different data")
    for name in sorted(sets):
        hashes = [(record.label, record.metadata.get("test_sets", {}).get(name)) for record in found]
        _require_one(hashes, f"were evaluated on different test sets {name!r}")
    return found


def _require_one(hashes: Sequence[tuple[str, str | None]], what: str) -> None:
    """Raise `UserError` if the runs, (label, hash), do not all have the same data; unknown hashes are left out."""
    of_data: dict[str, list[str]] = {}
    for label, name in hashes:
        if name:
            of_data.setdefault(name, []).append(label)
    if len(of_data) > 1:
        groups = "; ".join(f"{', '.join(labels)}: manifest {name[:16]}" for name, labels in of_data.items())
        raise UserError(f"These runs {what} and cannot be compared: {groups}. Compare each alone.")


def _collect(run: Run, unit: Unit) -> Record:
    metadata: dict[str, Any] = {}
    files, ends = run.files, run.ends
    for name in ("run.json", "config.json"):
        if (files / name).is_file():
            value = read_json(files / name, METADATA if name == "run.json" else runner.FORM)
            metadata |= value if name == "run.json" else {"config": value}
    if run.config is not None:
        metadata |= _of_config(run.config, on_cpu=metadata.get("device") == "cpu")
    last = run.last_row()
    metadata |= {key: last[key] for key in COST if key in last}
    if speed := run.tokens_per_s():
        metadata["tokens_per_s"] = speed
    if entropy := _entropy(schedule.end_directory(files, ends[-1]) if ends else files):
        metadata["entropy"] = entropy
    if lacking := run.lacking:
        raise UserError(
            f"{run.label} has no evaluation at the {_named(lacking)} ({run.workdir}); train it to the end, or compare "
            "what has finished with --partial."
        )
    of_ends = [read_points(schedule.end_directory(files, step), unit=unit)[-1] for step in ends]
    points = of_ends or read_points(run.workdir, unit=unit)
    return Record(run.label, run.model, run.seed, run.rate, run.schedule, points, metadata)


def _entropy(workdir: Path) -> dict[str, dict[str, float]]:
    """Return the entropy of attention that the run measured at its end, domain -> field -> value; empty if none."""
    fields = ("entropy", "entropy_relative")
    found: dict[str, dict[str, float]] = {}
    for row in metrics.read(workdir) if (workdir / "metrics.jsonl").is_file() else ():
        for key, value in row.items():
            kind, *rest = key.split("/")
            if kind == "eval" and len(rest) == 2 and rest[1] in fields:
                found.setdefault(rest[0], {})[rest[1]] = value
    return found


def _of_config(config: Config, *, on_cpu: bool) -> dict[str, Any]:
    """Return parameters, training FLOPs per token, and the bytes of one sequence's decoding state after T tokens.

    The state is that of the run's device, where "auto" is another dtype than here.
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


def write(
    out: Path,
    runs: Sequence[Record],
    *,
    study: dict[str, Any],
    missing: dict[str, str],
    workdirs: Mapping[str, str | Path],
    max_bytes: int = MAX_BYTES,
) -> list[str]:
    """Write the files into `out` and return messages about omitted data.

    `study` is the part of runs.json about the comparison, and `workdirs` hold the runs' rows and block losses; those of
    a run that is not in `workdirs` are taken from the files that `out` has already. Raises `UserError` if runs were
    evaluated on different blocks.
    """
    of_ends = study.get("protocol") == 2
    known = all(run.label in workdirs for run in runs)
    if study.get("unit", "nats") == "nats":
        of_run = {} if known else _stored_blocks(out)
        for run in (run for run in runs if run.label in workdirs):
            workdir = workdirs[run.label]
            of_run[run.label] = _of_ends(run, workdir) if of_ends else eval_losses.read(workdir)
        arrays, messages = _gather_blocks(runs, of_run, max_bytes=max_bytes)
        for run in (run for run in runs if run.label in workdirs):
            messages += _lost(run, of_run[run.label], workdirs[run.label])
    else:
        arrays, messages = {}, ["No intervals: the losses of blocks are kept in nats per token alone."]
    rows = _gather_metrics(runs, workdirs, stored=[] if known else _stored_metrics(out), of_ends=of_ends)
    out.mkdir(parents=True, exist_ok=True)
    entries = {r.label: {f: getattr(r, f) for f in ("model", "seed", "rate", "schedule")} | r.metadata for r in runs}
    write_json(out / "runs.json", {"study": study, "missing": missing, "runs": entries})
    with (out / "points.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for run in runs:
            for p in run.points:
                losses = p.domains | {MEAN + name: mean for name, mean in p.means.items()}
                start = [run.label, run.model, run.seed, f"{run.rate:g}", f"{run.schedule:g}"]
                for domain, loss in losses.items():
                    writer.writerow([*start, p.step, p.tokens, f"{p.train_loss:.6f}", domain, f"{loss:.6f}"])
    (out / "blocks.npz").unlink(missing_ok=True)
    tables = {"blocks.npz": arrays, "metrics.npz": rows}
    for name, table in tables.items():
        if table:
            with replacing(out / name) as file:
                np.savez_compressed(file, allow_pickle=False, **table)
    return messages


def _lost(run: Record, of_run: tuple[dict[str, np.ndarray], Losses], workdir: str | Path) -> list[str]:
    """Return messages about evaluations whose losses of blocks are lost.

    Raises `UserError` if there are such losses of an evaluation that `metrics.jsonl` has not: it was cut.
    """
    described, losses = of_run
    known = {point.step for point in run.points}
    if losses.keys() - known:  # or of one that has ended since the rows were read
        known |= {point.step for point in read_points(workdir)}
    if unknown := sorted(losses.keys() - known):
        raise UserError(
            f"{workdir}/metrics.jsonl lacks the evaluation after step {unknown[0]}, of which eval_losses has a file: "
            f"it was cut; {eval_losses.FIX}."
        )
    lost = [point.step for point in run.points if described and not losses.get(point.step)]
    names = ", ".join(eval_losses.path(Path(eval_losses.DIRECTORY), step).name for step in lost)
    return (
        [f"No loss of every block, and so no interval, of {run.label} where these are lost: {names}."] if lost else []
    )


def _gather_metrics(
    runs: Sequence[Record], workdirs: Mapping[str, str | Path], *, stored: list[dict[str, Any]], of_ends: bool
) -> dict[str, np.ndarray]:
    """Return the arrays of metrics.npz; `stored` are rows of runs without a workdir; `of_ends`: points are ends."""
    rows: list[dict[str, Any]] = []
    for run in runs:
        if run.label not in workdirs:
            rows += [row for row in stored if row["run"] == run.label]
            continue
        files = readable(workdirs[run.label])
        parts = {0: files} | {p.step: schedule.end_directory(files, p.step) for p in run.points if of_ends}
        rows += [{"run": run.label, "end": end} | row for end, path in parts.items() for row in metrics.read(path)]
    fields = dict.fromkeys(field for row in rows for field in row)
    values = {field: [row.get(field) for row in rows] for field in fields}  # None on a device that does not report it
    return {field: np.array([np.nan if x is None else x for x in column]) for field, column in values.items()}


def _stored_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.npz in `directory`; [] if it has none."""
    if not (directory / "metrics.npz").is_file():
        return []
    arrays = read_arrays(directory / "metrics.npz", fix=FIX)
    n_rows = len(arrays.take("run", "U", None))
    columns = {field: arrays.take(field, "Uiuf", n_rows).tolist() for field in arrays}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _stored_blocks(directory: Path) -> dict[str, tuple[dict[str, np.ndarray], Losses]]:
    """Return documents and losses of blocks.npz in `directory`, label -> as `eval_losses.read`; {} if it has none."""
    blocks = read(directory).blocks
    found: dict[str, tuple[dict[str, np.ndarray], Losses]] = {}
    if blocks is not None:
        described = {f"{domain}/documents": of_block for domain, of_block in blocks.documents.items()}
        for (label, step), row in blocks.rows.items():
            of_step = {domain: losses[row] for domain, losses in blocks.losses.items()}
            found.setdefault(label, (described, {}))[1][step] = of_step
    return found


def _gather_blocks(
    runs: Sequence[Record], of_run: dict[str, tuple[dict[str, np.ndarray], Losses]], *, max_bytes: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the arrays of blocks.npz, at most `max_bytes` of them; `of_run` has documents and losses by label."""
    of_run = {run.label: of_run.get(run.label, ({}, {})) for run in runs}
    without = [label for label, (described, _) in of_run.items() if not described]
    messages = [f"No loss of every block, and so no interval: {', '.join(without)}."] if without else []
    known = {label: described for label, (described, _) in of_run.items() if described}
    if not known:
        return {}, messages
    # A workdir says more of its blocks than the records of a study, which keep their documents alone.
    first, described = max(known.items(), key=lambda item: len(item[1]))
    of_documents = {key for key in described if key.endswith("/documents")}
    for label, other in known.items():
        same = of_documents <= other.keys() <= described.keys()
        if not same or any(not np.array_equal(of_block, described[key]) for key, of_block in other.items()):
            raise UserError(
                f"{label} was evaluated on other blocks than {first}; evaluate both with the same eval.seed."
            )
    documents = {key.split("/")[0]: value for key, value in described.items() if key.endswith("/documents")}
    rows = [(run.label, point.step, len(run.points) - i) for run in runs for i, point in enumerate(run.points)]
    n_blocks = sum(len(d) for d in documents.values())
    room = (max_bytes - 8 * n_blocks - 4096 * (1 + len(documents))) // n_blocks  # bytes per block, for all evaluations
    dtype, keep = (np.float32, len(rows)) if 4 * len(rows) <= room else (np.float16, room // 2)
    if dtype == np.float16:
        messages.append(f"blocks.npz holds float16: {len(rows)} x {n_blocks} losses are too many as float32.")
    # The last evaluations of every run matter most: it is compared at the lowest losses.
    last = max((n for *_, n in rows), default=0)
    while sum(n <= last for *_, n in rows) > keep:
        last -= 1
    if any(n > last for *_, n in rows):
        messages.append(f"blocks.npz holds the last {last} evaluations of each run: more would exceed its size limit.")
    arrays: dict[str, Any] = {f"{domain}/documents": of_block for domain, of_block in documents.items()}
    kept = [(label, step) for label, step, n in rows if n <= last]
    arrays["kept"] = np.array([n <= last for *_, n in rows])
    for domain, of_block in documents.items():
        nothing = np.full(len(of_block), np.nan)
        arrays[f"{domain}/losses"] = np.array(
            [of_run[label][1].get(step, {}).get(domain, nothing) for label, step in kept], dtype
        )
    return arrays, messages


def _of_ends(run: Record, workdir: str | Path) -> tuple[dict[str, np.ndarray], dict[int, dict[str, np.ndarray]]]:
    """Return the result of `eval_losses.read` for the run's ends; empty if an end has no losses of blocks.

    Raises `UserError` if ends were evaluated on different blocks.
    """
    described: dict[str, np.ndarray] = {}
    losses = {}
    for point in run.points:
        of_end, of_step = eval_losses.read(schedule.end_directory(readable(workdir), point.step))
        if not of_end:
            return {}, {}
        if described and any(not np.array_equal(of_block, of_end[key]) for key, of_block in described.items()):
            raise UserError(f"{run.label}: the end after step {point.step} was evaluated on other blocks than another.")
        described = of_end
        losses |= {point.step: of_step.get(point.step, {})}
    return described, losses


def read(directory: str | Path) -> Records:
    """Return the data that `write` wrote; raise `UserError` if files are missing."""
    directory = Path(directory)
    for name in ("runs.json", "points.csv"):
        if not (directory / name).is_file():
            raise UserError(f"{directory} is no finished study: it has no {name}.")
    about = read_json(directory / "runs.json", FORM, fix=FIX)
    points: dict[str, dict[int, Point]] = {label: {} for label in about["runs"]}
    rows: dict[tuple[str, int], int] = {}
    for row in read_table(directory / "points.csv", COLUMNS, fix=FIX):
        label, step, domain = row["run"], row["step"], row["domain"]
        if label not in points:
            raise UserError(f"{directory}/points.csv has a run {label!r} that runs.json has not; {FIX}.")
        of_run = points[label]
        if step not in of_run:
            of_run[step] = Point(step, row["tokens"], row["train_loss"], {}, {})
            rows[label, step] = len(rows)
        kind = of_run[step].means if domain.startswith(MEAN) else of_run[step].domains
        kind[domain.removeprefix(MEAN)] = row["loss"]
    references, domains = about["study"]["references"], about["study"]["domains"]
    if not domains or not any(run["model"] in references for run in about["runs"].values()):
        raise UserError(f"{directory}/runs.json has no domain, or no run of a reference {references}; {FIX}.")
    named = {*domains, *about["study"]["against"]}
    for label, of_run in points.items():
        if lacking := [d for d in sorted(named) if not of_run or any(d not in p.domains for p in of_run.values())]:
            raise UserError(f"{directory}/points.csv lacks losses of {label!r} on {', '.join(lacking)}; {FIX}.")
    runs = [
        Record(label, f["model"], f["seed"], f["rate"], f["schedule"], list(points[label].values()), f)
        for label, f in about["runs"].items()
    ]
    study = about["study"]
    return Records(
        study["title"],
        tuple(study["references"]),
        tuple(study["domains"]),
        tuple(study["against"]),
        runs,
        about["missing"],
        _read_blocks(directory / "blocks.npz", rows, named),
        study.get("speeds", {}),
        UNITS[study.get("unit", "nats")],
        study.get("sweep", ""),
        study.get("protocol", 1),
    )


def _read_blocks(path: Path, rows: dict[tuple[str, int], int], named: Collection[str]) -> Blocks | None:
    """Return the losses of blocks, those of the domains `named` among them; None if there are none."""
    if not path.exists():
        return None
    arrays = read_arrays(path, fix=FIX)
    kept = np.flatnonzero(arrays.take("kept", "b", len(rows)))
    domains = dict.fromkeys([*(k.removesuffix("/documents") for k in arrays if k.endswith("/documents")), *named])
    documents = {domain: arrays.take(f"{domain}/documents", "iu", None) for domain in domains}
    losses = {}
    for domain, of_block in documents.items():
        losses[domain] = np.full((len(rows), len(of_block)), np.nan)
        losses[domain][kept] = arrays.take(f"{domain}/losses", "f", len(kept), len(of_block))
    return Blocks(documents, losses, rows)
