"""Per-block losses of all evaluations, stored in `eval_losses/` of the workdir.

Block losses give the confidence intervals of loss differences. All evaluations use the same blocks, described in
`eval_losses/blocks.npz`. For each domain it has

    DOMAIN/index, DOMAIN/documents, DOMAIN/n_bytes    [n], see `seqjax.data.corpus.EvalBlocks`
    DOMAIN/sha256                                     uint8 [32], hash of the block tokens
    DOMAIN/sources                                    int64 [n], equal numbers share a source
                                                      (`seqjax.data.document_sources`); absent if no source is known

`eval_losses/STEP.npz` holds the evaluation after that step:

    DOMAIN                      float32 [n], mean loss per block in nats per token
    run/identity, run/sha256    the run identity (seqjax/training/identity.py), a checksum of the arrays
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.data import EvalBlocks
from seqjax.errors import UserError
from seqjax.files import replacing
from seqjax.reading import Arrays, read_arrays
from seqjax.training import identity
from seqjax.training.mirrors import readable

DIRECTORY = "eval_losses"
FIELDS = ("index", "documents", "n_bytes")
SOURCES = "sources"
FIX = "put back a copy of it, or train the run again"


def start(workdir: Path, blocks: Mapping[str, EvalBlocks], *, step: int) -> None:
    """Start the files, or resume after `step` and remove later evaluations.

    A killed process may have left later evaluations; the resumed run repeats them. A resumed run keeps its recorded
    block sources, and adds them if they were unknown. Raises `UserError` if earlier evaluations used other blocks,
    because their losses do not compare.
    """
    directory = workdir / DIRECTORY
    directory.mkdir(exist_ok=True)
    for path in directory.glob("[0-9]*.npz"):
        if path.stem.isdecimal() and int(path.stem) > step:
            path.unlink()
    arrays, sources = {}, {}
    for domain, domain_blocks in blocks.items():
        arrays |= {f"{domain}/{field}": getattr(domain_blocks, field) for field in FIELDS}
        arrays[f"{domain}/sha256"] = np.frombuffer(hashlib.sha256(domain_blocks.tokens.tobytes()).digest(), np.uint8)
        sources |= {f"{domain}/{SOURCES}": domain_blocks.sources} if domain_blocks.sources is not None else {}
    blocks_path = directory / "blocks.npz"
    if step and blocks_path.is_file():
        recorded = read_arrays(blocks_path, fix=FIX)
        _require_same(recorded, arrays, path=blocks_path)
        if sources.keys() - recorded.keys():
            _save(blocks_path, sources | recorded)
    else:
        _save(blocks_path, arrays | sources)


def _require_same(recorded: Mapping[str, np.ndarray], current: Mapping[str, np.ndarray], *, path: Path) -> None:
    changed = {
        key.rpartition("/")[0]
        for key in recorded.keys() & current.keys()
        if not np.array_equal(recorded[key], current[key])
    }
    changed |= domains_of(recorded) ^ domains_of(current)
    if changed:
        raise UserError(
            f"{path}: the evaluation text of {', '.join(sorted(changed))} has changed since this run began. Put back "
            "the earlier data (documents.npz in the directory of the blocks, or the texts in config.eval.path), or "
            "start in another --workdir."
        )


def write(workdir: Path, step: int, losses: Mapping[str, np.ndarray]) -> None:
    """Write one evaluation's losses, "DOMAIN" -> [n], in nats per token."""
    arrays = {domain: loss.astype(np.float32) for domain, loss in losses.items()}
    _save(path(workdir, step), arrays | seal(workdir, step, arrays))


def seal(workdir: Path, step: int, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays that identify a file's run and detect edits.

    Returns {} if the run has no identity.
    """
    run_identity = identity.recorded(workdir)
    return (
        {"run/identity": np.array(run_identity), "run/sha256": np.array(_digest(step, arrays))} if run_identity else {}
    )


def _digest(step: int, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(str(step).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _remove_seal(arrays: Arrays, run_identity: str | None, step: int) -> str:
    """Remove the seal from `arrays`, and return its fault or "".

    `run_identity` is the run identity.
    """
    file_identity, digest = (
        str(arrays.take(key, "U")) if key in arrays else "" for key in ("run/identity", "run/sha256")
    )
    for key in ("run/identity", "run/sha256"):
        arrays.pop(key, None)
    if file_identity != (run_identity or ""):
        return "is from another run: run.json " + ("is missing" if run_identity is None else "has another identity")
    return "" if not file_identity or digest == _digest(step, arrays) else "is edited or renamed: its checksum differs"


def path(workdir: Path, step: int) -> Path:
    """Return the path of an evaluation's losses.

    The file is written last, so its presence marks the evaluation as complete.
    """
    return workdir / DIRECTORY / f"{step:08d}.npz"


def fault(path: Path) -> str:
    """Return an evaluation file's fault, or "".

    Values are "is missing", "is damaged", "is without DOMAIN", "is from another run: ..." and "is edited or renamed:
    ...".
    """
    if not path.is_file():
        return "is missing"
    try:
        arrays, blocks = read_arrays(path), path.with_name("blocks.npz")
        step = int(path.stem) if path.stem.isdecimal() else int(arrays.take("step", "iu"))
        if seal_fault := _remove_seal(arrays, identity.recorded(path.parents[1]), step):
            return seal_fault
        missing_domains = (
            domains_of(read_arrays(blocks)) - arrays.keys() if blocks.is_file() and path.stem.isdecimal() else ()
        )
    except UserError:
        return "is damaged"
    return f"is without {', '.join(sorted(missing_domains))}" if missing_domains else ""


def domains_of(blocks: Iterable[str]) -> set[str]:
    """Return the domains in the array names of `blocks.npz`."""
    return {name.rpartition("/")[0] for name in blocks}


def missing_files(directory: Path, steps: Iterable[int]) -> list[Path]:
    """Return the missing files among the blocks and the evaluations after `steps`.

    Returns [] if all files are missing: the run then recorded no block losses.
    """
    expected = [directory / DIRECTORY / "blocks.npz", *(path(directory, step) for step in steps)]
    missing = [file for file in expected if not file.is_file()]
    return missing if len(missing) < len(expected) else []


def read(workdir: str | Path) -> tuple[dict[str, np.ndarray], dict[int, dict[str, np.ndarray]]]:
    """Return the blocks ("DOMAIN/FIELD" -> [n]) and losses (step -> "DOMAIN" -> [n]).

    Both are empty without files. "DOMAIN/sources" is missing if no source is known, as in older workdirs. Raises
    `UserError` if a file is damaged.
    """
    directory = readable(workdir) / DIRECTORY
    if not (directory / "blocks.npz").is_file():
        return {}, {}
    blocks = read_arrays(directory / "blocks.npz", fix=FIX)
    for name in blocks:
        blocks.take(name, "iu", None)
    for domain in domains_of(blocks):
        if f"{domain}/{SOURCES}" in blocks:
            blocks.take(f"{domain}/{SOURCES}", "iu", len(blocks.take(f"{domain}/documents", "iu", None)))
    losses, run_identity = {}, identity.recorded(directory.parent)
    for path in sorted(path for path in directory.glob("[0-9]*.npz") if path.stem.isdecimal()):
        losses[int(path.stem)] = step_losses = verified_arrays(path, run_identity, int(path.stem))
        for domain in domains_of(blocks) | step_losses.keys():
            step_losses.take(domain, "f", len(blocks.take(f"{domain}/documents", "iu", None)))
    return blocks, losses


def verified_arrays(path: Path, run_identity: str | None, step: int | None = None) -> Arrays:
    """Return a file's arrays; raise `UserError` unless their identity is `run_identity`."""
    arrays = read_arrays(path, fix=FIX)
    if seal_fault := _remove_seal(arrays, run_identity, int(arrays.take("step", "iu")) if step is None else step):
        raise UserError(f"{path} {seal_fault}; {FIX}.")
    return arrays


def _save(path: Path, arrays: Mapping[str, Any]) -> None:
    with replacing(path) as file:
        np.savez(file, allow_pickle=False, **arrays)
