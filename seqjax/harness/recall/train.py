"""Train one model on one task, and what share of the answers it gives right in every test."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

from seqjax import presets
from seqjax.config import ModelConfig, OptimConfig, from_config_dict
from seqjax.harness.recall.setups import Setup, TaskSetup
from seqjax.harness.recall.tasks import IGNORED, Examples, Task
from seqjax.models import Model, flops
from seqjax.training.optim import optimizer as make_optimizer
from seqjax.types import Array, Params

TRAIN_SEED, TEST_SEED = 0, 1
CURVE = 10  # points of the learning curve


def model_config(text: str, *, dim: int, vocab_size: int) -> ModelConfig:
    """Return the shipped config `NAME[:SETTINGS]` at size debug, with heads of 32 and this width."""
    name, _, settings = text.partition(":")
    heads = max(1, dim // 32)
    sized = f"debug,model.dim={dim},model.vocab_size={vocab_size},model.mixer.heads={heads}"
    shipped: Any = presets.read_config(f"{name}:debug")
    if "heads" not in shipped.model.mixer:  # the channels of Mamba-1 are on their own
        sized = sized.rpartition(",")[0]
    config: Any = presets.read_config(f"{name}:{','.join(filter(None, (sized, settings)))}")
    return from_config_dict(config).model


def batches(tasks: Iterable[Task], *, batch_size: int, seed: int) -> Iterator[Examples]:
    """Return an endless iterator of batches of one task after the other; those of shorter ones end in padding."""
    tasks = tuple(tasks)
    length = max(task.length for task in tasks)

    def drawn(index: int, rng: np.random.Generator) -> Examples:
        return padded(tasks[index % len(tasks)].examples(rng, batch_size), length)

    dataset = grain.MapDataset.range(2**31).seed(seed).random_map(drawn)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)))


def padded(examples: Examples, length: int) -> Examples:
    """Return the sequences with id 0 after their end, where nothing is asked and which a causal model does not see."""
    wider = ((0, 0), (0, length - examples.inputs.shape[1]))
    return Examples(np.pad(examples.inputs, wider), np.pad(examples.targets, wider, constant_values=IGNORED))


def _weights(targets_BT: Array) -> Array:
    return (targets_BT != IGNORED).astype(jnp.float32)


def make_step(model: Model, optimizer: optax.GradientTransformation) -> Any:
    """Return (params, opt_state, inputs [B, T], targets [B, T]) -> the next two and the mean loss of the answers."""

    def mean_loss(params: Params, inputs_BT: Array, targets_BT: Array) -> Array:
        total, count = model.target_loss(params, inputs_BT, jnp.maximum(targets_BT, 0), _weights(targets_BT))
        return total / count

    def step(params: Params, opt_state: Any, inputs_BT: Array, targets_BT: Array) -> tuple[Params, Any, Array]:
        loss, grads = jax.value_and_grad(mean_loss)(params, inputs_BT, targets_BT)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        new_params: Any = optax.apply_updates(params, updates)
        return new_params, opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def make_count(model: Model) -> Any:
    """Return (params, inputs, targets) -> right answers and answers, and sequences with all answers right."""

    def count(params: Params, inputs_BT: Array, targets_BT: Array) -> tuple[Array, Array, Array]:
        asked_BT = targets_BT != IGNORED
        right_BT = (jnp.argmax(model.logits(params, inputs_BT), -1) == targets_BT) & asked_BT
        return jnp.sum(right_BT), jnp.sum(asked_BT), jnp.sum(jnp.all(right_BT == asked_BT, -1))

    return jax.jit(count)


def accuracy(count: Any, params: Params, task: Task, *, sequences: int, batch_size: int) -> dict[str, float]:
    """Return the share of right answers, and of sequences without a wrong one, over sequences not trained on."""
    right = asked = whole = n = 0
    for inputs, targets in batches([task], batch_size=batch_size, seed=TEST_SEED):
        counts = jax.device_get(count(params, inputs, targets))
        right, asked, whole = (a + int(b) for a, b in zip((right, asked, whole), counts, strict=True))
        n += len(inputs)
        if n >= sequences:
            return {"accuracy": right / asked, "whole": whole / n}
    raise AssertionError("the batches are endless")


def train(text: str, task: TaskSetup, setup: Setup, *, dim: int, rate: float) -> dict[str, Any]:
    """Return parameters, state, learning curve and the result of every test of one model."""
    start = time.perf_counter()
    config = model_config(text, dim=dim, vocab_size=task.vocab_size)
    longest = max(test.length for test in (*task.train, *task.tests.values()))
    model = Model(config, max_len=longest)
    optim = OptimConfig(lr=rate, warmup_steps=setup.steps // 10, weight_decay=0.1)
    optimizer = make_optimizer(optim, setup.steps)
    params = jax.jit(model.init)(jax.random.key(0))
    opt_state = jax.jit(optimizer.init)(params)
    step, curve = make_step(model, optimizer), []
    stream = batches(task.train, batch_size=setup.batch_size, seed=TRAIN_SEED)
    for i in range(1, setup.steps + 1):
        params, opt_state, loss = step(params, opt_state, *next(stream))
        if i % max(1, setup.steps // CURVE) == 0:
            curve.append((i, float(loss)))
    count = make_count(model)
    tests = {}
    for name, test in task.tests.items():
        small = max(1, setup.batch_size * task.train[-1].length // max(test.length, task.train[-1].length))
        tests[name] = accuracy(count, params, test, sequences=setup.test_sequences, batch_size=small)
    return {
        "rate": rate,
        "dim": dim,
        "parameters": flops.n_params(model),
        "state": {name: state_size(model, test.length) for name, test in task.tests.items()},
        "curve": curve,
        "tests": tests,
        "chance": 1 / task.vocab_size,
        "seconds": time.perf_counter() - start,
    }


def state_size(model: Model, length: int) -> int:
    """Return the numbers that decoding keeps after `length` tokens, over all layers."""
    return model.repeats * sum(block.state_size(length) for block in model.abstract_blocks())


def best(results: Iterable[Mapping[str, Any]], own: str) -> Mapping[str, Any]:
    """Return the result that is best in the test that is like the training."""
    return max(results, key=lambda result: result["tests"][own]["accuracy"])


def describe(setup: Setup) -> dict[str, Any]:
    """Return the settings as JSON holds them."""
    return {**dataclasses.asdict(setup), "tasks": [task.name for task in setup.tasks]}
