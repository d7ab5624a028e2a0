"""Write a study's results: data from the runs, then tables and pictures from the data."""

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from seqjax.data import regimes
from seqjax.data.builtin import corpus as builtin
from seqjax.errors import UserError
from seqjax.escape import markdown
from seqjax.reading import read_json
from seqjax.study import gaps
from seqjax.study.gaps import classes
from seqjax.study.report import figures, forest, leaderboard, page, points, tables, words
from seqjax.study.runs import collect, files, identity
from seqjax.study.runs.record import NATS, UNITS, Record
from seqjax.study.runs.runner import FORM, Run
from seqjax.study.runs.studies import Study
from seqjax.terminal import tell

DATA = ("runs.json", "points.csv", "blocks.npz", "metrics.npz", classes.FILE)  # all files that an analysis may read
OLD_TABLES = "gaps.md"  # the leaderboard's name in earlier versions


# --------------------------------------------------------------------------------------------------- from runs to data
def write_results(
    study: Study, out: str | Path, *, missing: dict[str, str], quiet: bool = False, latex: bool = False
) -> None:
    """Write the results of finished runs into `out`; print them unless `quiet`.

    `missing` maps an unfinished run's label to the reason. A run that has not begun here keeps its results in `out`,
    for example from another machine. Raises `UserError` if no reference has results, or kept results have other
    settings than the study.
    """
    for message in _write_data(study, Path(out), missing):
        tell(message)
    analyse(out, quiet=quiet, latex=latex)


def unfinished(study: Study) -> dict[str, str]:
    """Return label -> missing part, for runs with missing evaluations."""
    return {run.label: why for run in study.runs if (why := collect.progress(run))}


def _write_data(study: Study, out: Path, missing: dict[str, str]) -> list[str]:
    """Write the finished runs' data and return messages about omitted data."""
    stored = _stored(study, out, [label for label, why in missing.items() if why == collect.NOT_BEGUN])
    missing = {label: why for label, why in missing.items() if label not in stored}
    runs = [run for run in study.runs if run.label not in missing and run.label not in stored]
    if not {run.model for run in [*runs, *stored.values()]}.intersection(study.references):
        why = "; ".join(f"{label}: {text}" for label, text in missing.items())
        raise UserError(f"No reference has results, so nothing can be compared ({why}).")
    fields = ("title", "references", "domains", "against", "speeds", "unit", "sweep")
    about = {name: getattr(study, name) for name in fields}
    workdirs = {run.label: run.workdir for run in runs}
    collected = collect.collect(runs, [*study.domains, *study.against], unit=UNITS[study.unit])
    by_label = stored | {run.label: run for run in collected}
    records = [by_label[run.label] for run in study.runs if run.label in by_label]
    sums = {label: run_sums for label, run_sums in (classes.read(out) if stored else {}).items() if label in stored}
    messages = files.write(out, records, study=about, missing=missing, workdirs=workdirs)
    new_sums, more = classes.collect(workdirs)
    sums |= new_sums
    in_order = {run.label: sums[run.label] for run in records if run.label in sums}
    classes.write(out, in_order if study.unit == "nats" else {})
    return [*messages, *more]


def _stored(study: Study, out: Path, labels: Collection[str]) -> dict[str, Record]:
    """Return the records in `out` with these labels.

    Raises `UserError` if a record has other settings than the study.
    """
    if not labels or not all((out / name).is_file() for name in ("runs.json", "points.csv")):
        return {}  # incomplete results are replaced, so damage in them does not matter
    stored = {record.label: record for record in files.read_runs(out) if record.label in labels}
    for run in study.runs:
        if run.label not in stored or run.config is None:
            continue
        if changed := identity.changed(stored[run.label].metadata.get("config", {}), run.config):
            raise UserError(
                f"{out} has results of {run.label!r} with other settings: {'; '.join(changed)}. Give the "
                "study's results another --out, or the run another label."
            )
    return {run.label: stored[run.label] for run in study.runs if run.label in stored}


# --------------------------------------------------------------------------------------- from data to tables, pictures
def analyse(
    directory: str | Path,
    *,
    others: Sequence[str | Path] = (),
    quiet: bool = False,
    latex: bool = False,
    html: bool = False,
) -> str:
    """Make a study's tables and pictures from its data; return the tables.

    `directory` has the data and receives the files. `others` are directories with finished studies on the same data;
    their runs join the comparison. `latex` also writes leaderboard.tex, `html` report.html.
    """
    directory = Path(directory)
    records, sums = files.read(directory), classes.read(directory)
    measured = any(run.metadata.get("config", {}).get("eval", {}).get("classes") for run in records.runs)
    if not sums and measured and records.unit == NATS:
        tell(f"The runs measured losses by token class, but {directory / classes.FILE} is missing.")
    compared = leaderboard.compared(records, sums, others=[files.read(other) for other in others])
    report = tables.report(records, compared)
    texts = {"leaderboard.md": report, leaderboard.FILE: leaderboard.csv_text(leaderboard.rows(records, compared))}
    if sections := [section for name in compared if (section := tables.class_section(records, sums, name))]:
        texts["classes.md"] = f"# {markdown(records.title)}: classes of tokens\n\n" + "\n".join(sections)
    if latex:
        texts["leaderboard.tex"] = leaderboard.latex(records, compared)
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    (directory / OLD_TABLES).unlink(missing_ok=True)
    pictures: dict[str, Callable[[Path], None]] = {}
    if forest.marks(compared):
        pictures["gaps"] = lambda path: forest.gaps(path, records, compared)
    pictures["losses"] = lambda path: figures.against_loss_in_domain(path, records)
    if points.run_speeds(records):
        pictures["cost"] = lambda path: points.gap_over_speed(path, records, compared)
    if any(len(gaps.rates(records, name).by_rate) > 1 for name in records.models):
        pictures["rates"] = lambda path: points.by_rate(path, records)
    if records.sweep and points.setting_values(records):
        pictures["sweep"] = lambda path: points.over_setting(path, records, compared)
    for name, draw in pictures.items():
        draw(directory / f"{name}.png")
    if html:
        page.write(directory / "report.html", records, text=report, compared=compared)
    names = [*texts, *(f"{name}.{kind}" for name in pictures for kind in ("png", "svg")), *["report.html"] * html]
    if not quiet:
        tell(f"{report}\nWritten to {directory}: {', '.join(names)}")
    return report


# ------------------------------------------------------------------------------------------------- other comparisons
def gaps_to(directory: str | Path, reference: str) -> str:
    """Return a table with the gaps to any model in `directory`.

    Raises `UserError` if there is no model with that name.
    """
    records = files.read(directory)
    gaps.require_model(records, reference)
    records = dataclasses.replace(records, references=(reference,))
    (rows,) = leaderboard.compared(records, classes.read(directory)).values()
    return f"Gaps to {reference}, positive where a model is worse:\n\n{tables.gap_table(records, rows)}"


def compare_two(directory: str | Path, model: str, reference: str) -> str:
    """Return a model's gap to another model in one line, from the data in `directory`.

    Raises `UserError` if there is no model with that name.
    """
    return words.in_one_line(files.read(directory), model, reference)


def compare_in_study(study: Study, out: Path | None, model: str, reference: str) -> str:
    """Return `compare_two` for a study's finished runs and the results kept in `out`."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        for path in (out / name for name in DATA) if out is not None else ():
            if path.is_file():
                shutil.copy(path, copy)
        _write_data(study, copy, unfinished(study))
        return compare_two(copy, model, reference)


def compare_workdirs(model: str, reference: str) -> str:
    """Return `compare_two` for two models given as workdirs; commas separate seeds.

    Runs are compared at the held-out loss on their training domains. Raises `UserError` for a workdir that is not a
    run, or if two runs of a model have the same seed and learning rate.
    """
    runs, sides = list[Run](), {name: [text for text in name.split(",") if text] for name in (model, reference)}
    configs = {}
    for name, workdirs in sides.items():
        for i, workdir in enumerate(workdirs):
            run = Run(len(runs), workdir, workdir, None, name)
            path = run.files / "config.json"
            if not path.is_file():
                raise UserError(f"--compare: {workdir} is not a run: it has no config.json.")
            configs[workdir] = config = read_json(path, FORM)
            seed, lr = config.get("train", {}).get("seed", i), config.get("optim", {}).get("lr", 1.0)
            runs.append(dataclasses.replace(run, seed=seed, rate=float(lr)))
    unit = runs[-1].rate  # any common unit: only ratios of rates are compared
    runs = [dataclasses.replace(run, rate=run.rate / unit) for run in runs]
    seen: dict[tuple[str, int, float], str] = {}
    for run in runs:
        other = seen.setdefault((run.model, run.seed, run.rate), run.label)
        if other != run.label:
            raise UserError(
                f"--compare: {other} and {run.label} are runs of one model with the same seed and learning rate; leave "
                "out one."
            )
    against, domains = _domains(configs[runs[-1].label], runs)
    return compare_in_study(Study("", (reference,), domains, runs, against), None, model, reference)


def _domains(config: dict, runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """Split the domains of the first run's evaluations: domains on which `config` trained, and the others."""
    data = config.get("data", {})
    known = builtin.REGIMES if data.get("corpus") == "builtin" else regimes.REGIMES
    trained = data.get("train_domains") or known[data.get("regime", "limited")].train
    evaluated = list(collect.collect(runs[:1], ())[0].last.domains)
    inside = [name for name in evaluated if name in trained]
    if not inside or len(inside) == len(evaluated):
        raise UserError(
            f"--compare: {runs[0].label} was evaluated on {', '.join(evaluated)}, and {runs[-1].label} trained on "
            f"{', '.join(trained)}; a comparison needs a domain of each kind. Evaluate the runs on more domains, or "
            "name the OOD domains in a study file (`domains`)."
        )
    return inside, [name for name in evaluated if name not in trained]
