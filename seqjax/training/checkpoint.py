"""Saves and restores checkpoints, through Orbax: parameters, optimiser, step, RNG, place in the data, state of the log.

Saving is asynchronous and atomic (a directory is renamed into place when it is complete), so however a process dies,
the newest complete checkpoint is intact, and a run that resumes from it neither repeats nor skips data. What happens to
it later is noticed: items and checksums are compared before it is read (seqjax/training/integrity.py).

In a workdir on gs:// Orbax writes to the store, whose objects have checksums of their own. For other stores it writes
to the spool, from which a thread copies every checkpoint that is complete (seqjax/training/stored_checkpoints.py).
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

from seqjax import store
from seqjax.data.pipeline import TrainIterator
from seqjax.errors import DISK_FULL, UserError, first_line
from seqjax.training import checkpoint_items, integrity, orbax_noise
from seqjax.training.checkpoint_copies import CheckpointCopies
from seqjax.training.checkpoint_directory import CheckpointDirectory
from seqjax.training.spool import Spool
from seqjax.training.step import TrainState
from seqjax.types import Params

OPEN_TRIES = 20


class Checkpoints:
    """The checkpoints under `workdir/checkpoints`."""

    def __init__(
        self,
        workdir: str | os.PathLike[str] | Spool,
        *,
        keep: int = 2,
        keep_period: int | None = None,
        read_only: bool = False,
    ):
        """Keep the newest `keep` checkpoints, and those of steps that `keep_period` divides, if it is given."""
        self._spool = spool = workdir if isinstance(workdir, Spool) else Spool(workdir)
        self._copies = None if read_only or not spool.copies_checkpoints else CheckpointCopies(spool, keep, keep_period)
        self._directory = CheckpointDirectory(spool, read_only=read_only)
        orbax_noise.hide()
        # Process 0 calls it when all items are written, before the directory is renamed.
        checksums = None if read_only or spool.is_direct else self._write_checksums
        self._custom = {} if spool.is_direct else integrity.CUSTOM
        self._options = options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep,
            keep_period=None if read_only or self._copies else keep_period,
            enable_async_checkpointing=not read_only,
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,  # incomplete checkpoints of a killed process
            async_options=None if checksums is None else ocp.AsyncOptions(post_finalization_callback=checksums),
        )
        self._manager = _opened(self._directory.path, options)
        self._saving: int | None = None  # the step of the newest save
        if self._copies is not None:
            self._copies.begin(self._manager)

    @property
    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, or None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, iterator: TrainIterator, meta: dict[str, Any]) -> None:
        """Start saving; return once `state` may be donated. Raise `UserError` if this save or the last one failed."""
        self._save(step, checkpoint_items.to_save(state, iterator, meta))

    def save_params(self, step: int, params: Params) -> None:
        """Save parameters alone, e.g. converted ones, from which a run can start but not resume."""
        self._save(step, checkpoint_items.params_to_save(params))

    def _save(self, step: int, args: ocp.args.Composite) -> None:
        try:
            if self._copies is not None:
                self._copies.wait_or_warn()
            elif self._spool.url:
                self._spool.push()  # the rows that this checkpoint counts on
            self._manager.wait_until_finished()  # as `save` does first, but `_saving` belongs to that one until then
            self._saving = step
            self._manager.save(step, args=args, custom_metadata=self._custom, force=True)
            if self._copies is not None:
                self._copies.send(self._manager, step)
        except Exception as error:
            raise self._failed(error) from error

    def _write_checksums(self) -> None:
        for unfinished in self._directory.path.glob(f"{self._saving}.orbax-checkpoint-tmp*"):
            integrity.write(Path(unfinished))

    @property
    def params_only(self) -> bool:
        """Whether the newest checkpoint was written by `save_params`; raise `UserError` if it does not say."""
        step = self.latest
        if step is None:
            return False
        try:
            return integrity.items(self._directory.of(step)) == integrity.PARAMS
        except integrity.DamagedError as error:
            raise self._directory.damaged(step, str(error), integrity.STATE) from None

    def restore(self, state: TrainState, iterator: TrainIterator) -> tuple[TrainState, dict[str, Any]]:
        """Return the newest checkpoint's state and meta and move `iterator`; `state` gives shapes and shardings.

        Raises `UserError` if the checkpoint is damaged, or belongs to other data.
        """
        step = self.latest
        assert step is not None
        if not iterator.is_global:
            checkpoint_items.require_as_many_processes(self._directory.of(step))
        restored = self._restore(checkpoint_items.to_restore(state, iterator), integrity.STATE)
        if iterator.is_global:
            try:
                place = checkpoint_items.global_place(self._directory.of(step))
            except integrity.DamagedError as error:
                raise self._directory.damaged(step, str(error), integrity.STATE) from None
            iterator.set_state(place)
        return restored["rest"]._replace(params=restored["params"]), restored["meta"]

    def restore_params(self, params: Params) -> tuple[Params, int]:
        """Return the parameters of the newest checkpoint and its step.

        Raises `UserError` if there is none, or if it is damaged.
        """
        args = checkpoint_items.params_to_restore(params)
        while self.latest is not None:
            step = self.latest
            try:
                return self._restore(args, integrity.PARAMS)["params"], step
            except UserError:
                # A run that goes on beside this process removes old checkpoints, perhaps the one that is being read.
                self._manager.close()
                self._manager = _opened(self._directory.path, self._options)
                if self.latest == step and self._directory.of(step).is_dir():
                    raise
        raise self._directory.none_complete()

    def _restore(self, args: ocp.args.Composite, names: Sequence[str]) -> Any:
        """Return what `args` asks of the newest checkpoint, after the files of its items `names` were checked."""
        step = self.latest
        assert step is not None
        fault = ""
        try:
            integrity.check(self._directory.of(step), names, part=jax.process_index(), parts=jax.process_count())
        except integrity.DamagedError as error:
            fault = str(error)
        if jax.process_count() > 1:  # All go on, or none does.
            faults = multihost_utils.process_allgather(np.asarray(bool(fault)))
            fault = fault or ("another process found damage" if faults.any() else "")
        if fault:
            raise self._directory.damaged(step, fault, names)
        try:
            return self._manager.restore(step, args=args)
        except (UserError, jax.errors.JaxRuntimeError):  # other data; no memory
            raise
        except Exception as error:
            logging.error("checkpoint of step %d: %s", step, error)
            raise self._directory.damaged(step, f"it cannot be read ({first_line(error)})", names) from error

    def wait(self) -> None:
        """Wait until everything saved is where it is kept; raise `UserError` if it could not be written."""
        try:
            self._manager.wait_until_finished()
            if self._copies is not None:
                self._copies.wait()
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

    def close(self) -> None:
        """Stop the threads of the checkpoint manager."""
        if self._copies is not None:
            self._copies.close()
        self._manager.close()

    def _failed(self, error: Exception) -> UserError:
        if isinstance(error, store.StoreError):
            return self._directory.not_sent(error, step=self.latest if self._copies is not None else None)
        return self._directory.not_written(error)


def _opened(directory: Path | epath.Path, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManager:
    """Return Orbax's manager, which cannot be made in the moment in which a run beside it removes a checkpoint."""
    for _ in range(OPEN_TRIES):
        try:
            return ocp.CheckpointManager(directory, options=options)
        except FileNotFoundError:
            if not options.read_only:
                raise
    return ocp.CheckpointManager(directory, options=options)
