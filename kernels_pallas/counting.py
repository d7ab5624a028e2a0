"""Count an op's operations as on an accelerator, on any device."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from kernels_pallas.selective_scan import xla, xla_cpu


@contextlib.contextmanager
def as_on_accelerators() -> Iterator[None]:
    """Return a context that traces the accelerators' `xla` backend on a CPU.

    Use it to count operations. Only the selective scan differs: accelerators do the usual 9 FLOPs per channel and
    state. The CPU loop does 6 and an exponential.
    """
    with mock.patch.object(xla_cpu, "forward", xla.forward):
        yield
