"""How a run began and was extended, recorded in its `run.json`.

Resumed processes keep these fields. Reports and studies print where a run began, if not from scratch, and its
extensions. `rules` is the version of the rules below. A run keeps the rules it began with.

    1  Weight decay applies to every array with more than one axis per layer. Bits per byte include the losses of
       tokens without bytes, such as BOS and EOS. In a hybrid with another mixer in layer 0, layers with RWKV-7 or its
       shell mix their values with zeros. run.json does not record these rules.
    2  Weight decay applies to matrices (`seqjax.nn.param`). Bits per byte cover only tokens with bytes. The first
       layer with RWKV-7 or its shell sets the values that later layers mix in.
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
    "init_from?": {"path": str, "step": int, "sha256": str},  # `--init_from`, and the parameters' digest
    "extended?": [{"step": int, "steps": int, "ends": [int]}],  # the trunk's step, and the earlier steps and ends
} | identity.FORM


def read(workdir: Path) -> dict[str, Any]:
    """Return the origin of the run in a local directory.

    Keys: `rules`, `identity` ("" for a run that began without), and `init_from` and `extended` if recorded. Without a
    run.json it holds only `rules`.
    """
    path = workdir / "run.json"
    if not path.is_file():
        return {"rules": RULES}
    origin = {"identity": ""} | read_json(path, FORM)
    if origin.setdefault("rules", 1) not in range(1, RULES + 1):
        raise UserError(
            f"{path}: the run began with rules {origin['rules']}, and this seqjax supports rules up to {RULES}. Update "
            "seqjax to resume it."
        )
    return {key: origin[key] for key in ("rules", "identity", "init_from", "extended") if key in origin}


def save(workdir: Path, origin: dict[str, Any]) -> None:
    """Write the origin into run.json; keep its remaining fields."""
    path = workdir / "run.json"
    write_json(path, (read_json(path) if path.is_file() else {}) | origin)


def extended(origin: dict[str, Any], extension: dict[str, Any]) -> dict[str, Any]:
    """Return an origin with the extension `extension`.

    A killed process may have recorded it already.
    """
    earlier = origin.get("extended", [])
    return origin | {"extended": earlier if extension in earlier else [*earlier, extension]}


def lines(run: dict[str, Any]) -> list[str]:
    """Return the origin as sentences without subject and full stop; [] for a run from scratch.

    `run` is the content of run.json.
    """
    sentences = []
    if "init_from" in run:
        source = run["init_from"]
        sentences.append(
            f"began with the weights of {source['path']}, step {source['step']}, sha256 {source['sha256'][:16]}"
        )
    for part in run.get("extended", ()):
        ends = ", ".join(map(str, part["ends"]))
        sentences.append(
            f"was extended after step {part['step']} of its trunk; until then it had ends after step {ends}"
        )
    return sentences
