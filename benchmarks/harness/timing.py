"""Times calls on an asynchronous device: enqueue several calls, wait once."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def seconds_per_call(call: Callable[[], Any], *, calls: int, repeats: int) -> list[float]:
    """Return one value per repeat; `call` returns the arrays to wait for."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / calls)
    return times


def calls_within(call: Callable[[], Any], seconds: float, *, at_most: int | None = None) -> int:
    """Return the number of calls, at least one, that take about `seconds`; the first of two trial calls is warmup."""
    jax.block_until_ready(call())
    calls = max(1, round(seconds / seconds_per_call(call, calls=1, repeats=1)[0]))
    return calls if at_most is None else min(at_most, calls)


def time_ms(call: Callable[[], Any], *, repeats: int, seconds: float) -> list[float]:
    """Return milliseconds per call, one value per repeat of about `seconds`."""
    calls = calls_within(call, seconds, at_most=100)
    return [1e3 * s for s in seconds_per_call(call, calls=calls, repeats=repeats)]


def measure(f: Callable, args: tuple, *, repeats: int, seconds: float) -> dict[str, Any]:
    """Compile and time `f(*args)`; return median and runs in ms, and XLA's reserved bytes."""
    start = time.perf_counter()
    compiled = jax.jit(f).lower(*args).compile()
    compile_s = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    runs = time_ms(lambda: compiled(*args), repeats=repeats, seconds=seconds)
    parts = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
    return {"ms": statistics.median(runs), "runs": runs, "compiled_bytes": sum(parts), "compile_s": compile_s}
