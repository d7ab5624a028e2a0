"""Where a run began, if not from scratch, and where it was extended: a part of its `run.json`.

Every process that goes on with a run keeps it. A run's report and a study say it in words.
"""

from pathlib import Path
from typing import Any

from seqjax.reading import read_json
from seqjax.utils import write_json

FORM = {
    "init_from?": {"path": str, "step": int, "sha256": str},  # `--init_from`, and the digest of the parameters
    "extended?": [{"step": int, "steps": int, "ends": [int]}],  # where the trunk was, and what the run had until then
}


def read(workdir: Path) -> dict[str, Any]:
    """Return the origin of the run in a local directory; {} if it began from scratch and was not extended."""
    path = workdir / "run.json"
    found = read_json(path, FORM) if path.is_file() else {}
    return {key: found[key] for key in ("init_from", "extended") if key in found}


def save(workdir: Path, origin: dict[str, Any]) -> None:
    """Write the origin into run.json and keep the rest."""
    path = workdir / "run.json"
    write_json(path, (read_json(path) if path.is_file() else {}) | origin)


def extended(origin: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return an origin with a new extension, which a process that was killed may have written already."""
    before = origin.get("extended", [])
    return origin | {"extended": before if new in before else [*before, new]}


def lines(run: dict[str, Any]) -> list[str]:
    """Return the origin in the metadata of a run as sentences without subject and full stop; [] for a plain run."""
    found = []
    if "init_from" in run:
        begun = run["init_from"]
        found.append(f"began with the weights of {begun['path']}, step {begun['step']}, sha256 {begun['sha256'][:16]}")
    for part in run.get("extended", ()):
        ends = ", ".join(map(str, part["ends"]))
        found.append(f"was extended after step {part['step']} of its trunk; until then it had ends after step {ends}")
    return found
