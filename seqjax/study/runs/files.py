"""Write and read a finished study's files, which suffice to analyse it again.

    runs.json    study fields (title, references, domains, against), missing runs, and per run: config, versions,
                 commit, devices, data, speed, seconds
    points.csv   every evaluation: each domain's loss, and the recorded OOD means
    blocks.npz   per domain: "DOMAIN/documents" [blocks], "DOMAIN/sources" [blocks] if known, and "DOMAIN/losses"
                 [evaluations, blocks] in the order of points.csv, nan for an omitted evaluation
    metrics.npz  every metrics.jsonl row: one array [rows] per field, nan for a missing value; "run" has the labels,
                 "end" the step of the row's cooldown, or 0

An analysis reads the first three files and classes.npz (seqjax/study/gaps/classes.py). metrics.npz keeps the training
curves after the workdirs are deleted. Tables and figures are always made from the result of `read`, so they are equal
byte for byte, wherever the files are.
"""

import csv
import dataclasses
import io
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.errors import UserError
from seqjax.files import replacing, write_json
from seqjax.reading import Float, read_arrays, read_json, read_table
from seqjax.study.runs import checks, runner
from seqjax.study.runs.collect import METADATA, read_points
from seqjax.study.runs.record import SPEEDS, UNITS, Blocks, Point, Record, Records, speed_tables
from seqjax.training import eval_losses, metrics, origin, schedule
from seqjax.training.mirrors import readable

COLUMNS = {"run": str, "model": str, "seed": int, "rate": float, "schedule": float}
COLUMNS |= {"step": int, "tokens": int, "train_loss": Float, "domain": str, "loss": float}
IDENTITY = ("model", "seed", "rate", "schedule")
MEAN = "out_of_domain/"  # prefix in the column "domain" for a recorded mean
RUN = {"model": str, "seed": int, "rate": float, "schedule": float, "config?": runner.FORM, "parameters?": (int, None)}
RUN |= dict.fromkeys(("tokens_per_s?", "device_peak_gib?", "state_bytes?", "flops_per_token?"), (float, None))
RUN |= METADATA | origin.FORM
RUN |= {"entropy?": {str: {"entropy": float, "entropy_relative": float}}}
STUDY = {"title": str, "references": [str], "domains": [str], "against": [str], "unit?": tuple(UNITS), "sweep?": str}
STUDY |= {"speeds?": SPEEDS, "asks?": [str], "protocol?": (1, 2)}  # `protocol` was written by earlier versions
FORM = {"study": STUDY, "missing": {str: str}, "runs": {str: RUN}}
FIX = "put back a copy of it, or move it away and compare the runs again (`seqjax study --study=... --out=...`)"
Described = dict[str, np.ndarray]  # "DOMAIN/FIELD" -> [blocks]
Losses = dict[int, dict[str, np.ndarray]]  # step -> domain -> losses [blocks]
MAX_BYTES = 16 * 2**20  # blocks.npz is committed with the results, so it must stay small
STORED_FIELDS = ("documents", "sources")  # block fields that a study keeps
# Largest difference between an evaluation in points.csv and its blocks' mean. Block losses are float32, or float16 if
# there are many (relative error 2**-11 for a loss below 16 nats, and less in the mean).
ROUNDING = {np.dtype(np.float32): 1e-3, np.dtype(np.float16): 1e-2, np.dtype(np.float64): 1e-3}


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

    `study` holds the study fields for runs.json. `workdirs` hold the runs' metrics and block losses. A run without a
    workdir keeps its data from the existing files in `out`. Raises `UserError` if runs were evaluated on different
    blocks.
    """
    known = all(run.label in workdirs for run in runs)
    if study.get("unit", "nats") == "nats":
        blocks = {} if known else _stored_blocks(out)
        for run in (run for run in runs if run.label in workdirs):
            workdir = workdirs[run.label]
            blocks[run.label] = _read_ends(run, workdir) if run.is_wsd else eval_losses.read(workdir)
        arrays, messages = _gather_blocks(runs, blocks, max_bytes=max_bytes)
        for run in (run for run in runs if run.label in workdirs):
            messages += _lost(run, blocks[run.label], workdirs[run.label])
            _require_means(run, blocks[run.label][1], workdirs[run.label])
    else:
        arrays, messages = {}, ["No intervals: block losses are kept only in nats per token."]
    messages += _unchecked(runs)
    rows = _gather_metrics(runs, workdirs, stored=[] if known else _stored_metrics(out))
    out.mkdir(parents=True, exist_ok=True)
    _write_tables(out, runs, study=study, missing=missing, arrays=arrays)
    if rows:
        _save(out / "metrics.npz", rows)
    return messages


def join(out: Path, others: Mapping[Path, Sequence[Record]], *, max_bytes: int = MAX_BYTES) -> list[str]:
    """Append other studies' runs, with blocks, to the files in `out`.

    Returns messages about omitted data. `others` has the runs read from each directory, with their labels and models in
    `out`. Raises `UserError` if runs were evaluated on different blocks or labels repeat.
    """
    about, runs, _ = _read_runs(out)
    blocks = _stored_blocks(out)
    for directory, joined in others.items():
        if repeated := {run.label for run in runs} & {run.label for run in joined}:
            raise UserError(f"{out} has a run {min(repeated)!r} already; join each directory once.")
        blocks |= _stored_blocks(directory, joined)
        runs += joined
    arrays, messages = _gather_blocks(runs, blocks, max_bytes=max_bytes)
    _write_tables(out, runs, study=about["study"], missing=about["missing"], arrays=arrays)
    return messages


def united(records: Records, others: Sequence[Records]) -> Records:
    """Return a study that also has other studies' runs on the same data.

    The added models are not in `asks`. A run that two studies share (model, learning rate, seed) comes from the first
    study. Block losses are kept if all studies evaluated the same blocks.

    Raises `UserError` for a study with other data, domains or unit.
    """
    runs, rows, parts = list(records.runs), 0, [] if records.blocks is None else [records.blocks]
    manifests = {run.metadata.get("manifest") for run in records.runs}
    for other in others:
        differing = [key for key in ("domains", "against", "unit") if getattr(other, key) != getattr(records, key)]
        if differing or {run.metadata.get("manifest") for run in other.runs} != manifests:
            named = ", ".join(differing) or "data"
            raise UserError(
                f"{other.name} has other {named} than {records.name}; join only studies with the same data."
            )
        scale = (other.unit_rate or 1.0) / (records.unit_rate or 1.0)
        rows += 0 if not parts else len(next(iter(parts[-1].losses.values())))
        known = {(run.model, round(run.rate, 6), run.seed) for run in runs}
        for run in other.runs:
            rate = round(run.rate * scale, 6)
            if (run.model, rate, run.seed) not in known:
                points = [[p._replace(row=p.row + rows) for p in side] for side in (run.points, run.ends)]
                runs.append(dataclasses.replace(run, rate=rate, points=points[0], ends=points[1]))
        if other.blocks is not None:
            parts.append(other.blocks)
    same = len(parts) == 1 + len(others) and all(
        np.array_equal(part.units[domain], units) for part in parts for domain, units in parts[0].units.items()
    )
    losses = {
        domain: np.concatenate([part.losses[domain] for part in parts]) for domain in (parts[0].losses if same else ())
    }
    asks = records.asks or tuple(model for model in records.models if model not in records.references)
    blocks = Blocks(parts[0].units, losses) if same else None
    _require_one_training(runs, " and ".join(dict.fromkeys(study.name for study in (records, *others))))
    return dataclasses.replace(records, runs=runs, blocks=blocks, asks=asks, remarks=tuple(checks.remarks(runs)))


def _write_tables(
    out: Path, runs: Sequence[Record], *, study: dict[str, Any], missing: dict[str, str], arrays: dict[str, Any]
) -> None:
    """Write runs.json, points.csv and blocks.npz."""
    entries = {r.label: {f: getattr(r, f) for f in IDENTITY} for r in runs}
    entries = {r.label: entries[r.label] | {k: v for k, v in r.metadata.items() if k not in IDENTITY} for r in runs}
    write_json(out / "runs.json", {"study": study, "missing": missing, "runs": entries})
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for run in runs:
        for p in run.points:
            losses = p.domains | {MEAN + name: mean for name, mean in p.means.items()}
            start = [run.label, run.model, run.seed, f"{run.rate:g}", f"{run.schedule:g}"]
            for domain, loss in losses.items():
                writer.writerow([*start, p.step, p.tokens, f"{p.train_loss:.6f}", domain, f"{loss:.6f}"])
    with replacing(out / "points.csv") as file:
        file.write(text.getvalue().encode())
    (out / "blocks.npz").unlink(missing_ok=True)
    if arrays:
        _save(out / "blocks.npz", arrays)


def _save(path: Path, arrays: dict[str, Any]) -> None:
    with replacing(path) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def _lost(run: Record, blocks: tuple[dict[str, np.ndarray], Losses], workdir: str | Path) -> list[str]:
    """Return messages about evaluations with lost block losses.

    Raises `UserError` if an evaluation has block losses but no row in `metrics.jsonl`: the file was cut.
    """
    described, losses = blocks
    known = {point.step for point in run.points}
    if losses.keys() - known:  # an evaluation may have ended after the rows were read
        known |= {point.step for point in read_points(workdir)}
    if unknown := sorted(losses.keys() - known):
        raise UserError(
            f"{workdir}/metrics.jsonl lacks the evaluation after step {unknown[0]}, but eval_losses has its file, so "
            f"metrics.jsonl was cut: {eval_losses.FIX}."
        )
    lost = [point.step for point in run.points if described and not losses.get(point.step)]
    names = ", ".join(eval_losses.path(Path(eval_losses.DIRECTORY), step).name for step in lost)
    return [f"No block losses in {run.label} for {names}: these evaluations have no interval."] if lost else []


def _require_means(run: Record, losses: Losses, workdir: str | Path) -> None:
    """Raise `UserError` if a loss in `metrics.jsonl` is not its blocks' mean.

    In that case one of the files was exchanged.
    """
    for point in run.points:
        for domain, block_losses in losses.get(point.step, {}).items():
            loss, mean = point.domains.get(domain), float(block_losses.astype(float).mean())
            if loss is not None and np.isfinite(mean) and abs(loss - mean) > ROUNDING[block_losses.dtype]:
                raise UserError(
                    f"{workdir}: metrics.jsonl has {domain} {loss:.6f} after step {point.step}, and its blocks in "
                    f"eval_losses have the mean {mean:.6f}; one of the files was edited or exchanged: "
                    f"{eval_losses.FIX}."
                )


def _unchecked(runs: Sequence[Record]) -> list[str]:
    """Return a message about runs that began before identities existed."""
    labels = [run.label for run in runs if not run.metadata.get("identity")]
    named = ", ".join(labels[:3]) + f" and {len(labels) - 3} others" * (len(labels) > 3)
    return [f"Not checked, because runs of earlier versions have no identity: {named}."] if labels else []


def _gather_metrics(
    runs: Sequence[Record], workdirs: Mapping[str, str | Path], *, stored: list[dict[str, Any]]
) -> dict[str, np.ndarray]:
    """Return the arrays for metrics.npz.

    `stored` has the rows for runs without a workdir.
    """
    rows: list[dict[str, Any]] = []
    for run in runs:
        if run.label not in workdirs:
            rows += [row for row in stored if row["run"] == run.label]
            continue
        files = readable(workdirs[run.label])
        parts = {0: files} | {p.step: schedule.end_directory(files, p.step) for p in run.points if run.is_wsd}
        rows += [{"run": run.label, "end": end} | row for end, path in parts.items() for row in metrics.read(path)]
    fields = dict.fromkeys(field for row in rows for field in row)
    values = {field: [row.get(field) for row in rows] for field in fields}  # None on a device that does not report it
    return {field: np.array([np.nan if x is None else x for x in column]) for field, column in values.items()}


def _stored_metrics(directory: Path) -> list[dict[str, Any]]:
    """Return the metrics.npz rows in `directory`; [] without the file."""
    if not (directory / "metrics.npz").is_file():
        return []
    arrays = read_arrays(directory / "metrics.npz", fix=FIX)
    n_rows = len(arrays.take("run", "U", None))
    columns = {field: arrays.take(field, "Uiuf", n_rows).tolist() for field in arrays}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _stored_blocks(directory: Path, runs: Sequence[Record] = ()) -> dict[str, tuple[Described, Losses]]:
    """Return blocks and losses in `directory`, label -> as from `eval_losses.read`.

    The result is {} without blocks.npz. `runs` are some of its runs, possibly with new labels; by default all runs.
    """
    _, stored, n_rows = _read_runs(directory)
    runs = runs or stored
    arrays = _read_arrays(directory / "blocks.npz", n_rows)
    if arrays is None:
        return {}
    described, losses = arrays
    return {
        run.label: (
            described,
            {p.step: {domain: domain_losses[p.row] for domain, domain_losses in losses.items()} for p in run.points},
        )
        for run in runs
    }


def _gather_blocks(
    runs: Sequence[Record], blocks: dict[str, tuple[Described, Losses]], *, max_bytes: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the arrays for blocks.npz, at most `max_bytes`, and messages.

    `blocks` has blocks and losses by label.
    """
    blocks = {run.label: blocks.get(run.label, ({}, {})) for run in runs}
    without = [label for label, (described, _) in blocks.items() if not described]
    messages = [f"No block losses, and therefore no interval: {', '.join(without)}."] if without else []
    known = {label: described for label, (described, _) in blocks.items() if described}
    if not known:
        return {}, messages
    # A workdir may describe its blocks in more detail than a study's files, and a new workdir in more than an old one.
    first, described = next(iter(known.items()))
    described = dict(described)
    document_keys = {key for key in described if key.endswith("/documents")}
    for label, other in known.items():
        same = {key for key in other if key.endswith("/documents")} == document_keys
        if not same or _differ(other, described):
            raise UserError(
                f"{label} was evaluated on other blocks than {first}; evaluate both with the same eval.seed."
            )
        described |= other
    documents = {key.rpartition("/")[0]: value for key, value in described.items() if key.endswith("/documents")}
    rows = [(run.label, point.step, len(run.points) - i) for run in runs for i, point in enumerate(run.points)]
    n_blocks = sum(len(d) for d in documents.values())
    room = (max_bytes - 8 * n_blocks - 4096 * (1 + len(documents))) // n_blocks  # bytes per block, for all evaluations
    dtype, keep = (np.float32, len(rows)) if 4 * len(rows) <= room else (np.float16, room // 2)
    if dtype == np.float16:
        messages.append(f"blocks.npz holds float16: {len(rows)} x {n_blocks} losses are too many as float32.")
    # Keep every run's last evaluations, because runs are compared at their lowest losses.
    last = max((n for *_, n in rows), default=0)
    while sum(n <= last for *_, n in rows) > keep:
        last -= 1
    if any(n > last for *_, n in rows):
        messages.append(f"blocks.npz holds the last {last} evaluations of each run: more would exceed its size limit.")
    arrays: dict[str, Any] = {key: array for key, array in described.items() if key.rpartition("/")[2] in STORED_FIELDS}
    evaluations = [(label, step) for label, step, n in rows if n <= last]
    arrays["kept"] = np.array([n <= last for *_, n in rows])
    for domain, of_block in documents.items():
        missing = np.full(len(of_block), np.nan)
        arrays[f"{domain}/losses"] = np.array(
            [blocks[label][1].get(step, {}).get(domain, missing) for label, step in evaluations], dtype
        )
    return arrays, messages


def _differ(one: Described, other: Described) -> bool:
    """Return whether two descriptions have different blocks.

    Sources are ignored, because they may become known after the blocks.
    """
    shared = [key for key in one.keys() & other.keys() if not key.endswith("/sources")]
    return any(not np.array_equal(one[key], other[key]) for key in shared)


def _read_ends(run: Record, workdir: str | Path) -> tuple[Described, Losses]:
    """Return the merged `eval_losses.read` results at the run's ends.

    Both are {} if an end has no block losses. Raises `UserError` if ends were evaluated on different blocks.
    """
    described: Described = {}
    losses = {}
    for point in run.points:
        end_blocks, end_losses = eval_losses.read(schedule.end_directory(readable(workdir), point.step))
        if not end_blocks:
            return {}, {}
        if _differ(described, end_blocks):
            raise UserError(
                f"{run.label}: the evaluation after step {point.step} used other test text than the evaluations after "
                "earlier steps of this run, so its directory has files of another run. Put back the run's own "
                "files, or train it again in a new workdir."
            )
        described |= end_blocks
        losses |= {point.step: end_losses.get(point.step, {})}
    return described, losses


def read(directory: str | Path) -> Records:
    """Return a study's data from the files of `write`.

    Runs that differ only in schedule become one run with several ends. Raises `UserError` if files are missing,
    damaged, or do not belong together.
    """
    directory = Path(directory)
    about, runs, n_rows = _read_runs(directory)
    study = about["study"]
    references, domains, against = study["references"], study["domains"], study["against"]
    named = [name for run in runs for name in (run.label, run.model)]
    named += [study["title"], *references, *domains, *against, *study.get("speeds", {}), *about["missing"]]
    checks.require_plain(named, f"{directory}/runs.json")
    if not domains or not any(run.model in references for run in runs):
        raise UserError(f"{directory}/runs.json has no domain, or no run of a reference {references}; {FIX}.")
    required = dict.fromkeys((*domains, *against))
    for run in runs:
        lacking = [d for d in required if not run.points or any(d not in p.domains for p in run.points)]
        if lacking:
            raise UserError(f"{directory}/points.csv lacks losses of {run.label!r} on {', '.join(lacking)}; {FIX}.")
    _require_one_training(runs, f"{directory}/runs.json")
    arrays = _read_arrays(directory / "blocks.npz", n_rows)
    if arrays is not None:
        _require_equal(directory, runs, arrays[1])
    speeds, conditions = speed_tables(study.get("speeds", {}))
    return Records(
        title=study["title"],
        references=tuple(references),
        domains=tuple(domains),
        against=tuple(against),
        runs=merged(runs),
        missing=about["missing"],
        blocks=None if arrays is None else _blocks(*arrays, list(required), directory),
        speeds=speeds,
        conditions=conditions,
        unit=UNITS[study.get("unit", "nats")],
        sweep=study.get("sweep", ""),
        asks=tuple(study.get("asks", ())),
        remarks=tuple(checks.remarks(runs)),
        name=directory.resolve().name,
    )


def _require_one_training(runs: Sequence[Record], source: str) -> None:
    checks.require_one_training(((run.label, run.model, run.metadata.get("config", {})) for run in runs), source)


def read_runs(directory: str | Path) -> list[Record]:
    """Return the runs in `directory`, one record per label."""
    return _read_runs(Path(directory))[1]


def _read_runs(directory: Path) -> tuple[dict[str, Any], list[Record], int]:
    """Return runs.json's content, the runs, and the evaluation count in points.csv."""
    for name in ("runs.json", "points.csv"):
        if not (directory / name).is_file():
            raise UserError(f"{directory} is not a finished study: it has no {name}.")
    about = read_json(directory / "runs.json", FORM, fix=FIX)
    points: dict[str, dict[int, Point]] = {label: {} for label in about["runs"]}
    n_rows = 0
    for row in read_table(directory / "points.csv", COLUMNS, fix=FIX):
        label, step, domain = row["run"], row["step"], row["domain"]
        if label not in points:
            raise UserError(f"{directory}/points.csv has a run {label!r} that runs.json lacks; {FIX}.")
        run_points = points[label]
        if step not in run_points:
            run_points[step] = Point(step, row["tokens"], row["train_loss"], {}, {}, n_rows)
            n_rows += 1
        kind = run_points[step].means if domain.startswith(MEAN) else run_points[step].domains
        kind[domain.removeprefix(MEAN)] = row["loss"]
    runs = []
    for label, f in about["runs"].items():
        run_points = list(points[label].values())
        is_wsd = bool(f.get("config", {}).get("train", {}).get("ends"))
        ends = sorted(run_points, key=lambda point: point.tokens) if is_wsd else run_points[-1:]
        runs.append(Record(label, f["model"], f["seed"], f["rate"], f["schedule"], run_points, ends, f))
    return about, runs, n_rows


def merged(runs: Sequence[Record]) -> list[Record]:
    """Return runs merged by model, rate and seed.

    The longest run in a group gets all ends in the group: a shorter schedule with a decayed learning rate is an earlier
    end of the full run.
    """
    groups: dict[tuple[str, float, int], list[Record]] = {}
    for run in runs:
        groups.setdefault((run.model, run.rate, run.seed), []).append(run)
    full_runs = []
    for group in groups.values():
        longest = max(group, key=lambda run: run.schedule)
        ends = sorted((end for run in group for end in run.ends), key=lambda end: end.tokens)
        full_runs.append(dataclasses.replace(longest, ends=ends) if len(group) > 1 else longest)
    return full_runs


def _read_arrays(path: Path, n_rows: int) -> tuple[Described, dict[str, np.ndarray]] | None:
    """Return the content of blocks.npz, or None without the file.

    These are the blocks ("DOMAIN/FIELD" -> [blocks]) and the losses (domain -> [evaluations, blocks]).
    """
    if not path.exists():
        return None
    arrays = read_arrays(path, fix=FIX)
    rows = np.flatnonzero(arrays.take("kept", "b", n_rows))
    described = {key: arrays.take(key, "iu", None) for key in arrays if key.rpartition("/")[2] in STORED_FIELDS}
    losses = {}
    for key, values in described.items():
        domain, _, field = key.rpartition("/")
        if field == "documents":
            domain_losses = arrays.take(f"{domain}/losses", "f", len(rows), len(values))
            losses[domain] = np.full((n_rows, len(values)), np.nan, np.result_type(domain_losses))
            losses[domain][rows] = domain_losses
    return described, losses


def _blocks(described: Described, losses: dict[str, np.ndarray], domains: Collection[str], directory: Path) -> Blocks:
    if without := [domain for domain in domains if domain not in losses]:
        raise UserError(f"{directory}/blocks.npz has no blocks of {', '.join(without)}; {FIX}.")
    units = {domain: described[f"{domain}/documents"] for domain in domains}
    sources = {domain: described[f"{domain}/sources"] for domain in domains if f"{domain}/sources" in described}
    units |= {domain: values for domain, values in sources.items() if len(np.unique(values)) > 1}
    return Blocks(units, {domain: losses[domain].astype(float) for domain in domains})


def _require_equal(directory: Path, runs: Sequence[Record], losses: Mapping[str, np.ndarray]) -> None:
    """Raise `UserError` if a loss in points.csv is not its blocks' mean.

    In that case one of the files was edited.
    """
    for domain, domain_losses in losses.items():
        means = domain_losses.astype(float).mean(1)
        for run in runs:
            for point in run.points:
                loss, mean = point.domains.get(domain), means[point.row]
                if loss is None or np.isnan(mean) or np.isinf(mean):
                    continue
                if abs(loss - mean) > ROUNDING[domain_losses.dtype]:
                    raise UserError(
                        f"{directory}: points.csv has {domain} {loss:.6f} after step {point.step} of {run.label!r}, "
                        f"and its blocks in blocks.npz have the mean {mean:.6f}; one of the files was edited, so {FIX}."
                    )
