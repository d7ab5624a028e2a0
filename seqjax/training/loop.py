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
from seqjax.data.corpora import document_ids
from seqjax.errors import UserError
from seqjax.files import write_json
from seqjax.models import Model, flops
from seqjax.nn.params import fingerprint, updated
from seqjax.sharding import batch_sharding, make_mesh, replicated, require_equal_pieces, to_devices
from seqjax.terminal import StatusLine
from seqjax.training import eval_losses, identity, metrics, mirrors, origin, provenance, report, schedule, train_log
from seqjax.training import workdir as workdirs
from seqjax.training.checkpoint import Checkpoints, has_any
from seqjax.training.evaluate import Evaluation, is_complete, repair_evaluation, report_missing_files
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


class Position(NamedTuple):
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
            mirror.check_lock(reread=True)  # raises a clearer error if the workdir was moved or deleted
            if not Path(str(error.filename)).absolute().is_relative_to(mirror.directory.absolute()):
                raise
            raise UserError(
                f"{error.filename} cannot be reached: its directory was deleted while this run wrote to it. The same "
                "command resumes from the last remaining checkpoint."
            ) from error


def _train_segments(config: Config, mirror: mirrors.Mirror, weights: Weights | None, *, manifest: str) -> bool:
    """Train all incomplete segments and write the report; return False if stopped early."""
    print_line = StatusLine(quiet=jax.process_index() != 0).say
    extension: dict[str, Any] = {}
    if jax.process_index() == 0:
        mirror.pull()
        workdirs.check_config(mirror, config)
        metrics.require_checkpoint(mirror)
        mirror.remove_temporaries()
        extension = workdirs.extension(mirror, config)
        identity.require(mirror.directory, label=str(mirror))
    setup = _set_up(config, mirror, manifest=manifest)
    checkpoints = _checkpoints(config, mirror, setup.origin.get("identity"))
    if weights is not None and checkpoints.latest is not None:
        print_line(f"{mirror} has a checkpoint and resumes from it; --init_from={weights.source} is ignored.")
    trunk = position = _restored(setup, checkpoints, mirror) or _fresh(setup, checkpoints, weights)
    if extension:
        setup.origin.update(origin.extended(setup.origin, {"step": trunk.step, **extension}))
    _require_reachable(setup, trunk.step, extended=bool(extension))
    for line in _description(setup, trunk):
        print_line(line)
    with StopRequest() as stop:
        for segment in schedule.segments(config):
            if not segment.is_cooldown:
                if trunk.step < segment.end or not config.train.ends:
                    trunk = position = _train(setup, segment, trunk, mirror, checkpoints, stop=stop)
            elif not is_complete(config, segment, mirror.directory):
                end_mirror = mirror.for_end(segment)
                end_identity = identity.of_segment(setup.origin.get("identity"), segment)
                end_checkpoints = _checkpoints(config, end_mirror, end_identity)
                position = _restored(setup, end_checkpoints, end_mirror) or _branch(trunk)
                print_line(f"Cooling down from step {position.step} to the end at step {segment.end} in {end_mirror}")
                position = _train(setup, segment, position, end_mirror, end_checkpoints, stop=stop)
                end_checkpoints.wait()
                end_checkpoints.close()
            elif has_any(end_directory := segment.directory(mirror.directory)):
                end_identity = identity.of_segment(setup.origin.get("identity"), segment)
                Checkpoints(end_directory, read_only=True, identity=end_identity).require_intact()
            if stop.agreed_on:
                break
    checkpoints.wait()
    checkpoints.close()
    if stop.agreed_on and position.step < config.train.steps:
        print_line(
            f"Stopped by {stop.name} after step {position.step}; everything is saved. To resume, run the same command "
            f"with --workdir={mirror}"
        )
        return False
    if jax.process_index() == 0:
        mirror.check_lock(reread=True)
        report_missing_files(config, mirror.directory)
        at_end = position.step == config.train.steps  # False if the last of several ends was already complete
        params, rng = (position.state.params, position.state.rng) if at_end else (None, None)
        print_line(
            report.write_for_run(mirror, config, setup.corpus, setup.model, params=params, rng=rng, mesh=setup.mesh)
        )
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
    run_origin = origin.read(mirror.directory)
    if jax.process_count() > 1:  # only process 0 has the files of a store
        run_origin["rules"] = int(multihost_utils.broadcast_one_to_all(np.array(run_origin["rules"], np.int32)))
    documents = document_ids(config.data, corpus.tokenizer)
    model = Model(config.model, max_len=seq_len, carry_from_zero=run_origin["rules"] == 1, documents=documents)
    optimizer = schedule.optimizer(config.optim, model.groups if run_origin["rules"] > 1 else None)
    init = lambda: init_state(model, optimizer, jax.random.key(config.train.seed))  # noqa: E731
    shapes = jax.eval_shape(init)
    state, tokens = state_shardings(mesh, model, optimizer, shapes), batch_sharding(mesh, leading=1)
    return Setup(
        config=config,
        mesh=mesh,
        corpus=corpus,
        iterator=iterator,
        evaluation=Evaluation(model, corpus, config, mesh=mesh, rules=run_origin["rules"]),
        model=model,
        init=jax.jit(init, out_shardings=state),
        target=jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, state),
        tokens=tokens,
        n_micro=n_micro,
        train_step=jit_train_step(model, optimizer, state=state, tokens=tokens),
        mirror=mirror,
        origin=run_origin,
    )


def _checkpoints(config: Config, mirror: mirrors.Mirror, run_identity: str | None) -> Checkpoints:
    keep, period = config.checkpoint.keep, config.checkpoint.keep_period
    check = functools.partial(mirror.check_lock, reread=True)
    return Checkpoints(str(mirror), keep=keep, keep_period=period, identity=run_identity, before_commit=check)


def _restored(setup: Setup, checkpoints: Checkpoints, mirror: mirrors.Mirror) -> Position | None:
    """Return the position of the newest checkpoint; None if no checkpoint can be resumed."""
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
    setup.origin.setdefault("identity", checkpoints.recorded_identity)  # run.json is lost, or only process 0 has it
    return Position(step, state, setup.iterator.get_state(), log)


def _fresh(setup: Setup, checkpoints: Checkpoints, weights: Weights | None) -> Position:
    """Return the start of a run.

    Its parameters come from `checkpoints` if `seqjax convert` wrote them, from `weights`, or from the initialiser.
    """
    init_from = setup.origin.pop("init_from", None)  # left by a process killed before the first checkpoint
    if checkpoints.params_only:
        state = setup.init()._replace(params=checkpoints.restore_params(setup.target.params)[0])
    elif weights is not None:
        params, step = weights.read(setup.config, setup.target.params)
        setup.origin["init_from"] = {"path": weights.source, "step": step, "sha256": fingerprint(params)}
        state = setup.init()
        state = state._replace(params=updated(state.params, params))  # a new index keeps its initial values
    elif init_from:
        raise UserError(
            f"{setup.mirror} began with the weights of {init_from['path']} and was stopped before its first "
            f"checkpoint: give --init_from={init_from['path']} again, or another --workdir to begin without them."
        )
    else:
        state = setup.init()
    corpus, run_origin = setup.corpus, setup.origin
    new = identity.of(setup.config, manifest=corpus.manifest_hash, test_sets=corpus.test_sets, origin=run_origin)
    checkpoints.identity = run_origin.setdefault("identity", new)
    return Position(0, state, setup.iterator.get_state(), None)


def _require_reachable(setup: Setup, step: int, *, extended: bool) -> None:
    """Raise `UserError` if an untrained cooldown branches off before `step`.

    `step` is the trunk's current step.
    """
    cooldowns = [segment for segment in schedule.segments(setup.config) if segment.is_cooldown]
    for segment in cooldowns:
        end_directory = segment.directory(setup.mirror.directory)
        if (
            step <= segment.begin
            or has_any(end_directory)
            or is_complete(setup.config, segment, setup.mirror.directory)
        ):
            continue
        if extended:
            ends = {s.end for s in cooldowns if s.begin >= step} | {*setup.origin["extended"][-1]["ends"]}
            shares = schedule.shares_of_steps(ends, steps=setup.config.train.steps)
            raise UserError(
                f"{setup.mirror} has trained to step {step}, and the cooldown to a new end after step {segment.end} "
                f'begins after step {segment.begin}. Ends that are still possible: --config.train.ends="{shares}".'
            )
        path = eval_losses.path(end_directory, segment.end)
        fault = eval_losses.fault(path) or "exists, but not its checkpoint"
        raise UserError(
            f"{end_directory} lacks the results of this end ({path.name} {fault}), and the trunk has continued from "
            f"step {segment.begin}, where this end branches off, to step {step}. Put the directory back, or start "
            "again in another --workdir."
        )


def _branch(trunk: Position) -> Position:
    """Return a copy of the trunk, where a cooldown starts."""
    assert trunk.log is not None, "a trunk has at least one step"
    log = {"metrics": 0, "window": [0.0, 0], "seconds": trunk.log["seconds"]}
    return Position(trunk.step, jax.tree.map(jnp.copy, trunk.state), trunk.data, log)


def _description(setup: Setup, start: Position) -> list[str]:
    """Return lines about the run, the model and its division over devices."""
    config, mirror, steps = setup.config, setup.mirror, setup.config.train.steps
    lines = [f"Training {config.name} ({config.size}, {steps} steps) in {mirror}"]
    if start.step:
        lines = [f"Resuming from step {start.step} of {steps} in {mirror}"]
    lines += [f"This run {line}" for line in origin.lines(setup.origin)]
    if setup.origin.get("identity") == "":
        lines.append(f"{mirror}: {identity.NOT_CHECKED}.")
    if setup.n_micro > 1 or config.train.accumulate is not None:
        lines.append(f"Each step: {division(config.train, setup.mesh)}")
    tokens_per_step = config.train.batch_size * config.train.seq_len
    if 0 < config.eval.every < tokens_per_step:
        lines.append(
            f"Every step is evaluated: config.eval.every={config.eval.every} counts tokens, and a step has "
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
    start: Position,
    mirror: mirrors.Mirror,
    checkpoints: Checkpoints,
    *,
    stop: StopRequest,
) -> Position:
    """Train a segment from `start` and return the last position, earlier than the end if stopped."""
    config, mesh, corpus, model = setup.config, setup.mesh, setup.corpus, setup.model
    iterator, evaluation = setup.iterator, setup.evaluation
    workdir, lead, replicated_sharding = mirror.directory, jax.process_index() == 0, replicated(mesh)
    tokens_per_step = config.train.batch_size * config.train.seq_len
    run_fields = {"manifest": corpus.manifest_hash, "rules": setup.origin["rules"]}
    run_identity = identity.of_segment(setup.origin["identity"], segment)
    state, step = start.state, start.step
    iterator.set_state(start.data)
    log = train_log.TrainLog(
        workdir, config, end=segment.end, lead=lead, flops_per_token=flops.flops_per_token(model, config.train.seq_len)
    )
    pending = None  # the newest step; its metrics are still on the device
    profiling = False
    with jax.set_mesh(mesh), jax.transfer_guard("disallow"), checkpoints.disk_full_as_user_error(), log:
        log.start(start.step, start.log, evaluation.blocks)
        if start.step == segment.end and segment.is_end:
            repair_evaluation(mirror, evaluation, start.step, state.params)
        for step in range(start.step + 1, segment.end + 1):
            if step == config.log.profile_start:
                jax.profiler.start_trace(str(workdir / "profile"))
                profiling = True
            batch = next(iterator)["tokens"]
            tokens = to_devices(batch.reshape(setup.n_micro, -1, config.train.seq_len + 1), setup.tokens)
            rate = to_devices(schedule.rates(config.optim, segment, np.array(step)), replicated_sharding)
            state, device_metrics = setup.train_step(state, tokens, rate)
            if pending is not None:  # log the previous step while the device computes this step
                log_step(*pending, log, mirror, checkpoints)
            pending = (step, device_metrics, batch)
            if step == start.step + 1:  # The step has been traced, so the backends of its kernels are known.
                metadata = provenance.run_metadata(
                    manifest=corpus.manifest_hash, test_sets=corpus.test_sets, parameters=flops.n_params(model)
                )
                if backends := metadata["backends"]:
                    log.say(f"Kernels: {', '.join(f'{op} on {backend}' for op, backend in backends.items())}")
                if lead:
                    # After the first step: a run that is refused or out of memory must not bind the workdir to
                    # settings that the user has to change.
                    jax.block_until_ready(device_metrics)
                    mirror.check_lock(reread=True)
                    hashes = mixers.source_hashes(mixer.name for mixer in config.model.mixers)
                    metadata |= {"mixers": hashes} if hashes else {}
                    # Write run.json first: config.json marks a run.
                    write_json(
                        workdir / "run.json", metadata | setup.origin | identity.entry(workdir, config, run_identity)
                    )
                    workdirs.save_config(mirror, config)
                    if segment.is_cooldown:  # This end may be the run's only new segment.
                        trunk = setup.mirror.directory
                        trunk_identity = identity.entry(trunk, config, setup.origin["identity"])
                        origin.save(trunk, setup.origin | trunk_identity)
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
            mirror.check_lock(reread=True)
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
                    mirror.check_lock(reread=True)
                    if step == config.train.steps and config.eval.classes:
                        evaluation.write_classes(workdir, step, state.params)
                    log.evaluation(step, row, losses)  # last: its file marks the evaluation as complete
                    if lead and not saving:  # a save pushes the files too
                        mirror.push(on_error=log.say)
                # ------------------------------------------------------------------------------------------ save
                if saving:
                    log.sync()
                    mirror.push()  # the rows that this checkpoint relies on
                    with jax.transfer_guard("allow"):
                        checkpoints.save(step, state, iterator, log.state | run_fields)
            if stopping:
                break
        return Position(step, state, iterator.get_state(), log.state | run_fields)


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
