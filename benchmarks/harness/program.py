"""Counts kernels, moved bytes and exchanged bytes of a compiled program from its text."""

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

CONTROL = ("while", "call", "conditional", "async-start")  # not kernels themselves; their computations hold kernels
NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id")
WORKSPACES = ("s8", "u8")
SLICES = ("dynamic-slice", "slice", "gather")


class Instruction(NamedTuple):
    """A line of a computation: `arguments` is the text in parentheses, `rest` the text after it."""

    root: str
    name: str
    shape: str
    op: str
    arguments: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """Return the operand names."""
        return NAME.findall(self.arguments)


class Work(NamedTuple):
    """Kernels of one execution on one device, bytes read and written, and bytes exchanged by operation."""

    kernels: int
    bytes: int
    exchanged: Counter[str]


def work(program: str) -> Work:
    """Return the work of one execution.

    A loop body counts once per trip if XLA states the trip count, otherwise once. Both sides of a condition count. A
    kernel reads each distinct operand once and writes its results; for a slice of an array, only the slice counts.
    Library workspaces (byte arrays) do not count. Caches are ignored: every operand is read from memory.
    """
    matches = [(entry, name, INSTRUCTION.findall(body)) for entry, name, body in COMPUTATION.findall(program)]
    computations = {name: [Instruction(*line) for line in lines] for _, name, lines in matches}
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

    total = Counter(of(next(name for entry, name, _ in matches if entry)))
    return Work(total.pop("kernels", 0), total.pop("bytes", 0), total)


def _moved(line: Instruction, shapes: dict[str, str], computations: dict[str, list[Instruction]]) -> int:
    """Return the bytes that a kernel reads and writes."""
    if line.op == "fusion":
        return _inside(computations[CALLED.findall(line.rest)[0]])
    parameters = [
        Instruction("", name, shapes.get(name, ""), "parameter", "", "") for name in dict.fromkeys(line.operands)
    ]
    return _inside([*parameters, line._replace(root="ROOT")])


def _inside(lines: list[Instruction]) -> int:
    """Return the bytes that a fused computation reads (parameters) and writes (root)."""
    by_name = {line.name: line for line in lines}

    def read(name: str) -> int:
        size, parts = _bytes(by_name[name].shape), 0
        for user in lines:
            if name in user.operands:
                if user.op == "bitcast":
                    parts += read(user.name)
                elif user.op in SLICES and user.operands[0] == name:
                    parts += _bytes(user.shape)
                elif user.op != "dynamic-update-slice" or user.operands[0] != name:
                    return size
        return min(size, parts)

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
    """Return the bytes of a shape; the shape of a started operation holds operands, then results."""
    arrays = [(kind, math.prod(int(n) for n in dims.split(",") if n)) for kind, dims in ARRAY.findall(shape)]
    sizes = [_size(kind) * n for kind, n in arrays if kind not in WORKSPACES or n == 1]
    return sum(sizes[len(sizes) // 2 :] if started and len(sizes) > 1 else sizes)


def _size(kind: str) -> int:
    """Return the bytes per element of a type such as "bf16" or "pred"."""
    bits = re.sub(r"\D", "", kind)
    return max(1, int(bits) // 8) if bits else 1
