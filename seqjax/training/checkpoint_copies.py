"""Copies checkpoints from the spool of a run to the store where it is kept, while the run goes on."""

import concurrent.futures

import orbax.checkpoint as ocp
from absl import logging

from seqjax import store
from seqjax.training import stored_checkpoints
from seqjax.training.spool import Spool


class CheckpointCopies:
    """Copies checkpoints from the spool to the store, one at a time, in a thread."""

    def __init__(self, spool: Spool, keep: int, keep_period: int | None):
        self._spool, self._keep, self._keep_period = spool, keep, keep_period
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint copies")
        self._sending: concurrent.futures.Future[None] | None = None

    def begin(self, manager: ocp.CheckpointManager) -> None:
        """Send the newest checkpoint of the spool if the store lacks it, because it was away when it was saved."""
        here = stored_checkpoints.local_steps(self._spool.directory)
        if here and here[-1] not in stored_checkpoints.complete(store.sizes(self._spool.url)):
            self.send(manager, here[-1])

    def send(self, manager: ocp.CheckpointManager, step: int) -> None:
        """Start to send a checkpoint when it is complete on this machine, after the files that it counts on."""
        self._sending = self._pool.submit(self._send, manager, step)

    def _send(self, manager: ocp.CheckpointManager, step: int) -> None:
        manager.wait_until_finished()
        self._spool.push()
        stored_checkpoints.send(self._spool.directory, self._spool.url, step)
        stored_checkpoints.prune(self._spool.url, keep=self._keep, keep_period=self._keep_period)

    def wait(self) -> None:
        """Wait for the checkpoint that is being sent; raise what kept it."""
        if self._sending is not None:
            self._sending.result()

    def wait_or_warn(self) -> None:
        """Do `wait`; a store that cannot be reached is only told, because the next checkpoint makes up for it."""
        try:
            self.wait()
        except store.StoreError as error:
            logging.warning("%s The checkpoint is in %s; the next one is sent.", error, self._spool.directory)

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown(cancel_futures=True)
