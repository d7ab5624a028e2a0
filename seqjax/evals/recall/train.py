"""Train a model on a task, and measure its answers in every test: which are right, and how likely it finds them."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

from seqjax import mixers
from seqjax.config import ModelConfig, OptimConfig, from_config_dict, presets
from seqjax.evals.recall.setups import Setup
from seqjax.evals.recall.tasks import IGNORED, Batch, Examples, Task, TaskSetup
from seqjax.models import Model, flops
from seqjax.training.origin import RULES
from seqjax.training.schedule import Segment, rates
from seqjax.training.schedule import optimizer as make_optimizer
from seqjax.types import Array, Params

TEST_SEED = 1  # seed of the test sequences; training sequences have even seeds
VALIDATION_SEED = 3  # of sequences like the training that no test has, for the choice of a learning rate
CURVE = 10  # points of the learning curve


def model_config(text: str, *, dim: int, vocab_size: int, depth: int = 1) -> ModelConfig:
    """Return the shipped config `NAME[:SETTINGS]` at size debug, with this width and heads of 32.

    It has `depth` times the layers. RWKV-5 and RWKV-6 keep their own heads of 64 if the width is at least 64; Mamba-1
    has no heads. Widths of an MLP or of values that the config gives grow with that of the model.
    """
    name, _, settings = text.partition(":")
    shipped: Any = presets.read_config(f"{name}:{','.join(filter(None, ('debug', settings)))}").model
    # Unrolled layers, and the logits of all answers at once: fewer launches per step.
    sized = {"dim": dim, "vocab_size": vocab_size, "n_layers": depth * shipped.n_layers, "scan_layers": False}
    sized["loss_chunk"] = 16384
    if shipped.mlp.dim is not None:
        sized["mlp.dim"] = shipped.mlp.dim * dim // shipped.dim
    several = isinstance(shipped.mixer, tuple)
    for i, mixer in enumerate(shipped.mixer if several else (shipped.mixer,)):
        own = f"mixer[{i}]" if several else "mixer"
        if "heads" in mixer:
            sized[f"{own}.heads"] = max(1, dim // 32)
        elif "head_dim" in mixer:
            sized[f"{own}.head_dim"] = min(dim, mixer["head_dim"])
        if mixer.get("value_dim"):
            sized[f"{own}.value_dim"] = mixer["value_dim"] * dim // shipped.dim
    given = ",".join(f"model.{key}={value}" for key, value in sized.items())
    config: Any = presets.read_config(f"{name}:{','.join(filter(None, ('debug', settings, given)))}")
    return from_config_dict(config).model


def code_of(text: str) -> dict[str, str]:
    """Return the SHA-256 of the files of a config's mixers from outside seqjax, by name."""
    return mixers.source_hashes(mixer.name for mixer in model_config(text, dim=64, vocab_size=8).mixers)


def batches(tasks: Sequence[Task], *, batch_size: int, seed: int, length: int = 0, answers: int = 0) -> Iterator[Batch]:
    """Return an endless iterator of batches of one task after another, padded to the largest number of answers.

    `length` and `answers` are the least inputs and answers of a batch.
    """
    length, answers = max(length, *(t.length for t in tasks)), max(answers, *(t.answers for t in tasks))

    def drawn(index: int, rng: np.random.Generator) -> Batch:
        return batch(padded(tasks[index % len(tasks)].examples(rng, batch_size), length), answers)

    dataset = grain.MapDataset.range(2**31).seed(seed).random_map(drawn)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)))


def padded(examples: Examples, length: int) -> Examples:
    """Return the sequences padded with id 0, without questions there; a causal model does not see it."""
    wider = ((0, 0), (0, length - examples.inputs.shape[1]))
    return Examples(np.pad(examples.inputs, wider), np.pad(examples.targets, wider, constant_values=IGNORED))


def batch(examples: Examples, answers: int) -> Batch:
    """Return the sequences with up to `answers` targets for each, so that logits are computed for these alone."""
    rows, columns = np.nonzero(examples.targets != IGNORED)
    place = np.arange(len(rows)) - np.searchsorted(rows, rows)
    positions = np.zeros((len(examples.inputs), answers), np.int32)
    targets = np.full(positions.shape, IGNORED, np.int32)
    positions[rows, place], targets[rows, place] = columns, examples.targets[rows, columns]
    return Batch(examples.inputs, positions, targets)


def make_steps(model: Model, optimizer: optax.GradientTransformation) -> Any:
    """Return (params, opt_state, rates [N, K], batches [N, K, ...]) -> the first two after K steps, and losses [N, K].

    All have a leading axis of N runs, which do not know of one another.
    """

    def mean_loss(params: Params, batch: Batch) -> Array:
        inputs_BT, positions_BA, targets_BA = map(jnp.asarray, batch)
        weights_BA = (targets_BA != IGNORED).astype(jnp.float32)
        total, count = model.target_loss(
            params, inputs_BT, jnp.maximum(targets_BA, 0), weights_BA, positions_BA=positions_BA
        )
        return total / count

    def steps(params: Params, opt_state: Any, rates_K: Array, batches: Batch) -> tuple[Params, Any, Array]:
        def step(state: tuple[Params, Any], inputs: tuple[Array, Batch]) -> tuple[tuple[Params, Any], Array]:
            (params, opt_state), (rate, batch) = state, inputs
            loss, grads = jax.value_and_grad(mean_loss)(params, batch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            updates = jax.tree.map(lambda update: rate * update, updates)
            new_params: Any = optax.apply_updates(params, updates)
            return (new_params, opt_state), loss

        (params, opt_state), losses_K = jax.lax.scan(step, (params, opt_state), (rates_K, batches))
        return params, opt_state, losses_K

    return jax.jit(jax.vmap(steps), donate_argnums=(0, 1))


def make_answers(model: Model) -> Any:
    """Return (params, batch) -> of each answer, [B, A], the likeliest id and the negative log2 likelihood of the right.

    The latter is 0 where nothing is asked.
    """

    def answers(params: Params, batch: Batch) -> tuple[Array, Array]:
        inputs_BT, positions_BA, targets_BA = map(jnp.asarray, batch)
        asked_BA = targets_BA != IGNORED
        logits_BAO = model.logits(params, inputs_BT, positions_BA)
        nats_BA = optax.softmax_cross_entropy_with_integer_labels(logits_BAO, jnp.maximum(targets_BA, 0))
        return jnp.argmax(logits_BAO, -1), jnp.where(asked_BA, nats_BA / np.log(2), 0)

    return jax.jit(answers)


def measure(
    answers: Any, params: Params, task: Task, stream: Iterator[Batch], *, sequences: int, parameters: int
) -> dict[str, float]:
    """Return what at least so many sequences of a test tell of a model with so many `parameters`.

    They are the share of right answers (`accuracy`) and of sequences without a wrong one (`whole`), the mean negative
    log2 likelihood of the right answers (`bits`), and the mean of the task's own scores (`score`), if it has them.
    """
    right = asked = whole = n = 0
    bits = score = 0.0
    while n < sequences:
        batch = next(stream)
        guesses_BA, bits_BA = jax.device_get(answers(params, batch))
        asked_BA = batch.targets != IGNORED
        right_BA = task.right(batch, guesses_BA) & asked_BA
        right += int(right_BA.sum())
        asked += int(asked_BA.sum())
        whole += int((right_BA == asked_BA).all(1).sum())
        bits += float(bits_BA.sum(dtype=np.float64))
        if task.score:
            score += float(task.scores(batch, bits_BA, parameters=parameters)[asked_BA].sum(dtype=np.float64))
        n += len(batch.inputs)
    own = {"score": score / asked} if task.score else {}
    return {"accuracy": right / asked, "whole": whole / n, "bits": bits / asked, **own}


def train(
    text: str, task: TaskSetup, setup: Setup, *, dim: int, runs: Sequence[tuple[float, int]]
) -> list[dict[str, Any]]:
    """Return, of a model at every (learning rate, seed), parameters, state, learning curve and results of all tests.

    The seed is that of the initialisation and of the training data; the tests are the same for all. The runs are
    trained in one program, by `jax.vmap`; the seconds of each are its share.
    """
    start = time.perf_counter()
    config = model_config(text, dim=dim, vocab_size=task.vocab_size, depth=task.depth)
    model = Model(config, max_len=max(t.length for t in (*task.train, *task.tests.values())))
    optims = [OptimConfig(lr=rate, warmup_steps=task.steps // 10, weight_decay=0.1) for rate, _ in runs]
    optimizer = make_optimizer(optims[0], model.groups)  # the rates are factors of its updates
    whole = Segment(0, task.steps, is_end=True)
    streams = {seed: batches(task.train, batch_size=setup.batch_size, seed=2 * seed) for _, seed in runs}
    params = jax.jit(jax.vmap(lambda seed: model.init(jax.random.key(seed))))(np.array([seed for _, seed in runs]))
    opt_state = jax.jit(jax.vmap(optimizer.init))(params)
    steps, losses = make_steps(model, optimizer), []
    for done in range(0, task.steps, setup.steps_per_call):
        n_steps = min(setup.steps_per_call, task.steps - done)
        drawn = {
            seed: jax.tree.map(_stack, *(next(stream) for _ in range(n_steps))) for seed, stream in streams.items()
        }
        together = jax.tree.map(_stack, *(drawn[seed] for _, seed in runs))
        rates_NK = np.stack([rates(optim, whole, np.arange(done, done + n_steps) + 1) for optim in optims])
        params, opt_state, losses_NK = steps(params, opt_state, rates_NK, together)
        losses.append(losses_NK)
        jax.block_until_ready(losses[-2:][0])  # At most one call ahead, so that batches do not pile up.
    curves = np.concatenate(jax.device_get(losses), 1)
    common = {
        "rules": RULES,
        "dim": dim,
        "steps": task.steps,
        "batch_size": setup.batch_size,
        "parameters": flops.n_params(model),
        "state": {name: state_size(model, test.length) for name, test in task.tests.items()},
        "chance": task.floor,
        "device": jax.devices()[0].device_kind,
        "together": len(runs),
        **({"mixers": code} if (code := code_of(text)) else {}),
        "train_seconds": (time.perf_counter() - start) / len(runs),
    }
    answers, results = make_answers(model), []
    for i, ((rate, seed), curve) in enumerate(zip(runs, curves, strict=True)):
        begun = time.perf_counter()
        tests, validation = _tested(answers, jax.tree.map(lambda x, i=i: x[i], params), task, setup, model)
        points = [(k, float(curve[k - 1])) for k in range(task.steps, 0, -max(1, task.steps // CURVE))][::-1]
        measured = {"curve": points, "tests": tests, "validation": validation}
        seconds = common["train_seconds"] + time.perf_counter() - begun
        results.append({"rate": rate, "seed": seed, **common, **measured, "seconds": seconds})
    return results


def _tested(
    answers: Any, params: Params, task: TaskSetup, setup: Setup, model: Model
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return the results of all tests, and of the one like the training with other sequences."""
    trained = max(t.length for t in task.train)

    def measured(test: Task, seed: int) -> dict[str, float]:
        # Two shapes, to compile two programs: up to the length of the training, and longer ones.
        length = trained if test.length <= trained else model.max_len
        alike = [t for t in task.tests.values() if (t.length <= trained) == (test.length <= trained)]
        stream = batches(
            [test],
            batch_size=max(1, setup.batch_size * trained // length),
            seed=seed,
            length=length,
            answers=max(t.answers for t in alike),
        )
        n_params = flops.n_params(model)
        return measure(answers, params, test, stream, sequences=setup.test_sequences, parameters=n_params)

    tests = {name: measured(test, TEST_SEED) for name, test in task.tests.items()}
    return tests, measured(task.tests[task.own], VALIDATION_SEED)


def _stack(*arrays: np.ndarray) -> np.ndarray:
    return np.stack(arrays)


def state_size(model: Model, length: int) -> int:
    """Return the number of state elements after `length` tokens of decoding, over all layers."""
    return model.repeats * sum(block.state_size(length) for block in model.abstract_blocks())
