"""Study files: `get_study(size)` defines the runs and how they are compared.

It returns a dict with

    title       of tables and figures
    reference   label of the run that the gaps refer to
    domains     that are compared
    runs        label -> {"workdir": DIR, "config": "FILE_OR_NAME:ARG" or a ConfigDict}; only read without "config"
    against     optional: domains whose mean loss takes the place of the training loss

and is given on the command line as a path or the name of a shipped one, `FILE.py[:SIZE]` or `window`.
"""

import dataclasses
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqjax import presets
from seqjax.config import Config, from_config_dict
from seqjax.errors import UserError
from seqjax.study.runner import Run


@dataclasses.dataclass(frozen=True)
class Study:
    """The content of a study file."""

    title: str
    reference: str
    domains: Sequence[str]
    runs: list[Run]
    against: Sequence[str] = ()


def load_study(text: str | Path) -> Study:
    """Return the study of `NAME_OR_FILE[:SIZE]`, its configs built and checked; raise `UserError` for a wrong one."""
    name, _, size = str(text).partition(":")
    path = presets.find(name, flag="--study", folder="studies")
    get_study = getattr(presets.load_file(path), "get_study", None)
    if get_study is None:
        raise UserError(f"--study: {path} has no get_study(), so it is no study.")
    if size and not inspect.signature(get_study).parameters:
        raise UserError(f"--study={text}: {path} takes no size; leave out ':{size}'.")
    with presets.naming_the_line(path):
        study: Any = get_study(size) if size else get_study()
    if not isinstance(study, dict):
        raise UserError(f"{path}: get_study() must return a dict, not {study!r}.")
    missing = {"title", "reference", "domains", "runs"} - set(study)
    if missing or study["reference"] not in study["runs"]:
        raise UserError(f"{path}: get_study() lacks {sorted(missing) or 'its reference among its runs'}.")
    runs = [
        Run(index, label, Path(run["workdir"]), _config(run["config"]) if "config" in run else None)
        for index, (label, run) in enumerate(study["runs"].items())
    ]
    return Study(study["title"], study["reference"], study["domains"], runs, study.get("against", ()))


def _config(config: Any) -> Config:
    return from_config_dict(presets.read_config(config) if isinstance(config, str) else config)
