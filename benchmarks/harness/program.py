"""What a compiled program does on a device, read off its text: kernels, the bytes that they move, those exchanged."""

import math
import re
from collections import Counter
from typing import NamedTuple

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", re.M | re.S)
INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\(([^)]*)\)(.*)$", re.M)
COLLECTIVE = re.compile(rf"({KINDS})(-start)?$")
NAME = re.compile(r"%([\w.-]+)")
ARRAY = re.compile(r"\b([a-z]+\d*)\w*\[([\d,]*)\]")
CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.-]+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')

CONTROL = ("while", "call", "conditional", "async-start")  # what they call are kernels, they themselves are none
NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id")
WORKSPACES = ("s8", "u8")
SLICES = ("dynamic-slice", "slice", "gather")


class Instruction(NamedTuple):
    """A line of a computation: `given` is what stands in parentheses, `rest` what follows them."""

    root: str
    name: str
    shape: str
    op: str
    given: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """Names."""
        return NAME.findall(self.given)


class Work(NamedTuple):
    """The kernels of a run on one device, the bytes that they read and write, and those exchanged, by operation."""

    kernels: int
    bytes: int
    exchanged: Counter[str]


def work(program: str) -> Work:
    """Return the work of one run.

    The body of a loop counts as often as it runs, where XLA says how often; else once, as both sides of a condition. A
    kernel reads its operands, one that it has twice once, and writes its results; of an array that it only cuts a slice
    from, or puts one into, the slice. Workspaces of libraries, which are arrays of bytes, count as nothing, and what a
    cache keeps from one kernel to the next as read from memory.
    """
    found = [(entry, name, INSTRUCTION.findall(body)) for entry, name, body in COMPUTATION.findall(program)]
    computations = {name: [Instruction(*line) for line in lines] for _, name, lines in found}
    totals: dict[str, Counter[str]] = {}

    def of(name: str) -> Counter[str]:
        if name not in totals:
            totals[name] = total = Counter()
            lines = computations.get(name, [])
            shapes = {line.name: line.shape for line in lines}
            for line in lines:
                if line.op in CONTROL:
                    trips = int(times[1]) if (times := TRIPS.search(line.rest)) else 1
                    for called in CALLED.findall(line.rest):
                        total.update({kind: trips * size for kind, size in of(called).items()})
                elif line.op not in NOTHING and not line.op.endswith("-done"):
                    total.update(kernels=1, bytes=_moved(line, shapes, computations))
                    if collective := COLLECTIVE.match(line.op):
                        total[collective[1]] += _bytes(line.shape, started=collective[2] is not None)
        return totals[name]

    total = Counter(of(next(name for entry, name, _ in found if entry)))
    return Work(total.pop("kernels", 0), total.pop("bytes", 0), total)


def _moved(line: Instruction, shapes: dict[str, str], computations: dict[str, list[Instruction]]) -> int:
    """Return the bytes that a kernel reads and writes."""
    if line.op == "fusion":
        return _inside(computations[CALLED.findall(line.rest)[0]])
    given = [Instruction("", name, shapes.get(name, ""), "parameter", "", "") for name in dict.fromkeys(line.operands)]
    return _inside([*given, line._replace(root="ROOT")])


def _inside(lines: list[Instruction]) -> int:
    """Return the bytes that go into a fused computation, by its parameters, and out of it, by its root."""
    by_name = {line.name: line for line in lines}

    def read(name: str) -> int:
        whole, parts = _bytes(by_name[name].shape), 0
        for user in lines:
            if name in user.operands:
                if user.op == "bitcast":
                    parts += read(user.name)
                elif user.op in SLICES and user.operands[0] == name:
                    parts += _bytes(user.shape)
                elif user.op != "dynamic-update-slice" or user.operands[0] != name:
                    return whole
        return min(whole, parts)

    def written(line: Instruction) -> int:
        if line.op == "tuple":
            return sum(written(by_name[name]) for name in line.operands)
        if line.op == "bitcast":
            return written(by_name[line.operands[0]])
        if line.op == "dynamic-update-slice":
            return _bytes(by_name[line.operands[1]].shape)
        return 0 if line.op == "parameter" else _bytes(line.shape)

    root = next(line for line in lines if line.root)
    return sum(read(line.name) for line in lines if line.op == "parameter") + written(root)


def _bytes(shape: str, *, started: bool = False) -> int:
    """Return the bytes of a shape; of an operation that is only started, it holds the operands and then the results."""
    arrays = [(kind, math.prod(int(n) for n in dims.split(",") if n)) for kind, dims in ARRAY.findall(shape)]
    sizes = [_size(kind) * n for kind, n in arrays if kind not in WORKSPACES or n == 1]
    return sum(sizes[len(sizes) // 2 :] if started and len(sizes) > 1 else sizes)


def _size(kind: str) -> int:
    """Return the bytes of a number of a kind, as "bf16" or "pred"."""
    bits = re.sub(r"\D", "", kind)
    return max(1, int(bits) // 8) if bits else 1
