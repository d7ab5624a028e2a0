"""The kernels against attention, by implementation and length:

    python -m benchmarks.kernels [--quick] [--cpu_table] [--lengths=2048,102400] [--cases=element] [--seconds=420]

12 heads of 64, chunks of 128, bf16, 8 sequences at T = 2,048 and one above; q and k are random normal and then
normalised (RMS 1), as the Top-1 mixers do. Top-1 Chunk (exact, approx) and its selection alone, Top-1 Element, each
by implementation, beside cuDNN's attention, full and over a window of 256, and FlashAttention through torch where a
torch with CUDA is installed. All in one run on one card: another run is another clock. `--cpu_table` is smaller: the
CPU table of docs/kernels.md, 4 heads of 64 in float32, one sequence of 512 to 8,192.

A time is the median over repeats of some calls that are enqueued together and waited for once. Beside it: what share of
the device's limit that is (benchmarks/limits.py), and what XLA reserves. `forward` of element is evaluation (no
softmax). Writes benchmarks/results/kernels.json (kernels_cpu.json) as it goes, the .png beside it at the end.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")  # the rest is torch's

import jax
import jax.numpy as jnp
import matplotlib
from absl import app, flags

import kernels_pallas as kp
from benchmarks import limits, torch_flash
from benchmarks.train_step import machine
from kernels_pallas.select_chunk import xla as select_xla
from kernels_pallas.top1_chunk import api as chunk_api
from kernels_pallas.top1_chunk.xla.attention import MASKED, SORTED
from seqjax.errors import UserError, nearest
from seqjax.ops.attention import causal_attention

LENGTHS = {2048: 8, 8192: 1, 32768: 1, 102400: 1}  # and how many sequences
CPU_LENGTHS: dict[int, int] = dict.fromkeys((512, 1024, 2048, 4096, 8192), 1)
CASES = ("attention", "window", "chunk-exact", "chunk-approx", "select-exact", "select-approx", "element")
PASSES = ("forward", "training")
SCHEDULES = {"masked": MASKED, "sorted": SORTED}  # of the xla backend
COLUMNS = f"{'':<30}{'T':>8}{'pass':>10}{'ms':>10}{'TFLOP/s':>10}{'GB/s':>8}{'limit ms':>10}{'x limit':>9}{'GiB':>7}"


def operands(n: limits.Sizes, dtype: str) -> tuple[jax.Array, ...]:
    """q, k (normalised), v and a cotangent, [B, T, H, K] each."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (jax.random.normal(key, (n.B, n.T, n.H, n.K), jnp.float32) for key in keys)
    q, k = (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True)) for x in (q, k))
    return tuple(x.astype(dtype) for x in (q, k, v, do))


def function(case: str, implementation: str, n: limits.Sizes) -> Callable:
    """f(q, k, v) of a case; for the implementation "default", dispatch picks those of selection and of attention."""
    if case in ("attention", "window"):
        window = n.window if case == "window" else 0
        return partial(causal_attention, window=window, implementation=implementation)
    if case == "element":
        return partial(kp.top1_element_attention, implementation=implementation)
    name, _, schedule = implementation.partition("-")
    selection, name = case.split("-")[1], None if name == "default" else name
    options: Any = {"chunk_size": n.C, "selection": selection, "implementation": name}
    if case.startswith("select-"):
        return lambda q, k, v: kp.select_chunk(q, k, **options)
    if not schedule:
        return partial(kp.top1_chunk_attention, **options)
    call = chunk_api.Call(select_xla, SCHEDULES[schedule], n.C, selection, n.K**-0.5)
    return lambda q, k, v: chunk_api.attend(q, k, v, call)


def implementations(case: str, *, on_gpu: bool) -> tuple[str, ...]:
    """What to measure a case with on this machine, the fastest first."""
    if case in ("attention", "window"):
        return ("cudnn",) if on_gpu else ("xla",)
    if not on_gpu:  # approx by schedule; exact takes one by length
        return ("xla-sorted", "xla-masked") if case == "chunk-approx" else ("xla",)
    return {"select-exact": ("triton", "pallas", "xla"), "chunk-exact": ("default", "xla")}.get(case, ("triton", "xla"))


def with_gradient(f: Callable) -> Callable:
    """(q, k, v, do) -> o and the cotangents of q, k, v."""

    def both(q, k, v, do):
        o, pull = jax.vjp(f, q, k, v)
        return o, pull(do)

    return both


def time_ms(call: Callable[[], Any], *, repeats: int, seconds: float) -> list[float]:
    """Milliseconds per call, one number per repeat; each repeat enqueues about `seconds` of calls and waits once."""
    jax.block_until_ready(call())  # the first may still load code
    start = time.perf_counter()
    jax.block_until_ready(call())
    calls = max(1, min(100, round(seconds / (time.perf_counter() - start))))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
        times.append(1e3 * (time.perf_counter() - start) / calls)
    return times


def measure(f: Callable, args: tuple, *, repeats: int, seconds: float) -> dict[str, Any]:
    """Compiles f for args and times it."""
    start = time.perf_counter()
    compiled = jax.jit(f).lower(*args).compile()
    compile_s = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    runs = time_ms(lambda: compiled(*args), repeats=repeats, seconds=seconds)
    parts = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
    return {"ms": statistics.median(runs), "runs": runs, "compiled_bytes": sum(parts), "compile_s": compile_s}


def rated(result: dict[str, Any], works: list[limits.Work], device: limits.Device | None) -> dict[str, Any]:
    """A result with its rates and its distance from the limit."""
    work, seconds = limits.total(works), result["ms"] / 1e3
    result |= {"tflops": work.flops / seconds / 1e12, "gbytes_per_s": work.bytes / seconds / 1e9}
    if device is not None:
        limit_ms = 1e3 * sum(w.limit_s(device) for w in works)
        result |= {"limit_ms": limit_ms, "times_limit": result["ms"] / limit_ms}
    return result


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    head = f"{row['case'] + ' ' + row['implementation']:<30}{row['T']:>8}{row['pass']:>10}"
    if "error" in row:
        return f"{head}  {row['error'].splitlines()[0][:90]}"
    limit = f"{row['limit_ms']:>10.3f}{row['times_limit']:>9.2f}" if "limit_ms" in row else f"{'-':>10}{'-':>9}"
    memory = f"{row['compiled_bytes'] / 2**30:>7.2f}" if "compiled_bytes" in row else f"{'-':>7}"
    return f"{head}{row['ms']:>10.3f}{row['tflops']:>10.1f}{row['gbytes_per_s']:>8.0f}{limit}{memory}"


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
    """Yields one row per case, implementation, length and pass."""
    on_gpu, device, begin = jax.default_backend() == "gpu", limits.device(), time.monotonic()
    for T, B in lengths.items():
        n = n._replace(B=B, T=T)
        args = operands(n, dtype)
        todo = [(case, name) for case in cases for name in implementations(case, on_gpu=on_gpu)]
        if on_gpu and "attention" in cases and torch_flash.is_available():
            todo.insert(1, ("attention", "flash (torch)"))
        for case, name in todo:
            for what in PASSES:
                works = limits.phases(case, n)[0] if what == "forward" else limits.training_phases(case, n)
                if what == "training" and not limits.phases(case, n)[1]:
                    continue
                row = {"case": case, "implementation": name, "T": T, "B": B, "pass": what}
                if time.monotonic() - begin > budget_s:
                    yield row | {"error": f"not measured: --seconds={budget_s} are over"}
                    continue
                try:
                    if name == "flash (torch)":
                        result = torch_flash.measure(n, training=what == "training", repeats=repeats, seconds=call_s)
                    else:
                        f = function(case, name, n)
                        f, given = (f, args[:3]) if what == "forward" else (with_gradient(f), args)
                        result = measure(f, given, repeats=repeats, seconds=call_s)
                except (RuntimeError, ValueError, NotImplementedError) as error:
                    yield row | {"error": f"{type(error).__name__}: {error}"}
                    continue
                yield row | rated(result, works, device)


def plot(report: dict[str, Any], path: Path) -> None:
    """Time per sequence against its length, both axes logarithmic; forward on the left, training on the right."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for row in report["results"]:
        if "error" not in row:
            series = lines.setdefault((row["case"], row["implementation"], row["pass"]), [])
            series.append((row["T"], row["ms"] / row["B"]))
    figure, both = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    colors = {case: f"C{i}" for i, case in enumerate(CASES)}
    for axes, what in zip(both, PASSES, strict=True):
        for (case, name, of), points in lines.items():
            if of == what:
                solid = name in ("triton", "cudnn", "default")
                style = "-" if solid else "-." if name == "xla-masked" else "--" if name.startswith("xla") else ":"
                axes.plot(*zip(*points, strict=True), style, color=colors[case], marker=".", label=f"{case}, {name}")
        axes.set(xscale="log", yscale="log", xlabel="tokens per sequence", ylabel="ms per sequence")
        ticks = sorted({row["T"] for row in report["results"]})
        axes.set_xticks(ticks, [f"{T:,}" for T in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title({"forward": "forward", "training": "forward and backward"}[what], fontsize=10, loc="left")
        axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    n = report["settings"]
    figure.suptitle(f"{n['H']} heads of {n['K']}, {n['dtype']}, {report['machine']['device']}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: list[str]) -> None:
    """Measure, print and write as it goes."""
    del argv
    given: Any = flags.FLAGS
    quick = given.quick or (jax.default_backend() == "cpu" and not given.cpu_table)
    cases = given.cases or CASES
    for case in cases:
        if case not in CASES:
            raise UserError(f"--cases={case}: no such case.{nearest(case, CASES)}")
    if quick:
        n, dtype, lengths, repeats, call_s = limits.Sizes(1, 0, 2, 16, C=64), "float32", {256: 2, 512: 1}, 3, 0.02
    elif given.cpu_table:
        n, dtype, lengths, repeats, call_s = limits.Sizes(1, 0, 4, 64, itemsize=4), "float32", CPU_LENGTHS, 5, 0.1
    else:
        n, dtype, lengths, repeats, call_s = limits.Sizes(1, 0, 12, 64), "bfloat16", LENGTHS, 5, 0.1
    lengths = {int(T): lengths.get(int(T), 1) for T in given.lengths} or lengths
    settings = {"H": n.H, "K": n.K, "C": n.C, "window": n.window, "dtype": dtype, "repeats": repeats}
    report: dict[str, Any] = {"machine": machine(), "settings": settings, "results": []}
    path = Path(given.json or f"benchmarks/results/kernels{'_cpu' if given.cpu_table else ''}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    print(COLUMNS)
    for row in run(cases, lengths, n, dtype=dtype, repeats=repeats, call_s=call_s, budget_s=given.seconds):
        report["results"].append(row)
        print(line(row), flush=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
    if any("error" not in row for row in report["results"]):
        plot(report, path.with_suffix(".png"))
    print(f"Wrote {path}.")


if __name__ == "__main__":
    flags.DEFINE_bool("quick", False, "Two short lengths, as on a CPU.")
    flags.DEFINE_bool("cpu_table", False, "4 heads of 64 in float32, 512 to 8,192 tokens.")
    flags.DEFINE_list("lengths", [], "Sequence lengths; 2048, 8192, 32768 and 102400 by default.")
    flags.DEFINE_list("cases", [], f"Of {', '.join(CASES)}; all by default.")
    flags.DEFINE_float("seconds", 420, "Begin no further measurement after so many seconds.")
    flags.DEFINE_string("json", "", "Where the report goes; empty: benchmarks/results/kernels.json, kernels_cpu.json.")
    app.run(main)
