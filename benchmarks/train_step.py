"""Tokens per second of a training step, per architecture: `python -m benchmarks.train_step [--quick] [--mixers=a,b]`.

Every file of configs/ (with settings: --mixers=top1_chunk:model.mixer.selection=approx) at size 110m, batch 16 of 2,048
tokens, without accumulation, and without rematerialisation unless --remat says which, on one device
and random tokens: forward, backward and the optimiser, compiled ahead, then the median over repeats of some steps. On
a CPU, or with --quick, the debug size. Side by side in one run, because another run is another clock and another XLA.

Writes benchmarks/results/train_step.json after every architecture, so that a run that is cut keeps what it has, and
train_step.png at the end. Memory is what XLA reserves for the compiled step (arguments and temporaries; outputs take
the arguments' place) and, where the device counts it, its peak, if this architecture raised that.
"""

import importlib
import json
import os
import platform
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib
import numpy as np
from absl import app, flags

from seqjax.config import Config, from_config_dict
from seqjax.errors import UserError, nearest
from seqjax.models import Model, flops
from seqjax.training import optim
from seqjax.training.step import init_state, make_train_step

CONFIGS = Path(__file__).parent.parent / "configs"
VERSIONS = ("jax", "jaxlib", "flax", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-triton", "triton")
# tokens/s on one H200 at 110m that a best-kept torch kernel library reaches, or what was set from it; none above 60 GiB
TARGETS = {
    "transformer_pp": 400e3, "rwkv6": 240e3, "deltanet": 300e3, "mamba2": 250e3, "gated_deltanet": 250e3,
    "rwkv7": 200e3, "mamba1": 120e3,
}  # fmt: skip
COLUMNS = f"{'':<18}{'ktok/s':>9}{'lowest':>9}{'target':>8}{'MFU':>7}{'GiB':>8}{'device':>8}{'compile s':>11}"


def names() -> list[str]:
    """Every architecture that has a config file."""
    return sorted(p.stem for p in CONFIGS.glob("*.py") if p.stem != "__init__")


def configured(name: str, size: str, *, batch: int, seq_len: int, remat: str = "none") -> Config:
    """The shipped config at `size`, with the settings after a colon in `name`; 0 keeps its batch or length."""
    stem, _, settings = name.partition(":")
    config = importlib.import_module(f"configs.{stem}").get_config(",".join(filter(None, (size, settings))))
    config.train.accumulate = 1
    config.train.batch_size = batch or config.train.batch_size
    config.train.seq_len = seq_len or config.train.seq_len
    config.model.remat = remat
    return from_config_dict(config)


def peak_bytes() -> int | None:
    """What the device says it held at most since the process began."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


class Prepared(NamedTuple):
    """A compiled training step with its first arguments; the step gives the state's buffers to its result."""

    model: Model
    compiled: Any
    compile_s: float
    state: Any
    tokens: jax.Array


def prepare(config: Config) -> Prepared:
    """Fresh parameters, random tokens, and the step compiled for them."""
    train = config.train
    model = Model(config.model, max_len=train.seq_len)
    optimizer = optim.optimizer(config.optim, train.steps)
    step = make_train_step(model, optimizer, optim.schedule(config.optim, train.steps))
    rng = np.random.default_rng(0)
    shape = (1, train.batch_size, train.seq_len + 1)
    tokens = jax.device_put(rng.integers(0, config.model.vocab_size, shape, np.int32))
    state = jax.jit(lambda: init_state(model, optimizer, jax.random.key(0)))()

    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(state, tokens).compile()
    return Prepared(model, compiled, time.perf_counter() - start, state, tokens)


def measure(config: Config, *, repeats: int, steps: int) -> dict[str, Any]:
    """Compile one step, run it `repeats` times `steps` times."""
    train, before = config.train, peak_bytes()
    model, compiled, compile_s, state, tokens = prepare(config)
    metrics: Any = None
    for _ in range(2):
        state, metrics = compiled(state, tokens)
    jax.block_until_ready(state)
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(steps):
            state, metrics = compiled(state, tokens)
        jax.block_until_ready(state)
        rates.append(steps * train.batch_size * train.seq_len / (time.perf_counter() - start))

    memory: Any = compiled.memory_analysis()
    after, per_token = peak_bytes(), flops.flops_per_token(model, train.seq_len)
    rate, peak = statistics.median(rates), flops.peak_flops()
    return {
        "tokens_per_s": rate,
        "runs": rates,
        "mfu": None if peak is None else rate * per_token / peak,
        "flops_per_token": per_token,
        "params": flops.n_params(model),
        "compiled_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "device_peak_bytes": after if after is not None and after > (before or 0) else None,
        "compile_s": compile_s,
        "loss": float(metrics["loss"]),
    }


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    installed = {dist.metadata["Name"].lower(): dist.version for dist in metadata.distributions()}
    return {
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: installed[name] for name in VERSIONS if name in installed},
    }


def label(name: str) -> str:
    """`top1_chunk:model.mixer.selection=approx` as "top1_chunk approx"."""
    stem, _, settings = name.partition(":")
    values = [part.partition("=")[2] for part in settings.split(",") if part]
    return " ".join([stem, *values])


def line(name: str, result: dict[str, Any]) -> str:
    """A row of the table."""
    if "error" in result:
        return f"{label(name):<18}{result['error'].splitlines()[0][:100]}"
    mfu, device, target = result["mfu"], result["device_peak_bytes"], TARGETS.get(name)
    cells = (
        f"{result['tokens_per_s'] / 1e3:>9.1f}{min(result['runs']) / 1e3:>9.1f}",
        f"{target / 1e3:>8.0f}" if target else f"{'-':>8}",
        f"{mfu:>7.1%}" if mfu else f"{'-':>7}",
        f"{result['compiled_bytes'] / 2**30:>8.2f}",
        f"{device / 2**30:>8.2f}" if device else f"{'-':>8}",
        f"{result['compile_s']:>11.1f}",
    )
    return f"{label(name):<18}" + "".join(cells)


def plot(report: dict[str, Any], path: Path) -> None:
    """Bars, fastest first."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [(name, r) for name, r in report["results"].items() if "error" not in r]
    rows.sort(key=lambda row: row[1]["tokens_per_s"])
    figure, axes = plt.subplots(figsize=(7, 0.6 + 0.35 * len(rows)), layout="constrained")
    rates = [r["tokens_per_s"] / 1e3 for _, r in rows]
    bars = axes.barh([label(name) for name, _ in rows], rates, color="#4c72b0")
    axes.bar_label(bars, [f"{rate:,.0f}" if rate > 10 else f"{rate:.2g}" for rate in rates], padding=3, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    settings = report["settings"]
    axes.set_xlabel("thousand tokens per second")
    batch, seq_len = settings["batch"] or "its own", settings["seq_len"] or "its own"
    title = f"Training step, {settings['size']}, batch {batch}, length {seq_len}, {report['machine']['device']}"
    axes.set_title(title, fontsize=9, loc="left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: list[str]) -> None:
    """Measure one after the other, print and write as it goes."""
    del argv
    given: Any = flags.FLAGS
    quick = given.quick or jax.default_backend() == "cpu"
    chosen = given.mixers or names()
    for name in chosen:
        if name.partition(":")[0] not in names():
            raise UserError(f"--mixers={name}: configs/ has no such file.{nearest(name, names())}")
    size, batch, seq_len = ("debug", 0, 0) if quick else (given.size, given.batch, given.seq_len)
    repeats, steps = (3, 2) if quick else (given.repeats, given.steps)
    remat = given.remat
    settings = {
        "size": size, "batch": batch, "seq_len": seq_len, "remat": remat, "repeats": repeats, "steps": steps,
    }  # fmt: skip
    report: dict[str, Any] = {"machine": machine(), "settings": settings, "results": {}}
    path = Path(given.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    print(COLUMNS)
    start = time.monotonic()
    for name in chosen:
        if time.monotonic() - start > given.seconds:
            result: dict[str, Any] = {"error": f"not measured: --seconds={given.seconds} are over"}
        else:
            try:
                config = configured(name, size, batch=batch, seq_len=seq_len, remat=remat)
                result = measure(config, repeats=repeats, steps=steps)
            except (RuntimeError, ValueError, TypeError, NotImplementedError, UserError) as error:
                result = {"error": f"{type(error).__name__}: {error}"}
        report["results"][name] = result
        print(line(name, result), flush=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
    if any("error" not in result for result in report["results"].values()):
        plot(report, path.with_suffix(".png"))
    print(f"Wrote {path}.")


if __name__ == "__main__":
    flags.DEFINE_bool("quick", False, "The debug size, as on a CPU.")
    flags.DEFINE_list("mixers", [], "Only these files of configs/; all by default.")
    flags.DEFINE_string("size", "110m", "Size of the configs.")
    flags.DEFINE_integer("repeats", 5, "Timed runs; their median counts.")
    flags.DEFINE_integer("steps", 4, "Steps per timed run.")
    flags.DEFINE_integer("batch", 16, "Sequences per step.")
    flags.DEFINE_integer("seq_len", 2048, "Tokens per sequence.")
    flags.DEFINE_enum("remat", "none", ["none", "full", "dots", "attention"], "What the backward pass keeps.")
    flags.DEFINE_float("seconds", 480, "Begin no further architecture after so many seconds.")
    flags.DEFINE_string("json", "benchmarks/results/train_step.json", "Where the report goes.")
    app.run(main)
