"""Reproduce the paper's table 3: training and inference speed relative to full attention.

    python -m lab.benchmarks.table3 [--quick] [--models="RWKV-7;Mamba-2"]

The models are those in figure 7, at 102,400 tokens. Training is the step from `benchmarks.train_step` at size
135m_100k, with one sequence of 102,400 tokens. Inference follows the paper: 64 sequences with prompts of 50,000 tokens
and 5,000 new tokens each, as large a batch as fits into device memory. Each prompt is prefilled in one piece at batch
size 1, which already saturates the device. Decoding is greedy, with one program call per token and batch. --timed steps
are timed at each of four positions, in three parts; their mean stands for all 5,000 steps, because only the growing
cache changes the step time. Tokens/s are new tokens divided by prefill plus decode time; "decode" leaves out prefill.

All sequences in a batch have the same prompt but separate caches. Writes benchmarks/results/table3.json and table3.png
after each model; quick and partial runs write to runs/benchmarks/.
"""

from benchmarks.harness import options

FLAGS = options.flags(__doc__, quick="the debug size, short prompts, as on a CPU")
FLAGS.add_argument(
    "--models", type=options.labels, default=[], help="only these of figure 7, with ; between them (all)"
)
FLAGS.add_argument("--sequences", type=int, default=64, help="sequences in all, and at most at a time (64)")
FLAGS.add_argument("--timed", type=int, default=50, help="decoding steps timed at each position (50)")
FLAGS.add_argument("--seconds", type=float, default=540, help="begin no further model after so many (540)")
options.parse_early(FLAGS, __name__)

import math
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import train_step
from benchmarks.harness import plot, report
from benchmarks.harness.configs import configured
from benchmarks.harness.machine import machine
from benchmarks.harness.timing import seconds_per_call
from seqjax import presets
from seqjax.command_line import run_command
from seqjax.models import Model
from seqjax.types import Array, Cache, Params

FIGURE = presets.load("studies/figure7")
# Training speed relative to full attention in table 3, on 8 A100s; Mamba-2 is not legible in our copy.
PAPER_TRAINING = {
    "RWKV-7 shell, full attention": 1.0,
    "RWKV-7 shell, Top-1 exact": 1.90,
    "RWKV-7 shell, Top-1 approx": 4.50,
    "RWKV-7 shell, W=256": 5.29,
    "RWKV-7": 2.47,
}
POSITIONS = 4
REPEATS = 3  # prompt repeats, and parts of the timed steps per position
TABLE = report.Table(
    30,
    (
        report.Column("train_tokens_per_s", "train ktok/s", ">13.1f", 1e-3),
        report.Column("train_ratio", "ratio", ">8.2f"),
        report.Column("paper_train_ratio", "paper", ">8.2f"),
        report.Column("at_a_time", "at a time", ">10.0f"),
        report.Column("prompt_s", "s/prompt", ">9.2f"),
        report.Column("step_ms", "ms/step", ">9.2f"),
        report.Column("decode_tokens_per_s", "decode tok/s", ">13.0f"),
        report.Column("new_tokens_per_s", "tok/s", ">9.0f"),
        report.Column("inference_ratio", "ratio", ">8.2f"),
    ),
)


class Inference(NamedTuple):
    """Prompt tokens, new tokens, number of sequences, timed steps per position, and config size."""

    prompt: int
    new: int
    sequences: int
    timed: int
    size: str


# Donate the input cache, so only one cache exists.
@partial(jax.jit, static_argnames="model", donate_argnames="cache")
def _prefill(params: Params, tokens_BT: Array, cache: Cache, *, model: Model) -> tuple[Array, Cache]:
    return model.prefill(params, tokens_BT, cache)


@partial(jax.jit, static_argnames="model", donate_argnames="cache")
def _greedy_step(params: Params, token_B: Array, position: Array, cache: Cache, *, model: Model) -> tuple[Array, Cache]:
    logits_BO, cache = model.step(params, token_B, position, cache)
    return jnp.argmax(logits_BO, -1).astype(jnp.int32), cache


def repeated(cache: Cache, model: Model, n: int, max_len: int) -> Cache:
    """Copy the cache of one sequence `n` times into a batch cache."""
    one, several = (jax.eval_shape(partial(model.init_cache, k, max_len)) for k in (1, n))

    def copies(x: Array, before: Any, after: Any) -> Array:
        axes = [axis for axis, (a, b) in enumerate(zip(before.shape, after.shape, strict=True)) if a != b]
        return jnp.repeat(x, n, axis=axes[0]) if axes else x

    return jax.tree.map(copies, cache, one, several)


def cache_bytes(model: Model, max_len: int) -> int:
    """Return the cache bytes per sequence."""
    leaves = jax.tree.leaves(jax.eval_shape(partial(model.init_cache, 1, max_len)))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def infer(model: Model, params: Params, n: Inference) -> dict[str, Any]:
    """Measure seconds per prompt and milliseconds per step, at the largest batch that fits."""
    max_len = -(-(n.prompt + n.new) // 128) * 128
    tokens_BT = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, n.prompt), np.int32)

    empty = jax.jit(partial(model.init_cache, 1, max_len))

    def prompt() -> tuple[Array, Cache]:
        return _prefill(params, tokens_BT, empty(), model=model)

    jax.block_until_ready(prompt())  # compiles
    prompts_s = seconds_per_call(prompt, calls=1, repeats=REPEATS)
    prompt_s = statistics.median(prompts_s)
    each = cache_bytes(model, max_len)
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    at_a_time = n.sequences
    while limit and at_a_time > 1 and at_a_time * each > 0.75 * limit:
        at_a_time //= 2
    while True:
        try:
            parts_s = _step_seconds(model, params, prompt()[1], n, at_a_time, max_len)
            break
        except jax.errors.JaxRuntimeError as error:
            if at_a_time == 1 or "RESOURCE_EXHAUSTED" not in str(error):
                raise
            at_a_time //= 2
    step_s = [statistics.mean(parts) for parts in parts_s]
    rounds = -(-n.sequences // at_a_time)
    decode_s = rounds * n.new * statistics.mean(step_s)
    total_s = n.sequences * prompt_s + decode_s
    of_repeats = zip(prompts_s, *parts_s, strict=False)
    repeats_s = [n.sequences * first + rounds * n.new * statistics.mean(steps) for first, *steps in of_repeats]
    return {
        "at_a_time": at_a_time,
        "cache_bytes": each,
        "prompt_s": prompt_s,
        "step_ms": 1e3 * statistics.mean(step_s),
        "steps_ms": [1e3 * s for s in step_s],
        "decode_tokens_per_s": n.sequences * n.new / decode_s,
        "new_tokens_per_s": n.sequences * n.new / total_s,
        "new_tokens_runs": [n.sequences * n.new / seconds for seconds in repeats_s],
    }


def _step_seconds(
    model: Model, params: Params, one: Cache, n: Inference, at_a_time: int, max_len: int
) -> list[list[float]]:
    """Return seconds per step by position and timed part."""
    cache = jax.jit(partial(repeated, model=model, n=at_a_time, max_len=max_len))(one)
    del one
    token_B, seconds = jnp.zeros(at_a_time, jnp.int32), []
    for first in np.linspace(n.prompt, n.prompt + n.new - n.timed - 2, POSITIONS, dtype=np.int32):
        parts = []
        for steps in (range(2), *np.array_split(np.arange(2, n.timed + 2), min(REPEATS, n.timed))):
            start = time.perf_counter()
            for i in steps:
                token_B, cache = _greedy_step(params, token_B, first + np.int32(i), cache, model=model)
            jax.block_until_ready(token_B)
            parts.append((time.perf_counter() - start) / len(steps))
        seconds.append(parts[1:])  # the first two steps include compilation or an idle device
    return seconds


def measure(name: str, n: Inference, *, repeats: int, steps: int) -> dict[str, Any]:
    """Return one row: training and inference."""
    stem, _, settings = FIGURE.MODELS[name].partition(",")
    long = n.size != "debug"
    batch, seq_len, remat = (1, 102_400, "dots") if long else (0, 0, "none")
    config = configured(f"{stem}:{settings}".rstrip(":"), n.size, batch=batch, seq_len=seq_len, remat=remat)
    trained = train_step.measure(config, repeats=repeats, steps=steps, devices=jax.devices()[:1])
    row = {"train_tokens_per_s": trained["tokens_per_s"], "train_runs": trained["runs"]}
    row |= {"train_compiled_bytes": trained["compiled_bytes"], "paper_train_ratio": PAPER_TRAINING.get(name)}
    model = Model(config.model, max_len=max(config.train.seq_len, n.prompt + n.new))
    params = jax.jit(model.init)(jax.random.key(0))
    return row | infer(model, params, n)


def relative(row: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Return the row with ratios to full attention, if measured."""
    pairs = {"train_ratio": "train_tokens_per_s", "inference_ratio": "new_tokens_per_s"}
    return row | {ratio: row[key] / reference[key] for ratio, key in pairs.items() if key in reference and key in row}


def plot_report(written: dict[str, Any], path: Path) -> None:
    """Draw training and inference relative to full attention, side by side."""
    # Each repeat is divided by full attention's median. Older records have no inference repeats.
    bars = [
        plot.Bar(f"{name}, {kind}", row[ratio], [run * row[ratio] / row[speed] for run in row.get(runs, ())])
        for name, row in written["results"].items()
        for kind, ratio, speed, runs in (
            ("training", "train_ratio", "train_tokens_per_s", "train_runs"),
            ("inference", "inference_ratio", "new_tokens_per_s", "new_tokens_runs"),
        )
        if ratio in row
    ]
    title = f"Table 3: {written['settings']['size']}, {written['machine']['device']}"
    plot.bars(path, bars, title=title, axis="speed relative to full attention")


def main(argv: list[str]) -> None:
    """Measure each model; print and write each result."""
    args = FLAGS.parse_args(argv)
    options.check_known("models", args.models, FIGURE.MODELS)
    quick = args.quick or jax.default_backend() == "cpu"
    if quick:
        n, repeats, steps = Inference(96, 32, 4, 4, "debug"), 1, 1
    else:
        n, repeats, steps = Inference(50_000, 5_000, args.sequences, args.timed, "135m_100k"), 3, 2
    path = options.destination(args.json, "table3", recorded=not (quick or args.models))
    written: dict[str, Any] = {"machine": machine(), "settings": n._asdict(), "results": {}}
    print(TABLE.header())
    start = time.monotonic()
    for name in args.models or FIGURE.MODELS:
        if time.monotonic() - start > args.seconds:
            row: dict[str, Any] = {"error": f"not measured: --seconds={args.seconds:g} reached"}
        else:
            try:
                row = measure(name, n, repeats=repeats, steps=steps)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                row = {"error": f"{type(error).__name__}: {error}"}
        row = relative(row, row if name == FIGURE.REFERENCE else written["results"].get(FIGURE.REFERENCE, {}))
        written["results"][name] = row
        print(TABLE.row(name, row), flush=True)
        report.save(path, written)
    if any("inference_ratio" in row for row in written["results"].values()):
        plot_report(written, path.with_suffix(".png"))
    print(f"Wrote {path}.")


if __name__ == "__main__":
    run_command(main)
