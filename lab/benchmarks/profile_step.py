"""Profile where a training step spends its time.

    python -m lab.benchmarks.profile_step [--mixers=a,b] [--size=110m] [--top=12] [--devices=4 [--layout=seq]]

The script runs the step from `benchmarks.train_step` under JAX's profiler and sums kernel times. It sums them by model
part (named scopes mixer, mlp, loss, optimizer; forward, backward, recomputation). Then it lists the slowest kernels,
each with its XLA source operation and output shape. "Idle" is the time between kernels. --devices=N runs a
data-parallel step over N devices with --batch sequences each; --layout selects another layout, as in
`benchmarks.train_step`. Times are means over devices. "Exposed" is the time in collectives without any other running
kernel. Results go to benchmarks/results/profile_step.json; quick, partial and multi-device runs write to
runs/benchmarks/.

XLA runs parts of a step as CUDA graphs, and the profiler shows each graph as one kernel. Set
XLA_FLAGS=--xla_gpu_enable_command_buffer= to see their kernels.
"""

from benchmarks.harness import options

FLAGS = options.flags(__doc__, quick="the debug size, as on a CPU")
FLAGS.add_argument("--mixers", type=options.words, default=[], help="only these configs; all by default")
FLAGS.add_argument("--size", default="110m", help="size of the configs (110m)")
FLAGS.add_argument("--batch", type=int, default=16, help="sequences per step (16)")
FLAGS.add_argument("--seq_len", type=int, default=2048, help="tokens per sequence (2048)")
FLAGS.add_argument("--devices", type=int, default=0, help="data parallel over so many; without it one")
FLAGS.add_argument("--layout", default="data", choices=["data", "fsdp", "seq"], help="with --devices (data)")
FLAGS.add_argument("--remat", default="none", choices=["none", "full", "dots", "attention"], help="(none)")
FLAGS.add_argument("--top", type=int, default=12, help="kernels to list (12)")
FLAGS.add_argument("--seconds", type=float, default=480, help="begin no further architecture after so many (480)")
options.parse_early(FLAGS, __name__)

import collections
import re
import time
from typing import Any

import jax

from benchmarks import train_step
from benchmarks.harness import report
from benchmarks.harness.configs import chosen, configured
from benchmarks.harness.machine import machine
from benchmarks.harness.trace import Kernel, profiled
from seqjax.command_line import run_command

PARTS = ("mixer", "mlp", "loss", "optimizer")
# Long tuples have a comment at every fifth element: (f32[8]{0}, ..., /*index=5*/f32[8]{0}).
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(?[\w\[\],{}: /*=]*?[\])}]\)?) ([\w\-]+)\(")
OP_NAME = re.compile(r'op_name="([^"]*)"')
NOISE = re.compile(
    r"jit\(\w+\)|while|body|closed_call|checkpoint|rematted_computation|jvp\(\)|transpose\(jvp\(\)\)|cond"
)


def instructions(hlo: str) -> dict[str, tuple[str, str]]:
    """Parse a compiled program's text into {instruction: (source operation, output shape)}."""
    by_name = {}
    for line in hlo.splitlines():
        match = INSTRUCTION.match(line)
        if match:
            source = OP_NAME.search(line)
            shape = re.sub(r"\{[^}]*\}|/\*[^*]*\*/", "", match[2])
            by_name[match[1]] = (source[1] if source else "", shape)
    return by_name


def part(op_name: str) -> str:
    """Return an operation's named scope and direction."""
    inner = next((p for p in PARTS if re.search(rf"\b{p}\b", op_name)), "other")
    if "rematted_computation" in op_name:
        return f"{inner}, again"
    if "transpose(" in op_name:
        return f"{inner}, backward"
    return inner if inner in ("optimizer", "other") else f"{inner}, forward"


def tail(op_name: str) -> str:
    """Return an operation's path without the surrounding control flow."""
    return "/".join([p for p in op_name.split("/") if p and not NOISE.fullmatch(p)][-3:])


def covered_ms(ran: list[Kernel]) -> float:
    """Return the milliseconds in which at least one of the kernels ran."""
    total, until = 0.0, 0.0
    for kernel in sorted(ran, key=lambda k: k.start):
        total += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return total / 1e6


def profile(stepper: train_step.Stepper, *, steps: int) -> dict[str, Any]:
    """Return milliseconds per step and device: by part, by kernel, idle, and in exposed collectives."""
    known = instructions(stepper.compiled.as_text())
    ran = profiled(stepper, calls=steps)
    wall = (max(k.end for k in ran) - min(k.start for k in ran)) / 1e6 / steps if ran else 0.0
    by_device: dict[str, list[Kernel]] = collections.defaultdict(list)
    parts: dict[str, float] = collections.defaultdict(float)
    # each unrolled layer has its own kernel; their names differ only in a trailing number
    groups: dict[tuple[str, ...], list[float]] = collections.defaultdict(list)
    for kernel in ran:
        by_device[kernel.device].append(kernel)
    n = steps * max(1, len(by_device))
    for kernel in ran:
        op_name, shape = known.get(kernel.name, ("", ""))
        where, ms = "collectives" if kernel.is_collective else part(op_name), (kernel.end - kernel.start) / 1e6
        parts[where] += ms / n
        name = re.sub(r"[.\d]+$", "", kernel.name)
        name = kernel.symbol if name == "triton_kernel_call" else name  # this name is shared by all Triton kernels here
        groups[name, shape, where, tail(op_name)].append(ms)
    rows = [
        {"kernel": name, "ms": sum(each) / n, "calls": len(each) / n, "part": where, "from": path, "shape": shape}
        for (name, shape, where, path), each in groups.items()
    ]
    rows.sort(key=lambda row: -row["ms"])
    busy = sum(covered_ms(each) for each in by_device.values()) / n
    alone = sum(covered_ms([k for k in each if not k.is_collective]) for each in by_device.values()) / n
    return {
        "step_ms": wall, "idle_ms": wall - busy, "exposed_ms": busy - alone, "parts": dict(parts), "kernels": rows,
    }  # fmt: skip


def show(name: str, result: dict[str, Any], top: int) -> None:
    """Print two short tables."""
    print(
        f"\n{name}: {result['step_ms']:.1f} ms a step, idle {result['idle_ms']:.1f}, "
        f"collectives alone {result['exposed_ms']:.1f}"
    )
    for label, ms in sorted(result["parts"].items(), key=lambda item: -item[1]):
        print(f"  {label:<22}{ms:8.2f} ms{ms / result['step_ms']:7.1%}")
    for row in result["kernels"][:top]:
        print(
            f"    {row['ms']:7.2f} ms {row['calls']:6.0f}x  {row['part']:<18} {row['kernel'][:34]:<34} "
            f"{row['shape'][:44]:<44} {row['from']}"
        )


def main(argv: list[str]) -> None:
    """Profile each model."""
    args = FLAGS.parse_args(argv)
    quick = args.quick or jax.default_backend() == "cpu"
    size, batch, seq_len = ("debug", 0, 0) if quick else (args.size, args.batch, args.seq_len)
    train_step.check_devices(args.devices, [args.layout])
    written: dict[str, Any] = {"machine": machine(), "results": {}}
    path = options.destination(args.json, "profile_step", recorded=not (quick or args.mixers or args.devices))
    start = time.monotonic()
    for name in chosen(args.mixers):
        if time.monotonic() - start > args.seconds:
            print(f"{name}: not profiled, --seconds={args.seconds} reached")
            continue
        config = configured(name, size, batch=batch, seq_len=seq_len, remat=args.remat)
        if args.devices:
            layouts = train_step.layouts(config, args.devices, [args.layout])
            config = layouts[f"{args.layout}={args.devices}"]
        devices = jax.devices()[: args.devices or 1]
        result = profile(train_step.Stepper(config, devices), steps=3)
        show(name, result, args.top)
        written["results"][name] = {**result, "kernels": result["kernels"][:40]}
        report.save(path, written)
    print(f"Wrote {path}.")


if __name__ == "__main__":
    run_command(main)
