"""The errors that stop a run at a loss or a norm that is not a finite number."""

import math

import numpy as np
from absl import logging

from seqjax.errors import UserError
from seqjax.training.checkpoint import Checkpoints
from seqjax.training.mirror import Mirror


def at_step(
    step: int, values: dict[str, float], batch: np.ndarray, *, mirror: Mirror, checkpoints: Checkpoints
) -> UserError:
    """Save the batch that produced non-finite values, and return the error that says where everything is."""
    path = mirror.directory / f"not_finite_step{step}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, tokens=batch)
    mirror.push(say=logging.warning)
    checkpoints.wait()
    last = checkpoints.latest
    kept = f"The checkpoint of step {last} is good" if last is not None else "No checkpoint was made before"
    logging.error("not finite at step %d: %s", step, values)
    return UserError(
        f"Step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}, parameter norm "
        f"{values['param_norm']}. Batch {step} of the data order was written to {path}. {kept}. Lower "
        "config.optim.lr, clip harder (config.optim.clip_norm), or warm up longer, in a new --workdir."
    )


def check_evaluation(step: int, row: dict[str, float]) -> None:
    """Raise `UserError` for a loss that is not finite; the parameters are, so the model overflows on some text."""
    losses = {name: value for name, value in row.items() if name.startswith("eval/") and name.endswith("/loss")}
    if not all(map(math.isfinite, losses.values())):
        raise UserError(
            f"Step {step}: the evaluation gave {losses}. The parameters are finite, so the model overflows "
            "on text it has not seen: lower config.optim.lr, in a new --workdir."
        )
