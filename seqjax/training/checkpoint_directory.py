"""Where the checkpoints of a run are, which of them are good, and the errors that name the newest good one."""

from collections.abc import Sequence
from pathlib import Path

import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from seqjax import store
from seqjax.errors import UserError
from seqjax.training import integrity, stored_checkpoints
from seqjax.training.spool import Spool, readable
from seqjax.training.stored_checkpoints import DIRECTORY


class CheckpointDirectory:
    """The directory in which Orbax writes and reads the checkpoints of a run.

    Attributes:
        path: A directory of this machine, in a workdir, a spool or a copy; or one of gs://.
    """

    def __init__(self, spool: Spool, *, read_only: bool):
        """Fetch the parameters of the newest checkpoint, if they are only read and Orbax cannot reach them."""
        self._spool = spool
        if spool.is_direct:
            self.path: Path | epath.Path = store.orbax_path(spool.url) / DIRECTORY
        elif spool.url and read_only:
            copy = readable(spool.url)
            stored_checkpoints.fetch_newest(spool.url, copy, items=integrity.PARAMS)
            self.path = copy / DIRECTORY
        else:
            self.path = spool.directory.absolute() / DIRECTORY

    def __str__(self) -> str:
        """Return where the user knows the checkpoints to be."""
        return f"{self._spool.url}/{DIRECTORY}" if self._spool.url else str(self.path)

    def of(self, step: int) -> Path | epath.Path:
        """Return the directory of a checkpoint."""
        return self.path / str(step)

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that are complete, not of those that Orbax started to write."""
        return sorted(ocp.utils.checkpoint_steps(self.path)) if self.path.exists() else []

    def damaged(self, step: int, fault: str, names: Sequence[str]) -> UserError:
        """Return the error about a damaged checkpoint, which names the newest whole one before it and the way there.

        `names` are the items that are needed.
        """
        earlier = sorted((s for s in self.steps() if s < step), reverse=True)
        good = next((s for s in earlier if integrity.is_whole(self.of(s), names)), None)
        text = f"The checkpoint {self.of(step)} is damaged: {fault}."
        if self._spool.url and not self._spool.is_direct:
            return UserError(
                f"{text} It is a copy of {self}/{step}. Delete the copy and run the same command again; if that one is "
                "damaged too, delete both, to go on from the one before."
            )
        if good is None:
            return UserError(
                f"{text} No whole one was made before it: put back a copy of the directory, or start again in another "
                "--workdir."
            )
        delete = " and ".join(str(self.of(s)) for s in (step, *(s for s in earlier if s > good)))
        return UserError(
            f"{text} The one of step {good} before it is whole: delete {delete} and run the same command again, to go "
            f"on from step {good}; or put back a copy of the directory."
        )

    def none_complete(self) -> UserError:
        """Return the error of a command that needs a checkpoint where there is none."""
        return UserError(
            f"{self} holds no complete checkpoint. Train first, or let the run reach its first save "
            "(config.checkpoint.every)."
        )

    def not_written(self, error: Exception) -> UserError:
        """Return the error about a checkpoint, or what a run writes beside it, that `error` kept from being written."""
        complete = self.steps()
        last = f"the last good checkpoint is {self.of(complete[-1])}" if complete else "no checkpoint is complete"
        logging.error("checkpoint: %s", error)
        fix = (
            "Check that it can be reached" if self._spool.is_direct else "Free some disk space or repair the directory"
        )
        return UserError(
            f"Writing to {self.path.parent} failed; {last}. {fix}, then run the same command again. Cause: {error}"
        )

    def not_sent(self, error: store.StoreError, *, step: int | None) -> UserError:
        """Return the error about a store that did not take the checkpoint of `step`, or just the files beside it."""
        kept = f"checkpoint of step {step} and all files are" if step is not None else "files beside it are"
        return UserError(
            f"{error} The {kept} in {self._spool.directory}: the same command, on this machine, sends them to "
            f"{self._spool.url} and goes on."
        )
