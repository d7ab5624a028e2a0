"""Checkpoints: parameters, optimiser, step, RNG, data iterator and metrics position, through Orbax.

Saving is asynchronous and atomic (a directory is renamed into place when it is whole), so whatever kills the process,
the newest complete checkpoint is intact, and a run that resumes from it repeats nothing and skips nothing.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from seqjax.errors import DISK_FULL, UserError
from seqjax.training.step import TrainState
from seqjax.types import Params


class Checkpoints:
    """The checkpoints under `workdir/checkpoints`."""

    def __init__(self, workdir: Path, *, keep: int = 2, read_only: bool = False):
        self.directory = workdir.absolute() / "checkpoints"
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep,
            enable_async_checkpointing=not read_only,
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,  # what a killed process left half written
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    @property
    def latest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, iterator: grain.DatasetIterator, meta: dict[str, Any]) -> None:
        """Start saving; returns once the state may change. Raises `UserError` when this or the last save failed."""
        args = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            rest=ocp.args.StandardSave(state._replace(params=())),
            data=grain.checkpoint.CheckpointSave(iterator),
            meta=ocp.args.JsonSave(meta),
        )
        try:
            self._manager.save(step, args=args, force=True)
        except Exception as error:
            raise self._failed(error) from error

    def save_params(self, step: int, params: Params) -> None:
        """Save parameters alone, e.g. converted ones: what a run starts from, not what it goes on from."""
        try:
            self._manager.save(step, args=ocp.args.Composite(params=ocp.args.StandardSave(params)), force=True)
        except Exception as error:
            raise self._failed(error) from error

    @property
    def params_only(self) -> bool:
        """Whether the newest checkpoint came from `save_params`."""
        return self.latest is not None and not (self.directory / str(self.latest) / "rest").exists()

    def restore(self, state: TrainState, iterator: grain.DatasetIterator) -> tuple[TrainState, dict[str, Any]]:
        """State and meta of the newest checkpoint; `state` says shapes and shardings, `iterator` is moved there."""
        args = ocp.args.Composite(
            params=ocp.args.StandardRestore(_abstract(state.params)),
            rest=ocp.args.StandardRestore(_abstract(state._replace(params=()))),
            data=grain.checkpoint.CheckpointRestore(iterator),
            meta=ocp.args.JsonRestore(),
        )
        restored = self._manager.restore(self.latest, args=args)
        return restored["rest"]._replace(params=restored["params"]), restored["meta"]

    def restore_params(self, params: Params) -> tuple[Params, int]:
        """Only the parameters of the newest checkpoint, and its step; raises `UserError` where there is none."""
        if self.latest is None:
            raise UserError(
                f"{self.directory} holds no complete checkpoint. Train first, or let the run reach its first save "
                "(config.checkpoint.every)."
            )
        args = ocp.args.Composite(params=ocp.args.StandardRestore(_abstract(params)))
        return self._manager.restore(self.latest, args=args)["params"], self.latest

    def wait(self) -> None:
        """Until what was saved is on disk; raises `UserError` when it could not be written."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error

    @contextlib.contextmanager
    def named_when_disk_full(self) -> Iterator[None]:
        """Whatever else is written meanwhile: a full disk becomes a `UserError` that names the last good checkpoint."""
        try:
            yield
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise self._failed(error) from error

    def not_finite(self, step: int, values: dict[str, float], batch: np.ndarray) -> UserError:
        """Keep the batch that did it; the error says where everything is."""
        path = self.directory.parent / f"not_finite_step{step}.npz"
        np.savez_compressed(path, tokens=batch)
        self.wait()
        last = self.latest
        kept = f"The checkpoint of step {last} is good" if last is not None else "No checkpoint was made before"
        logging.error("not finite at step %d: %s", step, values)
        return UserError(
            f"Step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}, parameter norm "
            f"{values['param_norm']}. Batch {step} of the data order was written to {path}. {kept}. Lower "
            "config.optim.lr, clip harder (config.optim.clip_norm), or warm up longer, in a new --workdir."
        )

    def close(self) -> None:
        """Release the manager's threads."""
        self._manager.close()

    def _failed(self, error: Exception) -> UserError:
        # Orbax lists what is complete on disk, not what it meant to write.
        complete = sorted(ocp.utils.checkpoint_steps(self.directory)) if self.directory.exists() else []
        last = (
            f"the last good checkpoint is {self.directory / str(complete[-1])}"
            if complete
            else "no checkpoint is complete"
        )
        logging.error("checkpoint: %s", error)
        return UserError(
            f"Writing to {self.directory.parent} failed; {last}. "
            f"Free some disk space or mend the directory, then run the same command again. Cause: {error}"
        )


def _abstract(tree: Any) -> Any:
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
