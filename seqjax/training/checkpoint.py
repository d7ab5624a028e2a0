"""Checkpoints of parameters, optimiser, step, RNG, data iterator and metrics position, through Orbax.

Saving is asynchronous and atomic (a directory is renamed into place when it is complete), so however a process dies,
the newest complete checkpoint is intact, and a run that resumes from it neither repeats nor skips data. What happens to
it later is noticed: items and checksums are compared before it is read (seqjax/training/integrity.py).

In a workdir on gs:// Orbax writes to the store, whose objects have checksums of their own. For other stores it writes
to the spool, from which a thread copies every checkpoint that is complete (seqjax/training/stored_checkpoints.py).
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

from seqjax import store
from seqjax.data.pipeline import TrainIterator
from seqjax.errors import DISK_FULL, UserError
from seqjax.training import integrity, orbax_noise, stored_checkpoints
from seqjax.training.checkpoint_copies import CheckpointCopies
from seqjax.training.spool import Spool, readable
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
        if spool.is_direct:
            self.directory: Path | epath.Path = store.orbax_path(spool.url) / "checkpoints"
        elif spool.url and read_only:
            copy = readable(spool.url)
            stored_checkpoints.fetch_newest(spool.url, copy, items=integrity.PARAMS)
            self.directory = copy / "checkpoints"
        else:
            self.directory = spool.directory.absolute() / "checkpoints"
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
        self._manager = _opened(self.directory, options)
        self._saving: int | None = None  # the step of the newest save
        if self._copies is not None:
            self._copies.begin(self._manager)

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
        self._save(step, args)

    def save_params(self, step: int, params: Params) -> None:
        """Save parameters alone, e.g. converted ones, from which a run can start but not resume."""
        self._save(step, ocp.args.Composite(params=ocp.args.StandardSave(params)))

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
        for unfinished in self.directory.glob(f"{self._saving}.orbax-checkpoint-tmp*"):
            integrity.write(Path(unfinished))

    @property
    def params_only(self) -> bool:
        """Whether the newest checkpoint was written by `save_params`; raise `UserError` if it does not say."""
        step = self.latest
        if step is None:
            return False
        try:
            return integrity.items(self._path(step)) == integrity.PARAMS
        except integrity.DamagedError as error:
            raise self._damaged(step, str(error), integrity.STATE) from None

    def restore(self, state: TrainState, iterator: TrainIterator) -> tuple[TrainState, dict[str, Any]]:
        """Return the newest checkpoint's state and meta and move `iterator`; `state` gives shapes and shardings.

        Raises `UserError` if the checkpoint is damaged, or belongs to other data.
        """
        args = ocp.args.Composite(
            params=ocp.args.StandardRestore(_abstract(state.params)),
            rest=ocp.args.StandardRestore(_abstract(state._replace(params=()))),
            meta=ocp.args.JsonRestore(),
            **({} if iterator.is_global else {"data": grain.checkpoint.CheckpointRestore(iterator)}),
        )
        if not iterator.is_global:
            self._require_as_many_processes()
        restored = self._restore(args, integrity.STATE)
        if iterator.is_global:
            iterator.set_state(self._position())
        return restored["rest"]._replace(params=restored["params"]), restored["meta"]

    def _require_as_many_processes(self) -> None:
        """Raise `UserError` if another number of processes saved their places in the data, each its own."""
        assert self.latest is not None
        names = [path.name for path in (self._path(self.latest) / "data").glob("process_0-of-*.json")]
        saved, now = "".join(names).removeprefix("process_0-of-").removesuffix(".json"), jax.process_count()
        if saved.isdecimal() and int(saved) != now:
            raise UserError(
                f"{self.directory.parent}: number of processes {saved} -> {now}. Each process of a stream reads shards "
                f"of its own, so a place in the data belongs to their number. Give {saved} again; or prepare the text "
                "as blocks (`seqjax prepare`), on which a run goes on with any number, and start a new --workdir."
            )

    def _position(self) -> dict[str, Any]:
        """Return the place in the data that process 0 saved, which is that of all however many there were."""
        assert self.latest is not None
        paths = list((self._path(self.latest) / "data").glob("process_0-of-*.json"))
        if len(paths) != 1:
            raise self._damaged(self.latest, "the item 'data' has no place in the data", integrity.STATE)
        return json.loads(paths[0].read_bytes())

    def restore_params(self, params: Params) -> tuple[Params, int]:
        """Return the parameters of the newest checkpoint and its step.

        Raises `UserError` if there is none, or if it is damaged.
        """
        args = ocp.args.Composite(params=ocp.args.StandardRestore(_abstract(params)))
        while self.latest is not None:
            step = self.latest
            try:
                return self._restore(args, integrity.PARAMS)["params"], step
            except UserError:
                # A run that goes on beside this process removes old checkpoints, perhaps the one that is being read.
                self._manager.close()
                self._manager = _opened(self.directory, self._options)
                if self.latest == step and self._path(step).is_dir():
                    raise
        raise UserError(
            f"{self._called} holds no complete checkpoint. Train first, or let the run reach its first save "
            "(config.checkpoint.every)."
        )

    def _restore(self, args: ocp.args.Composite, names: Sequence[str]) -> Any:
        """Return what `args` asks of the newest checkpoint, after the files of its items `names` were checked."""
        step = self.latest
        assert step is not None
        fault = ""
        try:
            integrity.check(self._path(step), names, part=jax.process_index(), parts=jax.process_count())
        except integrity.DamagedError as error:
            fault = str(error)
        if jax.process_count() > 1:  # All go on, or none does.
            faults = multihost_utils.process_allgather(np.asarray(bool(fault)))
            fault = fault or ("another process found damage" if faults.any() else "")
        if fault:
            raise self._damaged(step, fault, names)
        try:
            return self._manager.restore(step, args=args)
        except (UserError, jax.errors.JaxRuntimeError):  # other data; no memory
            raise
        except Exception as error:
            logging.error("checkpoint of step %d: %s", step, error)
            raise self._damaged(step, f"it cannot be read ({_first_line(error)})", names) from error

    def _damaged(self, step: int, fault: str, names: Sequence[str]) -> UserError:
        """Return the error about a damaged checkpoint, which names the newest whole one before it and the way there."""
        earlier = sorted((s for s in self._complete() if s < step), reverse=True)
        good = next((s for s in earlier if integrity.is_whole(self._path(s), names)), None)
        text = f"The checkpoint {self._path(step)} is damaged: {fault}."
        if self._spool.url and not self._spool.is_direct:
            return UserError(
                f"{text} It is a copy of {self._called}/{step}. Delete the copy and run the same command again; if "
                "that one is damaged too, delete both, to go on from the one before."
            )
        if good is None:
            return UserError(
                f"{text} No whole one was made before it: put back a copy of the directory, or start again in another "
                "--workdir."
            )
        delete = " and ".join(str(self._path(s)) for s in (step, *(s for s in earlier if s > good)))
        return UserError(
            f"{text} The one of step {good} before it is whole: delete {delete} and run the same command again, to go "
            f"on from step {good}; or put back a copy of the directory."
        )

    def _path(self, step: int) -> Path | epath.Path:
        return self.directory / str(step)

    @property
    def _called(self) -> str:
        """Where the user knows the checkpoints to be."""
        return f"{self._spool.url}/checkpoints" if self._spool.url else str(self.directory)

    def _complete(self) -> list[int]:
        # Orbax lists the checkpoints that are complete on disk, not those it started to write.
        return sorted(ocp.utils.checkpoint_steps(self.directory)) if self.directory.exists() else []

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

    def not_finite(self, step: int, values: dict[str, float], batch: np.ndarray) -> UserError:
        """Save the batch that produced non-finite values, and return the error that says where everything is."""
        path = self._spool.directory / f"not_finite_step{step}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, tokens=batch)
        self._spool.try_push(logging.warning)
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
        if self._copies is not None:
            self._copies.close()
        self._manager.close()

    def _failed(self, error: Exception) -> UserError:
        if isinstance(error, store.StoreError):
            return self._not_sent(error)
        complete = self._complete()
        last = f"the last good checkpoint is {self._path(complete[-1])}" if complete else "no checkpoint is complete"
        logging.error("checkpoint: %s", error)
        fix = (
            "Check that it can be reached" if self._spool.is_direct else "Free some disk space or repair the directory"
        )
        return UserError(
            f"Writing to {self.directory.parent} failed; {last}. {fix}, then run the same command again. Cause: {error}"
        )

    def _not_sent(self, error: store.StoreError) -> UserError:
        """Return the error about a store that did not take a checkpoint or the files beside it."""
        here = self.latest if self._copies is not None else None
        kept = f"checkpoint of step {here} and all files are" if here is not None else "files beside it are"
        return UserError(
            f"{error} The {kept} in {self._spool.directory}: the same command, on this machine, sends them to "
            f"{self._spool.url} and goes on."
        )


def _opened(directory: Path | epath.Path, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManager:
    """Return Orbax's manager, which cannot be made in the moment in which a run beside it removes a checkpoint."""
    for _ in range(OPEN_TRIES):
        try:
            return ocp.CheckpointManager(directory, options=options)
        except FileNotFoundError:
            if not options.read_only:
                raise
    return ocp.CheckpointManager(directory, options=options)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _abstract(tree: Any) -> Any:
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
