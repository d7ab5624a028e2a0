"""How a run began and where it was extended: a part of its `run.json`.

Every process that goes on with a run keeps it. A run's report and a study say in words where it began, if not from
scratch, and its extensions. `rules` is the version of the rules below. A run keeps the rules that it began with.

    1  Weight decay applies to every array with more than one axis per layer. The losses of tokens without bytes, such
       as BOS and EOS, are part of bits per byte. In a hybrid whose layer 0 is not RWKV-7 or its shell, these mix their
       values with zeros. run.json does not name these rules.
    2  Weight decay applies to matrices (`seqjax.nn.param`). Bits per byte are of the tokens with bytes. The first layer
       with RWKV-7 or its shell sets the values that later ones mix in.
"""

from pathlib import Path
from typing import Any

from seqjax.errors import UserError
from seqjax.files import write_json
from seqjax.reading import read_json
from seqjax.training import identity

RULES = 2
FORM = {
    "rules?": int,
    "init_from?": {"path": str, "step": int, "sha256": str},  # `--init_from`, and the digest of the parameters
    "extended?": [{"step": int, "steps": int, "ends": [int]}],  # where the trunk was, and what the run had until then
} | identity.FORM


def read(workdir: Path) -> dict[str, Any]:
    """Return the origin of the run in a local directory: `rules`, `identity`, `init_from`, `extended`, if it has them.

    The identity of a run that began without one is "".
    """
    path = workdir / "run.json"
    if not path.is_file():
        return {"rules": RULES}
    found = {"identity": ""} | read_json(path, FORM)
    if found.setdefault("rules", 1) not in range(1, RULES + 1):
        raise UserError(
            f"{path}: the run began with rules {found['rules']}, and this seqjax knows those up to {RULES}. Update "
            "seqjax to go on with it."
        )
    return {key: found[key] for key in ("rules", "identity", "init_from", "extended") if key in found}


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
