"""Saves and restores checkpoints, through Orbax: parameters, optimiser, step, RNG, place in the data, state of the log.

Saving is asynchronous and atomic (a directory is renamed into place when it is complete, an object is written last on
gs://). However a process dies, the newest complete checkpoint is thus intact, and a run that resumes from it neither
repeats nor skips data. A run saves the items `params`, `rest` (optimiser, step and RNG), `data` (the position in the
data, a file per process) and `meta` (JSON: the state of the log and the identity of the data). `seqjax convert` saves
only `params`.

Later damage to a checkpoint is detected before it is read. Orbax's array files have no checksum of their values, and a
directory that lost an item still loads without it. So a checkpoint names its items in `_CHECKPOINT_METADATA`, and
`checksums.json`, written before the checkpoint is renamed into place, holds the length and CRC-32 of every other file.
Checkpoints on gs://, whose objects have checksums of their own, have neither the file nor the entry `CHECKSUMMED`;
their items are checked, their bytes are not.
"""

import contextlib
import dataclasses
import logging as standard_logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
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
from seqjax.errors import UserError, first_line
from seqjax.files import DISK_FULL
from seqjax.reading import MOST_JSON
from seqjax.terminal import size
from seqjax.training.checksums import (
    CHECKSUMMED,
    METADATA,
    PARAMS,
    DamagedError,
    check,
    is_whole,
    read_metadata,
    read_object,
    write_checksums,
)
from seqjax.training.mirrors import Mirror
from seqjax.training.step import TrainState
from seqjax.types import Params

DIRECTORY = "checkpoints"  # in a workdir
OPEN_TRIES = 20
DESCRIBING = (".json", "metadata", "_METADATA", "_sharding")  # ends of the names of files that describe arrays
STORE_MARKER = "commit_success.txt"  # Orbax's, of a complete checkpoint on gs://
STATE = ("data", "meta", "params", "rest")


class Checkpoints:
    """The checkpoints under `workdir/checkpoints`, in a directory or on gs://."""

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        keep: int = 2,
        keep_period: int | None = None,
        read_only: bool = False,
        identity: str | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ):
        """Keep the newest `keep` checkpoints, and those of steps that `keep_period` divides, if it is given.

        `before_commit` may raise an error before a written checkpoint in a directory becomes complete.
        Saved checkpoints name `identity` (seqjax/training/identity.py), and restored ones must, unless it is None.
        """
        self.identity, self._before_commit = identity, before_commit
        workdir = store.location(workdir)
        url = store.url_of(workdir)
        self._is_remote = bool(url)
        self._path: Path | epath.Path = store.orbax_path(f"{url}/{DIRECTORY}") if url else Path(workdir) / DIRECTORY
        self._path = self._path if url else self._path.absolute()
        if isinstance(self._path, Path):
            _require_files(self._path)
        _hide_noise()
        # Process 0 calls it when all items are written, before the directory is renamed.
        checksums = None if read_only or url else self._write_checksums
        # A directory that cannot be created is then an error at once, not after five minutes.
        waiting = ocp.AsyncOptions(post_finalization_callback=checksums, create_directories_asynchronously=False)
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep,
            keep_period=None if read_only else keep_period,
            enable_async_checkpointing=not read_only,
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,  # incomplete checkpoints of a killed process
            async_options=None if checksums is None else waiting,
        )
        self._manager = self._opened()
        self._saving: int | None = None  # the step of the newest save

    def _opened(self) -> ocp.CheckpointManager:
        """Return Orbax's manager; retry while another run removes a checkpoint, when it cannot be created."""
        for _ in range(OPEN_TRIES):
            with contextlib.suppress(FileNotFoundError):
                return self._open()
        return self._open()

    def _open(self) -> ocp.CheckpointManager:
        try:
            return ocp.CheckpointManager(self._path, options=self._options)
        except (ValueError, RecursionError) as error:  # in the metadata of a checkpoint; it reads those of all
            for step in self._steps():
                try:
                    read_metadata(self._of(step))
                except DamagedError as fault:
                    raise self._damaged(step, str(fault), STATE) from None
            raise UserError(
                f"A checkpoint in {self._path} is damaged: its {METADATA} cannot be read ({first_line(error)}). Put "
                "back a copy of that file, or move the checkpoint away and run the same command again."
            ) from error

    @property
    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, or None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, iterator: TrainIterator, meta: dict[str, Any]) -> None:
        """Start saving; return once `state` may be donated. Raise `UserError` if this save or the last one failed."""
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            rest=ocp.args.StandardSave(state._replace(params=())),
            data=grain.checkpoint.CheckpointSave(iterator),
            meta=ocp.args.JsonSave(meta),
        )
        self._save(step, items)

    def save_params(self, step: int, params: Params) -> None:
        """Save parameters alone, e.g. converted ones, from which a run can start but not resume."""
        self._save(step, ocp.args.Composite(params=ocp.args.StandardSave(params)))

    def _save(self, step: int, items: ocp.args.Composite) -> None:
        try:
            self._manager.wait_until_finished()  # before `_saving` changes, as in `save`
            self._saving = step
            custom = ({} if self._is_remote else CHECKSUMMED) | ({"identity": self.identity} if self.identity else {})
            self._manager.save(step, args=items, custom_metadata=custom, force=True)
        except Exception as error:
            raise self._not_written(error) from error

    def _write_checksums(self) -> None:
        self._before_commit()
        for unfinished in self._path.glob(f"{self._saving}.orbax-checkpoint-tmp*"):
            write_checksums(Path(unfinished))

    @property
    def params_only(self) -> bool:
        """Whether the newest checkpoint was written by `save_params`; raise `UserError` if it does not say."""
        step = self.latest
        if step is None:
            return False
        try:
            return tuple(sorted(read_metadata(self._of(step))["item_handlers"])) == PARAMS
        except DamagedError as error:
            raise self._damaged(step, str(error), STATE) from None

    @property
    def named(self) -> str:
        """The identity that the newest checkpoint names, or ""."""
        step = self.latest
        return "" if step is None else read_metadata(self._of(step))["custom_metadata"].get("identity", "")

    def restore(self, state: TrainState, iterator: TrainIterator) -> tuple[TrainState, dict[str, Any]]:
        """Return the newest checkpoint's state and meta and move `iterator`; `state` gives shapes and shardings.

        Raises `UserError` if the checkpoint is damaged, or belongs to other data.
        """
        step = self.latest
        assert step is not None
        if not iterator.is_global:
            _require_as_many_processes(self._of(step))
        items = ocp.args.Composite(
            params=ocp.args.StandardRestore(_abstract(state.params)),
            rest=ocp.args.StandardRestore(_abstract(state._replace(params=()))),
            meta=ocp.args.JsonRestore(),
            **({} if iterator.is_global else {"data": grain.checkpoint.CheckpointRestore(iterator)}),
        )
        restored = self._restore(items, STATE)
        if iterator.is_global:
            try:
                place = _global_place(self._of(step))
            except DamagedError as error:
                raise self._damaged(step, str(error), STATE) from None
            iterator.set_state(place)
        return restored["rest"]._replace(params=restored["params"]), restored["meta"]

    def restore_params(self, params: Params) -> tuple[Params, int]:
        """Return the parameters of the newest checkpoint and its step; `params` gives shapes and shardings.

        Raises `UserError` if there is none, or if it is damaged.
        """
        items = ocp.args.Composite(params=ocp.args.StandardRestore(_abstract(params)))
        while self.latest is not None:
            step = self.latest
            try:
                return self._restore(items, PARAMS)["params"], step
            except UserError:
                # A run in another process removes old checkpoints, perhaps the one that is being read.
                self._manager.close()
                self._manager = self._opened()
                if self.latest == step and self._of(step).is_dir():
                    raise
        raise UserError(
            f"{self._path} holds no complete checkpoint. Train first, or let the run reach its first save "
            "(config.checkpoint.every)."
        )

    def _restore(self, items: ocp.args.Composite, names: Sequence[str]) -> Any:
        """Restore `items` of the newest checkpoint, after checking the files of its items `names`."""
        self.require_whole(names)
        step = self.latest
        assert step is not None
        try:
            if not self._is_remote:
                for name in {*names} & {"params", "rest"}:
                    _require_chunks(self._of(step) / name)
            return self._manager.restore(step, args=items)
        except DamagedError as error:
            raise self._damaged(step, str(error), names) from None
        except (UserError, jax.errors.JaxRuntimeError):  # other data; no memory
            raise
        except Exception as error:
            logging.error("checkpoint of step %d: %s", step, error)
            if "checksums" in read_metadata(self._of(step))["custom_metadata"]:  # Its files are what was written.
                raise UserError(
                    f"The checkpoint {self._of(step)} is whole, but cannot be restored here ({first_line(error)}). Put "
                    "back the config.json of its run, and install the versions of packages that run.json has."
                ) from error
            raise self._damaged(step, f"it cannot be read ({first_line(error)})", names) from error

    def require_whole(self, names: Sequence[str] = STATE) -> None:
        """Raise `UserError` if the items `names` of the newest checkpoint are damaged; all processes must call it."""
        step = self.latest
        assert step is not None
        fault = ""
        try:
            check(
                self._of(step),
                names,
                identity=self.identity,
                part=jax.process_index(),
                parts=jax.process_count(),
            )
        except DamagedError as error:
            fault = str(error)
        if jax.process_count() > 1:  # Either all processes continue or none does.
            faults = multihost_utils.process_allgather(np.asarray(bool(fault)))
            fault = fault or ("another process found damage" if faults.any() else "")
        if fault:
            raise self._damaged(step, fault, names)

    def wait(self) -> None:
        """Wait until everything saved is written; raise `UserError` if writing failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._not_written(error) from error

    @contextlib.contextmanager
    def named_when_disk_full(self) -> Iterator[None]:
        """Turn a full disk during any write into a `UserError` that names the last good checkpoint."""
        try:
            yield
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise self._not_written(error) from error

    def close(self) -> None:
        """Stop the threads of the checkpoint manager."""
        self._manager.close()

    # ---------------------------------------------------------------------------------------- errors and their remedies
    def _of(self, step: int) -> Path | epath.Path:
        return self._path / str(step)

    def _steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, without those that Orbax only started to write."""
        return sorted(ocp.utils.checkpoint_steps(self._path)) if self._path.exists() else []

    def _damaged(self, step: int, fault: str, names: Sequence[str]) -> UserError:
        """Return the error about a damaged checkpoint; it tells how to resume from the newest intact one.

        `names` are the items that are needed.
        """
        earlier = sorted((s for s in self._steps() if s < step), reverse=True)
        good = next((s for s in earlier if is_whole(self._of(s), names, self.identity)), None)
        if good is None and self.identity and is_whole(self._of(step), names, None):
            return UserError(
                f"The checkpoint {self._of(step)} and {self._path.parent / 'run.json'} are of different runs. Put back "
                "a copy of the one that is not of this run."
            )
        text = f"The checkpoint {self._of(step)} is damaged: {fault}."
        if good is None:
            return UserError(
                f"{text} No whole one was made before it: put back a copy of the directory, or start again in another "
                "--workdir."
            )
        delete = " and ".join(str(self._of(s)) for s in (step, *(s for s in earlier if s > good)))
        return UserError(
            f"{text} The one of step {good} before it is whole: delete {delete} and run the same command again, to go "
            f"on from step {good}; or put back a copy of the directory."
        )

    def _not_written(self, error: Exception) -> UserError:
        """Return the error about a checkpoint, or a file beside it, that could not be written because of `error`."""
        complete = self._steps()
        last = f"the last good checkpoint is {self._of(complete[-1])}" if complete else "no checkpoint is complete"
        logging.error("checkpoint: %s", error)
        fix = "Check that it can be reached" if self._is_remote else "Free some disk space or repair the directory"
        return UserError(
            f"Writing to {self._path.parent} failed; {last}. {fix}, then run the same command again. Cause: {error}"
        )


def _require_chunks(item: Path | epath.Path) -> None:
    """Raise `DamagedError` for an array stored in chunks larger than itself, whose zeros would unpack to gigabytes."""
    described: Any = ocp.StandardCheckpointHandler().metadata(epath.Path(item))
    for array in jax.tree.leaves(described.tree, is_leaf=lambda x: hasattr(x, "storage")):
        chunk = array.storage.chunk_shape if array.storage is not None else None
        if chunk is not None and math.prod(chunk) > max(1, math.prod(array.shape)):
            raise DamagedError(f"the array {array.name} {[*array.shape]} is stored in chunks of {[*chunk]}")


def _require_files(directory: Path) -> None:
    """Raise `UserError` unless everything in a directory of checkpoints is a regular file or a directory.

    Orbax would wait for a pipe for ever, follow a link to anywhere, and read metadata of any size.
    """
    # None yet, or another run removes it.
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _require_files(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                raise UserError(
                    f"{entry.path} is not a file but a link, a pipe or a device, which no checkpoint has. Put back a "
                    "copy of the checkpoint, or delete it."
                )
            elif entry.name.endswith(DESCRIBING) and entry.stat().st_size > MOST_JSON:
                raise UserError(
                    f"{entry.path} has {size(entry.stat().st_size)}, more than any description of a checkpoint. Put "
                    "back a copy of the checkpoint, or delete it."
                )


def has_checkpoint(workdir: str | os.PathLike[str], step: int) -> bool:
    """Return whether a run has a complete checkpoint of a step."""
    if url := Mirror(workdir).url:
        return STORE_MARKER in store.sizes(f"{url}/{DIRECTORY}/{step}")
    return (Path(workdir) / DIRECTORY / str(step)).is_dir()


def has_any(workdir: str | os.PathLike[str]) -> bool:
    """Return whether a run has a complete checkpoint."""
    if url := Mirror(workdir).url:
        return any(name.endswith(f"/{STORE_MARKER}") for name in store.sizes(f"{url}/{DIRECTORY}"))
    return any(path.name.isdecimal() for path in (Path(workdir) / DIRECTORY).glob("*"))


def _global_place(checkpoint: Path | epath.Path) -> dict[str, Any]:
    """Return the place in the data that process 0 saved, which is the same for any number of processes.

    Raises `DamagedError` if there is none.
    """
    paths = list((checkpoint / "data").glob("process_0-of-*.json"))
    if len(paths) != 1:
        raise DamagedError("the item 'data' has no place in the data")
    return read_object(paths[0], dict)


def _require_as_many_processes(checkpoint: Path | epath.Path) -> None:
    """Raise `UserError` if another number of processes saved their places in the data, each its own."""
    names = [path.name for path in (checkpoint / "data").glob("process_0-of-*.json")]
    saved, now = "".join(names).removeprefix("process_0-of-").removesuffix(".json"), jax.process_count()
    if saved.isdecimal() and int(saved) != now:
        workdir = checkpoint.parent.parent
        raise UserError(
            f"{workdir}: number of processes {saved} -> {now}. Each process of a stream reads shards of its own, so a "
            f"place in the data belongs to their number. Give {saved} again; or prepare the text as blocks (`seqjax "
            "prepare`), on which a run goes on with any number, and start a new --workdir."
        )


def _abstract(tree: Any) -> Any:
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)


# -------------------------------------------------------------------------------------------------------- checksums


# ------------------------------------------------------------------------------------------------- Orbax's messages
@dataclasses.dataclass(frozen=True)
class _UnraisableHook:
    shown: Callable[[Any], Any]

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            self.shown(unraisable)


def _hide_noise() -> None:
    """Leave out the tracebacks of a save that failed on Orbax's threads, because the save raises the error as well.

    Orbax logs the first error before it raises it. Its other writes end after its event loop has closed: asyncio logs
    their errors, and tensorstore tells `sys.unraisablehook` that the loop is closed. On a full disk that is dozens of
    tracebacks above the message with the remedy. The run itself also reports that several processes stop together.
    """
    for logger in (logging.get_absl_logger(), standard_logging.getLogger("asyncio")):
        logger.addFilter(_is_news)
    if not isinstance(sys.unraisablehook, _UnraisableHook):
        sys.unraisablehook = _UnraisableHook(sys.unraisablehook)


def _is_news(record: standard_logging.LogRecord) -> bool:
    if "orbax" not in record.pathname and "orbax" not in record.getMessage():
        return True
    return not (record.exc_info or "Reached preemption sync point" in record.getMessage())
