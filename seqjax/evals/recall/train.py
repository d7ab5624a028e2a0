"""Train a model on a task, and measure its answers in every test."""

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
VALIDATION_SEED = 3  # seed of the sequences that choose the learning rate; in no test
CURVE = 10  # points in the learning curve


def model_config(text: str, *, dim: int, vocab_size: int, depth: int = 1) -> ModelConfig:
    """Return the config `NAME[:SETTINGS]` at size debug, with width `dim`.

    The head dimension is 32. `depth` multiplies the number of layers. RWKV-5 and RWKV-6 keep their head dimension of
    64, limited by `dim`; Mamba-1 has no heads. MLP and value widths set in the config scale with `dim`.
    """
    name, _, settings = text.partition(":")
    shipped: Any = presets.read_config(f"{name}:{','.join(filter(None, ('debug', settings)))}").model
    # Unrolled layers and a single loss chunk mean fewer kernel launches per step.
    sized = {"dim": dim, "vocab_size": vocab_size, "n_layers": depth * shipped.n_layers, "scan_layers": False}
    sized["loss_chunk"] = 16384
    if shipped.mlp.dim is not None:
        sized["mlp.dim"] = shipped.mlp.dim * dim // shipped.dim
    is_hybrid = isinstance(shipped.mixer, tuple)
    for i, mixer in enumerate(shipped.mixer if is_hybrid else (shipped.mixer,)):
        prefix = f"mixer[{i}]" if is_hybrid else "mixer"
        if "heads" in mixer:
            sized[f"{prefix}.heads"] = max(1, dim // 32)
        elif "head_dim" in mixer:
            sized[f"{prefix}.head_dim"] = min(dim, mixer["head_dim"])
        if mixer.get("value_dim"):
            sized[f"{prefix}.value_dim"] = mixer["value_dim"] * dim // shipped.dim
    overrides = ",".join(f"model.{key}={value}" for key, value in sized.items())
    config: Any = presets.read_config(f"{name}:{','.join(filter(None, ('debug', settings, overrides)))}")
    return from_config_dict(config).model


def code_of(text: str) -> dict[str, str]:
    """Return SHA-256 hashes by name for a config's mixers from outside seqjax."""
    return mixers.source_hashes(mixer.name for mixer in model_config(text, dim=64, vocab_size=8).mixers)


def batches(tasks: Sequence[Task], *, batch_size: int, seed: int, length: int = 0, answers: int = 0) -> Iterator[Batch]:
    """Return an endless iterator over batches; the tasks take turns.

    All batches are padded to the largest length and number of answers among the tasks, and at least to `length` and
    `answers`.
    """
    length, answers = max(length, *(t.length for t in tasks)), max(answers, *(t.answers for t in tasks))

    def drawn(index: int, rng: np.random.Generator) -> Batch:
        return batch(padded(tasks[index % len(tasks)].examples(rng, batch_size), length), answers)

    dataset = grain.MapDataset.range(2**31).seed(seed).random_map(drawn)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)))


def padded(examples: Examples, length: int) -> Examples:
    """Right-pad the sequences with id 0 and `IGNORED` targets.

    Causal models do not see the padding.
    """
    wider = ((0, 0), (0, length - examples.inputs.shape[1]))
    return Examples(np.pad(examples.inputs, wider), np.pad(examples.targets, wider, constant_values=IGNORED))


def batch(examples: Examples, answers: int) -> Batch:
    """Gather up to `answers` targets per sequence.

    Logits are then computed only at their positions.
    """
    rows, columns = np.nonzero(examples.targets != IGNORED)
    slot = np.arange(len(rows)) - np.searchsorted(rows, rows)
    positions = np.zeros((len(examples.inputs), answers), np.int32)
    targets = np.full(positions.shape, IGNORED, np.int32)
    positions[rows, slot], targets[rows, slot] = columns, examples.targets[rows, columns]
    return Batch(examples.inputs, positions, targets)


def make_steps(model: Model, optimizer: optax.GradientTransformation) -> Any:
    """Return a compiled function for K training steps of N independent runs.

    (params, opt_state, rates [N, K], batches [N, K, ...]) -> (params, opt_state, losses [N, K]); all arrays have a
    leading axis of N runs. It donates params and opt_state.
    """

    def objective(params: Params, batch: Batch) -> tuple[Array, Array]:
        inputs_BT, positions_BA, targets_BA = map(jnp.asarray, batch)
        weights_BA = (targets_BA != IGNORED).astype(jnp.float32)
        total, count, auxiliary = model.training_loss(
            params, inputs_BT, jnp.maximum(targets_BA, 0), weights_BA, positions_BA=positions_BA
        )
        loss = total / count
        return sum(auxiliary.values(), loss), loss

    def steps(params: Params, opt_state: Any, rates_K: Array, batches: Batch) -> tuple[Params, Any, Array]:
        def step(state: tuple[Params, Any], inputs: tuple[Array, Batch]) -> tuple[tuple[Params, Any], Array]:
            (params, opt_state), (rate, batch) = state, inputs
            (_, loss), grads = jax.value_and_grad(objective, has_aux=True)(params, batch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            updates = jax.tree.map(lambda update: rate * update, updates)
            new_params: Any = optax.apply_updates(params, updates)
            return (new_params, opt_state), loss

        (params, opt_state), losses_K = jax.lax.scan(step, (params, opt_state), (rates_K, batches))
        return params, opt_state, losses_K

    return jax.jit(jax.vmap(steps), donate_argnums=(0, 1))


def make_answers(model: Model) -> Any:
    """Return a jitted function (params, batch) -> (most likely ids, bits).

    Both results are [B, A]. Bits are the negative log2 likelihood of the right answers, and 0 at `IGNORED` targets.
    """

    def answers(params: Params, batch: Batch) -> tuple[Array, Array]:
        inputs_BT, positions_BA, targets_BA = map(jnp.asarray, batch)
        has_answer_BA = targets_BA != IGNORED
        logits_BAO = model.logits(params, inputs_BT, positions_BA)
        nats_BA = optax.softmax_cross_entropy_with_integer_labels(logits_BAO, jnp.maximum(targets_BA, 0))
        return jnp.argmax(logits_BAO, -1), jnp.where(has_answer_BA, nats_BA / np.log(2), 0)

    return jax.jit(answers)


def measure(
    answers: Any, params: Params, task: Task, stream: Iterator[Batch], *, sequences: int, parameters: int
) -> dict[str, float]:
    """Return a model's test results over at least `sequences` sequences.

    Keys: `accuracy`, the fraction of right answers; `whole`, the fraction of sequences without a wrong answer; `bits`,
    the mean negative log2 likelihood of the right answers; and `score`, the mean of the task's scores, if it has
    scores. `parameters` is the model's parameter count, passed to `task.scores`.
    """
    n_right = n_answers = n_all_right = n = 0
    bits = score = 0.0
    while n < sequences:
        batch = next(stream)
        guesses_BA, bits_BA = jax.device_get(answers(params, batch))
        has_answer_BA = batch.targets != IGNORED
        right_BA = task.right(batch, guesses_BA) & has_answer_BA
        n_right += int(right_BA.sum())
        n_answers += int(has_answer_BA.sum())
        n_all_right += int((right_BA == has_answer_BA).all(1).sum())
        bits += float(bits_BA.sum(dtype=np.float64))
        if task.score:
            score += float(task.scores(batch, bits_BA, parameters=parameters)[has_answer_BA].sum(dtype=np.float64))
        n += len(batch.inputs)
    scores = {"score": score / n_answers} if task.score else {}
    return {"accuracy": n_right / n_answers, "whole": n_all_right / n, "bits": bits / n_answers, **scores}


def train(
    text: str, task: TaskSetup, setup: Setup, *, dim: int, runs: Sequence[tuple[float, int]]
) -> list[dict[str, Any]]:
    """Train a model at each (learning rate, seed); return one result per run.

    A result has the parameter count, state sizes, the learning curve and all test results. The seed determines
    initialisation and training data; all runs have the same tests. The runs train in one program with `jax.vmap`, and
    the training time is divided equally among them.
    """
    start = time.perf_counter()
    config = model_config(text, dim=dim, vocab_size=task.vocab_size, depth=task.depth)
    model = Model(config, max_len=max(t.length for t in (*task.train, *task.tests.values())))
    optims = [OptimConfig(lr=rate, warmup_steps=task.steps // 10, weight_decay=0.1) for rate, _ in runs]
    optimizer = make_optimizer(optims[0], model.groups)  # `make_steps` multiplies its updates by the rates
    segment = Segment(0, task.steps, is_end=True)
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
        rates_NK = np.stack([rates(optim, segment, np.arange(done, done + n_steps) + 1) for optim in optims])
        params, opt_state, losses_NK = steps(params, opt_state, rates_NK, together)
        losses.append(losses_NK)
        jax.block_until_ready(losses[-2:][0])  # Dispatch at most one call ahead, to bound the memory for batches.
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
        test_start = time.perf_counter()
        tests, validation = _tested(answers, jax.tree.map(lambda x, i=i: x[i], params), task, setup, model)
        points = [(k, float(curve[k - 1])) for k in range(task.steps, 0, -max(1, task.steps // CURVE))][::-1]
        measured = {"curve": points, "tests": tests, "validation": validation}
        seconds = common["train_seconds"] + time.perf_counter() - test_start
        results.append({"rate": rate, "seed": seed, **common, **measured, "seconds": seconds})
    return results


def _tested(
    answers: Any, params: Params, task: TaskSetup, setup: Setup, model: Model
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return all test results, and the validation result.

    Validation is the test `own` with other sequences.
    """
    trained = max(t.length for t in task.train)

    def measured(test: Task, seed: int) -> dict[str, float]:
        # Pad tests to one of two lengths, so only two programs are compiled: the training length or the maximum.
        length = trained if test.length <= trained else model.max_len
        same_length = [t for t in task.tests.values() if (t.length <= trained) == (test.length <= trained)]
        stream = batches(
            [test],
            batch_size=max(1, setup.batch_size * trained // length),
            seed=seed,
            length=length,
            answers=max(t.answers for t in same_length),
        )
        n_params = flops.n_params(model)
        return measure(answers, params, test, stream, sequences=setup.test_sequences, parameters=n_params)

    tests = {name: measured(test, TEST_SEED) for name, test in task.tests.items()}
    return tests, measured(task.tests[task.own], VALIDATION_SEED)


def _stack(*arrays: np.ndarray) -> np.ndarray:
    return np.stack(arrays)


def state_size(model: Model, length: int) -> int:
    """Return the state elements of all layers after decoding `length` tokens."""
    return model.repeats * sum(block.state_size(length) for block in model.abstract_blocks())
