"""The results of a study: the records of its runs, and the tables and pictures that are made from these alone."""

import dataclasses
import json
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from seqjax.config import differences, to_dict
from seqjax.study import (
    comparison,
    end_points,
    equal_loss,
    equal_loss_tables,
    figures,
    forest,
    made_of,
    protocol,
    records,
    runner,
    tables,
)
from seqjax.study.protocol import Record
from seqjax.study.studies import Study
from seqjax.utils import UserError


def write_results(study: Study, out: str | Path, *, missing: dict[str, str], quiet: bool = False) -> None:
    """Write the results of the runs that are not `missing` (label -> why) into `out`; print them unless `quiet`.

    A run that has not begun here keeps the results that `out` has of it, from another machine or from workdirs that are
    gone. Raises `UserError` if no reference has results, or kept ones were made with other settings than the study's.
    """
    out = Path(out)
    stored = _stored(study, out, [label for label, why in missing.items() if why == records.NOT_BEGUN])
    missing = {label: why for label, why in missing.items() if label not in stored}
    runs = [run for run in study.runs if run.label not in missing and run.label not in stored]
    number = runner.protocol([run for run in study.runs if run.label not in missing])
    if stored:  # a run without a config cannot tell
        number = max(number, records.read(out).protocol)
    present = {run.model for run in [*runs, *stored.values()] if number == 2 or run.rate == run.schedule == 1}
    if not present.intersection(study.references):
        why = "; ".join(f"{label}: {text}" for label, text in missing.items())
        raise UserError(f"No reference has results, so there is nothing to compare with ({why}).")
    about = {
        "title": study.title,
        "references": list(study.references),
        "domains": list(study.domains),
        "against": list(study.against),
        "speeds": study.speeds,
        "unit": study.unit,
        "sweep": study.sweep,
    } | ({"protocol": number} if number > 1 else {})
    workdirs = {run.label: run.workdir for run in runs}
    collected = records.collect(runs, [*study.domains, *study.against], unit=protocol.UNITS[study.unit])
    by_label = stored | {run.label: run for run in collected}
    found = [by_label[run.label] for run in study.runs if run.label in by_label]
    old_sums = {label: sums for label, sums in made_of.read(out).items() if label in stored}
    messages = records.write(out, found, study=about, missing=missing, workdirs=workdirs)
    new_sums, more = made_of.collect(workdirs)
    sums = old_sums | new_sums
    in_order = {run.label: sums[run.label] for run in found if run.label in sums}
    made_of.write(out, in_order if study.unit == "nats" else {})
    for message in (*messages, *more):
        sys.stdout.write(message + "\n")
    analyse(out, quiet=quiet)


def _stored(study: Study, out: Path, labels: Collection[str]) -> dict[str, Record]:
    """Return the records in `out` of the runs with these labels.

    Raises `UserError` if one was made with other settings of model, training or optimiser than the study's.
    """
    if not (out / "runs.json").is_file():
        return {}
    stored = {record.label: record for record in records.read(out).runs if record.label in labels}
    for run in study.runs:
        if run.label in stored and run.config is not None:
            recorded = stored[run.label].metadata.get("config", {})
            now = json.loads(json.dumps(to_dict(run.config)))
            for group in ("model", "train", "optim"):
                was = recorded.get(group, {})
                found = differences(was, _settings_of(now[group], was), f"{group}.")
                # Which backend computes is not what a model is: it differs between machines, and a default may change.
                if changed := [text for text in found if not text.split(": ")[0].endswith("implementation")]:
                    raise UserError(
                        f"{out} has results of {run.label!r} with other settings: {'; '.join(changed)}. Give the "
                        "study's results another --out, or the run another label."
                    )
    return {run.label: stored[run.label] for run in study.runs if run.label in stored}


def _settings_of(now: Any, was: Any) -> Any:
    """Return `now`, of groups in lists as well, without the settings that did not exist when `was` was recorded."""
    if isinstance(now, dict) and isinstance(was, dict):
        return {key: _settings_of(value, was[key]) for key, value in now.items() if key in was}
    if isinstance(now, list) and isinstance(was, list) and len(now) == len(was):
        return [_settings_of(*pair) for pair in zip(now, was, strict=True)]
    return now


def analyse(directory: str | Path, *, quiet: bool = False) -> str:
    """Make the tables and pictures of a study from its records in `directory`; return the tables."""
    directory = Path(directory)
    found = records.read(directory)
    report = equal_loss_tables.report(found) if found.protocol == 2 else tables.report(found)
    sums = made_of.read(directory)
    measured = any(run.metadata.get("config", {}).get("eval", {}).get("classes") for run in found.runs)
    if not sums and measured and found.unit == protocol.NATS:
        sys.stdout.write(f"No losses by class of token, which the runs had: {directory / made_of.FILE} is missing.\n")
    for name in found.references:
        if name in comparison.models(found) and (section := made_of.section(found, sums, name)):
            report += "\n" + section
    (directory / "gaps.md").write_text(report, encoding="utf-8")
    known = [name for name in found.references if equal_loss.shown_runs(found, name)]
    has_reference = bool(known)
    pictures: dict[str, Callable[[Path, records.Records], None]] = {"losses.png": figures.against_loss_in_domain}
    if forest.references(found):
        pictures = {"gaps.png": forest.gaps} | pictures
    if end_points.run_speeds(found) and has_reference:
        pictures["cost.png"] = end_points.gap_over_speed
    if any(len(comparison.by_rate(found, name)) > 1 for name in comparison.models(found)):
        pictures["rates.png"] = end_points.by_rate
    if found.sweep and found.protocol == 1 and end_points.values_of(found) and has_reference:
        pictures["sweep.png"] = end_points.over_setting
    for name, draw in pictures.items():
        draw(directory / name, found)
    files = ["gaps.md", *(f"{name[:-4]}.{kind}" for name in pictures for kind in ("png", "svg"))]
    if not quiet:
        sys.stdout.write(f"{report}\nWritten to {directory}: {', '.join(files)}\n")
    return report


def gaps_to(directory: str | Path, reference: str) -> str:
    """Return the table of the gaps to any model with results in `directory`, a reference of its study or not.

    Raises `UserError` if there is no model of that name.
    """
    found = dataclasses.replace(records.read(Path(directory)), references=(reference,))
    gap_table = equal_loss_tables.gap_table if found.protocol == 2 else tables.gap_table
    return f"Gaps to {reference}, positive where a model is worse:\n\n{gap_table(found, reference)}"
