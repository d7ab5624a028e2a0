"""Several processes that train one model, and how a process is stopped.

`jax.distributed.initialize` joins the processes. JAX recognises SLURM, TPU pods and other clusters; elsewhere flags or
variables give each process its number. Process 0 runs JAX's coordination service. If a process is lost, the service
aborts the remaining processes within `HEARTBEAT_SECONDS` and reports the lost process. If process 0 is lost, they are
aborted at once. An abort is SIGABRT, status 134 in a shell. A collective can fail earlier; the process then exits with
status `LOST` (75). After either status, the same command resumes the run.

On SIGTERM or SIGINT the run finishes its step, saves and exits. A second SIGINT interrupts it. With several processes,
JAX's preemption service handles SIGTERM: it forwards the signal to all processes, which agree on a step that no process
has passed. It also catches a signal that arrives before the training loop.
"""

import contextlib
import math
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from seqjax.command_line import LOST, explained, reporting
from seqjax.errors import UserError, first_line, is_out_of_memory
from seqjax.terminal import leave

START_SECONDS = 60.0
HEARTBEAT_SECONDS = 30
SHUTDOWN_SECONDS = 300  # process 0 writes the report while the remaining processes wait
HOST_BYTES = 256  # longer host names are cut
HOW = (
    "Start under SLURM or on a TPU pod, or give every process --coordinator_address=HOST:PORT, --num_processes=N and "
    "--process_id=I (or set JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID)."
)


def require_one_process(environment: Mapping[str, str]) -> None:
    """Raise `UserError` if several SLURM tasks would each train the whole model.

    SLURM_STEP_NUM_TASKS counts the tasks of an `srun`, SLURM_NTASKS the tasks of the job. A batch script is one process
    in a job that may have several tasks. The user's intent is then unknown, so it is refused too.
    """
    text = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1"
    if text.isdecimal() and int(text) > 1:
        raise UserError(
            f"SLURM has {text} tasks here, and each would train by itself. Give --distributed and --workdir to train "
            "one model in all of them; for one process, start it with `srun --ntasks=1` or unset SLURM_NTASKS."
        )


@contextlib.contextmanager
def joined(
    address: str | None = None,
    count: int | None = None,
    index: int | None = None,
    *,
    start_seconds: float = START_SECONDS,
) -> Iterator[None]:
    """Return a context for processes that work together and leave it together.

    An error ends this process at once, because a normal Python exit would wait at JAX's barrier. JAX then aborts the
    remaining processes. Arguments and errors are as in `initialize`.
    """
    initialize(address, count, index, start_seconds=start_seconds)
    try:
        yield
        jax.distributed.shutdown()
    except BaseException as error:
        leave(_status(error))


def initialize(
    address: str | None = None,
    count: int | None = None,
    index: int | None = None,
    *,
    start_seconds: float = START_SECONDS,
) -> None:
    """Connect to the run's other processes; JAX then sees all their devices.

    Args:
        address: HOST:PORT of process 0, by default JAX_COORDINATOR_ADDRESS.
        count: Number of processes, by default JAX_NUM_PROCESSES.
        index: Number of this process, from 0, by default JAX_PROCESS_ID.
        start_seconds: Time for all processes to connect. JAX then aborts the processes that have connected.

    JAX takes missing values from the cluster. JAX_LOCAL_DEVICE_IDS lists the GPUs of this process; under SLURM, its
    rank on the node selects its GPU. Raises `UserError` if a value is unknown or impossible, or if process 0's port is
    taken.
    """
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    count = count if count is not None else _number("JAX_NUM_PROCESSES")
    index = index if index is not None else _number("JAX_PROCESS_ID")
    if address is not None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise UserError(f"The coordinator's address {address!r} is not HOST:PORT. {HOW}")
        if index == 0 and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
            _require_free(int(port))
    if count is not None and index is not None and not 0 <= index < count:
        raise UserError(f"Process {index} of {count}: processes are numbered from 0 to {count - 1}. {HOW}")
    # JAX's own message about a missing process names neither the time limit nor how to change it.
    where = "" if address is None else f" at {address}"
    sys.stderr.write(f"Waiting{where} for all processes, {start_seconds:g} s at most (--start_timeout=SECONDS)\n")
    sys.stderr.flush()
    try:
        jax.distributed.initialize(
            address,
            count,
            index,
            initialization_timeout=math.ceil(start_seconds),
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except ValueError as error:
        raise UserError(f"--distributed: {error} {HOW}") from error
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"--distributed: the processes cannot connect{where}: {first_line(error)}. {HOW}") from error


def _require_free(port: int) -> None:
    """Raise `UserError` if another program listens on a port of this host."""
    try:  # On a taken port, JAX's service can crash with a segmentation fault (0.10.2).
        socket.create_server(("", port)).close()
    except OSError as error:
        raise UserError(
            f"Process 0 cannot listen on port {port}, where all processes meet: {error.strerror or error}. Give all of "
            "them another port in --coordinator_address (JAX_COORDINATOR_ADDRESS)."
        ) from error


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    if not text.isdecimal():
        raise UserError(f"{name}={text} is not a number.")
    return int(text)


def _status(error: BaseException) -> int:
    """Report an error and return the exit status: `LOST` if another process was lost."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, jax.errors.JaxRuntimeError) and not is_out_of_memory(cause):
            traceback.print_exception(error)
            sys.stderr.write(
                f"error: {first_line(cause)}. Another process of the run was probably lost: read its output, then run "
                "the same command again to resume from the last checkpoint.\n"
            )
            return LOST
        cause = cause.__cause__
    try:
        with reporting(), explained():
            raise error
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def hosts() -> list[str]:
    """Return the host name of each process; all processes must call this."""
    name = np.frombuffer(socket.gethostname().encode()[:HOST_BYTES].ljust(HOST_BYTES, b"\0"), np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(name))
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]


def banner(hosts: Sequence[str], *, devices: Iterable[Any], axes: Mapping[str, int]) -> str:
    """Return a line about all processes, then one line per host.

    Args:
        hosts: The host of each process.
        devices: The devices of all processes.
        axes: Number of devices per mesh axis.
    """
    devices = sorted(devices, key=lambda device: device.id)
    device_ids = [[d.id for d in devices if d.process_index == i] for i in range(len(hosts))]
    counts = sorted({len(ids) for ids in device_ids})
    mesh = " x ".join(f"{axis}={n}" for axis, n in axes.items())
    lines = [
        f"{_counted(len(hosts), 'process', 'processes')} on {_counted(len(set(hosts)), 'host', 'hosts')}, "
        f"{' or '.join(map(str, counts))} device{'' if counts == [1] else 's'} in each: {len(devices)} x "
        f"{devices[0].device_kind} ({devices[0].platform}), mesh {mesh}"
    ]
    for host in dict.fromkeys(hosts):
        indices = [i for i, other in enumerate(hosts) if other == host]
        ids = sorted(device for i in indices for device in device_ids[i])
        lead = "; process 0 coordinates and writes" if 0 in indices else ""
        lines.append(f"  {host}: process {_ranges(indices)}, device {_ranges(ids)}{lead}")
    return "\n".join(lines)


def _counted(count: int, singular: str, plural: str) -> str:
    return f"{count} {singular if count == 1 else plural}"


def _ranges(numbers: Sequence[int]) -> str:
    """Return [0, 1, 2, 5] as 0-2, 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


class StopRequest:
    """A context in which the first SIGTERM or SIGINT only sets `name`.

    The process continues.

    `name` is the signal's name.
    """

    def __init__(self):
        self.name = ""
        self.agreed_on = False
        self._n_checks = 0
        self._old_handlers = {}
        self._is_distributed = jax.process_count() > 1

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT,) if self._is_distributed else (signal.SIGTERM, signal.SIGINT):
            self._old_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        if self._is_distributed:
            os.kill(os.getpid(), signal.SIGTERM)

    def agreed(self) -> bool:
        """Return whether to stop after this step.

        Several processes agree, so all must call it at every step. `agreed_on` is the last answer.
        """
        # JAX's service needs an increasing count, but the step count decreases after a cooldown.
        self._n_checks += 1
        self.agreed_on = ocp.multihost.reached_preemption(self._n_checks) if self._is_distributed else bool(self.name)
        if self.agreed_on and not self.name:
            self.name = "a signal to one of the processes"
        return self.agreed_on


def use_compile_cache() -> None:
    """Cache programs in JAX_COMPILATION_CACHE_DIR, or in ~/.cache/seqjax/xla.

    The cache saves minutes on accelerators. CPU programs are not cached: they compile in seconds, and a cached program
    is tied to the exact machine.
    """
    # The default is set here, not in the environment, so that a laptop without a cache directory still starts.
    if jax.default_backend() != "cpu":
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "seqjax" / "xla"))
        jax.config.update("jax_compilation_cache_dir", cache)
