"""What seqjax uses of JAX that JAX does not export: all of it is here, and nowhere else in seqjax.

`jax.distributed.initialize` puts the coordination service into process 0, whose end then aborts the others before any
can say why (hub.py). So the service and its clients are started one by one, as `State.initialize` in
jax/_src/distributed.py does it. What recognises SLURM and TPU pods is not exported either.

Tried on jax 0.10.2 and 0.12.0.1. `require` says whether the installed release still has it all. For a release that has
not, compare these functions with its `State.initialize`.
"""

import importlib
import importlib.metadata
from typing import Any

from seqjax.errors import UserError

TRIED = ("0.10.2", "0.12.0.1")  # on Python 3.11 and 3.12 (docs/tested.md)

# Modules and what is used of them.
FIND = ("jax._src.clusters", "ClusterEnv.auto_detect_unset_distributed_params")
SERVICE = ("jax._src.lib", "_jax.get_distributed_runtime_service")
CLIENT = ("jax._src.lib", "_jax.get_distributed_runtime_client")
STATE = ("jax._src.distributed", "global_state")
STATE_HAS = ("client", "coordinator_address", "initialize_preemption_sync_manager", "num_processes", "process_id")


def require() -> None:
    """Raise `UserError` unless the installed JAX has all that is used here."""
    for used in (FIND, SERVICE, CLIENT, *((STATE[0], f"{STATE[1]}.{name}") for name in STATE_HAS)):
        _private(*used)


def find_cluster(
    address: str | None, count: int | None, index: int | None, devices: tuple[int, ...] | None
) -> tuple[str | None, int | None, int | None, tuple[int, ...] | None]:
    """Return the coordinator's address, the number of processes, that of this one, and its GPUs.

    What is None is filled in under a scheduler that JAX recognises.
    """
    address, count, index, found = _private(*FIND)(address, count, index, devices, None, 300)
    return address, count, index, None if found is None else tuple(found)


def start_service(port: int, *, count: int) -> Any:
    """Start the coordination service for `count` processes on a port of this host; it lives as long as its object."""
    # Its own timeouts are longer than the hub's, which has better messages.
    return _private(*SERVICE)(f"[::]:{port}", count, shutdown_timeout=300)


def connect(address: str, *, index: int, count: int) -> None:
    """Connect this process to the coordination service, so that JAX sees the devices of all processes."""
    state = _private(*STATE)
    state.coordinator_address, state.process_id, state.num_processes = address, index, count
    state.client = _private(*CLIENT)(address, index, init_timeout=300, use_compression=True)
    state.client.connect()
    state.initialize_preemption_sync_manager()


def _private(module: str, name: str) -> Any:
    """Return what JAX calls `name` in `module`, which is imported now: in the hub that would delay the roll call."""
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"--distributed: jax {importlib.metadata.version('jax')} has no {module}.{name}, by which the processes of "
            f"a run meet. Install a release that seqjax was tried on, {' or '.join(TRIED)}, with the same extra: pip "
            f"install 'jax[cuda13]=={TRIED[-1]}' for example."
        ) from error
    return found
