"""Run preparation jobs in this process, in local processes or on a Dask cluster.

cluster.py implements the Dask cluster. A job is a plain function call with an output description. It renames its files
when they are complete and writes its report `done` last. A job may therefore be interrupted or run twice.
"""

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from typing import Any, Protocol

from seqjax.data.prepare import cluster, progress
from seqjax.data.prepare.cluster import Needs
from seqjax.errors import UserError

LOCAL = "local"
DASK = "dask:"  # followed by the scheduler address


class Executor(Protocol):
    """An object that runs jobs."""

    def run(self, function: Callable[[Any], None], jobs: Sequence[Any], display: progress.Display) -> None:
        """Call `function` with each job, in any order.

        `display` counts the finished jobs. Raises the error of a failed job; no further job starts after a failure.
        """
        ...


@dataclasses.dataclass(frozen=True)
class LocalProcesses:
    """Runs jobs in this process, or in `workers` spawned processes if more than 1."""

    workers: int

    def run(self, function: Callable[[Any], None], jobs: Sequence[Any], display: progress.Display) -> None:
        """Call `function` with each job.

        If several jobs fail, the first error in job order is raised.
        """
        if self.workers == 1:
            progress.use_progress(display.counters)
            for job in jobs:
                function(job)
                display.finished += 1
            return
        context = multiprocessing.get_context("spawn")
        pool = concurrent.futures.ProcessPoolExecutor(
            min(self.workers, len(jobs)), context, progress.start_worker, (display.counters,)
        )
        try:
            futures = [pool.submit(function, job) for job in jobs]
            for future in concurrent.futures.as_completed(futures):
                if future.exception() is not None:
                    break
                display.finished += 1
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        try:
            for future in futures:
                if not future.cancelled():
                    future.result()
        except BrokenProcessPool:
            raise UserError(
                "A worker process was killed, perhaps because memory ran out; run the same command again with "
                "fewer --workers. Finished shards are kept."
            ) from None


def require(name: str, *, workers: int) -> None:
    """Raise `UserError` unless the executor `name` is usable.

    `name` must be local or dask:ADDRESS, and its package must be installed. `workers` requires local.
    """
    if name == LOCAL:
        return
    if not name.startswith(DASK) or name == DASK:
        raise UserError(
            f"--executor={name} is not known: give {LOCAL}, or {DASK}ADDRESS with the address of the scheduler, "
            f"{DASK}10.0.0.1:8786 for example."
        )
    if workers:
        raise UserError("--workers is for this machine, but --executor uses the cluster's workers; leave it out.")
    cluster.require()


def opened(name: str, *, workers: int, needs: Needs) -> AbstractContextManager[Executor]:
    """Return a context with the executor `name`.

    A local executor uses `workers` processes. A cluster's workers are checked first, and a `UserError` names missing
    requirements.
    """
    if name == LOCAL:
        return contextlib.nullcontext(LocalProcesses(workers))
    return cluster.connected(name.removeprefix(DASK), needs)
