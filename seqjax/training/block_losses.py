"""The loss of every evaluated block, stored beside `metrics.jsonl` to compute confidence intervals of differences.

A workdir's `eval_losses/blocks.npz` describes the blocks, which are the same at every evaluation: per domain the arrays
"DOMAIN/index", "DOMAIN/documents" and "DOMAIN/n_bytes" [n] (`seqjax.data.corpus.EvalBlocks`), and
`eval_losses/STEP.npz` holds "DOMAIN", float32 [n], each block's mean loss in nats per token after that step.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.data.corpus import EvalBlocks
from seqjax.files import replacing
from seqjax.training.mirror import readable

DIRECTORY = "eval_losses"
FIELDS = ("index", "documents", "n_bytes")


def start(workdir: Path, blocks: Mapping[str, EvalBlocks], *, step: int) -> None:
    """Start, or resume after `step`: later evaluations of a killed process are removed, because they are repeated."""
    directory = workdir / DIRECTORY
    directory.mkdir(exist_ok=True)
    for path in directory.glob("[0-9]*.npz"):
        if int(path.stem) > step:
            path.unlink()
    if step == 0 or not (directory / "blocks.npz").is_file():  # The config keeps them the same for the whole run.
        arrays = {f"{domain}/{field}": getattr(b, field) for domain, b in blocks.items() for field in FIELDS}
        _save(directory / "blocks.npz", arrays)


def write(workdir: Path, step: int, losses: Mapping[str, np.ndarray]) -> None:
    """Write the losses of one evaluation, "DOMAIN" -> [n], in nats per token."""
    _save(path(workdir, step), {domain: loss.astype(np.float32) for domain, loss in losses.items()})


def path(workdir: Path, step: int) -> Path:
    """Return the file of an evaluation, which is written last of all that belongs to it."""
    return workdir / DIRECTORY / f"{step:08d}.npz"


def read(workdir: str | Path) -> tuple[dict[str, np.ndarray], dict[int, dict[str, np.ndarray]]]:
    """Return the blocks ("DOMAIN/FIELD" -> [n]) and, by step, the losses ("DOMAIN" -> [n]); empty if there are none."""
    directory = readable(workdir) / DIRECTORY
    if not (directory / "blocks.npz").is_file():
        return {}, {}
    return _load(directory / "blocks.npz"), {int(p.stem): _load(p) for p in sorted(directory.glob("[0-9]*.npz"))}


def _save(path: Path, arrays: Mapping[str, Any]) -> None:
    with replacing(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def _load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return dict(arrays)
