"""Read the rows of `metrics.jsonl`, and create the errors for non-finite values."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from seqjax.errors import UserError
from seqjax.reading import Float, read_json, read_json_lines
from seqjax.training.checkpoint import DIRECTORY, Checkpoints, has_any
from seqjax.training.mirrors import Mirror, readable

# A value is None if the device does not report it.
ROW = {"step": int, "tokens?": int, "seconds?": float, str: (Float, None)}


def read(workdir: str | Path) -> list[dict[str, Any]]:
    """Return the rows of `metrics.jsonl`; raise `UserError` if it is damaged.

    A last line that a crash left incomplete is dropped.
    """
    fix = "put back a copy of it, or remove the damaged lines"
    return read_json_lines(readable(workdir) / "metrics.jsonl", ROW, grows=True, fix=fix)


def require_checkpoint(mirror: Mirror) -> None:
    """Raise `UserError` if a run has lost its checkpoints.

    Training would overwrite its results. A run that was killed before its first complete checkpoint is accepted; it
    repeats its rows.
    """
    files = mirror.directory
    rows = read(mirror.directory) if (files / "metrics.jsonl").is_file() else []
    if not rows or has_any(str(mirror)):
        return
    every = read_json(files / "config.json", {"checkpoint": {"every": int}})["checkpoint"]["every"]
    finished = (files / "report.md").exists()
    # A save waits for the previous save, so after two saves one checkpoint is complete.
    saved_twice = every and rows[-1]["step"] > 2 * every
    removed = not mirror.url and not (files / DIRECTORY).exists()  # created before the first step
    if finished or saved_twice or removed:
        raise UserError(
            f"{mirror} has results up to step {rows[-1]['step']} and no checkpoint to resume from, so training would "
            f"overwrite them. Put back a copy of {mirror}/{DIRECTORY}, or train in another --workdir; to start again "
            f"here, move {mirror}/metrics.jsonl away."
        )


def not_finite(
    step: int, values: dict[str, float], batch: np.ndarray, *, mirror: Mirror, checkpoints: Checkpoints
) -> UserError:
    """Save the batch with non-finite values, and return the error with its path."""
    path = mirror.directory / f"not_finite_step{step}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, tokens=batch)
    mirror.push(on_error=logging.warning)
    checkpoints.wait()
    last = checkpoints.latest
    note = f"the checkpoint of step {last} is good" if last is not None else "no checkpoint was made before"
    logging.error("not finite at step %d: %s", step, values)
    named = {"auxiliary_loss": "auxiliary loss of the mixer", "auxiliary_grad_norm": "auxiliary gradient norm"}
    named = {"loss": "loss", "grad_norm": "gradient norm", "param_norm": "parameter norm"} | named
    found = ", ".join(f"{text} {values[name]}" for name, text in named.items() if name in values)
    return UserError(
        f"Step {step}: {found}; batch {step} was written to {path}, and {note}. Lower config.optim.lr, clip harder "
        "(config.optim.clip_norm), or warm up longer, in a new --workdir."
    )


def check_evaluation(step: int, row: dict[str, float]) -> None:
    """Raise `UserError` if an evaluation loss is not finite.

    The parameters are finite at this point, so the model overflows on some text.
    """
    losses = {name: value for name, value in row.items() if name.startswith("eval/") and name.endswith("/loss")}
    if not all(map(math.isfinite, losses.values())):
        raise UserError(
            f"Step {step}: the evaluation gave {losses}. The parameters are finite, so the model overflows "
            "on text it has not seen: lower config.optim.lr, in a new --workdir."
        )
