"""Train a model on a task, and measure its answers in every test: which are right, and how likely it finds them."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

from seqjax.config import ModelConfig, OptimConfig, from_config_dict, presets
from seqjax.evals.recall.setups import Setup
from seqjax.evals.recall.tasks import IGNORED, Batch, Examples, Task, TaskSetup
from seqjax.models import Model, flops
from seqjax.training.schedule import Segment, rates
from seqjax.training.schedule import optimizer as make_optimizer
from seqjax.types import Array, Params

TEST_SEED = 1  # seed of the test sequences; training sequences have even seeds
CURVE = 10  # points of the learning curve


def model_config(text: str, *, dim: int, vocab_size: int, depth: int = 1) -> ModelConfig:
    """Return the shipped config `NAME[:SETTINGS]` at size debug, with this width and heads of 32.

    It has `depth` times the layers. RWKV-5 and RWKV-6 keep their own heads of 64 if the width is at least 64; Mamba-1
    has no heads.
    """
    name, _, settings = text.partition(":")
    heads = max(1, dim // 32)
    # Unrolled layers, and the logits of all answers at once: fewer launches per step.
    sized = f"debug,model.dim={dim},model.vocab_size={vocab_size},model.scan_layers=False,model.loss_chunk=16384"
    shipped: Any = presets.read_config(f"{name}:debug")
    if depth != 1:
        sized += f",model.n_layers={depth * shipped.model.n_layers}"
    if "heads" in shipped.model.mixer:
        sized += f",model.mixer.heads={heads}"
    elif "head_dim" in shipped.model.mixer:
        sized += f",model.mixer.head_dim={min(dim, shipped.model.mixer.head_dim)}"
    config: Any = presets.read_config(f"{name}:{','.join(filter(None, (sized, settings)))}")
    return from_config_dict(config).model


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
    """Return (params, opt_state, rates [K], batches [K, ...]) -> the first two after K steps, and the losses [K]."""

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

    return jax.jit(steps, donate_argnums=(0, 1))


def make_answers(model: Model) -> Any:
    """Return (params, batch) -> of every answer, [B, A], whether it is right, and its negative log2 likelihood.

    Both are 0 where nothing is asked.
    """

    def answers(params: Params, batch: Batch) -> tuple[Array, Array]:
        inputs_BT, positions_BA, targets_BA = map(jnp.asarray, batch)
        asked_BA = targets_BA != IGNORED
        logits_BAO = model.logits(params, inputs_BT, positions_BA)
        nats_BA = optax.softmax_cross_entropy_with_integer_labels(logits_BAO, jnp.maximum(targets_BA, 0))
        return (jnp.argmax(logits_BAO, -1) == targets_BA) & asked_BA, jnp.where(asked_BA, nats_BA / np.log(2), 0)

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
        right_BA, bits_BA = jax.device_get(answers(params, batch))
        asked_BA = batch.targets != IGNORED
        right += int(right_BA.sum())
        asked += int(asked_BA.sum())
        whole += int((right_BA == asked_BA).all(1).sum())
        bits += float(bits_BA.sum(dtype=np.float64))
        if task.score:
            score += float(task.scores(batch, bits_BA, parameters=parameters)[asked_BA].sum(dtype=np.float64))
        n += len(batch.inputs)
    own = {"score": score / asked} if task.score else {}
    return {"accuracy": right / asked, "whole": whole / n, "bits": bits / asked, **own}


def train(text: str, task: TaskSetup, setup: Setup, *, dim: int, rate: float, seed: int = 0) -> dict[str, Any]:
    """Return parameters, state, learning curve and the result of every test of one model.

    `seed` is that of the initialisation and of the training data; the tests are the same for all.
    """
    start = time.perf_counter()
    config = model_config(text, dim=dim, vocab_size=task.vocab_size, depth=task.depth)
    trained, longest = (max(t.length for t in tasks) for tasks in (task.train, (*task.train, *task.tests.values())))
    model = Model(config, max_len=longest)
    optim = OptimConfig(lr=rate, warmup_steps=task.steps // 10, weight_decay=0.1)
    optimizer, rate_of = make_optimizer(optim), rates(optim, Segment(0, task.steps, is_end=True))
    params = jax.jit(model.init)(jax.random.key(seed))
    opt_state = jax.jit(optimizer.init)(params)
    steps, losses = make_steps(model, optimizer), []
    stream = batches(task.train, batch_size=setup.batch_size, seed=2 * seed)
    for done in range(0, task.steps, setup.steps_per_call):
        drawn = [next(stream) for _ in range(min(setup.steps_per_call, task.steps - done))]
        rates_K = rate_of[done : done + len(drawn)]
        params, opt_state, losses_K = steps(params, opt_state, rates_K, jax.tree.map(_stack, *drawn))
        losses.append(losses_K)
        jax.block_until_ready(losses[-2:][0])  # At most one call ahead, so that batches do not pile up.
    curve = np.concatenate(jax.device_get(losses))
    trained_s = time.perf_counter() - start
    answers, tests, parameters = make_answers(model), {}, flops.n_params(model)
    for name, test in task.tests.items():
        # Two shapes, to compile two programs: up to the length of the training, and longer ones.
        length = trained if test.length <= trained else longest
        alike = [t for t in task.tests.values() if (t.length <= trained) == (test.length <= trained)]
        stream = batches(
            [test],
            batch_size=max(1, setup.batch_size * trained // length),
            seed=TEST_SEED,
            length=length,
            answers=max(t.answers for t in alike),
        )
        tests[name] = measure(answers, params, test, stream, sequences=setup.test_sequences, parameters=parameters)
    return {
        "rate": rate,
        "dim": dim,
        "seed": seed,
        "steps": task.steps,
        "batch_size": setup.batch_size,
        "parameters": parameters,
        "state": {name: state_size(model, test.length) for name, test in task.tests.items()},
        "curve": [(i, float(curve[i - 1])) for i in range(task.steps, 0, -max(1, task.steps // CURVE))][::-1],
        "tests": tests,
        "chance": task.floor,
        "device": jax.devices()[0].device_kind,
        "seconds": time.perf_counter() - start,
        "train_seconds": trained_s,
    }


def _stack(*arrays: np.ndarray) -> np.ndarray:
    return np.stack(arrays)


def state_size(model: Model, length: int) -> int:
    """Return the number of state elements after `length` tokens of decoding, over all layers."""
    return model.repeats * sum(block.state_size(length) for block in model.abstract_blocks())
