"""Read study files: `get_study(size)` defines the runs and their comparison.

On the command line a study is a path or a shipped name, `FILE.py[:SIZE]` or `figure1b:demo`. `get_study` returns a
dict:

    title       for tables and figures
    references  models that gaps refer to, one table each; always shown
    domains     compared OOD domains
    against     optional: domains that define the in-domain loss (mean held-out loss); default: the training loss
    speeds      optional: training speeds measured with the same kernels on one card, "CONDITION" ->
                {"card": "H200", "length": 2048, "tokens_per_s": {model: tokens/s}}, or -> {model: tokens/s}
    unit        optional: "nats" per token (default), or "bits_per_byte" for runs with different tokenizers
    sweep       optional: the varied setting, such as "model.mixer.temperature"; a picture shows gaps over it
    runs        label -> a dict with the fields below

    workdir     the run's directory, also gs://
    config      "FILE_OR_NAME:ARG" or a ConfigDict; a run without a config is only read
    model       architecture name, default: the label; a model's runs differ only in seed, rate and schedule
    seed        default 0; two models' runs with the same seed read the same data in the same order
    rate        default 1; the learning rate, absolute or as a multiple of one rate for all runs
    schedule    default 1; for linear decays: the run's steps as a share of the longest run's steps

`model`, `seed`, `rate` and `schedule` label a run for the comparison. They do not change its training: set the same
values in `config` (train.seed, data.seed, optim.lr, train.steps).

A run with `train.ends` has a warmup-stable-decay (WSD) schedule and is read at its ends, each after a separate
cooldown; leave out `schedule`. A run with a linear decay has one end. Give new runs `train.ends=(0.5,0.65,0.8,1.0)`:
a better model has the reference's in-domain loss earlier in training, so it needs early ends (docs/protocol.md).
"""

import dataclasses
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqjax import store
from seqjax.config import Config, from_config_dict, presets
from seqjax.data import open_corpus
from seqjax.errors import UserError
from seqjax.reading import check
from seqjax.study.runs import checks, identity
from seqjax.study.runs.record import SPEEDS, UNITS, speed_tables
from seqjax.study.runs.runner import Run
from seqjax.user_code import naming_the_line

# End positions as shares of the steps. A better model has the reference's in-domain loss at an early end.
ENDS = (0.5, 0.65, 0.8, 1.0)
OPTIONAL = ("against", "speeds", "unit", "sweep")
FIELDS = ("title", "references", "domains", *OPTIONAL, "runs")
RUN_FIELDS = ("workdir", "config", "model", "seed", "rate", "schedule")


@dataclasses.dataclass(frozen=True)
class Study:
    """Hold a study file's content."""

    title: str
    references: Sequence[str]
    domains: Sequence[str]
    runs: list[Run]
    against: Sequence[str] = ()
    speeds: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    unit: str = "nats"
    sweep: str = ""


WRITTEN = '''"""A study of several configs, written by `seqjax study --configs`.

Edit it, and run it: seqjax study --study=FILE --out=DIR
"""

WORKDIRS = {runs!r}
CONFIGS = {configs}  # the first model is the reference
SEEDS = {seeds}  # of the parameters and the data order; all models read the data in the same order


def get_study():
    """Return the title, references, domains and runs."""
    runs = {{}}
    for model, config in CONFIGS.items():
        for seed in range(SEEDS):
            label = model if SEEDS == 1 else f"{{model}}, seed {{seed}}"
            start = f"{{config}}," if ":" in config else f"{{config}}:"
            runs[label] = {{
                "workdir": f"{{WORKDIRS}}/{{len(runs):02d}}",
                "config": f"{{start}}train.seed={{seed}},data.seed={{seed}}",
                "model": model,
                "seed": seed,
            }}
    return {{
        "title": {title!r},
        "references": tuple(CONFIGS)[:1],
        "against": {against},
        "domains": {domains},
        "runs": runs,
    }}
'''


def write_study(configs: Sequence[str], *, seeds: int, out: Path) -> Path:
    """Write `out`/study.py for configs `NAME_OR_FILE[:ARG]`; return its path.

    The workdirs are in `out`/runs. The first config is the reference. Runs are compared at the mean loss on its
    training domains. Every run gets the ends `ENDS`, unless its config sets `train.ends`. An existing file must have
    the same content.

    Raises `UserError` for an unreadable config, a repeated config, configs with different data, too few steps for the
    ends, or a reference without OOD domains.
    """
    if seeds < 1:
        raise UserError(f"--seeds must be at least 1, not {seeds}.")
    if len(configs) < 2 or len(set(configs)) < len(configs):
        raise UserError(
            f"--configs={';'.join(configs)}: name at least two configs, each once; the first is the reference."
        )
    first, *others = [_config(config) for config in configs]
    for config, text in zip(others, configs[1:], strict=True):
        if dataclasses.replace(config.data, seed=0) != dataclasses.replace(first.data, seed=0):
            raise UserError(f"--configs: {text} reads other data than {configs[0]}; compare models on the same data.")
    corpus = open_corpus(first.data, seq_len=first.train.seq_len, vocab_size=first.model.vocab_size)
    domains = tuple(name for name in corpus.eval_domains if name not in corpus.in_domain)
    if not domains:
        raise no_ood_domains(configs[0], corpus.eval_domains)
    with_ends = [
        text if config.train.ends or "train.ends" in text else _with(text, f"train.ends={str(ENDS).replace(' ', '')}")
        for text, config in zip(configs, (first, *others), strict=True)
    ]
    for text in with_ends:
        _config(text)
    path, models = out / "study.py", _names(configs, [config.name for config in (first, *others)])
    text = WRITTEN.format(
        title=f"{', '.join(models)}, {seeds} seed{'s' * (seeds > 1)}",
        configs=dict(zip(models, with_ends, strict=True)),
        seeds=seeds,
        runs=str(out / "runs"),
        against=tuple(name for name in corpus.eval_domains if name in corpus.in_domain),
        domains=domains,
    )
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise UserError(f"{path} exists with other content; run it with --study={path}, or give another --out.")
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _with(config: str, setting: str) -> str:
    """Return the config text with one more setting."""
    return f"{config}{',' if ':' in config else ':'}{setting}"


def no_ood_domains(config: str, domains: Sequence[str]) -> UserError:
    """Return the error for a config without OOD evaluation domains."""
    return UserError(
        f"--configs: {config} is evaluated only on its training domains ({', '.join(domains)}); the regime limited "
        "has OOD domains."
    )


def _names(configs: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return a label per config: its name and its distinguishing settings."""
    settings = [presets.parts(text.partition(":")[2]) if ":" in text else [] for text in configs]
    labels = [
        ", ".join([name, *(text for text in parts if any(text not in others for others in settings))])
        for name, parts in zip(names, settings, strict=True)
    ]
    return labels if len(set(labels)) == len(labels) else list(configs)


def load_study(text: str | Path) -> Study:
    """Return the study `NAME_OR_FILE[:SIZE]` with checked configs.

    Raises `UserError` for a wrong study.
    """
    name, _, size = str(text).partition(":")
    path = presets.find(name, flag="--study", folder="studies")
    get_study = getattr(presets.load_file(path), "get_study", None)
    if get_study is None:
        raise UserError(f"--study: {path} has no get_study(), so it is not a study.")
    if size and not inspect.signature(get_study).parameters:
        raise UserError(f"--study={text}: {path} takes no size; leave out ':{size}'.")
    with naming_the_line(path):
        study: Any = get_study(size) if size else get_study()
    if not isinstance(study, dict):
        raise UserError(f"{path}: get_study() must return a dict, not {study!r}.")
    missing = set(FIELDS) - set(OPTIONAL) - set(study)
    unknown = set(study) - set(FIELDS)
    if missing or unknown:
        problem = f"lacks {sorted(missing)}" if missing else f"has unknown fields {sorted(unknown)}"
        raise UserError(f"{path}: get_study() {problem}; its fields are {', '.join(FIELDS)}.")
    runs = [make_run(path, index, label, run) for index, (label, run) in enumerate(study["runs"].items())]
    names = [name for run in runs for name in (run.label, run.model)]
    checks.require_plain([str(study["title"]), *names], str(path))
    _check(path, study, runs)
    unit = study.get("unit", "nats")
    if unit not in UNITS:
        raise UserError(f"{path}: unit is {' or '.join(map(repr, UNITS))}, not {unit!r}.")
    if unit != "nats" and not study.get("against"):
        raise UserError(
            f"{path}: runs in {UNITS[unit].name} cannot be compared at the training loss, which is in nats per token; "
            "name held-out domains in `against`."
        )
    check(study.get("speeds", {}), SPEEDS, f"{path}: speeds", fix="see seqjax/study/runs/studies.py")
    for condition, table in speed_tables(study.get("speeds", {}))[0].items():
        if unknown := set(table) - {run.model for run in runs}:
            raise UserError(f"{path}: speeds[{condition!r}] names {sorted(unknown)}, but no run has this model.")
    return Study(
        study["title"],
        tuple(study["references"]),
        study["domains"],
        runs,
        study.get("against", ()),
        study.get("speeds", {}),
        unit,
        study.get("sweep", ""),
    )


def make_run(path: Path, index: int, label: str, run: dict[str, Any]) -> Run:
    """Return the run for an entry in `runs`; raise `UserError` for a wrong entry."""
    if "workdir" not in run or set(run) - set(RUN_FIELDS):
        raise UserError(f"{path}: the fields of a run are {', '.join(RUN_FIELDS)}; {label!r} has {', '.join(run)}.")
    return Run(
        index,
        label,
        store.location(str(run["workdir"])),
        _config(run["config"]) if "config" in run else None,
        model=run.get("model", label),
        seed=run.get("seed", 0),
        rate=float(run.get("rate", 1.0)),
        schedule=float(run.get("schedule", 1.0)),
    )


def _config(config: Any) -> Config:
    return from_config_dict(presets.read_config(config) if isinstance(config, str) else config)


def _check(path: Path, study: dict[str, Any], runs: list[Run]) -> None:
    """Raise `UserError` for wrong references, a WSD run's schedule, or duplicate runs."""
    references = study["references"]
    if isinstance(references, str) or not references:
        raise UserError(f"{path}: references must be a tuple of models, not {references!r}.")
    for run in runs:
        if run.schedule != 1 and run.config is not None and run.config.train.ends:
            raise UserError(f"{path}: {run.label!r}: leave out schedule, which a run with train.ends does not have.")
    if unknown := set(references) - {run.model for run in runs}:
        raise UserError(
            f"{path}: no run trains the references {sorted(unknown)}. Add runs of them, or name models of the runs."
        )
    seen: dict[tuple[str, int, float, float], str] = {}
    for run in runs:
        key = (run.model, run.seed, run.rate, run.schedule)
        if key in seen:
            raise UserError(f"{path}: {seen[key]!r} and {run.label!r} have the same model, seed, rate and schedule.")
        seen[key] = run.label
    identity.require_distinct(runs, str(path))
