"""A process's membership in a run of several: it joins, watches the others while it trains, and ends with them.

A collective waits for all processes, so one that is lost would leave the others waiting: for ever, or until JAX's own
heartbeat aborts them without a name. Here a thread listens to the hub (hub.py). When a member is lost it prints which
one, and ends this process with status `LOST` (75); when one ends with an error it prints that, with its status.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from importlib import metadata
from types import TracebackType
from typing import Any, NoReturn

import jax

import seqjax
from seqjax.distributed import hub, jax_private
from seqjax.distributed.place import Place
from seqjax.errors import LOST, UserError, leave, reporting

START_SECONDS = 60.0
GRACE_SECONDS = 3.0  # for this process's own error, which says more than that of another


def join(place: Place, *, start_seconds: float = START_SECONDS) -> "Membership":
    """Meet the other processes, start JAX's distributed runtime in all of them, and return this one's membership.

    Args:
        place: Which process this is.
        start_seconds: The hub waits so long for the next process, and a process for the hub.

    A process that is missing ends this one, as later a process that is lost. Raises `UserError` if the coordinator's
    port is taken, or the installed JAX lacks what is needed.
    """
    jax_private.require()
    started = _start_hub(place, start_seconds) if place.index == 0 else None
    connection = _connected(place, start_seconds)
    versions = {"seqjax": seqjax.__version__, "jax": jax.__version__, "jaxlib": metadata.version("jaxlib")}
    hello = {"process": place.index, "processes": place.count, "host": socket.gethostname(), "pid": os.getpid()}
    member = Membership(place, connection, started)
    member.send({"hello": hello | {"versions": ", ".join(f"{name} {v}" for name, v in versions.items())}})
    member.start()
    _initialize_jax(place, port=member.jax_port)
    return member


class Membership:
    """A context of what the processes do together; all leave it at its end, or none does.

    Attributes:
        place: Which process this is.
        hosts: The host of every process.
        jax_port: Port of JAX's coordination service, on the coordinator's host.
    """

    def __init__(self, place: Place, connection: socket.socket, started: subprocess.Popen[str] | None):
        self.place = place
        self.hosts: list[str] = []
        self.jax_port = 0
        self._connection, self._hub = connection, started
        self._sending = threading.Lock()
        self._ending = threading.Lock()  # held for good by whoever ends this process
        self._let_go, self._all_done, self._told = threading.Event(), threading.Event(), threading.Event()
        self._verdict: dict[str, Any] = {}

    def start(self) -> None:
        """Start to listen and to beat; return when all members have come."""
        for work in (self._listen, self._beat):
            threading.Thread(target=work, name=f"membership {work.__name__}", daemon=True).start()
        self._let_go.wait()

    def __enter__(self) -> "Membership":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self._fail(error)
        self.send({"done": True})
        self._all_done.wait()  # or the thread ends this process

    def _fail(self, error: BaseException) -> NoReturn:
        """End this process after an error of its own, or for the reason of that error: another process is lost.

        A collective or a save fails at once when the other end closes; the hub says why a moment later.
        """
        ours = isinstance(error, (KeyboardInterrupt, SystemExit)) or (
            isinstance(error, UserError) and error.__cause__ is None
        )
        if not ours and self._told.wait(GRACE_SECONDS):
            self._end()
        with self._ending:
            text, status = (str(error) or type(error).__name__).splitlines()[0], 1
            try:
                with reporting():
                    raise error
            except SystemExit as ended:
                status = ended.code if isinstance(ended.code, int) else 1
            except BaseException:
                traceback.print_exc()
            self.send({"failed": text, "status": status})
            leave(status)  # Python's usual end would wait for the others at JAX's barrier.

    def _end(self) -> NoReturn:
        """End this process because of another."""
        with self._ending:
            again = " The same command, started again, goes on from the last checkpoint."
            more = again if self._verdict["status"] == LOST else ""
            sys.stderr.write(f"error: {self._verdict['end']}{more}\n")
            leave(self._verdict["status"])

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the hub; if it is gone, the thread that listens notices."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _beat(self) -> None:
        while True:
            time.sleep(hub.BEAT_SECONDS)
            self.send({"beat": True})

    def _listen(self) -> None:
        """Take the hub's messages; end the process when the hub says so or is gone."""
        self._connection.settimeout(hub.SILENT_SECONDS)
        host = self.place.host
        with self._connection.makefile("r", encoding="utf-8") as lines:
            while not self._told.is_set():
                try:
                    line = lines.readline()
                except TimeoutError:
                    line, how = "", f"has not been heard of for {hub.SILENT_SECONDS:.0f} s: it or the network is down."
                except OSError as error:
                    line, how = "", f"is gone ({error.strerror})."
                else:
                    how = "is gone."
                message = json.loads(line) if line else {"end": f"The coordinator on {host} {how}", "status": LOST}
                if "go" in message:
                    self.jax_port, self.hosts = message["go"]["port"], message["go"]["hosts"]
                    self._let_go.set()
                elif "all_done" in message:
                    self._all_done.set()
                    return
                elif "end" in message:
                    self._verdict = message
                    self._told.set()
        time.sleep(GRACE_SECONDS if self._let_go.is_set() else 0)
        self._end()


def _start_hub(place: Place, start_seconds: float) -> subprocess.Popen[str]:
    """Start the hub on this host, and return when it listens."""
    host = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "").rpartition(":")[0].strip("[]")
    where = [f"--host={host}", f"--port={place.port}"]
    how = [f"--processes={place.count}", f"--start_seconds={start_seconds}"]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}  # what JAX's service logs is said by the hub
    process = subprocess.Popen(
        [sys.executable, "-m", "seqjax.distributed.hub", *where, *how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    said = process.stdout.readline().strip()
    if said != "listening":
        process.communicate()  # It has ended.
        raise UserError(
            f"Process 0 cannot listen on port {place.port}, where all processes meet: {said or 'it ended'}. Give all "
            "of them another port in --coordinator_address (JAX_COORDINATOR_ADDRESS), or set JAX_COORDINATOR_PORT."
        )
    return process


def _connected(place: Place, seconds: float) -> socket.socket:
    """Return a connection to the hub, which may not have started yet."""
    bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "").rpartition(":")[0].strip("[]")
    host = (bound or "localhost") if place.index == 0 else place.host  # a host may not know its own name
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((host, place.port), timeout=5)
        except OSError as error:
            if time.monotonic() > deadline:
                sys.stderr.write(
                    f"error: Process 0, the coordinator at {place.host}:{place.port}, has not answered process "
                    f"{place.index} on {socket.gethostname()} for {seconds:.0f} s ({error.strerror or error}). Look at "
                    "its output; --start_timeout=SECONDS waits longer.\n"
                )
                leave(LOST)
            time.sleep(0.2)


def _initialize_jax(place: Place, *, port: int) -> None:
    """Do what `jax.distributed.initialize` does, but for the coordination service, which the hub has."""
    if place.devices:
        for platform in ("cuda", "rocm"):
            jax.config.update(f"jax_{platform}_visible_devices", ",".join(map(str, place.devices)))
    host = f"[{place.host}]" if ":" in place.host else place.host
    jax_private.connect(f"{host}:{port}", index=place.index, count=place.count)
