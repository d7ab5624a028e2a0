"""Weights & Biases as a log of a run, beside TensorBoard: `config.log.wandb=PROJECT`, in process 0 alone.

The run's id is kept in the workdir, so that a run that goes on after an interruption is the same one there. The
package reads its own environment: `WANDB_MODE=offline` needs no account, `WANDB_ENTITY` names a team.
"""

import importlib
import uuid
from pathlib import Path
from typing import Any

from seqjax.errors import UserError
from seqjax.files import read_json, write_json

FILE = "wandb.json"


class WandbRun:
    """A run on Weights & Biases."""

    def __init__(self, workdir: Path, project: str, *, settings: dict[str, Any]):
        """Begin the run of `workdir` in `project`, or go on with it; `settings` are those of the run.

        Raises `UserError` if the package is not installed or cannot begin a run.
        """
        try:
            # Here, because it takes a second and only process 0 of a run that asks for it needs it.
            wandb: Any = importlib.import_module("wandb")
        except ImportError:
            raise UserError(
                f"config.log.wandb={project!r} needs the package: pip install 'seqjax[wandb]', or set "
                "config.log.wandb=None."
            ) from None
        path = workdir / FILE
        if not path.exists():
            write_json(path, {"id": uuid.uuid4().hex[:12]})
        run_id = read_json(path)["id"]
        try:
            self._run = wandb.init(
                project=project,
                id=run_id,
                resume="allow",  # a new run, or the one of this id
                name=workdir.absolute().name,
                dir=str(workdir),
                config=settings,
            )
        except wandb.Error as error:
            raise UserError(
                f"Weights & Biases did not begin a run ({error}). Log in with `wandb login`, set WANDB_MODE=offline, "
                "or set config.log.wandb=None."
            ) from error

    def write(self, step: int, values: dict[str, int | float]) -> None:
        """Log the values measured at a step, unless an earlier process did so before it was killed.

        A resumed run repeats the steps since its last checkpoint, with the same results.
        """
        if step >= self._run.step:
            self._run.log(values, step=step)

    def close(self) -> None:
        """Wait until everything is sent, or written in offline mode."""
        self._run.finish()
