"""Minimal work of a kernel, and a device's time for it.

Counts are of the algorithm, not of any implementation: each input is read once, each output written once, and only
causal pairs count. Only the recomputation of flash attention's backward pass is included. The limit of a phase is the
largest of three times: floating-point operations on the matrix units, bytes over memory bandwidth, exponentials on the
special-function units (16 per clock and multiprocessor). Limits of consecutive phases add up.
"""

from typing import NamedTuple

import jax


class Device(NamedTuple):
    """Measured device rates, not datasheet values."""

    flops: float  # bf16 matrix product, FLOP/s
    bytes: float  # device-to-device copy, read plus written, B/s
    exps: float  # 16 per clock and multiprocessor, 1/s


# H200: an 8192^3 product and an 8.6 GB copy; A100: datasheet. Exponentials: multiprocessors x clock x 16.
DEVICES = {
    "H200": Device(790e12, 4.3e12, 132 * 1.755e9 * 16),
    "H100": Device(790e12, 3.0e12, 132 * 1.755e9 * 16),
    "A100": Device(312e12, 2.0e12, 108 * 1.41e9 * 16),
}


class Work(NamedTuple):
    """Work of a phase; phases can be added or converted to a time."""

    flops: float
    bytes: float
    exps: float = 0.0

    def limit_s(self, device: Device) -> float:
        """Return the lower bound in seconds for the device's rates."""
        return max(self.flops / device.flops, self.bytes / device.bytes, self.exps / device.exps)


class Sizes(NamedTuple):
    """A self-attention problem with equal numbers of query and key-value heads."""

    B: int
    T: int
    H: int
    K: int
    C: int = 128  # chunk
    window: int = 256
    itemsize: int = 2


def device() -> Device | None:
    """Return the first device's rates, None if unknown."""
    kind = jax.devices()[0].device_kind
    return next((rates for name, rates in DEVICES.items() if name in kind), None)


def phases(case: str, n: Sizes) -> tuple[list[Work], list[Work]]:
    """Return forward phases and backward phases of a case of benchmarks.kernels."""
    tensor = n.B * n.T * n.H * n.K * n.itemsize
    queries = n.B * n.T * n.H
    pairs = queries * n.T / 2  # causal
    select = {
        "exact": Work(2 * n.K * pairs, 2 * tensor, pairs),
        "best_key": Work(2 * n.K * pairs, 2 * tensor),
        "best_key_int8": Work(n.K * pairs, 2 * tensor),  # at twice the rate
        "approx": Work(2 * n.K * pairs / n.C, 2 * tensor),
        "shortlist": Work(2 * n.K * (pairs / n.C + 4 * n.C * queries), 2 * tensor),  # four candidates by mean key
    }
    if case == "attention":
        return [Work(4 * n.K * pairs, 4 * tensor, pairs)], [Work(10 * n.K * pairs, 8 * tensor, pairs)]
    if case == "window":
        near = queries * min(n.window, n.T / 2)
        return [Work(4 * n.K * near, 4 * tensor, near)], [Work(10 * n.K * near, 8 * tensor, near)]
    if case == "element":  # forward: only scores. The gradient of v needs no product
        return [Work(2 * n.K * pairs, 4 * tensor)], [Work(8 * n.K * pairs, 8 * tensor, pairs)]
    if case.startswith("select-"):
        return [select[case.split("-")[1]]], []
    if case.startswith("chunk-"):
        read = queries * (n.C + (n.C + 1) / 2)  # the selected chunk and half of the current chunk
        attend = Work(4 * n.K * read, 4 * tensor, read)
        return [select[case.removeprefix("chunk-")], attend], [Work(10 * n.K * read, 8 * tensor, read)]
    raise ValueError(f"no count for case {case!r}")


def training_phases(case: str, n: Sizes) -> list[Work]:
    """Return forward and backward phases of training.

    Element's differentiated forward equals attention's forward with one more output, the soft one.
    """
    forward, backward = phases(case, n)
    if case == "element":
        attention = phases("attention", n)[0][0]
        forward = [attention._replace(bytes=attention.bytes * 5 / 4)]
    return forward + backward


def total(works: list[Work]) -> Work:
    """Return the sum of phases."""
    return Work(*(sum(x) for x in zip(*works, strict=True)))
