"""Run preparation jobs on a running Dask cluster (https://distributed.dask.org).

Source and output are on storage shared by this machine and all workers; only job descriptions pass through the cluster.
If a worker dies, the scheduler gives its job to another worker and gives up after four deaths
(`distributed.scheduler.allowed-failures`).

Each worker process checks the job requirements before its first job, including processes that join later. The
requirements are in a *marker* file next to the parts.
"""

import asyncio
import concurrent.futures
import contextlib
import importlib.metadata
import logging
import os
import platform
import queue
import socket
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import fsspec

import seqjax
from seqjax.data import shards
from seqjax.data.prepare import progress
from seqjax.data.tokenizer import load_tokenizer
from seqjax.errors import MissingPackageError, UserError
from seqjax.files import write_json
from seqjax.reading import read_json
from seqjax.terminal import StatusLine

SAMPLES = 5  # source files that each worker opens as a test

# Packages with equal versions everywhere: the protocol depends on the first two, the written bytes on the rest.
_PACKAGES = ("dask", "distributed", "array_record")
_TOKENIZER_PACKAGES = {"mixtral": ("sentencepiece",), "huggingface": ("tokenizers",)}


# The marker format; the command writes it and workers read it.
FORM = {"versions": {str: str}, "sources": [list], "tokenizer": str, "tokenizer_path": str, "tokenizer_sha256": str}


class Needs(NamedTuple):
    """The job requirements on every worker: parts directory, shards and tokenizer."""

    parts: Path
    shards: Sequence[shards.Shard]
    tokenizer: str
    tokenizer_path: str
    tokenizer_sha256: str


def run_job(job: Any, *, function: Callable[[Any], None], marker: str) -> None:
    """Run a job in a worker.

    Raises `UserError` if this process does not meet the requirements.
    """
    if fault := worker_fault(marker):
        raise UserError(fault)
    function(job)


_checked: set[str] = set()  # markers with requirements that this process meets


def worker_fault(marker: str) -> str:
    """Return why this process cannot do a preparation's jobs; "" if it can."""
    if marker in _checked:
        return ""
    fault = _fault(Path(marker))
    if fault:
        return f"The worker process {os.getpid()} on {socket.gethostname()} {fault}"
    _checked.add(marker)
    return ""


def _fault(marker: Path) -> str:
    try:
        needs = read_json(marker, FORM, fix="")
    except UserError as error:
        return (
            f"does not see this machine's {marker.parent.parent} ({error}): give an --out on storage that all "
            "workers share, under the same path."
        )
    required = needs["versions"]
    present = _versions(required)
    differing = [name for name in required if present[name] != required[name]]
    if differing:
        listing = ", ".join(f"{name} {present[name]} (here {required[name]})" for name in differing)
        return f"has {listing}: install the same versions, because other versions may write other bytes."
    try:
        with tempfile.TemporaryFile(dir=marker.parent) as file:
            file.write(b"seqjax")
    except OSError as error:
        return f"cannot write to {marker.parent.parent} ({error.strerror}); change its permissions."
    for url, size in needs["sources"]:
        if fault := _source_fault(url, size):
            return f"{fault}: give a --source that all workers share, under the same path."
    try:
        tokenizer = load_tokenizer(needs["tokenizer"], needs["tokenizer_path"])
    except UserError as error:
        return f"cannot load the tokenizer: {error}"
    if tokenizer.hash != needs["tokenizer_sha256"]:
        return f"has another tokenizer of this name ({tokenizer.hash[:12]}, here {needs['tokenizer_sha256'][:12]})."
    return ""


def _source_fault(url: str, size: int) -> str:
    try:
        fs, path = fsspec.core.url_to_fs(url)
        worker_size = fs.info(path)["size"]
        with fs.open(path, "rb") as file:
            file.read(1)
    except Exception as error:  # Each file system has different errors.
        return f"cannot read {url} ({type(error).__name__}: {error})"
    return "" if worker_size == size else f"sees {worker_size} bytes in {url}, where this machine sees {size}"


def write_marker(path: Path, needs: Needs) -> None:
    """Write a marker for `worker_fault`."""
    step = max(1, len(needs.shards) // SAMPLES)
    packages = (*_PACKAGES, *_TOKENIZER_PACKAGES.get(needs.tokenizer, ()))
    packages = (*packages, *sorted({shard.package for shard in needs.shards if shard.package}))
    marker = {
        "versions": _versions(("python", "seqjax", *packages)),
        "sources": [(shard.url, shard.size) for shard in needs.shards[::step]],
        "tokenizer": needs.tokenizer,
        "tokenizer_path": needs.tokenizer_path,
        "tokenizer_sha256": needs.tokenizer_sha256,
    }
    write_json(path, marker)


def _versions(names: Iterable[str]) -> dict[str, str]:
    known = {"python": ".".join(platform.python_version_tuple()[:2]), "seqjax": seqjax.__version__}
    return {name: known[name] if name in known else installed(name) for name in names}


def installed(package: str) -> str:
    """Return the version of a package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


CONNECT_SECONDS = 20.0
START_SECONDS = 60.0  # maximum wait for the first worker
CHECK_SECONDS = 10.0  # time without a finished job before checking for workers
LOST_SECONDS = 300.0  # time without any worker before giving up
VISIBLE_SECONDS = 90.0  # maximum wait for another machine's file; NFS caches its absence for a minute


def require() -> None:
    """Raise `MissingPackageError` if Dask is not installed."""
    try:
        import distributed  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingPackageError(
            "--executor=dask needs dask and distributed: install them with `pip install 'seqjax[dask]'`."
        ) from None


@contextlib.contextmanager
def connected(address: str, needs: Needs) -> Iterator["DaskCluster"]:
    """Return a context with the cluster at a scheduler address.

    Raises `UserError` if there is no scheduler or no worker, or if a worker fails the check.
    """
    from distributed import Client  # pyright: ignore[reportMissingImports]
    from distributed.versions import VersionMismatchWarning  # pyright: ignore[reportMissingImports]

    _require_scheduler(address)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VersionMismatchWarning)  # `_require_workers` checks the relevant versions
        client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False, name="seqjax-prepare")
    marker = needs.parts / f"cluster-{uuid.uuid4().hex}.json"
    # A lost connection raises an error here. Without this, reconnection attempts would also log tracebacks.
    log = logging.getLogger("distributed.client")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        write_marker(marker, needs)
        try:
            _require_workers(client, marker, address)
        except OSError as error:
            raise UserError(
                f"--executor=dask:{address}: the cluster stopped answering ({error}). Start it again and run the same "
                "command."
            ) from None
        yield DaskCluster(client, marker, address)
    finally:
        marker.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            client.close()
        log.setLevel(level)


class DaskCluster:
    """Runs jobs on a cluster's workers."""

    def __init__(self, client: Any, marker: Path, address: str):
        self._client, self._marker, self._address = client, marker, address

    def run(self, function: Callable[[Any], None], jobs: Sequence[Any], display: progress.Display) -> None:
        """Call `function` with each job.

        If a job fails or the user interrupts, the remaining jobs are cancelled.
        """
        futures = self._client.map(run_job, jobs, function=function, marker=str(self._marker), pure=False)
        pending = {future.key: (future, job) for future, job in zip(futures, jobs, strict=True)}
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for future in futures:
            future.add_done_callback(ended.put)
        no_workers_since = None  # start time of a period without workers
        try:
            while pending:
                try:
                    future = ended.get(timeout=CHECK_SECONDS)
                except queue.Empty:
                    no_workers_since = self._check_workers(no_workers_since, display)
                    continue
                no_workers_since = None
                _, job = pending.pop(future.key)
                if future.status in ("error", "cancelled"):
                    self._raise(future, job)
                # The report describes the job completely, so the result is released without fetching it. Dask does
                # not recompute an unreferenced result when its worker dies.
                future.release()
                display.counters.add(**job.counts())
                display.finished += 1
        finally:
            if pending:
                with contextlib.suppress(OSError):  # The scheduler may have failed.
                    self._client.cancel([future for future, _ in pending.values()])
        _wait_for([job.done for job in jobs])

    def _raise(self, future: Any, job: Any) -> NoReturn:
        """Raise the error of a failed job."""
        from distributed import KilledWorker  # pyright: ignore[reportMissingImports]

        try:
            future.result()
        except KilledWorker as error:
            raise UserError(
                f"{job.name}: {error.allowed_failures + 1} workers died while running it, perhaps because "
                "memory ran out. Give them more memory and run the same command again: finished shards are kept."
            ) from None
        except concurrent.futures.CancelledError:
            pass
        raise self._cluster_error("The connection to the scheduler was lost") from None

    def _check_workers(self, since: float | None, display: progress.Display) -> float | None:
        """Return the start time of the period without workers, or None if there are some.

        Raises `UserError` if the period exceeds `LOST_SECONDS`.
        """
        try:
            n_workers = len(self._client.nthreads())
        except OSError:
            raise self._cluster_error("The connection to the scheduler was lost") from None
        now = time.monotonic()
        if n_workers:
            return None
        if since is None:
            display.say(f"The cluster at {self._address} has no workers left; waiting for new ones.")
            return now
        if now - since > LOST_SECONDS:
            raise self._cluster_error(f"There was no worker for {LOST_SECONDS:.0f} seconds")
        return since

    def _cluster_error(self, reason: str) -> UserError:
        return UserError(
            f"{reason} ({self._address}). Start the cluster again and run the same command: finished shards are kept."
        )


def _require_scheduler(address: str) -> None:
    """Raise `UserError` if no scheduler answers at `address`.

    Without this check, a client would wait for any server at that address.
    """
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # In a notebook, this thread already runs a loop.
            server: Any = thread.submit(asyncio.run, _identity(address)).result()
    except ValueError as error:
        raise UserError(f"--executor=dask:{address}: {error}; give dask:HOST:PORT or dask:tls://HOST:PORT.") from None
    except OSError as error:
        raise UserError(
            f"--executor=dask:{address}: no Dask scheduler answers ({error.__cause__ or error}). Start one with `dask "
            "scheduler` and give the address that it prints, not its dashboard address."
        ) from None
    if server["type"] != "Scheduler":
        raise UserError(f"--executor=dask:{address} is a {server['type'].lower()}; give the scheduler's address.")


async def _identity(address: str) -> Any:
    """Return the self-description of a Dask server."""
    from distributed.core import rpc  # pyright: ignore[reportMissingImports]

    async with asyncio.timeout(CONNECT_SECONDS + 1), rpc(address, timeout=CONNECT_SECONDS) as remote:
        return await remote.identity()


def _require_workers(client: Any, marker: Path, address: str) -> None:
    """Raise `UserError` unless scheduler and workers are usable.

    The scheduler must have the same versions as this machine, there must be a worker, and every worker must pass the
    check.
    """
    scheduler = client.get_versions()["scheduler"]["packages"]
    for package in ("dask", "distributed"):
        if scheduler[package] != (here := installed(package)):
            raise UserError(
                f"The scheduler at {address} has {package} {scheduler[package]}, this machine has {here}: install the "
                "same version."
            )
    try:
        client.wait_for_workers(1, timeout=START_SECONDS)
    except TimeoutError:
        raise UserError(
            f"The cluster at {address} has no workers: start some with `dask worker {address} --nthreads=1`. An "
            "autoscaling cluster needs a minimum of 1."
        ) from None
    answers = client.run(worker_fault, str(marker), on_error="return")
    faults = [
        # The worker could not load the function.
        f"The worker {worker} cannot run seqjax ({answer}): install seqjax {seqjax.__version__} and its dependencies."
        if isinstance(answer, Exception)
        else answer
        for worker, answer in answers.items()
        if answer
    ]
    if faults:
        raise UserError(f"{len(faults)} of {len(answers)} workers cannot do the work. {faults[0]}")
    threads = max(client.nthreads().values(), default=1)
    if threads > 1:
        StatusLine().say(
            f"Workers have up to {threads} threads, and these take turns in one Python process. Workers with one "
            "thread, one per core, are faster (`dask worker --nthreads=1 --nworkers=N`)."
        )


def _wait_for(paths: Iterable[Path]) -> None:
    """Wait until this machine sees files from other machines."""
    deadline = time.monotonic() + VISIBLE_SECONDS
    for path in paths:
        while not path.is_file():
            if time.monotonic() > deadline:
                raise UserError(
                    f"A worker wrote {path}, but this machine does not see it; give an --out that all workers and this "
                    "machine share."
                )
            time.sleep(0.5)
