"""The training loop, one linear function that can be read from top to bottom.

Metrics are fetched one step late, so the device never waits for the host; the data iterator, the optimiser and the
position in `metrics.jsonl` are saved together, so a run that was killed and resumed equals an uninterrupted one.
"""

import math
import os
from pathlib import Path

import jax
import numpy as np

import kernels_pallas
from kernels_pallas import cpu_compiler
from seqjax import generate
from seqjax.config import Config
from seqjax.data import MissingPackageError, open_corpus
from seqjax.errors import UserError
from seqjax.evaluate import evaluate, evaluate_tokens, load_domains, measure_entropy, summarize
from seqjax.files import read_json, write_json
from seqjax.models import Model, flops
from seqjax.models.entropy import require_entropy
from seqjax.sequence_sharding import require_equal_pieces
from seqjax.sharding import batch_sharding, make_mesh, replicated, to_devices
from seqjax.terminal import StatusLine
from seqjax.training import not_finite, report, token_classes
from seqjax.training import workdir as workdirs
from seqjax.training.batches import division, micro_batches
from seqjax.training.checkpoint import Checkpoints
from seqjax.training.facts import run_facts
from seqjax.training.lock import WorkdirLock
from seqjax.training.log import TrainLog
from seqjax.training.optim import optimizer as make_optimizer
from seqjax.training.optim import schedule
from seqjax.training.placement import parameter_table
from seqjax.training.signals import StopRequest
from seqjax.training.spool import Spool
from seqjax.training.step import init_state, jit_train_step, make_eval_step, make_token_step, state_shardings
from seqjax.training.store_lock import StoreLock, locked


def train(config: Config, workdir: str | Path) -> bool:
    """Start or resume training in `workdir`; return True if the run is complete and False if it was stopped early.

    On a CPU, some versions of XLA need a flag to compile sums of products right. It is added to XLA_FLAGS unless JAX
    has started already; then this warns, because the flag comes too late (kernels_pallas/cpu_compiler.py).

    `workdir` may be in a store, gs://BUCKET/PATH or s3://BUCKET/PATH (seqjax/training/spool.py).

    Raises `UserError` if another run is writing to `workdir`, or for what cannot be trained.
    """
    cpu_compiler.use_safe_fusions()  # as the commands do
    spool = Spool(workdir)
    if jax.process_count() > 1 and spool.copies_checkpoints:
        raise UserError(
            f"--workdir={spool}: of several processes each has a part of the checkpoint on its own machine. Give a "
            "directory that they share, or gs://BUCKET/PATH, to which all of them write."
        )
    if jax.process_index() != 0:
        return _train(config, spool, lock=None)
    # What a scheduler starts again may come before the lock of its first start has grown old.
    again = jax.process_count() > 1 or "SLURM_RESTART_COUNT" in os.environ
    with locked(spool, wait=again) as lock:
        return _train(config, spool, lock=lock)


def _train(config: Config, spool: Spool, *, lock: WorkdirLock | StoreLock | None) -> bool:
    workdir = spool.directory
    n_steps, seq_len = config.train.steps, config.train.seq_len
    tokens_per_step = config.train.batch_size * seq_len
    lead = jax.process_index() == 0

    # --------------------------------------------------------------------------------------------- workdir, mesh
    if lead:
        spool.pull(StatusLine().say)
        workdirs.check_config(spool, config)
    mesh = make_mesh(data=config.mesh.data, fsdp=config.mesh.fsdp, seq=config.mesh.seq, tensor=config.mesh.tensor)
    require_equal_pieces(seq_len, mesh)
    n_micro = micro_batches(config.train, mesh)

    # ------------------------------------------------------------------------------------------------------ data
    corpus = open_corpus(config.data, seq_len=seq_len, vocab_size=config.model.vocab_size, test_sets=config.eval.path)
    iterator = corpus.train_iterator(
        batch_size=config.train.batch_size // jax.process_count(),
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    domains = load_domains(corpus, config, mesh=mesh)
    blocks = {name: domain.blocks for name, domain in domains.items()}

    # ----------------------------------------------------------------------------------------------------- model
    model = Model(config.model, max_len=seq_len)
    if config.eval.entropy_tokens:
        require_entropy(model)
    optimizer = make_optimizer(config.optim, n_steps)
    log = TrainLog(workdir, config, lead=lead, flops_per_token=flops.flops_per_token(model, seq_len))

    # ----------------------------------------------------------------------------------------------------- state
    init_fn = lambda: init_state(model, optimizer, jax.random.key(config.train.seed))  # noqa: E731
    shapes = jax.eval_shape(init_fn)
    state_sharding, unsharded = state_shardings(mesh, model, optimizer, shapes), replicated(mesh)
    tokens_sharding = batch_sharding(mesh, leading=1)
    train_step = jit_train_step(
        model, optimizer, schedule(config.optim, n_steps), state=state_sharding, tokens=tokens_sharding
    )
    eval_step = jax.jit(make_eval_step(model), out_shardings=unsharded)
    token_step = jax.jit(make_token_step(model), out_shardings=unsharded)  # compiled at the end, where it is called

    # --------------------------------------------------------------------------------------------------- restore
    checkpoints = Checkpoints(spool, keep=config.checkpoint.keep, keep_period=config.checkpoint.keep_period)
    start, saved = checkpoints.latest or 0, None
    target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, state_sharding)
    if checkpoints.latest is not None and not checkpoints.params_only:
        state, saved = checkpoints.restore(target, iterator)
        if saved["manifest"] != corpus.manifest_hash:
            raise UserError(
                f"The data is not what {spool} was trained on (manifest {corpus.manifest_hash}, then "
                f"{saved['manifest']}). Point config.data.path at the same data, or start in another --workdir."
            )
        log.say(f"Going on from step {start} of {n_steps} in {spool}")
    else:
        state = jax.jit(init_fn, out_shardings=state_sharding)()
        if checkpoints.params_only:  # a workdir that seqjax.convert wrote
            state = state._replace(params=checkpoints.restore_params(target.params)[0])
        log.say(f"Training {config.name} ({config.size}, {n_steps} steps) in {spool}")
    if n_micro > 1 or config.train.accumulate is not None:
        log.say(f"Each step: {division(config.train, mesh)}")
    if 0 < config.eval.every < tokens_per_step:
        log.say(
            f"It evaluates after every step: config.eval.every={config.eval.every} counts tokens, of which a step has "
            f"{tokens_per_step:,}."
        )
    if mesh.size > 1:
        log.say("\n".join(parameter_table(model, state_sharding.params)))

    # ------------------------------------------------------------------------------------------------------ loop
    stop = StopRequest()
    pending = None  # the newest step, whose metrics are still on the device
    profiling = False
    with jax.set_mesh(mesh), stop, jax.transfer_guard("disallow"), checkpoints.named_when_disk_full(), log:
        log.start(start, saved, blocks)
        for step in range(start + 1, n_steps + 1):
            if step == config.log.profile_start:
                jax.profiler.start_trace(str(workdir / "profile"))
                profiling = True
            batch = next(iterator)["tokens"]
            tokens = to_devices(batch.reshape(n_micro, -1, seq_len + 1), tokens_sharding)
            state, device_metrics = train_step(state, tokens)
            if pending is not None:  # of the previous step, while the device computes this one
                log_step(*pending, log, spool, checkpoints)
            pending = (step, device_metrics, batch)
            if step == start + 1:  # The step has been traced, so the backends of its kernels are known.
                used = kernels_pallas.backends_used()
                if used:
                    log.say(f"Kernels: {', '.join(f'{op} on {backend}' for op, backend in used.items())}")
                facts = run_facts(
                    backends=used,
                    manifest=corpus.manifest_hash,
                    test_sets=corpus.test_sets,
                    parameters=flops.n_params(model),
                )
                if lead:
                    # Not before: what is refused, or needs more memory than there is, must not bind the workdir to the
                    # settings that its error advises to change.
                    jax.block_until_ready(device_metrics)
                    workdirs.save_config(spool, config)
                    write_json(workdir / "run.json", facts)
                    spool.push()

            every = config.eval.every
            last = step == n_steps
            stopping = stop.agreed(step)
            if lock is not None:
                lock.check()
            evaluating = last or (every and step * tokens_per_step // every > (step - 1) * tokens_per_step // every)
            saving = last or stopping or (config.checkpoint.every and step % config.checkpoint.every == 0)
            profiled = profiling and (last or step == (config.log.profile_start or 0) + config.log.profile_steps - 1)
            if not (evaluating or saving or profiled):
                continue
            if lock is not None:
                lock.check(look=True)
            log_step(*pending, log, spool, checkpoints)
            pending = None
            if profiled:
                jax.profiler.stop_trace()
                profiling = False
            with log.clock.paused():
                # -------------------------------------------------------------------------------------- evaluate
                if evaluating:
                    losses = evaluate(eval_step, state.params, domains, mesh=mesh)
                    row = summarize(losses, domains, corpus)
                    if last and config.eval.entropy_tokens:
                        for field, values in measure_entropy(model, state.params, corpus, config, mesh=mesh).items():
                            row |= {f"eval/{name}/{field}": value for name, value in values.items()}
                    not_finite.check_evaluation(step, row)
                    log.evaluation(step, row, losses)
                    if last and config.eval.classes:
                        of_tokens = evaluate_tokens(token_step, state.params, domains, mesh=mesh)
                        if lead:
                            token_classes.write(workdir, step, of_tokens, blocks, corpus)
                    if lead and not saving:  # which comes after the files
                        spool.try_push(log.say)
                # ------------------------------------------------------------------------------------------ save
                if saving:
                    log.sync()
                    with jax.transfer_guard("allow"):
                        checkpoints.save(step, state, iterator, log.state | {"manifest": corpus.manifest_hash})
            if stopping and not last:
                break

    # ---------------------------------------------------------------------------------------------------- finish
    checkpoints.wait()
    checkpoints.close()
    if int(jax.device_get(state.step)) != n_steps:
        log.say(
            f"Stopped by {stop.name} after step {step}; everything is saved. Go on with the same command and "
            f"--workdir={spool}"
        )
        return False
    if lead:
        sample = None
        prompt, n_new = "The ", config.log.sample_tokens
        if model.longest:  # Position tables have an end; the prompt takes BOS and at most one token per byte.
            n_new = min(n_new, model.longest - 1 - len(prompt))
        if n_new > 0 and jax.process_count() == 1:
            key = jax.random.wrap_key_data(jax.device_get(state.rng))
            try:
                parts = generate.stream(model, state.params, corpus.tokenizer, prompt, key, n_new=n_new, mesh=mesh)
                new = "".join(parts)
                sample = prompt + new
            except MissingPackageError as error:  # Training from prepared blocks needs no tokenizer, text does.
                log.say(f"No sample of text: {error}")
        facts = read_json(workdir / "run.json")
        log.say(report.write(workdir, config, corpus, facts=facts, sample=sample, called=str(spool)))
        spool.push_last()
    return True


def log_step(
    step: int,
    device_metrics: dict[str, jax.Array],
    batch: np.ndarray,
    log: TrainLog,
    spool: Spool,
    checkpoints: Checkpoints,
) -> None:
    """Fetch and log the metrics of a step; save its batch and raise `UserError` if a value is not finite."""
    values = {name: float(x) for name, x in jax.device_get(device_metrics).items()}
    if not all(map(math.isfinite, values.values())):
        raise not_finite.at_step(step, values, batch, spool=spool, checkpoints=checkpoints)
    log.step(step, values)
