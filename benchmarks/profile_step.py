"""Where a training step's time goes: `python -m benchmarks.profile_step --mixers=a,b [--size=110m] [--top=12]`.

Runs the step of `benchmarks.train_step` under JAX's profiler and adds up the device's kernels: first by part of the
model (the named scopes mixer, mlp, loss, optimizer; forward, backward, or computed again for it), then the kernels that
take longest, each with the operation that XLA says it came from and the shape that it writes. Idle is what the device
waited between kernels. Writes benchmarks/results/profile_step.json.
"""

import collections
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from benchmarks import train_step

PARTS = ("mixer", "mlp", "loss", "optimizer")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(?[\w\[\],{}: ]*?[\])}]\)?) ([\w\-]+)\(")
OP_NAME = re.compile(r'op_name="([^"]*)"')
NOISE = re.compile(
    r"jit\(\w+\)|while|body|closed_call|checkpoint|rematted_computation|jvp\(\)|transpose\(jvp\(\)\)|cond"
)


def instructions(hlo: str) -> dict[str, tuple[str, str]]:
    """{instruction: (operation that it came from, shape that it writes)} of a compiled program's text."""
    found = {}
    for line in hlo.splitlines():
        match = INSTRUCTION.match(line)
        if match:
            source = OP_NAME.search(line)
            shape = re.sub(r"\{[^}]*\}", "", match[2])
            found[match[1]] = (source[1] if source else "", shape)
    return found


def part(op_name: str) -> str:
    """Which named scope an operation belongs to, and in which direction."""
    inner = next((p for p in PARTS if re.search(rf"\b{p}\b", op_name)), "other")
    if "rematted_computation" in op_name:
        return f"{inner}, again"
    if "transpose(" in op_name:
        return f"{inner}, backward"
    return inner if inner in ("optimizer", "other") else f"{inner}, forward"


def tail(op_name: str) -> str:
    """An operation's path without the control flow around it."""
    return "/".join([p for p in op_name.split("/") if p and not NOISE.fullmatch(p)][-3:])


def kernels(directory: str) -> tuple[list[tuple[str, float]], float]:
    """[(instruction, ms)] of every kernel in a trace, and the ms from the first to the last of them."""
    path = next(Path(directory).glob("**/*.xplane.pb"))
    events, spans = [], []
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        # a GPU lists kernels by stream; a CPU has threads of the host instead
        on_device = plane.name.startswith("/device:")
        if not on_device and not (jax.default_backend() == "cpu" and "CPU" in plane.name):
            continue
        for row in plane.lines:
            if on_device and not row.name.startswith("Stream"):
                continue
            for event in row.events:
                name = dict(event.stats).get("hlo_op")
                if name is not None and event.duration_ns > 0 and not str(name).startswith(("while", "call")):
                    events.append((str(name), event.duration_ns / 1e6))
                    spans.append((event.start_ns, event.start_ns + event.duration_ns))
    wall = (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e6 if spans else 0.0
    return events, wall


def profile(config: Any, *, steps: int) -> dict[str, Any]:
    """Milliseconds per step: by part, by kernel, idle."""
    _, compiled, _, state, tokens = train_step.prepare(config)
    known = instructions(compiled.as_text())
    for _ in range(3):
        state, _ = compiled(state, tokens)
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(steps):
                state, _ = compiled(state, tokens)
            jax.block_until_ready(state)
        events, wall = kernels(directory)
    parts: dict[str, float] = collections.defaultdict(float)
    # unrolled layers have a kernel each, which differ in a number at the end of their names
    groups: dict[tuple[str, ...], list[float]] = collections.defaultdict(list)
    for name, ms in events:
        op_name, shape = known.get(name, ("", ""))
        parts[part(op_name)] += ms / steps
        groups[re.sub(r"[.\d]+$", "", name), shape, part(op_name), tail(op_name)].append(ms)
    rows = [
        {
            "kernel": name,
            "ms": sum(each) / steps,
            "calls": len(each) / steps,
            "part": where,
            "from": path,
            "shape": shape,
        }
        for (name, shape, where, path), each in groups.items()
    ]
    rows.sort(key=lambda row: -row["ms"])
    busy = sum(parts.values())
    return {"step_ms": wall / steps, "idle_ms": wall / steps - busy, "parts": dict(parts), "kernels": rows}


def show(name: str, result: dict[str, Any], top: int) -> None:
    """Two short tables."""
    print(f"\n{name}: {result['step_ms']:.1f} ms a step, idle {result['idle_ms']:.1f}")
    for label, ms in sorted(result["parts"].items(), key=lambda item: -item[1]):
        print(f"  {label:<22}{ms:8.2f} ms{ms / result['step_ms']:7.1%}")
    for row in result["kernels"][:top]:
        print(
            f"    {row['ms']:7.2f} ms {row['calls']:6.0f}x  {row['part']:<18} {row['kernel'][:34]:<34} "
            f"{row['shape'][:44]:<44} {row['from']}"
        )


def main(argv: list[str]) -> None:
    """Profile one after the other."""
    del argv
    given: Any = flags.FLAGS
    quick = given.quick or jax.default_backend() == "cpu"
    size, batch, seq_len = ("debug", 0, 0) if quick else (given.size, given.batch, given.seq_len)
    report: dict[str, Any] = {"machine": train_step.machine(), "results": {}}
    path, start = Path(given.json), time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in given.mixers or train_step.names():
        if time.monotonic() - start > given.seconds:
            print(f"{name}: not profiled, --seconds={given.seconds} are over")
            continue
        result = profile(train_step.configured(name, size, batch=batch, seq_len=seq_len), steps=3)
        show(name, result, given.top)
        report["results"][name] = {**result, "kernels": result["kernels"][:40]}
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    flags.DEFINE_bool("quick", False, "The debug size, as on a CPU.")
    flags.DEFINE_list("mixers", [], "Only these files of configs/; all by default.")
    flags.DEFINE_string("size", "110m", "Size of the configs.")
    flags.DEFINE_integer("batch", 16, "Sequences per step.")
    flags.DEFINE_integer("seq_len", 2048, "Tokens per sequence.")
    flags.DEFINE_integer("top", 12, "Kernels to list.")
    flags.DEFINE_float("seconds", 480, "Begin no further architecture after so many seconds.")
    flags.DEFINE_string("json", "benchmarks/results/profile_step.json", "Where the report goes.")
    app.run(main)
