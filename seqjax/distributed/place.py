"""Which process of a run this one is: from flags, the environment, SLURM, or a TPU's metadata."""

import dataclasses
from collections.abc import Mapping

from seqjax.distributed import jax_private
from seqjax.errors import UserError

HOW = (
    "Start under SLURM or on a TPU pod, or give every process --coordinator_address=HOST:PORT, --num_processes=N and "
    "--process_id=I (or set JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID)."
)


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a process among those of its run.

    Attributes:
        host: Host of process 0, where all processes meet.
        port: Port of that host that they meet at.
        count: Number of processes.
        index: Number of this process, from 0.
        devices: Numbers of the GPUs of its host that it takes; None for all that it sees.
    """

    host: str
    port: int
    count: int
    index: int
    devices: tuple[int, ...] | None = None


def find_place(
    environment: Mapping[str, str], *, address: str | None = None, count: int | None = None, index: int | None = None
) -> Place:
    """Return the place of this process: what is not given is taken from the environment, then from the cluster.

    The variables are those of JAX (`JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`,
    `JAX_LOCAL_DEVICE_IDS`), and so is what recognises a cluster. Under SLURM a process takes the one GPU that its rank
    on the node names. Raises `UserError` if something is still unknown, or cannot be.
    """
    address = address or environment.get("JAX_COORDINATOR_ADDRESS")
    count = count if count is not None else _number(environment, "JAX_NUM_PROCESSES")
    index = index if index is not None else _number(environment, "JAX_PROCESS_ID")
    local = environment.get("JAX_LOCAL_DEVICE_IDS")
    devices = tuple(map(int, local.split(","))) if local else None
    if None in (address, count, index, devices):
        address, count, index, devices = jax_private.find_cluster(address, count, index, devices)
    if address is None or count is None or index is None:
        absent = {"the coordinator": address, "the number of processes": count, "the number of this one": index}
        raise UserError(f"--distributed: unknown: {', '.join(k for k, v in absent.items() if v is None)}. {HOW}")
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise UserError(f"The coordinator's address {address!r} is not HOST:PORT. {HOW}")
    if not 0 <= index < count:
        raise UserError(f"Process {index} of {count}: processes are numbered from 0 to {count - 1}. {HOW}")
    return Place(host.strip("[]"), int(port), count, index, devices)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    if not text.isdecimal():
        raise UserError(f"{name}={text} is not a number.")
    return int(text)


def require_one_process(environment: Mapping[str, str]) -> None:
    """Raise `UserError` if SLURM started several tasks, each of which would train the whole model by itself.

    SLURM_STEP_NUM_TASKS counts the tasks of an `srun`, SLURM_NTASKS those of the job. In a batch script, which is one
    process of a job that may have several tasks, what the user means is unknown, so it is refused as well.
    """
    text = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1"
    if text.isdecimal() and int(text) > 1:
        raise UserError(
            f"SLURM has {text} tasks here, and each would train by itself. Give --distributed and --workdir to train "
            "one model in all of them; for one process, start it with `srun --ntasks=1` or unset SLURM_NTASKS."
        )
