"""For those who count operations: ops as accelerators compute them, whatever device counts."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from kernels_pallas.selective_scan import xla, xla_cpu


@contextlib.contextmanager
def as_on_accelerators() -> Iterator[None]:
    """Return a context that traces the operations of the `xla` backend on accelerators, to count them on a CPU.

    The selective scan differs: 9 FLOPs per channel and state are usual, and the loop of a CPU has 6 and an exponential.
    """
    with mock.patch.object(xla_cpu, "forward", xla.forward):
        yield
