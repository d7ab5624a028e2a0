"""The training loop, one linear function: read it from top to bottom to know what a run does.

Metrics are fetched one step late, so the device never waits for the host; the data iterator, the optimiser and the
position in `metrics.jsonl` are saved together, so a run that was killed and resumed equals one that was not.
"""

import contextlib
import math
import time
from pathlib import Path
from typing import Any

import jax
import optax

import kernels_pallas.dispatch
from seqjax import block_losses, generate, metrics, report
from seqjax import workdir as workdirs
from seqjax.checkpoint import Checkpoints
from seqjax.config import Config
from seqjax.data import open_corpus
from seqjax.errors import UserError
from seqjax.evaluate import evaluate, load_domains, measure_entropy, summarize
from seqjax.models import Model, flops
from seqjax.models.entropy import require_entropy
from seqjax.optim import optimizer as make_optimizer
from seqjax.optim import schedule
from seqjax.sharding import batch_sharding, make_mesh, replicated, shardings, to_devices
from seqjax.signals import StopRequest
from seqjax.step import TrainState, init_state, make_eval_step, make_train_step


def train(config: Config, workdir: Path) -> bool:
    """Train, or go on training, in `workdir`; True when the run is complete, False when it was asked to stop."""
    n_steps, seq_len = config.train.steps, config.train.seq_len
    tokens_per_step = config.train.batch_size * seq_len
    lead = jax.process_index() == 0
    progress = metrics.Progress(n_steps, quiet=not lead)

    # --------------------------------------------------------------------------------------------- workdir, mesh
    if lead:
        workdirs.save_config(workdir, config)
    mesh = make_mesh(data=config.mesh.data, fsdp=config.mesh.fsdp, tensor=config.mesh.tensor)
    micro_batch = config.train.batch_size // config.train.accumulate
    if micro_batch % (mesh.shape["data"] * mesh.shape["fsdp"]):
        raise UserError(
            f"A micro-batch of {micro_batch} sequences cannot be split over data={mesh.shape['data']} x "
            f"fsdp={mesh.shape['fsdp']} devices; change config.train.batch_size, .accumulate or config.mesh."
        )

    # ------------------------------------------------------------------------------------------------------ data
    corpus = open_corpus(config.data, seq_len=seq_len, vocab_size=config.model.vocab_size)
    iterator = corpus.train_iterator(
        batch_size=config.train.batch_size // jax.process_count(),
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    domains = load_domains(corpus, config, mesh=mesh)

    # ----------------------------------------------------------------------------------------------------- model
    model = Model(config.model, max_len=seq_len)
    if config.eval.entropy_tokens:
        require_entropy(model)
    optimizer = make_optimizer(config.optim, n_steps)
    flops_per_token = flops.flops_per_token(model, seq_len)

    # ----------------------------------------------------------------------------------------------------- state
    init_fn = lambda: init_state(model, optimizer, jax.random.key(config.train.seed))  # noqa: E731
    shapes = jax.eval_shape(init_fn)
    by_param = shardings(mesh, model.shapes, model.axes)
    one = replicated(mesh)
    opt_shardings = optax.tree.map_params(
        optimizer, lambda _, s: s, shapes.opt_state, by_param, transform_non_params=lambda _: one
    )
    state_shardings = TrainState(by_param, opt_shardings, one, one)
    batch_spec = batch_sharding(mesh, leading=1)
    train_step = jax.jit(
        make_train_step(model, optimizer, schedule(config.optim, n_steps)),
        donate_argnums=0,
        in_shardings=(state_shardings, batch_spec),
        out_shardings=(state_shardings, one),
    )
    eval_step = jax.jit(make_eval_step(model), out_shardings=one)

    # --------------------------------------------------------------------------------------------------- restore
    checkpoints = Checkpoints(workdir, keep=config.checkpoint.keep)
    # `meta` is what a checkpoint holds beside arrays; "window" sums the training loss since the last evaluation.
    meta: dict[str, Any] = {
        "metrics": 0,
        "window": [0.0, 0],
        "seconds": 0.0,
        "manifest": corpus.manifest_hash,
    }
    start = checkpoints.latest or 0
    target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, state_shardings)
    if checkpoints.latest is not None and not checkpoints.params_only:
        state, saved = checkpoints.restore(target, iterator)
        if saved["manifest"] != corpus.manifest_hash:
            raise UserError(
                f"The data is not what {workdir} was trained on (manifest {corpus.manifest_hash}, then "
                f"{saved['manifest']}). Point config.data.path at the same data, or start in another --workdir."
            )
        meta = saved
        progress.say(f"Going on from step {start} of {n_steps} in {workdir}")
    else:
        state = jax.jit(init_fn, out_shardings=state_shardings)()
        if checkpoints.params_only:  # seqjax.convert wrote them
            state = state._replace(params=checkpoints.restore_params(target.params)[0])
        progress.say(f"Training {config.name} ({config.size}, {n_steps} steps) in {workdir}")
    writer = (
        metrics.Metrics(workdir, position=meta["metrics"], step=start, tensorboard=config.log.tensorboard)
        if lead
        else None
    )
    if lead:
        block_losses.start(workdir, {name: domain.blocks for name, domain in domains.items()}, step=start)

    # ------------------------------------------------------------------------------------------------------ loop
    stop = StopRequest()
    pending = None  # metrics of the newest step, still on the device
    clock, clock_step, paused = time.perf_counter(), start, 0.0
    loss, profiling = math.nan, False

    def settle() -> None:
        """Fetch the metrics of the newest step: check them, add them up, log them."""
        nonlocal pending, clock, clock_step, paused, loss
        if pending is None:
            return
        step, device_metrics, batch = pending
        pending = None
        values = {name: float(x) for name, x in jax.device_get(device_metrics).items()}
        loss = values["loss"]
        if step == start + 1:  # the programs are made, so it is known which kernels they call
            used = kernels_pallas.dispatch.used()
            if used:
                progress.say(f"Kernels: {', '.join(f'{op} on {backend}' for op, backend in used.items())}")
            facts = metrics.run_facts(backends=used, manifest=corpus.manifest_hash, parameters=flops.n_params(model))
            if lead:
                workdirs.write_json(workdir / "run.json", facts)
        if not all(map(math.isfinite, values.values())):
            raise checkpoints.not_finite(step, values, batch)
        meta["window"] = [meta["window"][0] + loss, meta["window"][1] + 1]
        if step % config.log.every and step != n_steps:
            return
        seconds = time.perf_counter() - clock - paused
        rate = (step - clock_step) * tokens_per_step / seconds
        meta["seconds"] += seconds
        clock, clock_step, paused = time.perf_counter(), step, 0.0
        used = flops.mfu(rate, flops_per_token)
        row = {
            "tokens": step * tokens_per_step,
            "train/loss": loss,
            "train/grad_norm": values["grad_norm"],
            "train/param_norm": values["param_norm"],
            "train/lr": values["lr"],
            "tokens_per_s": rate,
            "mfu": used,
            "seconds": meta["seconds"],
            "device_peak_gib": metrics.device_peak_gib(),
        }
        if writer is not None:
            writer.write(step, row)
        eta = (n_steps - step) * tokens_per_step / rate
        progress.update(step, loss=loss, tokens_per_s=rate, mfu=used, eta=eta)

    with (
        jax.set_mesh(mesh),
        stop,
        jax.transfer_guard("disallow"),
        checkpoints.named_when_disk_full(),
        writer or contextlib.nullcontext(),
    ):
        for step in range(start + 1, n_steps + 1):
            if step == config.log.profile_start:
                jax.profiler.start_trace(str(workdir / "profile"))
                profiling = True
            batch = next(iterator)["tokens"]
            tokens = to_devices(batch.reshape(config.train.accumulate, -1, seq_len + 1), batch_spec)
            state, device_metrics = train_step(state, tokens)
            settle()  # the step before, while the device works on this one
            pending = (step, device_metrics, batch)
            if profiling and (
                step == (config.log.profile_start or 0) + config.log.profile_steps - 1 or step == n_steps
            ):
                settle()
                jax.profiler.stop_trace()
                profiling = False

            every = config.eval.every
            last = step == n_steps
            stopping = stop.agreed(check=step % config.log.every == 0)
            evaluating = last or (every and step * tokens_per_step // every > (step - 1) * tokens_per_step // every)
            saving = last or stopping or (config.checkpoint.every and step % config.checkpoint.every == 0)
            if not (evaluating or saving):
                continue
            settle()
            pause = time.perf_counter()
            # ------------------------------------------------------------------------------------------ evaluate
            if evaluating:
                losses = evaluate(eval_step, state.params, domains, mesh=mesh)
                row = {"tokens": step * tokens_per_step, "train/loss": meta["window"][0] / meta["window"][1]}
                row |= summarize(losses, domains, corpus)
                if last and config.eval.entropy_tokens:
                    for field, values in measure_entropy(model, state.params, corpus, config, mesh=mesh).items():
                        row |= {f"eval/{name}/{field}": value for name, value in values.items()}
                meta["window"] = [0.0, 0]
                means = {name: row[f"eval/{name}/loss"] for name in losses}
                if not all(map(math.isfinite, means.values())):
                    raise UserError(
                        f"Step {step}: the evaluation gave {means}. The parameters are finite, so the model overflows "
                        "on text it has not seen: lower config.optim.lr, in a new --workdir."
                    )
                if writer is not None:
                    writer.write(step, row)
                    block_losses.write(workdir, step, losses)
                text = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
                progress.say(f"step {step}: train {row['train/loss']:.3f} | {text}")
            # ---------------------------------------------------------------------------------------------- save
            if saving:
                meta["metrics"] = writer.position if writer is not None else 0
                with jax.transfer_guard("allow"):
                    checkpoints.save(step, state, iterator, meta)
            paused += time.perf_counter() - pause
            if stopping and not last:
                break

    # ---------------------------------------------------------------------------------------------------- finish
    checkpoints.wait()
    checkpoints.close()
    finished = int(jax.device_get(state.step)) == n_steps
    if not finished:
        progress.say(
            f"Stopped by {stop.name} after step {step}; everything is saved. Go on with the same command and "
            f"--workdir={workdir}"
        )
        return False
    if lead:
        sample = None
        prompt, n_new = "The ", config.log.sample_tokens
        if model.longest:  # tables over positions end; the prompt takes a BOS and at most its bytes
            n_new = min(n_new, model.longest - 1 - len(prompt))
        if n_new > 0 and jax.process_count() == 1:
            key = jax.random.wrap_key_data(jax.device_get(state.rng))
            with jax.set_mesh(mesh):
                sample = prompt + generate.text(model, state.params, corpus.tokenizer, prompt, key, n_new=n_new)
        facts = workdirs.read_json(workdir / "run.json")
        progress.say(report.write(workdir, config, corpus, facts=facts, sample=sample))
    return True
