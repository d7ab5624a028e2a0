"""Checkpoints of parameters, optimiser, step, RNG, data iterator and metrics position, through Orbax.

Saving is asynchronous and atomic (a directory is renamed into place when it is complete), so however a process dies,
the newest complete checkpoint is intact, and a run that resumes from it neither repeats nor skips data.
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

from seqjax.data.pipeline import TrainIterator
from seqjax.errors import DISK_FULL, UserError
from seqjax.files import read_json
from seqjax.training.step import TrainState
from seqjax.types import Params


class Checkpoints:
    """The checkpoints under `workdir/checkpoints`."""

    def __init__(self, workdir: str | Path, *, keep: int = 2, keep_period: int | None = None, read_only: bool = False):
        """Keep the newest `keep` checkpoints, and those of steps that `keep_period` divides, if it is given."""
        self.directory = Path(workdir).absolute() / "checkpoints"
        options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep,
            keep_period=None if read_only else keep_period,
            enable_async_checkpointing=not read_only,
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,  # incomplete checkpoints of a killed process
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    @property
    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, or None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, iterator: TrainIterator, meta: dict[str, Any]) -> None:
        """Start saving; return once `state` may be donated. Raise `UserError` if this save or the last one failed."""
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
        """Save parameters alone, e.g. converted ones, from which a run can start but not resume."""
        try:
            self._manager.save(step, args=ocp.args.Composite(params=ocp.args.StandardSave(params)), force=True)
        except Exception as error:
            raise self._failed(error) from error

    @property
    def params_only(self) -> bool:
        """Whether the newest checkpoint was written by `save_params`."""
        return self.latest is not None and not (self.directory / str(self.latest) / "rest").exists()

    def restore(self, state: TrainState, iterator: TrainIterator) -> tuple[TrainState, dict[str, Any]]:
        """Return the newest checkpoint's state and meta and move `iterator`; `state` gives shapes and shardings."""
        args = ocp.args.Composite(
            params=ocp.args.StandardRestore(_abstract(state.params)),
            rest=ocp.args.StandardRestore(_abstract(state._replace(params=()))),
            meta=ocp.args.JsonRestore(),
            **({} if iterator.is_global else {"data": grain.checkpoint.CheckpointRestore(iterator)}),
        )
        restored = self._manager.restore(self.latest, args=args)
        if iterator.is_global:
            iterator.set_state(self._position())
        return restored["rest"]._replace(params=restored["params"]), restored["meta"]

    def _position(self) -> dict[str, Any]:
        """Return the place in the data that process 0 saved, which is that of all however many there were."""
        (path,) = (self.directory / str(self.latest) / "data").glob("process_0-of-*.json")
        return read_json(path)

    def restore_params(self, params: Params) -> tuple[Params, int]:
        """Return the parameters of the newest checkpoint and its step; raise `UserError` if there is none."""
        if self.latest is None:
            raise UserError(
                f"{self.directory} holds no complete checkpoint. Train first, or let the run reach its first save "
                "(config.checkpoint.every)."
            )
        args = ocp.args.Composite(params=ocp.args.StandardRestore(_abstract(params)))
        return self._manager.restore(self.latest, args=args)["params"], self.latest

    def wait(self) -> None:
        """Wait until everything saved is on disk; raise `UserError` if it could not be written."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error

    @contextlib.contextmanager
    def named_when_disk_full(self) -> Iterator[None]:
        """Turn a full disk, whatever was being written, into a `UserError` that names the last good checkpoint."""
        try:
            yield
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise self._failed(error) from error

    def not_finite(self, step: int, values: dict[str, float], batch: np.ndarray) -> UserError:
        """Save the batch that produced non-finite values, and return the error that says where everything is."""
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
        """Stop the threads of the checkpoint manager."""
        self._manager.close()

    def _failed(self, error: Exception) -> UserError:
        # Orbax lists the checkpoints that are complete on disk, not those it started to write.
        complete = sorted(ocp.utils.checkpoint_steps(self.directory)) if self.directory.exists() else []
        last = (
            f"the last good checkpoint is {self.directory / str(complete[-1])}"
            if complete
            else "no checkpoint is complete"
        )
        logging.error("checkpoint: %s", error)
        return UserError(
            f"Writing to {self.directory.parent} failed; {last}. "
            f"Free some disk space or repair the directory, then run the same command again. Cause: {error}"
        )


def _abstract(tree: Any) -> Any:
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
