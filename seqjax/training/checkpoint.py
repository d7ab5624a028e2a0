"""Save and restore checkpoints through Orbax.

Saves are asynchronous and atomic. A directory is renamed into place when it is complete; on gs:// a marker object is
written last. However a process dies, the newest complete checkpoint stays intact. A run that resumes from it neither
repeats nor skips data.

A run saves four items: `params`, `rest` (optimiser, step, RNG), `data` (one data position per process) and `meta`
(JSON: log state and data identity). `seqjax convert` saves only `params`.

Damage is detected before a checkpoint is read. Orbax's array files have no value checksums, and a directory that lost
an item still loads. `_CHECKPOINT_METADATA` therefore lists the items. `checksums.json`, written before the rename,
holds the length and CRC-32 for each item file. Checkpoints on gs:// have neither `checksums.json` nor the entry
`CHECKSUMMED`, because the store keeps object checksums. Only their items are checked.
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
    is_intact,
    read_metadata,
    read_object,
    write_checksums,
)
from seqjax.training.mirrors import Mirror
from seqjax.training.step import TrainState
from seqjax.types import Params

DIRECTORY = "checkpoints"  # in a workdir
OPEN_TRIES = 20
METADATA_NAMES = (".json", "metadata", "_METADATA", "_sharding")  # name endings of files that describe arrays
STORE_MARKER = "commit_success.txt"  # Orbax writes it when a checkpoint on gs:// is complete
STATE = ("data", "meta", "params", "rest")


class Checkpoints:
    """Manages the checkpoints in `workdir/checkpoints`, local or on gs://."""

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
        """Keep the newest `keep` checkpoints, and every step that `keep_period` divides.

        `before_commit` runs before a written checkpoint becomes complete, and may raise an error. Saved checkpoints
        record `identity` (seqjax/training/identity.py). Restored checkpoints must have the same identity, unless it is
        None.
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
        # Process 0 calls this when all items are written, before the rename.
        finish = self._before_commit if url else self._write_checksums
        # Synchronous creation: a directory that cannot be created fails at once, not after five minutes.
        waiting = ocp.AsyncOptions(post_finalization_callback=finish, create_directories_asynchronously=False)
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=None if read_only else keep,
            keep_period=None if read_only else keep_period,
            enable_async_checkpointing=not read_only,
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,  # incomplete checkpoints of a killed process
            async_options=None if read_only else waiting,
        )
        self._manager = self._opened()
        self._saving: int | None = None  # the step of the newest save

    def _opened(self) -> ocp.CheckpointManager:
        """Return Orbax's manager, with retries while another run removes a checkpoint."""
        for _ in range(OPEN_TRIES):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                return self._open()
        return self._open()

    def _open(self) -> ocp.CheckpointManager:
        try:
            return ocp.CheckpointManager(self._path, options=self._options)
        except (ValueError, RecursionError) as error:  # Orbax reads the metadata of all checkpoints here
            for step in self._steps():
                try:
                    read_metadata(self._directory(step))
                except DamagedError as fault:
                    raise self._damaged(step, str(fault), STATE) from None
            raise UserError(
                f"A checkpoint in {self._path} is damaged: its {METADATA} cannot be read ({first_line(error)}). Put "
                "back a copy of that file, or move the checkpoint away and run the same command again."
            ) from error

    @property
    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None without a checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, iterator: TrainIterator, meta: dict[str, Any]) -> None:
        """Start a save and return once `state` may be donated.

        Raises `UserError` if this save or the previous save failed.
        """
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            rest=ocp.args.StandardSave(state._replace(params=())),
            data=grain.checkpoint.CheckpointSave(iterator),
            meta=ocp.args.JsonSave(meta),
        )
        self._save(step, items)

    def save_params(self, step: int, params: Params) -> None:
        """Save only parameters; a run can start from them, but not resume."""
        self._save(step, ocp.args.Composite(params=ocp.args.StandardSave(params)))

    def _save(self, step: int, items: ocp.args.Composite) -> None:
        try:
            self._manager.wait_until_finished()  # before `_saving` changes: the previous save still uses it
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
        """Whether `save_params` wrote the newest checkpoint.

        Raises `UserError` if its metadata is damaged.
        """
        step = self.latest
        if step is None:
            return False
        try:
            return tuple(sorted(read_metadata(self._directory(step))["item_handlers"])) == PARAMS
        except DamagedError as error:
            raise self._damaged(step, str(error), STATE) from None

    @property
    def recorded_identity(self) -> str:
        """The identity recorded in the newest checkpoint, or ""."""
        step = self.latest
        return "" if step is None else read_metadata(self._directory(step))["custom_metadata"].get("identity", "")

    def restore(self, state: TrainState, iterator: TrainIterator) -> tuple[TrainState, dict[str, Any]]:
        """Return the newest checkpoint's state and meta, and move `iterator` there.

        `state` gives shapes and shardings. Raises `UserError` if the checkpoint is damaged or belongs to other data.
        """
        step = self.latest
        assert step is not None
        if not iterator.is_global:
            _require_same_process_count(self._directory(step))
        items = ocp.args.Composite(
            params=ocp.args.StandardRestore(_abstract(state.params)),
            rest=ocp.args.StandardRestore(_abstract(state._replace(params=()))),
            meta=ocp.args.JsonRestore(),
            **({} if iterator.is_global else {"data": grain.checkpoint.CheckpointRestore(iterator)}),
        )
        restored = self._restore(items, STATE)
        if iterator.is_global:
            try:
                position = _global_position(self._directory(step))
            except DamagedError as error:
                raise self._damaged(step, str(error), STATE) from None
            iterator.set_state(position)
        return restored["rest"]._replace(params=restored["params"]), restored["meta"]

    def restore_params(self, params: Params) -> tuple[Params, int]:
        """Return the newest checkpoint's parameters and its step.

        `params` gives shapes and shardings. Raises `UserError` if no checkpoint exists or the newest is damaged.
        """
        items = ocp.args.Composite(params=ocp.args.StandardRestore(_abstract(params)))
        while self.latest is not None:
            step = self.latest
            try:
                return self._restore(items, PARAMS)["params"], step
            except UserError:
                # A run in another process removes old checkpoints, perhaps this one during the read.
                self._manager.close()
                self._manager = self._opened()
                if self.latest == step and self._directory(step).is_dir():
                    raise
        raise UserError(
            f"{self._path} holds no complete checkpoint. Train first, or let the run reach its first save "
            "(config.checkpoint.every)."
        )

    def _restore(self, items: ocp.args.Composite, names: Sequence[str]) -> Any:
        """Restore `items` of the newest checkpoint after checking the items `names`."""
        self.require_intact(names)
        step = self.latest
        assert step is not None
        try:
            if not self._is_remote:
                for name in {*names} & {"params", "rest"}:
                    _require_chunks(self._directory(step) / name)
            return self._manager.restore(step, args=items)
        except DamagedError as error:
            raise self._damaged(step, str(error), names) from None
        except (UserError, jax.errors.JaxRuntimeError):  # other data; no memory
            raise
        except Exception as error:
            logging.error("checkpoint of step %d: %s", step, error)
            fault = f"it cannot be read ({first_line(error)})"
            try:
                is_checked = "checksums" in read_metadata(self._directory(step))["custom_metadata"]
            except DamagedError as missing:  # another run removed the checkpoint during the read
                is_checked, fault = False, str(missing)
            if is_checked:  # The checksums were right.
                raise UserError(
                    f"The checkpoint {self._directory(step)} is intact but cannot be restored here "
                    f"({first_line(error)}). Put back its run's config.json, and install the package versions in "
                    "run.json."
                ) from error
            raise self._damaged(step, fault, names) from error

    def require_intact(self, names: Sequence[str] = STATE) -> None:
        """Raise `UserError` if the items `names` of the newest checkpoint are damaged.

        All processes must call it: each reads a part, and all raise if any finds damage.
        """
        step = self.latest
        assert step is not None
        fault = ""
        try:
            check(
                self._directory(step),
                names,
                identity=self.identity,
                part=jax.process_index(),
                parts=jax.process_count(),
            )
        except DamagedError as error:
            fault = str(error)
        if jax.process_count() > 1:  # All processes must agree, or the healthy ones would hang.
            faults = multihost_utils.process_allgather(np.asarray(bool(fault)))
            fault = fault or ("another process found damage" if faults.any() else "")
        if fault:
            raise self._damaged(step, fault, names)

    def wait(self) -> None:
        """Wait until all saves are written; raise `UserError` if writing failed."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._not_written(error) from error

    @contextlib.contextmanager
    def disk_full_as_user_error(self) -> Iterator[None]:
        """Turn a full disk into a `UserError` that names the newest complete checkpoint."""
        try:
            yield
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise self._not_written(error) from error

    def close(self) -> None:
        """Stop the threads of the checkpoint manager."""
        self._manager.close()

    # ---------------------------------------------------------------------------------------------- errors and fixes
    def _directory(self, step: int) -> Path | epath.Path:
        return self._path / str(step)

    def _steps(self) -> list[int]:
        """Return the steps of the complete checkpoints; unfinished saves are left out."""
        return sorted(ocp.utils.checkpoint_steps(self._path)) if self._path.exists() else []

    def _damaged(self, step: int, fault: str, names: Sequence[str]) -> UserError:
        """Return the error for a damaged checkpoint, with the way to resume from an intact one.

        `names` are the items that an intact checkpoint needs.
        """
        earlier = sorted((s for s in self._steps() if s < step), reverse=True)
        intact = next((s for s in earlier if is_intact(self._directory(s), names, self.identity)), None)
        if intact is None and self.identity and is_intact(self._directory(step), names, None):
            return UserError(
                f"The checkpoint {self._directory(step)} and {self._path.parent / 'run.json'} belong to different "
                "runs. Put back this run's copy of the replaced file."
            )
        text = f"The checkpoint {self._directory(step)} is damaged: {fault}."
        if intact is None:
            return UserError(
                f"{text} No earlier checkpoint is intact: put back a copy of the directory, or start again in another "
                "--workdir."
            )
        delete = " and ".join(str(self._directory(s)) for s in (step, *(s for s in earlier if s > intact)))
        return UserError(
            f"{text} To resume from the intact checkpoint of step {intact}, delete {delete} and run the same command "
            "again; or put back a copy of the directory."
        )

    def _not_written(self, error: Exception) -> UserError:
        """Return the error for a failed write to the workdir; `error` is its cause."""
        complete = self._steps()
        last = (
            f"the last good checkpoint is {self._directory(complete[-1])}" if complete else "no checkpoint is complete"
        )
        logging.error("checkpoint: %s", error)
        fix = "Check that it can be reached" if self._is_remote else "Free some disk space or repair the directory"
        return UserError(
            f"Writing to {self._path.parent} failed ({error}); {last}. {fix}, then run the same command again."
        )


def _require_chunks(item: Path | epath.Path) -> None:
    """Raise `DamagedError` for an array stored in chunks larger than the array.

    Such chunks compress to a few bytes and unpack to gigabytes.
    """
    metadata: Any = ocp.StandardCheckpointHandler().metadata(epath.Path(item))
    for array in jax.tree.leaves(metadata.tree, is_leaf=lambda x: hasattr(x, "storage")):
        chunk = array.storage.chunk_shape if array.storage is not None else None
        if chunk is not None and math.prod(chunk) > max(1, math.prod(array.shape)):
            raise DamagedError(f"the array {array.name} {[*array.shape]} is stored in chunks of {[*chunk]}")


def _require_files(directory: Path) -> None:
    """Raise `UserError` if a checkpoint has links, pipes or huge metadata.

    Only regular files and directories are allowed. Orbax would wait for a pipe for ever, follow a link anywhere, and
    read metadata of any size.
    """
    # The directory may not exist yet, or another run may remove it.
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _require_files(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                raise UserError(
                    f"{entry.path} is not a file but a link, a pipe or a device. Put back a copy of the checkpoint, or "
                    "delete it."
                )
            elif entry.name.endswith(METADATA_NAMES) and entry.stat().st_size > MOST_JSON:
                raise UserError(
                    f"{entry.path} has {size(entry.stat().st_size)}, more than checkpoint metadata can have. Put back "
                    "a copy of the checkpoint, or delete it."
                )


def has_checkpoint(workdir: str | os.PathLike[str], step: int) -> bool:
    """Return whether a run has a complete checkpoint of `step`."""
    if url := Mirror(workdir).url:
        return STORE_MARKER in store.sizes(f"{url}/{DIRECTORY}/{step}")
    return (Path(workdir) / DIRECTORY / str(step)).is_dir()


def has_any(workdir: str | os.PathLike[str]) -> bool:
    """Return whether a run has any complete checkpoint."""
    if url := Mirror(workdir).url:
        return any(name.endswith(f"/{STORE_MARKER}") for name in store.sizes(f"{url}/{DIRECTORY}"))
    return any(path.name.isdecimal() for path in (Path(workdir) / DIRECTORY).glob("*"))


def _global_position(checkpoint: Path | epath.Path) -> dict[str, Any]:
    """Return the data position that process 0 saved.

    It is valid for any process count. Raises `DamagedError` if it is missing.
    """
    paths = list((checkpoint / "data").glob("process_0-of-*.json"))
    if len(paths) != 1:
        raise DamagedError("the item 'data' has no data position")
    return read_object(paths[0], dict)


def _require_same_process_count(checkpoint: Path | epath.Path) -> None:
    """Raise `UserError` if a different number of processes saved the data positions.

    Each process saves the position in its own shards.
    """
    names = [path.name for path in (checkpoint / "data").glob("process_0-of-*.json")]
    n_saved, n_processes = "".join(names).removeprefix("process_0-of-").removesuffix(".json"), jax.process_count()
    if n_saved.isdecimal() and int(n_saved) != n_processes:
        workdir = checkpoint.parent.parent
        raise UserError(
            f"{workdir}: number of processes {n_saved} -> {n_processes}. Each process of a stream has a separate data "
            f"position: start {n_saved} processes again, or start a new --workdir with blocks from `seqjax prepare`, "
            "which any number of processes can resume."
        )


def _abstract(tree: Any) -> Any:
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)


# ------------------------------------------------------------------------------------------------- Orbax's messages
@dataclasses.dataclass(frozen=True)
class _UnraisableHook:
    previous_hook: Callable[[Any], Any]

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            self.previous_hook(unraisable)


def _hide_noise() -> None:
    """Hide tracebacks from Orbax's threads; a failed save raises the error anyway.

    Orbax logs the first error before it raises it. Its remaining writes end after its event loop has closed. asyncio
    logs their errors, and tensorstore reports the closed loop to `sys.unraisablehook`. On a full disk these are dozens
    of tracebacks above the message with the fix. The log line that several processes stop together is hidden too,
    because the run reports the stop.
    """
    for logger in (logging.get_absl_logger(), standard_logging.getLogger("asyncio")):
        logger.addFilter(_is_informative)
    if not isinstance(sys.unraisablehook, _UnraisableHook):
        sys.unraisablehook = _UnraisableHook(sys.unraisablehook)


def _is_informative(record: standard_logging.LogRecord) -> bool:
    if "orbax" not in record.pathname and "orbax" not in record.getMessage():
        return True
    return not (record.exc_info or "Reached preemption sync point" in record.getMessage())
