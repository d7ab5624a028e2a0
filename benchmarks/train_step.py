"""Measure training throughput (tokens/s) per architecture:

    python -m benchmarks.train_step [--mixers=a,b] [--quick] [--against=benchmarks/results/train_step.json]
    python -m benchmarks.train_step --devices=4 [--layouts=data,fsdp] [--size=1b3 --batch=4]
    python -m benchmarks.train_step --devices=4 --layouts=seq --batch=1 --seq_len=102400
    python -m benchmarks.train_step --mixers=kimi_linear,qwen3_next --parts

A step is forward, backward and optimiser, compiled and sharded like the steps of `seqjax.training.loop`
(`step.jit_train_step`) over all devices. Defaults: shipped configs at size 110m, 16 sequences of 2,048 random tokens,
no gradient accumulation, no rematerialisation (unless --remat). A config can have settings: --mixers="top1_chunk:
model.mixer.selection=best_key,model.mixer.top_k=4;mamba2". On a CPU, or with --quick, the size is debug. A result is
the median over repeats of several steps. Compare results within one run, or use --against: clocks and XLA versions
differ between runs.

--devices=N measures every architecture on one device and then on N: data parallel (mesh.data=N) and fully sharded
(mesh.fsdp=N), with --batch sequences per device (at debug: the config's batch). The layout seq splits --batch sequences
over N devices (mesh.seq=N). "scaling" is throughput on N devices / (N x throughput on one device), in the same run.

Memory is per device: XLA's reservation for the compiled step (arguments and temporaries; outputs reuse the arguments)
and, if the device reports it, the peak when this architecture raised it. "state MB" is the decode cache of one sequence
of the training length. "kernels" and "moved GB" count a step's kernels per device and the bytes they read and write
(benchmarks/harness/program.py). "exch. MB" is the output size of a step's collective operations per device.

--parts also measures, for each mixer of a hybrid, a model in which all layers have this mixer. "/ layers" is the
hybrid's time divided by the mean of these times, weighted by the layers.

Results go to benchmarks/results/train_step.json (--devices=N: train_step_N_devices.json), written after every
architecture, with a plot at the end. A quick or partial run, or a run with --against, writes to runs/benchmarks/.
"""

from benchmarks.harness import options

FLAGS = options.flags(__doc__, quick="the debug size, as on a CPU")
options.add_models(FLAGS)
FLAGS.add_argument("--devices", type=int, default=0, help="on one device and on so many; without it on all, once")
FLAGS.add_argument("--layouts", type=options.words, default=["data", "fsdp"], help="with --devices (data,fsdp)")
FLAGS.add_argument("--parts", action="store_true", help="also models with one of a hybrid's mixers")
FLAGS.add_argument("--repeats", type=int, default=5, help="timed runs, whose median counts (5)")
FLAGS.add_argument("--steps", type=int, default=4, help="steps per timed run (4)")
FLAGS.add_argument("--seconds", type=float, default=480, help="begin no further architecture after so many (480)")
FLAGS.add_argument("--against", default="", help="a recorded report to show speeds relative to")
options.parse_early(FLAGS, __name__)

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.harness import plot, report
from benchmarks.harness.configs import chosen, configured, label
from benchmarks.harness.machine import machine
from benchmarks.harness.program import work
from benchmarks.harness.timing import seconds_per_call
from seqjax.command_line import run_command
from seqjax.config import Config
from seqjax.errors import UserError
from seqjax.models import Model, flops
from seqjax.sharding import batch_sharding, make_mesh, replicated, require_equal_pieces, to_devices
from seqjax.training import provenance, schedule
from seqjax.training.step import TrainState, init_state, jit_train_step, micro_batches, state_shardings

TABLE = report.Table(
    30,
    (
        report.Column("tokens_per_s", "ktok/s", ">9.1f", 1e-3),
        report.Column("lowest", "lowest", ">9.1f", 1e-3),
        report.Column("mfu", "MFU", ">8.1%"),
        report.Column("compiled_bytes", "GiB", ">8.2f", 2**-30),
        report.Column("device_peak_bytes", "device", ">8.2f", 2**-30),
        report.Column("cache_bytes", "state MB", ">10.2f", 1e-6),
        report.Column("kernels", "kernels", ">9.0f"),
        report.Column("moved_bytes", "moved GB", ">10.1f", 1e-9),
        report.Column("exchanged_bytes", "exch. MB", ">10.1f", 1e-6),
        report.Column("compile_s", "compile s", ">11.1f"),
        report.Column("scaling", "scaling", ">9.3f"),
        report.Column("of_layers", "/ layers", ">10.3f"),
        report.Column("of_recorded", "/ recorded", ">12.3f"),
    ),
)


class Step(NamedTuple):
    """A config's training step on a mesh before compilation: the state constructor and the input shardings."""

    model: Model
    init: Callable[[], TrainState]
    state_shardings: TrainState
    tokens: jax.ShapeDtypeStruct
    lowered: Any


def lower(config: Config, mesh: Mesh) -> Step:
    """Return the step of `seqjax.training.loop`, lowered for a mesh."""
    train = config.train
    require_equal_pieces(train.seq_len, mesh)
    n_micro = micro_batches(train, mesh)
    model = Model(config.model, max_len=train.seq_len)
    optimizer = schedule.optimizer(config.optim, model.groups)
    init = lambda: init_state(model, optimizer, jax.random.key(train.seed))  # noqa: E731
    shapes = jax.eval_shape(init)
    by_leaf = state_shardings(mesh, model, optimizer, shapes)
    batch = batch_sharding(mesh, leading=1)
    step = jit_train_step(model, optimizer, state=by_leaf, tokens=batch)
    shape = (n_micro, train.batch_size // n_micro, train.seq_len + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch)
    with jax.set_mesh(mesh):
        return Step(model, init, by_leaf, tokens, step.lower(shapes, tokens, jax.ShapeDtypeStruct((), jnp.float32)))


class Stepper:
    """A config's compiled training step with state and one batch of random tokens; each call runs a step."""

    def __init__(self, config: Config, devices: list[Any] | None = None):
        mesh = make_mesh(**dataclasses.asdict(config.mesh), devices=devices)
        step = lower(config, mesh)
        self.model = step.model
        rng = np.random.default_rng(0)
        with jax.set_mesh(mesh):
            tokens = rng.integers(0, config.model.vocab_size, step.tokens.shape, np.int32)
            self.tokens = to_devices(tokens, step.tokens.sharding)
            self.rate = to_devices(np.float32(config.optim.lr), replicated(mesh))
            self.state = jax.jit(step.init, out_shardings=step.state_shardings)()
            start = time.perf_counter()
            self.compiled = step.lowered.compile()
            self.compile_s = time.perf_counter() - start

    def __call__(self) -> dict[str, jax.Array]:
        """Run a step; its metrics become ready when the step ends."""
        self.state, step_metrics = self.compiled(self.state, self.tokens, self.rate)
        return step_metrics


def measure(config: Config, *, repeats: int, steps: int, devices: list[Any] | None = None) -> dict[str, Any]:
    """Compile a step for the devices (default: all), then time `repeats` repeats of `steps` steps."""
    train, before = config.train, provenance.device_peak_bytes()
    stepper, n_devices = Stepper(config, devices), len(devices or jax.devices())
    seconds_per_call(stepper, calls=2, repeats=1)
    times = seconds_per_call(stepper, calls=steps, repeats=repeats)
    rates = [train.batch_size * train.seq_len / seconds for seconds in times]

    after, per_token = provenance.device_peak_bytes(), flops.flops_per_token(stepper.model, train.seq_len)
    rate = statistics.median(rates)
    return {
        "tokens_per_s": rate,
        "runs": rates,
        "mfu": flops.mfu(rate * jax.device_count() / n_devices, per_token),  # `mfu` divides by the peak of all devices
        "devices": n_devices,
        "flops_per_token": per_token,
        "params": flops.n_params(stepper.model),
        "cache_bytes": cache_bytes(stepper.model, train.seq_len),
        **of_program(stepper.compiled),
        "device_peak_bytes": after if after is not None and after > (before or 0) else None,
        "compile_s": stepper.compile_s,
        "loss": float(stepper()["loss"]),
    }


def cache_bytes(model: Model, seq_len: int) -> int:
    """Return the bytes of one sequence's decode cache."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(lambda: model.init_cache(1, seq_len))))


def of_program(compiled: Any) -> dict[str, int]:
    """Return a compiled step's reserved, moved and exchanged bytes per device, and its number of kernels."""
    memory, per_step = compiled.memory_analysis(), work(compiled.as_text())
    return {
        "compiled_bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "kernels": per_step.kernels,
        "moved_bytes": per_step.bytes,
        "exchanged_bytes": per_step.exchanged.total(),
    }


def layouts(config: Config, n_devices: int, axes: list[str]) -> dict[str, Config]:
    """Return configs by layout: "" for one device, "data=4" and similar for `n_devices` on one mesh axis."""

    def on(n: int, axis: str) -> Config:
        n_batches = 1 if axis == "seq" else n  # seq splits sequences, so the batch stays
        train = dataclasses.replace(config.train, batch_size=config.train.batch_size * n_batches)
        mesh = dataclasses.replace(config.mesh, **({"data": 1, "fsdp": 1, "seq": 1, "tensor": 1} | {axis: n}))
        return dataclasses.replace(config, train=train, mesh=mesh)

    return {"": on(1, "data")} | {f"{axis}={n_devices}": on(n_devices, axis) for axis in axes}


class Part(NamedTuple):
    """One mixer's share of a hybrid's layers, and a config in which all layers have it."""

    share: float
    config: Config


def parts(config: Config) -> dict[str, Part]:
    """Return a hybrid's parts by name, "layers=0" and so on; empty for one mixer."""
    pattern, replace = config.model.mixer, dataclasses.replace
    if not isinstance(pattern, tuple) or len(set(pattern)) == 1:
        return {}
    return {
        f"layers={i}": Part(
            pattern.count(kind) / len(pattern), replace(config, model=replace(config.model, mixer=kind))
        )
        for i, kind in enumerate(dict.fromkeys(pattern))
    }


def variants_of(name: str, size: str, args: argparse.Namespace) -> list[str]:
    """Return what to measure of a config: its layouts, or its parts and then the config."""
    if args.devices:
        return ["", *(f"{axis}={args.devices}" for axis in args.layouts)]
    return [*parts(configured(name, size, batch=0, seq_len=0)), ""] if args.parts else [""]


def add_ratio(results: dict[str, Any], name: str, variant: str, result: dict[str, Any]) -> None:
    """Add "scaling" to a layout's result and "of_layers" to a hybrid's; `results` has the earlier results by name."""
    if "error" in result:
        return
    one = results.get(name, {})
    if variant and "tokens_per_s" in one:
        result["scaling"] = result["tokens_per_s"] / (result["devices"] * one["tokens_per_s"])
    layers = [other for key, other in results.items() if key.startswith(f"{name} layers=")]
    if not variant and layers and all("tokens_per_s" in other for other in layers):
        predicted = sum(other["share"] / other["tokens_per_s"] for other in layers)
        result["of_layers"] = 1 / result["tokens_per_s"] / predicted


def row(title: str, result: dict[str, Any], recorded: dict[str, Any]) -> str:
    """Return a table line; `recorded` is the result of the same name in another report, or empty."""
    if "error" in result:
        return TABLE.row(title, result)
    shown = {**result, "lowest": min(result["runs"])}
    if "tokens_per_s" in recorded:
        shown["of_recorded"] = result["tokens_per_s"] / recorded["tokens_per_s"]
    return TABLE.row(title, shown)


def plot_report(written: dict[str, Any], path: Path) -> None:
    """Plot bars, fastest first."""
    measured = {name: result for name, result in written["results"].items() if "error" not in result}
    rows = [
        plot.Bar(
            title_of(*name.split(" ")), result["tokens_per_s"] / 1e3, [run / 1e3 for run in result.get("runs", ())]
        )
        for name, result in measured.items()
    ]
    settings = written["settings"]
    batch, seq_len = settings["batch"] or "its own", f"{settings['seq_len']:,}" if settings["seq_len"] else "its own"
    device = written["machine"]["device"]
    title = f"Training step: {settings['size']}, batch {batch}, length {seq_len}, {device}"
    plot.bars(path, sorted(rows, key=lambda row: -row.value), title=title, axis="thousand tokens per second")


def title_of(name: str, layout: str = "") -> str:
    """Return the label of an architecture and layout in tables and plots."""
    return f"{label(name)} {layout}".rstrip()


def check_devices(n_devices: int, axes: list[str]) -> None:
    """Raise `UserError` for more devices than exist and for layouts that do not split the tokens."""
    options.check_known("layouts", axes, ["data", "fsdp", "seq"])
    if n_devices and not 2 <= n_devices <= jax.device_count():
        raise UserError(f"--devices={n_devices}: give 2 to {jax.device_count()}, the number of devices here.")


def main(argv: list[str]) -> None:
    """Measure all architectures; print and write after each."""
    args = FLAGS.parse_args(argv)
    check_devices(args.devices, args.layouts)
    if args.devices and args.parts:
        raise UserError("--parts measures on all devices at once: leave out --devices, or leave out --parts.")
    quick = args.quick or jax.default_backend() == "cpu"
    names = chosen(args.mixers)
    size, batch, seq_len = ("debug", 0, 0) if quick else (args.size, args.batch, args.seq_len)
    repeats, steps = (3, 2) if quick else (args.repeats, args.steps)
    settings = {
        "size": size, "batch": batch, "seq_len": seq_len, "remat": args.remat, "repeats": repeats, "steps": steps,
    }  # fmt: skip
    if args.devices:
        settings["devices"] = args.devices
    written: dict[str, Any] = {"machine": machine(), "settings": settings, "results": {}}
    recorded = report.load(args.against) if args.against else None
    if recorded:
        print("\n".join(report.differences(written, recorded)))
    file = f"train_step_{args.devices}_devices" if args.devices else "train_step"
    path = options.destination(args.json, file, recorded=not (quick or args.mixers or args.against))
    print(TABLE.header())
    start = time.monotonic()
    for name, variant in [(stem, kind) for stem in names for kind in variants_of(stem, size, args)]:
        key = f"{name} {variant}".rstrip()
        if time.monotonic() - start > args.seconds:
            result: dict[str, Any] = {"error": f"not measured: --seconds={args.seconds} reached"}
        else:
            try:
                config = configured(name, size, batch=batch, seq_len=seq_len, remat=args.remat)
                devices = None
                if args.devices:
                    config = layouts(config, args.devices, args.layouts)[variant]
                    devices = jax.devices()[: args.devices if variant else 1]
                part = parts(config)[variant] if variant and not args.devices else None
                result = measure(part.config if part else config, repeats=repeats, steps=steps, devices=devices)
                result |= {"share": part.share} if part else {}
            except (RuntimeError, ValueError, TypeError, NotImplementedError, UserError) as error:
                result = {"error": f"{type(error).__name__}: {error}"}
        add_ratio(written["results"], name, variant, result)
        written["results"][key] = result
        print(row(title_of(name, variant), result, recorded["results"].get(key, {}) if recorded else {}), flush=True)
        report.save(path, written)
    if any("error" not in result for result in written["results"].values()):
        plot_report(written, path.with_suffix(".png"))
    print(f"Wrote {path}.")


if __name__ == "__main__":
    run_command(main)
