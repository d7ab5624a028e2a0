"""Two processes whose devices compute together, of which one is lost: on two CPUs, and on two GPUs of one host."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from seqjax.errors import LOST
from tests import support

PATIENCE = 150.0  # seconds; far longer than it takes
# Sums over both devices for ever; nothing of seqjax but the membership.
COMPUTE = """
import os
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from seqjax.distributed.membership import join
from seqjax.distributed.place import find_place

with join(find_place(os.environ)):
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
    ("lost", "number", "says"),
    [
        (0, signal.SIGKILL, "gone without a word"),
        (1, signal.SIGKILL, "gone without a word"),
        (1, signal.SIGSTOP, "not been heard of for 30 s"),
    ],
    ids=["coordinator", "killed", "stopped"],
)
@pytest.mark.slow
def test_the_other_ends_within_a_minute_and_names_it(tmp_path, platform, lost, number, says):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    logs, started = [tmp_path / "0", tmp_path / "1"], []
    try:
        for index, log in enumerate(logs):
            env = os.environ | {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
            env |= {"JAX_PROCESS_ID": str(index), "JAX_LOCAL_DEVICE_IDS": str(index), "JAX_PLATFORMS": platform}
            env |= {"XLA_FLAGS": ""}  # one CPU device
            with log.open("w") as file:
                command = [sys.executable, "-c", COMPUTE]
                started.append(subprocess.Popen(command, cwd=support.ROOT, env=env, stdout=file, stderr=file))
        deadline = time.monotonic() + PATIENCE
        while not all("computing" in log.read_text() for log in logs):
            assert time.monotonic() < deadline
            assert [process.poll() for process in started] == [None, None], [log.read_text() for log in logs]
            time.sleep(0.1)
        begin = time.monotonic()
        started[lost].send_signal(number)
        assert started[1 - lost].wait(timeout=PATIENCE) == LOST, logs[1 - lost].read_text()
        assert time.monotonic() - begin < 60
    finally:
        for process in started:
            process.kill()
            process.wait()
    who = rf"^error: Process {lost} \(pid {started[lost].pid}\) on {re.escape(socket.gethostname())} "
    assert re.search(rf"{who}(is|has) {says}", logs[1 - lost].read_text(), re.MULTILINE)
