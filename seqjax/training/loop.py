"""The training loop, one linear function.

Metrics are fetched one step late, so the device never waits for the host. The data iterator, the optimiser and the
position in `metrics.jsonl` are saved together. A run that was killed and resumed therefore equals an uninterrupted run.

A run is trained in segments (seqjax/training/schedule.py): a single segment, or a trunk and one cooldown per end.
`train` goes through the segments, and `_train` trains a segment. All segments use the same compiled step.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from seqjax import mixers
from seqjax.command_line import use_safe_fusions
from seqjax.config import Config
from seqjax.data import Corpus, TrainIterator, open_corpus
from seqjax.errors import UserError
from seqjax.files import write_json
from seqjax.models import Model, flops
from seqjax.nn.params import fingerprint
from seqjax.sharding import batch_sharding, make_mesh, replicated, require_equal_pieces, to_devices
from seqjax.terminal import StatusLine
from seqjax.training import eval_losses, identity, metrics, mirrors, origin, provenance, report, schedule, train_log
from seqjax.training import workdir as workdirs
from seqjax.training.checkpoint import Checkpoints, has_any
from seqjax.training.evaluate import Evaluation, is_complete, mend, say_lost
from seqjax.training.processes import StopRequest
from seqjax.training.step import (
    TrainState,
    division,
    init_state,
    jit_train_step,
    micro_batches,
    parameter_table,
    state_shardings,
)
from seqjax.types import Params


class Setup(NamedTuple):
    """What all segments of a run share: data, model and compiled steps."""

    config: Config
    mesh: jax.sharding.Mesh
    corpus: Corpus
    iterator: TrainIterator
    evaluation: Evaluation
    model: Model
    init: Callable[[], TrainState]
    target: TrainState  # shapes and shardings
    tokens: jax.sharding.NamedSharding  # for a batch [A, B, T + 1]
    n_micro: int  # A
    train_step: Any
    mirror: mirrors.Mirror
    origin: dict[str, Any]  # for run.json (seqjax/training/origin.py)


class Place(NamedTuple):
    """A position in training: device state, data position, log state (None: new)."""

    step: int
    state: TrainState
    data: dict[str, Any]
    log: dict[str, Any] | None


class Weights(NamedTuple):
    """The initial weights of a new run: their location and how to read them.

    `read` takes the run's config and its parameters' shapes and shardings. It returns parameters and step
    (seqjax/pretrained.py).
    """

    source: str
    read: Callable[[Config, Params], tuple[Params, int]]


def train(config: Config, workdir: str | Path, *, weights: Weights | None = None, manifest: str = "") -> bool:
    """Start or resume training in `workdir`; return whether the run is complete.

    False means that the run was stopped early. A new run begins with `weights`, if given. A run with a checkpoint
    resumes from it and ignores them. A run with ends may be extended by more steps and ends (docs/protocol.md).

    A new run uses the built-in text with the hash `manifest` if that text is still cached, as a resumed run does.
    `workdir` may be in a store, gs://BUCKET/PATH (seqjax/training/mirrors.py).

    On a CPU, some XLA versions need a flag to compile sums of products correctly. It is added to XLA_FLAGS; if JAX has
    already started, a warning follows instead (kernels_pallas/cpu_compiler.py).

    Raises `UserError` if another run is writing to `workdir` or the run cannot be trained.
    """
    use_safe_fusions()  # as the commands do
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise UserError("Training compiles its steps, which JAX_DISABLE_JIT forbids; unset it.")
    mirror = mirrors.Mirror(workdir)
    if mirror.url and config.train.ends:
        raise UserError(
            f"--workdir={mirror}: a run with config.train.ends has a directory for each end and cannot be kept in a "
            "store; give a directory of this machine."
        )
    with mirror.locked():
        try:
            return _train_segments(config, mirror, weights, manifest=manifest)
        except FileNotFoundError as error:
            mirror.check_lock(look=True)  # raises a clearer error if the workdir was moved or deleted
            if not Path(str(error.filename)).absolute().is_relative_to(mirror.directory.absolute()):
                raise
            raise UserError(
                f"{error.filename} cannot be reached: its directory was deleted while this run wrote to it. The same "
                "command resumes from the last remaining checkpoint."
            ) from error


def _train_segments(config: Config, mirror: mirrors.Mirror, weights: Weights | None, *, manifest: str) -> bool:
    """Train all incomplete segments, then report the run.

    Returns False if it was stopped.
    """
    say = StatusLine(quiet=jax.process_index() != 0).say
    extended: dict[str, Any] = {}
    if jax.process_index() == 0:
        mirror.pull()
        workdirs.check_config(mirror, config)
        metrics.require_checkpoint(mirror)
        mirror.remove_temporaries()
        extended = workdirs.extension(mirror, config)
        identity.require(mirror.directory, called=str(mirror))
    setup = _set_up(config, mirror, manifest=manifest)
    checkpoints = _checkpoints(config, mirror, setup.origin.get("identity"))
    if weights is not None and checkpoints.latest is not None:
        say(f"{mirror} has weights of its own and goes on with them; --init_from={weights.source} is not read.")
    trunk = place = _restored(setup, checkpoints, mirror) or _fresh(setup, checkpoints, weights)
    if extended:
        setup.origin.update(origin.extended(setup.origin, {"step": trunk.step, **extended}))
    _require_reachable(setup, trunk.step, extended=bool(extended))
    for line in _description(setup, trunk):
        say(line)
    with StopRequest() as stop:
        for segment in schedule.segments(config):
            if not segment.is_cooldown:
                if trunk.step < segment.end or not config.train.ends:
                    trunk = place = _train(setup, segment, trunk, mirror, checkpoints, stop=stop)
            elif not is_complete(config, segment, mirror.directory):
                there = mirror.of_end(segment)
                of_end = _checkpoints(config, there, identity.of_segment(setup.origin.get("identity"), segment))
                place = _restored(setup, of_end, there) or _branch(trunk)
                say(f"Cooling down from step {place.step} to the end at step {segment.end} in {there}")
                place = _train(setup, segment, place, there, of_end, stop=stop)
                of_end.wait()
                of_end.close()
            elif has_any(there := segment.directory(mirror.directory)):
                own = identity.of_segment(setup.origin.get("identity"), segment)
                Checkpoints(there, read_only=True, identity=own).require_whole()
            if stop.agreed_on:
                break
    checkpoints.wait()
    checkpoints.close()
    if stop.agreed_on and place.step < config.train.steps:
        say(
            f"Stopped by {stop.name} after step {place.step}; everything is saved. Go on with the same command and "
            f"--workdir={mirror}"
        )
        return False
    if jax.process_index() == 0:
        mirror.check_lock(look=True)
        say_lost(config, mirror.directory)
        at_end = place.step == config.train.steps  # False if the last of several ends was already complete
        params, rng = (place.state.params, place.state.rng) if at_end else (None, None)
        say(report.of_run(mirror, config, setup.corpus, setup.model, params=params, rng=rng, mesh=setup.mesh))
        mirror.push()
    return True


def _set_up(config: Config, mirror: mirrors.Mirror, *, manifest: str) -> Setup:
    """Open the data and build the model and its steps.

    Nothing is compiled or written.
    """
    recorded = workdirs.recorded_manifest(mirror.directory) or manifest
    seq_len = config.train.seq_len
    # ------------------------------------------------------------------------------------------------ mesh, data
    mesh = make_mesh(data=config.mesh.data, fsdp=config.mesh.fsdp, seq=config.mesh.seq, tensor=config.mesh.tensor)
    require_equal_pieces(seq_len, mesh)
    n_micro = micro_batches(config.train, mesh)
    sizes = {"seq_len": seq_len, "vocab_size": config.model.vocab_size}
    corpus = open_corpus(config.data, test_sets=config.eval.path, recorded=recorded, **sizes)
    iterator = corpus.train_iterator(
        batch_size=config.train.batch_size // jax.process_count(),
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    # ----------------------------------------------------------------------------------------------- model, state
    begun = origin.read(mirror.directory)
    if jax.process_count() > 1:  # only process 0 has the files of a store
        begun["rules"] = int(multihost_utils.broadcast_one_to_all(np.array(begun["rules"], np.int32)))
    model = Model(config.model, max_len=seq_len, carry_from_zero=begun["rules"] == 1)
    optimizer = schedule.optimizer(config.optim, model.groups if begun["rules"] > 1 else None)
    init = lambda: init_state(model, optimizer, jax.random.key(config.train.seed))  # noqa: E731
    shapes = jax.eval_shape(init)
    state, tokens = state_shardings(mesh, model, optimizer, shapes), batch_sharding(mesh, leading=1)
    return Setup(
        config=config,
        mesh=mesh,
        corpus=corpus,
        iterator=iterator,
        evaluation=Evaluation(model, corpus, config, mesh=mesh, rules=begun["rules"]),
        model=model,
        init=jax.jit(init, out_shardings=state),
        target=jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, state),
        tokens=tokens,
        n_micro=n_micro,
        train_step=jit_train_step(model, optimizer, state=state, tokens=tokens),
        mirror=mirror,
        origin=begun,
    )


def _checkpoints(config: Config, mirror: mirrors.Mirror, own: str | None) -> Checkpoints:
    keep, period = config.checkpoint.keep, config.checkpoint.keep_period
    check = functools.partial(mirror.check_lock, look=True)
    return Checkpoints(str(mirror), keep=keep, keep_period=period, identity=own, before_commit=check)


def _restored(setup: Setup, checkpoints: Checkpoints, mirror: mirrors.Mirror) -> Place | None:
    """Return the place of the newest checkpoint.

    Returns None if no checkpoint can be resumed.
    """
    step = checkpoints.latest
    if step is None or checkpoints.params_only:
        return None
    if step > setup.config.train.steps:
        raise UserError(
            f"{mirror}/checkpoints/{step} is beyond the end of the run, config.train.steps={setup.config.train.steps}; "
            "move it away to resume from the previous checkpoint."
        )
    state, log = checkpoints.restore(setup.target, setup.iterator)
    if log["manifest"] != setup.corpus.manifest_hash:
        raise UserError(
            f"{mirror} was trained on other data (manifest {log['manifest']}, now {setup.corpus.manifest_hash}). Point "
            "config.data.path at the same data, or start in another --workdir."
        )
    if log.get("rules", 1) != setup.origin["rules"]:
        raise UserError(
            f"{mirror}/run.json is missing or belongs to another run: the checkpoint of step {step} has other rules. "
            "Put back a copy of run.json."
        )
    setup.origin.setdefault("identity", checkpoints.named)  # run.json is lost, or only process 0 has it
    return Place(step, state, setup.iterator.get_state(), log)


def _fresh(setup: Setup, checkpoints: Checkpoints, weights: Weights | None) -> Place:
    """Return the start of a run.

    Its parameters come from `checkpoints` if `seqjax convert` wrote them, from `weights`, or from the initialiser.
    """
    begun = setup.origin.pop("init_from", None)  # left by a process killed before the first checkpoint
    if checkpoints.params_only:
        state = setup.init()._replace(params=checkpoints.restore_params(setup.target.params)[0])
    elif weights is not None:
        params, step = weights.read(setup.config, setup.target.params)
        setup.origin["init_from"] = {"path": weights.source, "step": step, "sha256": fingerprint(params)}
        state = setup.init()._replace(params=params)
    elif begun:
        raise UserError(
            f"{setup.mirror} began with the weights of {begun['path']} and was stopped before its first checkpoint: "
            f"give --init_from={begun['path']} again, or another --workdir to begin without them."
        )
    else:
        state = setup.init()
    corpus, begun = setup.corpus, setup.origin
    own = identity.of(setup.config, manifest=corpus.manifest_hash, test_sets=corpus.test_sets, origin=begun)
    checkpoints.identity = begun.setdefault("identity", own)
    return Place(0, state, setup.iterator.get_state(), None)


def _require_reachable(setup: Setup, step: int, *, extended: bool) -> None:
    """Raise `UserError` if an untrained cooldown branches off before `step`.

    `step` is the trunk's current step.
    """
    cooldowns = [segment for segment in schedule.segments(setup.config) if segment.is_cooldown]
    for segment in cooldowns:
        there = segment.directory(setup.mirror.directory)
        if step <= segment.begin or has_any(there) or is_complete(setup.config, segment, setup.mirror.directory):
            continue
        if extended:
            ends = {s.end for s in cooldowns if s.begin >= step} | {*setup.origin["extended"][-1]["ends"]}
            shares = schedule.shares_of_steps(ends, steps=setup.config.train.steps)
            raise UserError(
                f"{setup.mirror} has trained to step {step}, and the cooldown to a new end after step {segment.end} "
                f'begins after step {segment.begin}. Ends that are still possible: --config.train.ends="{shares}".'
            )
        path = eval_losses.path(there, segment.end)
        fault = eval_losses.fault(path) or "exists, but not its checkpoint"
        raise UserError(
            f"{there} lacks the results of this end ({path.name} {fault}), and the trunk has continued from step "
            f"{segment.begin}, where this end branches off, to step {step}. Put the directory back, or start again in "
            "another --workdir."
        )


def _branch(trunk: Place) -> Place:
    """Return a copy of the trunk, where a cooldown starts."""
    assert trunk.log is not None, "a trunk has at least one step"
    log = {"metrics": 0, "window": [0.0, 0], "seconds": trunk.log["seconds"]}
    return Place(trunk.step, jax.tree.map(jnp.copy, trunk.state), trunk.data, log)


def _description(setup: Setup, start: Place) -> list[str]:
    """Return lines about the run, the model and its division over devices."""
    config, mirror, steps = setup.config, setup.mirror, setup.config.train.steps
    lines = [f"Training {config.name} ({config.size}, {steps} steps) in {mirror}"]
    if start.step:
        lines = [f"Going on from step {start.step} of {steps} in {mirror}"]
    lines += [f"This run {line}" for line in origin.lines(setup.origin)]
    if setup.origin.get("identity") == "":
        lines.append(f"{mirror}: {identity.NOT_CHECKED}.")
    if setup.n_micro > 1 or config.train.accumulate is not None:
        lines.append(f"Each step: {division(config.train, setup.mesh)}")
    tokens_per_step = config.train.batch_size * config.train.seq_len
    if 0 < config.eval.every < tokens_per_step:
        lines.append(
            f"It evaluates after every step: config.eval.every={config.eval.every} counts tokens, of which a step has "
            f"{tokens_per_step:,}."
        )
    if setup.mesh.size > 1:
        lines += parameter_table(setup.model, jax.tree.map(lambda x: x.sharding, setup.target.params))
    if start.step < steps:
        lines.append("Compiling the training step: seconds, or minutes for large models")
    return lines


def _train(
    setup: Setup,
    segment: schedule.Segment,
    start: Place,
    mirror: mirrors.Mirror,
    checkpoints: Checkpoints,
    *,
    stop: StopRequest,
) -> Place:
    """Train a segment from `start`.

    Returns its last place, earlier than the end if stopped.
    """
    config, mesh, corpus, model = setup.config, setup.mesh, setup.corpus, setup.model
    iterator, evaluation = setup.iterator, setup.evaluation
    workdir, lead, everywhere = mirror.directory, jax.process_index() == 0, replicated(mesh)
    tokens_per_step = config.train.batch_size * config.train.seq_len
    belongs_to = {"manifest": corpus.manifest_hash, "rules": setup.origin["rules"]}
    own = identity.of_segment(setup.origin["identity"], segment)
    state, step = start.state, start.step
    iterator.set_state(start.data)
    log = train_log.TrainLog(
        workdir, config, end=segment.end, lead=lead, flops_per_token=flops.flops_per_token(model, config.train.seq_len)
    )
    pending = None  # the newest step; its metrics are still on the device
    profiling = False
    with jax.set_mesh(mesh), jax.transfer_guard("disallow"), checkpoints.named_when_disk_full(), log:
        log.start(start.step, start.log, evaluation.blocks)
        if start.step == segment.end and segment.is_end:
            mend(mirror, evaluation, start.step, state.params)
        for step in range(start.step + 1, segment.end + 1):
            if step == config.log.profile_start:
                jax.profiler.start_trace(str(workdir / "profile"))
                profiling = True
            batch = next(iterator)["tokens"]
            tokens = to_devices(batch.reshape(setup.n_micro, -1, config.train.seq_len + 1), setup.tokens)
            rate = to_devices(schedule.rates(config.optim, segment, np.array(step)), everywhere)
            state, device_metrics = setup.train_step(state, tokens, rate)
            if pending is not None:  # log the previous step while the device computes this step
                log_step(*pending, log, mirror, checkpoints)
            pending = (step, device_metrics, batch)
            if step == start.step + 1:  # The step has been traced, so the backends of its kernels are known.
                metadata = provenance.run_metadata(
                    manifest=corpus.manifest_hash, test_sets=corpus.test_sets, parameters=flops.n_params(model)
                )
                if used := metadata["backends"]:
                    log.say(f"Kernels: {', '.join(f'{op} on {backend}' for op, backend in used.items())}")
                if lead:
                    # Not earlier: a run that is refused or runs out of memory must not bind the workdir to settings
                    # that the user has to change.
                    jax.block_until_ready(device_metrics)
                    mirror.check_lock(look=True)
                    hashes = mixers.source_hashes(mixer.name for mixer in config.model.mixers)
                    metadata |= {"mixers": hashes} if hashes else {}
                    # Write run.json first: config.json marks a run.
                    write_json(workdir / "run.json", metadata | setup.origin | identity.entry(workdir, config, own))
                    workdirs.save_config(mirror, config)
                    if segment.is_cooldown:  # This end may be the run's only new segment.
                        trunk = setup.mirror.directory
                        of_trunk = identity.entry(trunk, config, setup.origin["identity"])
                        origin.save(trunk, setup.origin | of_trunk)
                        workdirs.save_config(setup.mirror, config)
                    mirror.push()

            every = config.eval.every
            last = step == segment.end
            stopping = stop.agreed()
            evaluating = (last and segment.is_end) or (
                every and step * tokens_per_step // every > (step - 1) * tokens_per_step // every
            )
            saving = (last and schedule.keeps_checkpoint(config, segment)) or (
                config.checkpoint.every and step % config.checkpoint.every == 0
            )
            saving = saving or (stopping and not (last and segment.is_cooldown))
            profiled = profiling and (last or step == (config.log.profile_start or 0) + config.log.profile_steps - 1)
            if not (evaluating or saving or profiled or last):
                continue
            mirror.check_lock(look=True)
            log_step(*pending, log, mirror, checkpoints)
            pending = None
            if profiled:
                jax.profiler.stop_trace()
                profiling = False
            with log.clock.paused():
                # -------------------------------------------------------------------------------------- evaluate
                if evaluating:
                    losses, row = evaluation.measure(state.params)
                    if last and segment.is_end and config.eval.entropy_tokens:
                        for field, values in evaluation.entropy(state.params).items():
                            row |= {f"eval/{name}/{field}": value for name, value in values.items()}
                    metrics.check_evaluation(step, row)
                    mirror.check_lock(look=True)
                    if step == config.train.steps and config.eval.classes:
                        evaluation.write_classes(workdir, step, state.params)
                    log.evaluation(step, row, losses)  # last: its file marks the evaluation as complete
                    if lead and not saving:  # a save pushes the files too
                        mirror.push(say=log.say)
                # ------------------------------------------------------------------------------------------ save
                if saving:
                    log.sync()
                    mirror.push()  # the rows that this checkpoint relies on
                    with jax.transfer_guard("allow"):
                        checkpoints.save(step, state, iterator, log.state | belongs_to)
            if stopping:
                break
        return Place(step, state, iterator.get_state(), log.state | belongs_to)


def log_step(
    step: int,
    device_metrics: dict[str, jax.Array],
    batch: np.ndarray,
    log: train_log.TrainLog,
    mirror: mirrors.Mirror,
    checkpoints: Checkpoints,
) -> None:
    """Fetch and log a step's metrics.

    If a value is not finite, saves the batch and raises `UserError`. Nothing is written if another run has taken the
    workdir.
    """
    values = {name: float(x) for name, x in jax.device_get(device_metrics).items()}
    mirror.check_lock()
    if not all(map(math.isfinite, values.values())):
        raise metrics.not_finite(step, values, batch, mirror=mirror, checkpoints=checkpoints)
    log.step(step, values)
