"""Join finished studies to a judgement: `--runs=DIR`.

The joined runs must have the judgement's data, tokens and optimiser. They supply the learning-rate slope and the seed
variance. A joined model with a reference's settings replaces this reference, which then need not be trained.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seqjax.config import Config, differences, to_dict
from seqjax.errors import UserError
from seqjax.study import gaps
from seqjax.study.gaps.heights import FEWEST
from seqjax.study.runs import files, identity
from seqjax.study.runs.record import NATS, Record, Records
from seqjax.training.identity import ADDED

DATA = (
    *("train.steps", "train.batch_size", "train.seq_len", "model.vocab_size"),
    *("eval.tokens", "eval.seed"),
)  # settings that determine the training and evaluation text
UNIT = 1e-3  # learning rate of a run with `rate` = 1
FALLBACK = "Without it, mixer and references are compared at common learning rates."
# Share of the tokens: a first end (an evaluation after a cooldown) up to here counts as an end at 50%. A model far from
# the reference's loss needs one (`heights.NO_REACH`).
EARLY = 0.505


def rounded(rate: float) -> float:
    """Return a learning rate, or a multiple, rounded to six digits."""
    return float(f"{rate:.6g}")


@dataclasses.dataclass(frozen=True)
class Joined:
    """Hold other studies' runs, with their labels, models and rates in the judgement.

    Args:
        by_directory: Each directory's runs.
        records: All runs as one study; None without any.
        remarks: Sentences about runs that do not join.
    """

    by_directory: Mapping[Path, Sequence[Record]] = dataclasses.field(default_factory=dict)
    records: Records | None = None
    remarks: tuple[str, ...] = ()

    @property
    def runs(self) -> Sequence[Record]:
        """All runs."""
        return () if self.records is None else self.records.runs

    @property
    def n_slopes(self) -> int:
        """The number of models with a learning-rate slope.

        A slope needs two near-best rates with the same seed.
        """
        return len(self._with_slope) if self.records is not None else 0

    @property
    def has_slope(self) -> bool:
        """Whether the slopes suffice to compare runs with different learning rates."""
        return self.n_slopes >= FEWEST

    @property
    def _with_slope(self) -> list[str]:
        assert self.records is not None
        names = []
        for model in self.records.models:
            seeds = [run.seed for run in self.near(model)]
            names += [model] if len(set(seeds)) < len(seeds) else []
        return names

    def near(self, model: str) -> list[Record]:
        """Return a model's runs at its near-best learning rates."""
        if self.records is None or model not in self.records.models:
            return []
        near = gaps.rates(self.records, model).near
        return [run for run in self.records.of_model(model) if run.rate in near]


def read(
    directories: Sequence[Path],
    config: Config,
    references: Mapping[str, Config],
    *,
    name: str,
    domains: Sequence[str],
    against: Sequence[str],
    manifest: str,
) -> Joined:
    """Return the runs of finished studies that join a judgement of `config`.

    `name` is the judged model's name. Raises `UserError` if a directory is not a finished study, was edited, or has no
    run with the same data, tokens and optimiser.
    """
    if len({path.resolve() for path in directories}) < len(directories):
        raise UserError("--runs: name each directory once.")
    by_directory: dict[Path, list[Record]] = {}
    remarks: list[str] = []
    records = None
    for directory in directories:
        study = files.read(directory)
        if study.unit != NATS:
            raise UserError(f"--runs={directory}: its losses are in {study.unit.name}, not nats per token. {FALLBACK}")
        why = {run.label: _mismatch(run, config, (*domains, *against), manifest) for run in study.runs}
        fitting = [run for run in study.runs if not why[run.label]]
        if not fitting:
            raise UserError(f"--runs={directory}: {next(iter(why.values()))} {FALLBACK}")
        if left_out := [label for label, text in why.items() if text]:
            remarks.append(f"{len(left_out)} runs of {directory} do not join: {why[left_out[0]]}")
        subset = dataclasses.replace(study, runs=fitting, domains=tuple(domains), against=tuple(against))
        names, name_remarks = _names(subset, directory, references, config, taken=[name, *_models(by_directory)])
        remarks += name_remarks
        by_directory[directory] = [
            dataclasses.replace(
                run,
                label=f"{directory.resolve().name}: {run.label}",
                model=names[run.model],
                rate=rounded(run.metadata["config"]["optim"]["lr"] / UNIT),
            )
            for run in fitting
            if run.model in names
        ]
        records = dataclasses.replace(subset, runs=[run for runs in by_directory.values() for run in runs], blocks=None)
    joined = Joined(by_directory, records, tuple(remarks))
    if records is not None and not joined.has_slope:
        text = (
            f"The joined runs have {joined.n_slopes} models with two near-best learning rates; the learning-rate slope "
            f"needs {FEWEST}. The verdict is therefore at learning rates common to the mixer and the references."
        )
        joined = dataclasses.replace(joined, remarks=(*remarks, text))
    return joined


def _models(by_directory: Mapping[Path, Sequence[Record]]) -> list[str]:
    return [run.model for runs in by_directory.values() for run in runs]


def _names(
    records: Records, directory: Path, references: Mapping[str, Config], config: Config, *, taken: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Return each joined model's name in the judgement, and remarks."""
    names, remarks = {}, []
    for model in records.models:
        recorded = records.of_model(model)[0].metadata["config"]
        reference = next((name for name, settings in references.items() if _same(recorded, settings)), None)
        if reference is None or reference in names.values() or reference in taken:
            is_taken = model in taken or model in references
            names[model] = f"{model} ({directory.resolve().name})" if is_taken else model
            continue
        near = gaps.rates(records, model).near
        firsts = [run.ends[0].tokens / run.last.tokens for run in records.of_model(model) if run.rate in near]
        if min(firsts) <= EARLY:
            names[model] = reference
        else:
            remarks.append(
                f"{model} of {directory} has no ends from 50% of the tokens, so {reference} is trained here; the "
                "other models join."
            )
    return names, remarks


def _same(recorded: Mapping[str, Any], config: Config) -> bool:
    """Return whether a recorded config has a reference's model.

    A missing setting has its default.
    """
    return not any(text.startswith("model.") for text in identity.changed(recorded, config))


def _mismatch(run: Record, config: Config, domains: Sequence[str], manifest: str) -> str:
    """Return a sentence why a run cannot join a judgement of `config`; "" if it can."""
    recorded = run.metadata.get("config", {})
    if not run.is_wsd or "optim" not in recorded or "model" not in recorded:
        return f"{run.label} has no warmup-stable-decay schedule, so a gap would include the schedule's effect."
    only = "so its losses do not compare with the judgement's."
    if manifest and (recorded_manifest := run.metadata.get("manifest")) != manifest:
        return f"{run.label} has other data (manifest {str(recorded_manifest)[:16]}, here {manifest[:16]}), {only}"
    if lacking := [domain for domain in domains if domain not in run.last.domains]:
        return f"{run.label} has no loss of {', '.join(lacking)}, {only}"
    expected = to_dict(config)
    for key in DATA:
        group, _, field = key.partition(".")
        value = recorded.get(group, {}).get(field, expected[group][field])
        if value != expected[group][field]:
            return f"{run.label} has {key}={value}, here {expected[group][field]}, {only}"
    defaults = {key.removeprefix("optim."): value for key, value in ADDED.items() if key.startswith("optim.")}
    recorded_optim = defaults | recorded["optim"]
    optimiser = {key: value for key, value in recorded_optim.items() if key != "lr" and key in expected["optim"]}
    if changed := differences(optimiser, {key: expected["optim"][key] for key in optimiser}, "optim."):
        return f"{run.label} has another optimiser ({changed[0]} here), so a gap would include the optimiser's effect."
    return ""
