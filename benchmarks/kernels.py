"""Time the attention and selection kernels by implementation and length:

    python -m benchmarks.kernels [--quick] [--cpu_table] [--lengths=2048,102400] [--cases=element]

Operands: 12 heads of 64, chunks of 128, bf16; 8 sequences at T = 2,048 and one at longer lengths. q and k are random
normal with RMS 1 per head, like the operands of the Top-1 mixers. Cases: Top-1 Chunk and its selection by every rule
(`shortlist` takes four candidates by mean key; `select-exact-top4` and similar cases select several chunks), Top-1
Element, cuDNN attention (full and window 256), and FlashAttention through torch if torch has CUDA. `--cpu_table`
measures the CPU table of docs/kernels.md: 4 heads of 64, float32, one sequence of 512 to 8,192 tokens.

A time is the median over repeats. Each repeat enqueues several calls and waits once. The table also shows the share of
the hardware limit (benchmarks/harness/limits.py) and the memory that XLA reserves. Element's `forward` is evaluation,
without softmax. Results go to benchmarks/results/kernels.json (kernels_cpu.json), written after every measurement, with
a plot at the end. A quick or partial run, or a run with --against, writes to runs/benchmarks/. With
--against=benchmarks/results/kernels.json, each time is also shown relative to that report. Compare times within one run
only: GPU clocks differ between runs.
"""

from benchmarks.harness import options

FLAGS = options.flags(__doc__, quick="two short lengths, as on a CPU")
FLAGS.add_argument("--cpu_table", action="store_true", help="4 heads of 64 in float32, 512 to 8,192 tokens")
FLAGS.add_argument("--lengths", type=options.integers, default=[], help="sequence lengths (2048,8192,32768,102400)")
FLAGS.add_argument("--cases", type=options.words, default=[], help="only these cases; all by default")
FLAGS.add_argument("--seconds", type=float, default=420, help="start no measurement after this time (420)")
FLAGS.add_argument("--against", default="", help="a recorded report to show times relative to")
options.parse_early(FLAGS, __name__)

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")  # leaves memory for torch

import jax
import jax.numpy as jnp
from matplotlib.lines import Line2D

import kernels_pallas as kp
from benchmarks.harness import limits, plot, report, torch_flash
from benchmarks.harness.machine import machine
from benchmarks.harness.timing import measure
from kernels_pallas.select_chunk import xla as select_xla
from kernels_pallas.top1_chunk import api as chunk_api
from kernels_pallas.top1_chunk.xla.attention import MASKED, SORTED
from seqjax import pictures
from seqjax.command_line import run_command
from seqjax.ops.attention import causal_attention

LENGTHS = {2048: 8, 8192: 1, 32768: 1, 102400: 1}  # length: number of sequences
CPU_LENGTHS: dict[int, int] = dict.fromkeys((512, 1024, 2048, 4096, 8192), 1)
RULES = ("exact", "best_key", "best_key_int8", "approx", "shortlist")
CASES = ("attention", "window", *(f"{part}-{rule}" for part in ("chunk", "select") for rule in RULES), "element")
SEVERAL = tuple(f"select-{rule}-top{k}" for rule in RULES[:4] for k in (2, 4, 8))  # only measured with --cases
PASSES = ("forward", "training")
SCHEDULES = {"masked": MASKED, "sorted": SORTED}  # of the xla backend
TABLE = report.Table(
    48,
    (
        report.Column("ms", "ms", ">10.3f"),
        report.Column("tflops", "TFLOP/s", ">10.1f"),
        report.Column("gbytes_per_s", "GB/s", ">8.0f"),
        report.Column("limit_ms", "limit ms", ">10.3f"),
        report.Column("times_limit", "x limit", ">9.2f"),
        report.Column("compiled_bytes", "GiB", ">7.2f", 2**-30),
        report.Column("of_recorded", "/ recorded", ">12.3f"),
    ),
)


def operands(n: limits.Sizes, dtype: str) -> tuple[jax.Array, ...]:
    """Return q, k (normalised), v and a cotangent, each [B, T, H, K]."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (jax.random.normal(key, (n.B, n.T, n.H, n.K), jnp.float32) for key in keys)
    q, k = (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True)) for x in (q, k))
    return tuple(x.astype(dtype) for x in (q, k, v, do))


def function(case: str, implementation: str, n: limits.Sizes) -> Callable:
    """Return f(q, k, v) for a case; "default" lets dispatch choose the selection and attention backends."""
    if case in ("attention", "window"):
        window = n.window if case == "window" else 0
        return partial(causal_attention, window=window, implementation=implementation)
    if case == "element":
        return partial(kp.top1_element_attention, implementation=implementation)
    name, _, schedule = implementation.partition("-")
    (_, selection, *several), name = case.split("-"), None if name == "default" else name
    options: Any = {"chunk_size": n.C, "selection": selection, "implementation": name}
    if several:
        options["top_k"] = int(several[0].removeprefix("top"))
    if case.startswith("select-"):
        return lambda q, k, v: kp.select_chunk(q, k, **options)
    if not schedule:
        return partial(kp.top1_chunk_attention, **options)
    call = chunk_api.Call(select_xla, SCHEDULES[schedule], n.C, selection, n.K**-0.5)
    return lambda q, k, v: chunk_api.attend(q, k, v, call)


def implementations(case: str, *, on_gpu: bool) -> tuple[str, ...]:
    """Return the implementations to measure for a case on this machine, fastest first."""
    if case in ("attention", "window"):
        return ("cudnn",) if on_gpu else ("xla",)
    if not on_gpu:  # approx by schedule; exact takes one by length
        return ("xla-sorted", "xla-masked") if case == "chunk-approx" else ("xla",)
    return {"select-exact": ("triton", "pallas", "xla"), "chunk-exact": ("default", "xla")}.get(case, ("triton", "xla"))


def with_gradient(f: Callable) -> Callable:
    """Return a function (q, k, v, do) -> o and the cotangents of q, k, v."""

    def both(q, k, v, do):
        o, pull = jax.vjp(f, q, k, v)
        return o, pull(do)

    return both


def rated(result: dict[str, Any], works: list[limits.Work], device: limits.Device | None) -> dict[str, Any]:
    """Return a result with its rates and its share of the hardware limit."""
    work, seconds = limits.total(works), result["ms"] / 1e3
    result |= {"tflops": work.flops / seconds / 1e12, "gbytes_per_s": work.bytes / seconds / 1e9}
    if device is not None:
        limit_ms = 1e3 * sum(w.limit_s(device) for w in works)
        result |= {"limit_ms": limit_ms, "times_limit": result["ms"] / limit_ms}
    return result


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the case that a row measures."""
    return tuple(row[name] for name in ("case", "implementation", "T", "B", "pass"))


def line(row: dict[str, Any], recorded_ms: float | None = None) -> str:
    """Return a table row; `recorded_ms` is the same row's time in another report."""
    if recorded_ms is not None and "ms" in row:
        row = {**row, "of_recorded": row["ms"] / recorded_ms}
    return TABLE.row(f"{row['case'] + ' ' + row['implementation']:<30}{row['T']:>8}{row['pass']:>10}", row)


def run(
    cases: Sequence[str],
    lengths: dict[int, int],
    n: limits.Sizes,
    *,
    dtype: str,
    repeats: int,
    call_s: float,
    budget_s: float,
) -> Iterator[dict[str, Any]]:
    """Yield one row per case, implementation, length and pass."""
    on_gpu, device, begin = jax.default_backend() == "gpu", limits.device(), time.monotonic()
    for T, B in lengths.items():
        n = n._replace(B=B, T=T)
        args = operands(n, dtype)
        todo = [(case, name) for case in cases for name in implementations(case, on_gpu=on_gpu)]
        if on_gpu and "attention" in cases and torch_flash.is_available():
            todo.insert(1, ("attention", "flash (torch)"))
        for case, name in todo:
            for direction in PASSES:
                works = limits.phases(case, n)[0] if direction == "forward" else limits.training_phases(case, n)
                if direction == "training" and not limits.phases(case, n)[1]:
                    continue
                row = {"case": case, "implementation": name, "T": T, "B": B, "pass": direction}
                if time.monotonic() - begin > budget_s:
                    yield row | {"error": f"not measured: --seconds={budget_s} reached"}
                    continue
                try:
                    if name == "flash (torch)":
                        result = torch_flash.measure(
                            n, training=direction == "training", repeats=repeats, seconds=call_s
                        )
                    else:
                        f = function(case, name, n)
                        f, inputs = (f, args[:3]) if direction == "forward" else (with_gradient(f), args)
                        result = measure(f, inputs, repeats=repeats, seconds=call_s)
                except (RuntimeError, ValueError, NotImplementedError) as error:
                    yield row | {"error": f"{type(error).__name__}: {error}"}
                    continue
                yield row | rated(result, works, device)


def line_style(implementation: str) -> str:
    """Return the line style: solid for a GPU default or library kernel, dashed for xla, dotted otherwise."""
    if implementation in ("triton", "cudnn", "default"):
        return "-"
    return "-." if implementation == "xla-masked" else "--" if implementation.startswith("xla") else ":"


def plot_report(written: dict[str, Any], path: Path) -> None:
    """Plot time per sequence over length on log-log axes: forward on the left, training on the right."""
    lines: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for row in written["results"]:
        if "error" not in row:
            series = lines.setdefault((row["case"], row["implementation"], row["pass"]), [])
            series.append((row["T"], row["ms"] / row["B"]))
    figure, panels = plot.figure(11, 5, panels=2)
    look: dict[str, Any]
    colors = itertools.cycle(pictures.COLORS)
    cases = list(dict.fromkeys((*CASES, *(row["case"] for row in written["results"]))))
    looks = {c: {"color": next(colors), "marker": m} for c, m in zip(cases, itertools.cycle(plot.MARKERS))}
    ticks = sorted({row["T"] for row in written["results"]})
    ticks = ticks if len(ticks) > 1 else pictures.log_ticks(ticks[0] / 2, ticks[0] * 2)
    for axes, direction in zip(panels, PASSES, strict=True):
        for (case, name, of), points in lines.items():
            if of == direction:
                look = looks[case] | {"linestyle": line_style(name)}
                axes.plot(*zip(*points, strict=True), **look, markersize=4.5, linewidth=1.5)
        axes.set(xscale="log", yscale="log", xlabel="tokens per sequence")
        axes.set_xticks(ticks, [f"{T:,.0f}" for T in ticks])
        axes.minorticks_off()
        axes.grid(color="0.9")
        axes.set_title({"forward": "forward", "training": "forward and backward"}[direction], fontsize=10, loc="left")
    times = pictures.log_ticks(*panels[0].get_ylim())
    panels[0].set_yticks(times, [f"{ms:g}" for ms in times])
    panels[0].set_ylabel("ms per sequence")
    handles = []
    for case in cases:
        if any(case == drawn for drawn, _, _ in lines):
            look = looks[case]
            handles.append(Line2D([], [], **look, markersize=4.5, label=case))
    by_style: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for _, name, _ in lines):
        by_style.setdefault(line_style(name), []).append(name)
    for linestyle, names in by_style.items():
        look = {"linestyle": linestyle, "color": "0.3"}
        handles.append(Line2D([], [], **look, label=", ".join(names)))
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9, handlelength=3)
    n = written["settings"]
    title = f"{n['H']} heads of {n['K']}, {n['dtype']}, {written['machine']['device']}"
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    plot.save(figure, path)


def main(argv: list[str]) -> None:
    """Measure all cases; print and write after each."""
    args = FLAGS.parse_args(argv)
    quick = args.quick or (jax.default_backend() == "cpu" and not args.cpu_table)
    cases = args.cases or CASES
    options.check_known("cases", cases, (*CASES, *SEVERAL))
    if quick:
        n, dtype, lengths, repeats, call_s = limits.Sizes(1, 0, 2, 16, C=64), "float32", {256: 2, 512: 1}, 3, 0.02
    elif args.cpu_table:
        n, dtype, lengths, repeats, call_s = limits.Sizes(1, 0, 4, 64, itemsize=4), "float32", CPU_LENGTHS, 5, 0.1
    else:
        n, dtype, lengths, repeats, call_s = limits.Sizes(1, 0, 12, 64), "bfloat16", LENGTHS, 5, 0.1
    lengths = {T: lengths.get(T, 1) for T in args.lengths} or lengths
    settings = {"H": n.H, "K": n.K, "C": n.C, "window": n.window, "dtype": dtype, "repeats": repeats}
    written: dict[str, Any] = {"machine": machine(), "settings": settings, "results": []}
    recorded = report.load(args.against) if args.against else None
    recorded_ms = {key(row): row["ms"] for row in recorded["results"] if "error" not in row} if recorded else {}
    if recorded:
        print("\n".join(report.differences(written, recorded)))
    is_full_run = not (quick or args.cases or args.lengths or args.against)
    path = options.destination(args.json, "kernels_cpu" if args.cpu_table else "kernels", recorded=is_full_run)
    print(TABLE.header())
    for row in run(cases, lengths, n, dtype=dtype, repeats=repeats, call_s=call_s, budget_s=args.seconds):
        written["results"].append(row)
        print(line(row, recorded_ms.get(key(row))), flush=True)
        report.save(path, written)
    if any("error" not in row for row in written["results"]):
        plot_report(written, path.with_suffix(".png"))
    print(f"Wrote {path}.")


if __name__ == "__main__":
    run_command(main)
