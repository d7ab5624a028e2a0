"""How many bytes a compiled program exchanges between devices, by kind of collective operation."""

import math
import re
from collections import Counter

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", re.M | re.S)
COLLECTIVE = re.compile(rf" = (.*?) ({KINDS})(-start)?\(")
ARRAY = re.compile(r"\b([a-z]+\d*)\w*\[([\d,]*)\]")
CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.-]+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def exchanged(program: str) -> Counter[str]:
    """Return by kind the result bytes of a program's collective operations on a device, for one run.

    The body of a loop counts as often as it runs, where XLA says how often; else once, as both sides of a condition.
    """
    computations = {name: (entry, body) for entry, name, body in COMPUTATION.findall(program)}
    found: dict[str, Counter[str]] = {}

    def of(name: str) -> Counter[str]:
        if name not in found:
            found[name] = total = Counter()
            for line in computations.get(name, ("", ""))[1].splitlines():
                if made := COLLECTIVE.search(line):
                    total[made[2]] += _bytes(made[1], started=made[3] is not None)
                    continue
                trips = int(times[1]) if (times := TRIPS.search(line)) else 1
                for called in CALLED.findall(line):
                    total.update({kind: trips * size for kind, size in of(called).items()})
        return found[name]

    return of(next(name for name, (entry, _) in computations.items() if entry))


def _bytes(shape: str, *, started: bool) -> int:
    """Return the bytes of a shape; of an operation that is only started, it holds the operands and then the results."""
    sizes = [_size(kind) * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in ARRAY.findall(shape)]
    return sum(sizes[len(sizes) // 2 :] if started and len(sizes) > 1 else sizes)


def _size(kind: str) -> int:
    """Return the bytes of a number of a kind, as "bf16" or "pred"."""
    bits = re.sub(r"\D", "", kind)
    return max(1, int(bits) // 8) if bits else 1
