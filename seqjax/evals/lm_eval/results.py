"""Store task results in a directory: one JSON file per task, in lm_eval's format.

The key `seqjax` identifies the checkpoint and the settings. A directory never mixes results from different checkpoints,
so its table describes one model.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from seqjax.errors import UserError
from seqjax.files import write_json
from seqjax.reading import check, read_json

KEY = "seqjax"
FORM = {
    KEY: {"task": str, "step?": int, "max_length?": int, "tokenizer?": str, "parameters_sha256?": str},
    "results": {str: dict},
    "groups?": ({str: dict}, None),
    "config?": ({"model_num_parameters?": int}, None),
    "group_subtasks?": ({str: [str]}, None),
    "n-samples?": {str: {"effective": int}},
    "n-shot?": {str: (int, None)},
}
FIX = "delete it, and measure its task again"
# Keys with equal values in all results in a table; other settings may differ between tasks.
OF_MODEL = ("parameters_sha256", "tokenizer", "max_length", "add_bos_token")


def path_of(out: Path, task: str) -> Path:
    """Return a task's result file."""
    return out / f"{task.replace('/', '_')}.json"


def read(out: Path) -> dict[str, dict[str, Any]]:
    """Return the results in a directory by task, sorted by file name."""
    by_task = {}
    for path in sorted(out.glob("*.json")):
        result = read_json(path, fix=FIX)
        if KEY in result and "results" in result:
            check(result, FORM, path, fix=FIX)
            by_task[result[KEY]["task"]] = result
    return by_task


def to_measure(
    saved: Mapping[str, Mapping[str, Any]],
    identities: Mapping[str, Mapping[str, Any]],
    *,
    again: Collection[str],
    out: Path,
) -> list[str]:
    """Return the tasks in `identities` without a result, and the tasks in `again`.

    Raises `UserError` if a result that would be kept has another checkpoint or other settings.
    """
    for task, result in saved.items():
        if task in again:
            continue
        saved_identity = result[KEY]
        identity = identities.get(task) or {key: next(iter(identities.values()))[key] for key in OF_MODEL}
        differing = [key for key, value in identity.items() if saved_identity.get(key) != value]
        if differing:
            kind = "another checkpoint" if {"step", "parameters_sha256"} & {*differing} else "other settings"
            changes = "; ".join(
                f"{key} {str(saved_identity.get(key))[:12]}, now {str(identity[key])[:12]}" for key in differing
            )
            raise UserError(
                f"{path_of(out, task)} has results for {kind}: {changes}. Give another --out, or --again to measure "
                "this command's tasks again."
            )
    return [task for task in identities if task not in saved or task in again]


def write(out: Path, task: str, result: Mapping[str, Any], identity: Mapping[str, Any]) -> dict[str, Any]:
    """Write a task's `simple_evaluate` result with its identity.

    Samples are left out. Returns the written content.
    """
    from lm_eval.utils import handle_non_serializable

    without_samples = {key: value for key, value in result.items() if key != "samples"}
    plain = json.loads(json.dumps(without_samples, default=handle_non_serializable))
    out.mkdir(parents=True, exist_ok=True)
    content = plain | {KEY: {"task": task, **identity}}
    write_json(path_of(out, task), content)
    return content
