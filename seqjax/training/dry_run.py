"""Describe a run without starting it (`seqjax train --dry_run`).

Nothing is written, and no data is prepared. State and batch bytes per device are exact. Gradient and activation bytes
come from XLA's analysis of the compiled training step on this machine's devices. With `--devices=N` they are for N
simulated CPU devices.

The time comes from the recorded speed of the same model and device kind (recorded_speeds.json, written by `python -m
benchmarks.record`), or from a few steps on random tokens.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from kernels_pallas import cpu_compiler
from seqjax.config import Config, from_config_dict, presets
from seqjax.data import open_corpus
from seqjax.errors import UserError
from seqjax.models import Model, flops
from seqjax.nn.params import GROUPS, names
from seqjax.reading import read_json
from seqjax.sharding import batch_sharding, make_mesh, require_equal_pieces
from seqjax.terminal import StatusLine, duration, size
from seqjax.training.checkpoint import has_any
from seqjax.training.mirrors import readable
from seqjax.training.origin import RULES
from seqjax.training.origin import read as read_origin
from seqjax.training.schedule import end_steps, segments, update_rules
from seqjax.training.schedule import optimizer as make_optimizer
from seqjax.training.step import (
    bytes_per_device,
    division,
    init_state,
    jit_train_step,
    micro_batches,
    parameter_table,
    state_shardings,
)
from seqjax.training.workdir import check_config, extension

SPEEDS = Path(__file__).with_name("recorded_speeds.json")
SPEED = {"file": str, "device": str, "size": str, "seq_len": int, "batch": int, "remat": str, "name": str}
SPEED |= {"params": int, "flops_per_token": float, "tokens_per_s": float}
TIMED_STEPS = 3
# Largest FLOPs per step that are timed here, because such steps take seconds: on a CPU, and on one accelerator.
CPU_FLOPS, ACCELERATOR_FLOPS = 5e11, 1e15
TIMED = f"{TIMED_STEPS} steps timed here"
# A container's memory limit, for control groups version 2 and 1.
CGROUP_LIMITS = tuple(Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory/memory.limit_in_bytes"))
FORCE = "--xla_force_host_platform_device_count"  # the flag that sets the number of CPU devices


def describe(
    config: Config,
    workdir: str | Path | None,
    devices: Sequence[Any] | None = None,
    *,
    weights: Callable[[], str] | None = None,
) -> Iterator[str]:
    """Yield the report line by line, the quick lines first.

    `devices`, from `simulated_devices`, replace this machine's devices. `weights` returns a line about the initial
    weights, or raises `UserError` if they cannot be used. Raises `UserError` if the run cannot be trained.
    """
    train, simulated = config.train, devices is not None
    devices = list(devices) if devices is not None else jax.devices()
    device = devices[0]
    mesh = make_mesh(**dataclasses.asdict(config.mesh), devices=devices)
    require_equal_pieces(train.seq_len, mesh)
    micro_batches(train, mesh)  # raises `UserError` for a batch that cannot be split
    yield f"{config.name}, size {config.size}: a dry run, nothing is written"
    yield f"mixer        {config.model.mixer_names}"
    yield f"workdir      {_workdir(workdir, config)}"
    if weights is not None:
        yield f"weights      {_weights(weights, workdir)}"
    kind = "simulated CPU devices, not this machine's" if simulated else f"{device.device_kind} ({device.platform})"
    yield f"devices      {len(devices)} x {kind}"
    yield f"mesh         {' x '.join(f'{axis}={n}' for axis, n in mesh.shape.items())}"
    yield f"data         {_data(config)}"

    rules = RULES if workdir is None else read_origin(readable(workdir))["rules"]
    model = _model(config, carry_from_zero=rules == 1)
    total, active = flops.n_params(model), flops.matmul_params(model)
    tokens_per_step = train.batch_size * train.seq_len
    steps = sum(segment.end - segment.begin for segment in segments(config))
    tokens, per_token = steps * tokens_per_step, flops.flops_per_token(model, train.seq_len)
    yield f"parameters   {total:,}, of which {active:,} multiply every token (tables are looked up)"
    yield f"steps        {train.steps:,} of {train.batch_size:,} x {train.seq_len:,} = {tokens_per_step:,} tokens"
    if train.ends:
        ends = ", ".join(f"{step:,}" for step in end_steps(config))
        yield f"ends         after step {ends}; with their cooldowns {steps:,} steps in all"
    yield f"each step    {division(train, mesh)}"
    yield f"tokens       {tokens:,}, {tokens / total:.1f} per parameter"
    yield f"FLOPs        {per_token:,.0f} per token in training, {tokens * per_token:.3g} in all"

    yield from group_table(model)
    yield f"decay        {_decay(config.optim.weight_decay, rules)}"
    step = Step(config, model, mesh, rules=rules)
    yield from _optimiser(step)
    yield ""
    yield from parameter_table(model, step.sharding.params, step.update_rules)
    yield ""
    params_bytes = bytes_per_device(step.shapes.params, step.sharding.params)
    yield (
        f"state        {step.state_bytes:,} bytes on each device: parameters {size(params_bytes)}, the optimiser's "
        f"{size(step.state_bytes - params_bytes)}"
    )
    yield f"batch        {step.batch_bytes:,} bytes on each device"
    if not simulated and (excess := _excess(step.state_bytes + step.batch_bytes, devices)):
        yield f"             state and batch are {excess}"  # reported before the compilation, which may take minutes
    StatusLine().say("compiling the training step, for its memory")
    compiled = step.compile()
    program = "the CPU program; other devices have another program" if simulated else "the compiled step"
    needed, text = _memory(compiled, resident_bytes=step.state_bytes + step.batch_bytes, program=program)
    yield f"memory       {text}"
    if simulated:
        yield "time         unknown: the devices are simulated"
        return
    if excess := _excess(needed, devices):
        remedy = "lower config.train.per_device_batch_size"
        if train.accumulate is not None:
            remedy = "raise config.train.accumulate"
        yield f"             {excess}: {remedy},"
        yield "             raise config.mesh.fsdp, or set config.model.remat"
    speed, source = None, ""
    record = recorded_speed(config, n_params=total, per_token=per_token, device=device.device_kind)
    if record is not None:
        times = jax.device_count()
        speed, source = record.tokens_per_s * times, record.source
        source += f"; of one device, times {times}" if times > 1 else ""
    if speed is None and not excess and step.takes_seconds:
        speed, source = step.tokens_per_s(compiled), TIMED
    if speed is None:
        yield "time         unknown: no recorded speed of this model on this device, and its steps are too long to try"
    else:
        yield f"time         {duration(tokens / speed)} at {speed:,.0f} tokens/s ({source}), without evaluations"


class Step:
    """A config's training step on a mesh, before anything is allocated."""

    def __init__(self, config: Config, model: Model, mesh: Mesh, *, rules: int):
        """Describe the step under the run's `rules` (seqjax/training/origin.py)."""
        train = config.train
        self.config, self.model, self.mesh = config, model, mesh
        optimizer = make_optimizer(config.optim, model.groups if rules > 1 else None)
        self.update_rules = None if config.optim.name == "adam" else update_rules(model.groups, model.shapes)
        self._init = lambda: init_state(model, optimizer, jax.random.key(train.seed))
        self.shapes = jax.eval_shape(self._init)
        self.sharding = state_shardings(mesh, model, optimizer, self.shapes)
        self._tokens = batch_sharding(mesh, leading=1)
        n_micro = micro_batches(train, mesh)
        self._batch = jax.ShapeDtypeStruct((n_micro, train.batch_size // n_micro, train.seq_len + 1), np.int32)
        self.state_bytes = bytes_per_device(self.shapes, self.sharding)
        self.batch_bytes = bytes_per_device(self._batch, self._tokens)
        self._step = jit_train_step(model, optimizer, state=self.sharding, tokens=self._tokens)

    def compile(self) -> Any:
        """Return the compiled step; nothing is allocated."""
        with jax.set_mesh(self.mesh):
            return self._step.lower(self.shapes, self._batch, jax.ShapeDtypeStruct((), np.float32)).compile()

    @property
    def takes_seconds(self) -> bool:
        """Whether a few steps should take seconds, estimated from their FLOPs."""
        devices = self.mesh.devices.flatten()
        budget = CPU_FLOPS if devices[0].platform == "cpu" else ACCELERATOR_FLOPS * len(devices)
        train = self.config.train
        return train.batch_size * train.seq_len * flops.flops_per_token(self.model, train.seq_len) <= budget

    def tokens_per_s(self, compiled: Any) -> float:
        """Return the speed of `TIMED_STEPS` steps on random tokens, in tokens/s."""
        train = self.config.train
        with jax.set_mesh(self.mesh):
            state = jax.jit(self._init, out_shardings=self.sharding)()
            ids = np.random.default_rng(0).integers(0, self.config.model.vocab_size, self._batch.shape, np.int32)
            seconds = _time_steps(compiled, state, jax.device_put(ids, self._tokens))
        return train.batch_size * train.seq_len / seconds


class Measured(NamedTuple):
    """The speed of a config on one device, and why it does not fit.

    `tokens_per_s` is None if no step was timed. `excess` is "" if the config fits.
    """

    tokens_per_s: float | None
    excess: str


def measure(config: Config, *, timed: bool = True, say: Callable[[str], None] = lambda text: None) -> Measured:
    """Time a few steps of a config on one device of this machine, if they fit.

    Steps that would take longer than seconds, or need not be `timed`, are not compiled, because compilation takes
    minutes. Their memory is checked for state and batch only.
    """
    devices = jax.devices()[:1]
    step = Step(config, _model(config), make_mesh(devices=devices), rules=RULES)
    resident_bytes = step.state_bytes + step.batch_bytes
    if (excess := _excess(resident_bytes, devices)) or not (timed and step.takes_seconds):
        return Measured(None, excess and f"state and batch need {size(resident_bytes)} on one device, {excess}")
    say(f"timing {TIMED_STEPS} steps on {devices[0].device_kind}")
    compiled = step.compile()
    needed, _ = _memory(compiled, resident_bytes=resident_bytes, program="")
    if excess := _excess(needed, devices):
        return Measured(None, f"a step needs {size(needed)} on one device, {excess}")
    try:
        return Measured(step.tokens_per_s(compiled), "")
    except jax.errors.JaxRuntimeError:  # another process holds the memory of the device
        return Measured(None, "")


def _model(config: Config, *, carry_from_zero: bool = False) -> Model:
    documents = (0, 1) if config.data.reset else None  # the ids do not change the program's size
    return Model(config.model, max_len=config.train.seq_len, carry_from_zero=carry_from_zero, documents=documents)


def group_table(model: Model) -> list[str]:
    """Return one line per parameter group: arrays, counted per layer, and elements."""
    arrays, elements, shapes = collections.Counter(), collections.Counter(), dict(names(model.shapes))
    for name, group in names(model.groups):
        arrays[group] += model.repeats if name.startswith("blocks.") else 1
        elements[group] += math.prod(shapes[name].shape)
    heads = itertools.chain(["groups"], itertools.repeat(""))
    return [
        f"{head:<12} {group:<11} {arrays[group]:,} arrays, {elements[group]:,} parameters"
        for head, group in zip(heads, filter(arrays.get, GROUPS))
    ]


def _optimiser(step: "Step") -> Iterator[str]:
    """Yield the schedule, and a line per rule with its rate, arrays (counted per layer) and state bytes per device."""
    optim, model = step.config.optim, step.model
    schedule = f"WSD, cooldowns over {optim.cooldown:.0%}" if step.config.train.ends else optim.schedule
    yield f"schedule     {schedule}, warmup {optim.warmup_steps:,} steps, final rate {optim.final_lr:g}"
    if step.update_rules is None:
        yield f"optimiser    {optim.name}, lr {optim.lr:g}"
        return
    shapes, rules = dict(names(model.shapes)), names(step.update_rules)
    adam_lr = optim.lr if optim.adam_lr is None else optim.adam_lr
    of_state = [
        {rule: inner for part in parts if isinstance(part, optax.PartitionState) for rule, inner in part[0].items()}
        for parts in (step.shapes.opt_state, step.sharding.opt_state)
    ]
    for head, rule, label, lr in (("optimiser", "muon", optim.name, optim.lr), ("", "adam", "adam", adam_lr)):
        paths = [path for path, own in rules if own == rule]
        arrays = sum(model.repeats if path.startswith("blocks.") else 1 for path in paths)
        elements = sum(math.prod(shapes[path].shape) for path in paths)
        state_bytes = bytes_per_device(*(inner[rule] for inner in of_state))
        yield (
            f"{head:<12} {label:<11} {arrays:,} arrays, {elements:,} parameters, lr {lr:g}, state {size(state_bytes)} "
            "on each device"
        )


def _decay(weight_decay: float, rules: int) -> str:
    if not weight_decay:
        return "none"
    if rules > 1:
        return f"{weight_decay:g} on matrices"
    return f"{weight_decay:g} on every array with more than one axis per layer, as when the run in the workdir began"


def simulated_devices(count: int) -> list[Any]:
    """Return `count` CPU devices that simulate another machine.

    Programs are compiled for them, not run. JAX creates them when it starts, so call this first. Raises `UserError` if
    JAX has started with fewer.
    """
    if count < 1:
        raise UserError(f"--devices={count}: give the number of devices to simulate, 1 or more.")
    if not cpu_compiler.has_started():
        flags = os.environ.get("XLA_FLAGS", "").split()
        os.environ["XLA_FLAGS"] = " ".join(flag for flag in flags if not flag.startswith(FORCE))
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
    cpu_devices = jax.devices("cpu")
    if len(cpu_devices) < count:
        raise UserError(
            f"JAX has started with {len(cpu_devices)} CPU device(s), so {count} cannot be simulated; start a new "
            "process."
        )
    return cpu_devices[:count]


def _workdir(workdir: str | Path | None, config: Config) -> str:
    if workdir is None:
        return "a new one under runs/"
    try:
        check_config(workdir, config)
    except UserError as error:
        return f"NOT READY: {error}"
    if extension(workdir, config):
        return f"{workdir}, which holds a run with other ends: it would be extended"
    exists = (readable(workdir) / "config.json").is_file()
    return f"{workdir}, " + ("which holds a run: it would be resumed" if exists else "which holds no run yet")


def _weights(describe: Callable[[], str], workdir: str | Path | None) -> str:
    if workdir is not None and has_any(workdir):
        return "from the run in the workdir; --init_from would be ignored"
    try:
        return describe()
    except UserError as error:
        return f"NOT READY: {error}"


def _data(config: Config) -> str:
    """Return a line about the text source.

    For prepared blocks it has the number of passes.
    """
    if config.data.corpus != "blocks":
        return " ".join(filter(None, (config.data.corpus, ", ".join(config.data.tfds), config.data.path)))
    try:
        corpus = open_corpus(config.data, seq_len=config.train.seq_len, vocab_size=config.model.vocab_size)
    except UserError as error:
        return f"NOT READY: {error}"
    tokens = sum(corpus.tokens.values())
    passes = config.train.steps * config.train.batch_size * config.train.seq_len / tokens
    return (
        f"{config.data.path}: {tokens:,} training tokens in {', '.join(corpus.train_domains)}, read {passes:.2f} times"
    )


def _limit(device: Any) -> int | None:
    """Return a device's memory in bytes, for a CPU the machine's; None if unknown."""
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    limits = []
    with contextlib.suppress(OSError, ValueError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # the file may hold "max"
            limits.append(int(path.read_text(encoding="ascii")))
    return min(limits, default=None)


def _excess(needed: int, devices: Sequence[Any]) -> str:
    """Return a text if a device needs more bytes than it has.

    Returns "" if it fits or its memory is unknown.
    """
    limit = _limit(devices[0])
    is_cpu = devices[0].platform == "cpu"  # CPU devices share the machine's memory
    if limit is None or needed * (len(devices) if is_cpu else 1) <= limit:
        return ""
    return f"MORE than the {size(limit)} of {'this machine' if is_cpu else 'a device'}"


def _memory(compiled: Any, *, resident_bytes: int, program: str) -> tuple[int, str]:
    """Return the bytes a device needs, and a text with their parts.

    `resident_bytes` counts state and batch bytes.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        text = "at least, for parameters, optimiser and batch; this backend gives no memory analysis"
        return resident_bytes, f"{size(resident_bytes)} {text}"
    needed = resident_bytes + analysis.temp_size_in_bytes
    return needed, (
        f"{size(needed)} per device: {size(resident_bytes)} parameters, optimiser and batch, "
        f"{size(analysis.temp_size_in_bytes)} gradients and activations (XLA's analysis of {program})"
    )


class RecordedSpeed(NamedTuple):
    """A model's recorded training speed on one device, and its benchmark."""

    tokens_per_s: float
    device: str
    source: str


def recorded_speed(
    config: Config, *, n_params: int, per_token: float, device: str | None, within: float = 0.0
) -> RecordedSpeed | None:
    """Return the recorded speed of this model on a device kind, or None.

    `device` None matches any device. A record matches if config name, sequence length, mixer settings, parameter count
    and FLOPs per token agree. With a share `within`, mixer settings may differ (such as QK norm), and parameters and
    FLOPs may differ by that share. The fastest matching record is returned, because kernels get faster.
    """
    matches: list[RecordedSpeed] = []
    for entry in read_json(SPEEDS, {"speeds": [SPEED]})["speeds"]:
        is_match = entry["name"].partition(":")[0] == config.name and entry["seq_len"] == config.train.seq_len
        is_match &= device in (None, entry["device"])
        is_match &= math.isclose(entry["params"], n_params, rel_tol=within or 1e-9)
        is_match &= math.isclose(entry["flops_per_token"], per_token, rel_tol=within or 1e-9)
        # Parameters and FLOPs do not identify a model: Top-1 selection rules, for example, share them.
        if is_match and (within or _benchmark_config(entry["name"], entry["size"]).model.mixer == config.model.mixer):
            source = f"{entry['file']}, batch {entry['batch']}, remat {entry['remat']}"
            matches.append(RecordedSpeed(entry["tokens_per_s"], entry["device"], source))
    return max(matches, default=None)


def _benchmark_config(name: str, model_size: str) -> Config:
    """Return the config of a benchmark by its name `config[:key=value,...]`."""
    base, _, settings = name.partition(":")
    return from_config_dict(presets.read_config(f"{base}:{','.join(filter(None, (model_size, settings)))}"))


def _time_steps(compiled: Any, state: Any, tokens: jax.Array) -> float:
    """Return the median seconds per step.

    The first step is left out because it allocates.
    """
    seconds = []
    for _ in range(1 + TIMED_STEPS):
        start = time.perf_counter()
        state, metrics = compiled(state, tokens, np.float32(0))
        assert math.isfinite(float(metrics["loss"]))
        seconds.append(time.perf_counter() - start)
    return sorted(seconds[1:])[TIMED_STEPS // 2]
