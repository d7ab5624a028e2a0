"""How the processes of a run find each other, what is refused before any of them waits, and how they end together."""

import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import pytest

from seqjax.command_line import LOST
from seqjax.commands import train
from seqjax.errors import UserError
from seqjax.training import processes
from seqjax.training.processes import banner
from tests import support

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "2",
}
JAX = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:99", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
NAMES = ("JAX_LOCAL_DEVICE_IDS", "JAX_COORDINATOR_PORT", *SLURM, *JAX)
PATIENCE = 150.0  # seconds; far longer than it takes
# How a process ends that lost another one: as seqjax sees it, or as JAX aborts it.
LOST_STATUSES = (LOST, -signal.SIGABRT)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---------------------------------------------------------------------------------------------- which process this is
@pytest.fixture
def initialize(monkeypatch):
    """`initialize` in an environment with these variables alone; returns what JAX is told."""
    told = []

    def remember(address, count, index, **settings):
        told.append((address, count, index, settings))

    def run(environment, *place, **settings):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with monkeypatch.context() as patched:
            patched.setattr(jax.distributed, "initialize", remember)
            processes.initialize(*place, **settings)
        return told[-1]

    return run


def test_flags_come_before_variables_and_the_cluster_after_them(initialize, capsys):
    settings = {"initialization_timeout": 60, "heartbeat_timeout_seconds": 30, "shutdown_timeout_seconds": 300}
    assert initialize(SLURM) == (None, None, None, settings), "JAX looks"
    assert initialize(SLURM | JAX) == ("10.0.0.1:99", 4, 2, settings)
    assert initialize(JAX, "[::1]:7", 3, 0, start_seconds=1.5)[:3] == ("[::1]:7", 3, 0)
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r" \[::1\]:7 .* 1\.5 s .*\(--start_timeout=SECONDS\)$", last)


REFUSED = (
    ((), r"--distributed: .*Start under SLURM.*JAX_COORDINATOR_ADDRESS=HOST:PORT"),
    (("a:1", 2), r"--distributed: .*process id .*--process_id=I"),
    (("a:1", None, 0), r"--distributed: Number .*--num_processes=N"),
    ((None, 2, 0), r"--distributed: coordinator_address .*--coordinator_address=HOST:PORT"),
    (("somewhere", 2, 0), "'somewhere' is not HOST:PORT"),
    (("a:b", 2, 0), "'a:b' is not HOST:PORT"),
    (("a:1", 2, 2), r"Process 2 of 2: .* 0 .* 1\b"),
    (("a:1", 2, -1), r"Process -1 of 2: .* 0 .* 1\b"),
)
REFUSE = f"""
from seqjax.training.processes import initialize
from seqjax.errors import UserError

for place in {[place for place, _ in REFUSED]}:
    try:
        initialize(*place)
    except UserError as error:
        print(error)
"""


def test_what_is_missing_or_impossible_is_said():
    """By JAX's real function, in a process of its own, for JAX refuses one whose devices are in use."""
    env = {name: value for name, value in support.environment().items() if name not in NAMES}
    done = subprocess.run([sys.executable, "-c", REFUSE], cwd=support.ROOT, env=env, capture_output=True, check=True)
    said = done.stdout.decode().splitlines()
    assert len(said) == len(REFUSED), said
    for text, (_, says) in zip(said, REFUSED, strict=True):
        assert re.search(says, text), text


def test_a_variable_that_is_no_number_is_named(initialize):
    with pytest.raises(UserError, match=r"JAX_PROCESS_ID=two .*number"):
        initialize(JAX | {"JAX_PROCESS_ID": "two"})


def test_several_processes_need_a_directory_that_they_share():
    words = ["--coordinator_address=127.0.0.1:1", "--num_processes=1", "--process_id=0", "--config=transformer_pp"]
    with pytest.raises(UserError, match=r"--distributed .*--workdir: .*directory"):
        train.main(words)
    with pytest.raises(UserError, match=r"--devices .* --dry_run"):
        train.main([*words, "--dry_run", "--devices=3"])


# --------------------------------------------------------------------------------------------------------- the banner
def devices(*processes):
    """A device of each process that is named, numbered in that order."""
    kind = {"device_kind": "NVIDIA H200", "platform": "gpu"}
    return [SimpleNamespace(id=i, process_index=process, **kind) for i, process in enumerate(processes)][::-1]


def test_hosts_processes_devices_and_mesh():
    hosts = ["a", "a", "b"]
    text = banner(hosts, devices=devices(0, 0, 1, 1, 2, 2), axes={"data": 1, "fsdp": 6})
    assert text.splitlines() == [
        "3 processes on 2 hosts, 2 devices in each: 6 x NVIDIA H200 (gpu), mesh data=1 x fsdp=6",
        "  a: process 0-1, device 0-3; process 0 coordinates and writes",
        "  b: process 2, device 4-5",
    ]
    first, _, last = banner(hosts, devices=devices(0, 1, 2, 2), axes={"data": 4}).splitlines()
    assert "1 or 2 devices in each: 4 x" in first
    assert last == "  b: process 2, device 2-3"


def test_processes_of_a_host_need_not_follow_each_other():
    first, a, b = banner(["a", "b", "a"], devices=devices(0, 1, 2), axes={"data": 3}).splitlines()
    assert "3 processes on 2 hosts, 1 device in each" in first
    assert a.startswith("  a: process 0, 2, device 0, 2; process 0")
    assert b == "  b: process 1, device 1"


# -------------------------------------------------------------------------------------------------------------- ends
class LeftError(BaseException):
    """In place of the end of this process."""


def failing_save(cause: Exception) -> UserError:
    """As Checkpoints makes it of whatever Orbax raises."""
    error = UserError("Writing to the workdir failed.")
    error.__cause__ = cause
    return error


LOSS = jax.errors.JaxRuntimeError("INTERNAL: Gloo all-reduce failed: Connection closed by peer")


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (UserError("No room."), 2, "error: No room.\n"),
        (ZeroDivisionError("by zero"), 1, "ZeroDivisionError: by zero"),
        (KeyboardInterrupt(), 130, "Interrupted."),
        (RuntimeError("Exception raised in callback:\nKeyboardInterrupt: "), 130, r"\A\nInterrupted.\n\Z"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 1 GB"), 2, "error: The device is out of memory"),
        (failing_save(OSError("full")), 2, "error: Writing to the workdir failed."),
        (LOSS, LOST, "error: INTERNAL: Gloo all-reduce failed: .*lost.*resume from the last checkpoint"),
        (failing_save(LOSS), LOST, "error: INTERNAL: Gloo all-reduce failed: .*lost.*resume from the last checkpoint"),
    ],
    ids=["user", "bug", "interrupt", "callback", "memory", "disk", "collective", "save"],
)
def test_the_status_of_an_error(monkeypatch, capsys, error, status, says):
    def leave(status):
        raise LeftError(status)

    monkeypatch.setattr(processes, "initialize", lambda *args, **settings: None)
    monkeypatch.setattr(processes, "leave", leave)
    with pytest.raises(LeftError) as caught, processes.joined():
        raise error
    assert caught.value.args == (status,)
    assert re.search(says, capsys.readouterr().err)


def start(code, log, *, index, port, count=2, platform="cpu"):
    """Start Python code as one process of several, with an environment as bare as that of a scheduler."""
    env = {name: value for name, value in support.environment().items() if name != "PYTHONUNBUFFERED"}
    env |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
    env |= {"JAX_PROCESS_ID": str(index), "JAX_LOCAL_DEVICE_IDS": str(index), "JAX_PLATFORMS": platform}
    env |= {"XLA_FLAGS": ""}  # one CPU device
    with log.open("w") as file:
        return subprocess.Popen([sys.executable, "-c", code], cwd=support.ROOT, env=env, stdout=file, stderr=file)


MEET = """
from seqjax.training.processes import joined
from seqjax.command_line import run_command

def main(argv):
    with joined(start_seconds=1):
        print("met", flush=True)

run_command(main)
"""


def test_a_port_that_is_taken_is_named(initialize):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f" listen .* {port},.*--coordinator_address"):
            initialize({}, f"127.0.0.1:{port}", 2, 0)
    assert initialize({}, f"127.0.0.1:{port}", 2, 0)[0] == f"127.0.0.1:{port}"


def test_who_waits_in_vain_ends(tmp_path):
    """JAX aborts it, the first process and another one; what it waited for stands above JAX's words."""
    ports, logs = (free_port(), free_port()), (tmp_path / "0", tmp_path / "1")
    started = [start(MEET, log, index=i, port=port) for i, (log, port) in enumerate(zip(logs, ports, strict=True))]
    try:
        statuses = [process.wait(timeout=PATIENCE) for process in started]
    finally:
        for process in started:
            process.kill()
    assert statuses == [-signal.SIGABRT] * 2
    for log, port in zip(logs, ports, strict=True):
        text = log.read_text()
        assert re.search(rf"Waiting at 127\.0\.0\.1:{port} .* 1 s ", text)
        assert "DEADLINE_EXCEEDED" in text


# Sums over both devices for ever; nothing of seqjax but the meeting.
COMPUTE = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from seqjax.training.processes import joined

with joined():
    mesh = jax.make_mesh((2,), ("x",))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    x = jax.make_array_from_callback((256, 128), rows, lambda index: np.ones((128, 128), np.float32))
    step = jax.jit(lambda x: x / jnp.sum(x), out_shardings=rows)
    for n in range(10**9):
        x = step(x)
        if n == 20:
            jax.block_until_ready(x)
            print("computing", flush=True)
"""


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("lost", "number"),
    [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)],
    ids=["coordinator", "killed", "stopped"],
)
@pytest.mark.slow
def test_the_other_ends_within_a_minute(tmp_path, platform, lost, number):
    if platform == "cuda" and jax.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, one for each process, here is {jax.device_count()}")
    port, logs, started = free_port(), [tmp_path / "0", tmp_path / "1"], []
    try:
        for index, log in enumerate(logs):
            started.append(start(COMPUTE, log, index=index, port=port, platform=platform))
        deadline = time.monotonic() + PATIENCE
        while not all("computing" in log.read_text() for log in logs):
            assert time.monotonic() < deadline
            assert [process.poll() for process in started] == [None, None], [log.read_text() for log in logs]
            time.sleep(0.1)
        begin = time.monotonic()
        started[lost].send_signal(number)
        assert started[1 - lost].wait(timeout=PATIENCE) in LOST_STATUSES, logs[1 - lost].read_text()
        assert time.monotonic() - begin < 60
    finally:
        for process in started:
            process.kill()
            process.wait()
    says = r"another process of the run is lost|another task died"
    assert re.search(says, logs[1 - lost].read_text()), logs[1 - lost].read_text()
