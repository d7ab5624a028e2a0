"""Read the kernels of a profile: `jax.profiler` traces, as used by benchmarks.scans and lab.benchmarks.profile_step."""

import collections
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.harness.timing import seconds_per_call

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


class Kernel(NamedTuple):
    """An executed kernel: device, program instruction, time in nanoseconds, and symbol name."""

    device: str
    name: str
    start: float
    end: float
    symbol: str = ""

    @property
    def is_collective(self) -> bool:
        """Whether the kernel exchanges data between devices."""
        return self.name.startswith(COLLECTIVES)


def kernels(directory: str) -> list[Kernel]:
    """Return all kernels in the trace in `directory`."""
    path = next(Path(directory).glob("**/*.xplane.pb"))
    ran = []
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        # GPU traces list kernels by stream; CPU traces have host threads instead
        on_device = plane.name.startswith("/device:")
        if not on_device and not (jax.default_backend() == "cpu" and "CPU" in plane.name):
            continue
        for row in plane.lines:
            if on_device and not row.name.startswith("Stream"):
                continue
            for event in row.events:
                name = dict(event.stats).get("hlo_op")
                if name is not None and event.duration_ns > 0 and not str(name).startswith(("while", "call")):
                    end = event.start_ns + event.duration_ns
                    ran.append(Kernel(plane.name, str(name), event.start_ns, end, event.name))
    return ran


def profiled(call: Callable[[], Any], *, calls: int) -> list[Kernel]:
    """Return the kernels of some calls, after three calls without a profile."""
    seconds_per_call(call, calls=3, repeats=1)
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            seconds_per_call(call, calls=calls, repeats=1)
        return kernels(directory)


def kernel_ms(call: Callable[[], Any], *, calls: int = 10) -> dict[str, float]:
    """Return the milliseconds per call of each kernel, by name, longest first.

    Numbers at the end of a name are dropped. The times have no gaps between kernels.
    """
    total: dict[str, float] = collections.defaultdict(float)
    for kernel in profiled(call, calls=calls):
        total[re.sub(r"[._\d]+$", "", kernel.symbol)] += (kernel.end - kernel.start) / 1e6 / calls
    return dict(sorted(total.items(), key=lambda item: -item[1]))
